"""The product's commands as ``kvgate`` lists them: a summary each; calling one imports its module."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import typer

    from kvgate.lazy import Command

_RUN: Final = "Run"
_LOOK: Final = "Look"
_PASSED_ON: Final = MappingProxyType(
    {
        "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
        "add_help_option": False,
    }
)
"""Of a command that becomes another program: its words are that program's."""


def up() -> Callable[..., None]:
    """Start engines and the gateway on this machine, and stop them all at Ctrl-C."""
    from kvgate.up.command import up as command

    return command


def engine() -> Callable[..., None]:
    """Run one engine instance: LMDeploy's api_server with KV events and /kv/v1."""
    from kvgate.engine.command import engine as command

    return command


def gateway() -> Callable[..., None]:
    """Run the gateway: OpenAI-compatible HTTP in front of the engines."""
    from kvgate.gateway.command import gateway as command

    return command


def sim() -> Callable[..., None]:
    """Run one simulated engine: an instance that computes nothing and takes as long as one that does."""
    from kvgate.engine.sim import sim as command

    return command


def register() -> Callable[..., None]:
    """Keep an engine registered at a gateway for as long as it is healthy."""
    from kvgate.gateway.register import register as command

    return command


def admin() -> "typer.Typer":
    """Manage a running gateway."""
    from kvgate.admin.command import build_admin

    return build_admin()


def doctor() -> Callable[..., None]:
    """Check this machine and installation."""
    from kvgate.doctor import doctor as command

    return command


def top() -> Callable[..., None]:
    """Watch a running gateway: instances, tiers, traffic, tenants, policies."""
    from kvgate.top.command import top as command

    return command


COMMANDS: Final[tuple[tuple[str, "Callable[[], Command]", Mapping[str, Any]], ...]] = (
    (_RUN, up, {}),
    (_RUN, engine, {"context_settings": {"allow_extra_args": True}}),
    (_RUN, gateway, _PASSED_ON),
    (_RUN, sim, _PASSED_ON),
    (_RUN, register, {}),
    (_RUN, admin, {}),
    (_LOOK, doctor, {}),
    (_LOOK, top, {}),
)
"""The heading in ``kvgate --help``, what loads the command, and its settings."""
