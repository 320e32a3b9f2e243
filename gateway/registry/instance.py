"""A snapshot of one engine instance, as the gateway knows it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.http.endpoint import Endpoint, endpoint_of
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole


class Source(StrEnum):
    """Who named an instance: the settings, an operator, the instance itself, or a way of discovery."""

    SETTINGS = "settings"
    ADMIN = "admin"
    SELF = "self"
    FILE = "file"
    DNS = "dns"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """An instance as it is named: an id that is stable over its restarts, and where its HTTP server listens. ``role``
    is what it is for; None is what it says itself.
    """

    id: InstanceId
    url: str
    source: Source = Source.SETTINGS
    role: EngineRole | None = None

    @property
    def endpoint(self) -> Endpoint:
        return endpoint_of(self.url)


class InstanceState(StrEnum):
    """``STARTING`` until its first good health check; only ``HEALTHY`` ones are given requests."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Isolation(StrEnum):
    """What becomes of an instance without ``/kv/v1``, which takes no cache salt, where there are several tenants."""

    ALLOW = "allow"
    STRICT = "strict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as an instance lists it; ``card`` is the whole object from its ``/v1/models``."""

    id: str
    card: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """A good health check. ``stats`` is None for an engine that doesn't serve ``/kv/v1`` (``kv``); ``stats_problem`` is
    why an engine that does could not be read. ``in_flight`` is the most requests of ours that it had while it was
    asked.
    """

    models: tuple[Model, ...]
    stats: InstanceStats | None
    stats_problem: str | None
    in_flight: int
    kv: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A snapshot of one instance. ``reason`` says why it is in its state; ``foreign_requests`` are those in its
    scheduler that did not come through this gateway, at the last health check. ``settled`` says that its blocks have
    been learned since it became healthy, or that this was tried in vain: then ``blocks_problem`` says why they are
    unknown, and the instance is routed by load until a later try succeeds. A ``draining`` one finishes what it has and
    is given nothing new. ``life`` counts how often it became healthy: it may be another process each
    time; ``doubts`` how often answers have contradicted what it announces. ``named_role`` is the role that its source
    names, ``assigned_role`` the one that operators assign, None where there is none; ``role`` follows from these and
    from what the instance reports, and is hybrid before that is known. ``kv``: it serves ``/kv/v1``, whether or not
    that could be read at the last check.
    """

    id: InstanceId
    url: str
    state: InstanceState
    reason: str
    source: Source = Source.SETTINGS
    draining: bool = False
    life: int = 0
    doubts: int = 0
    named_role: EngineRole | None = None
    assigned_role: EngineRole | None = None
    role: EngineRole = EngineRole.HYBRID
    models: tuple[Model, ...] = ()
    stats: InstanceStats | None = None
    kv: bool = False
    foreign_requests: int = 0
    settled: bool = False
    blocks_problem: str | None = None

    @property
    def endpoint(self) -> Endpoint:
        return endpoint_of(self.url)

    @property
    def ready(self) -> bool:
        """Whether it can be given requests, and learning what it holds has been tried at least once."""
        return self.state is InstanceState.HEALTHY and not self.draining and (self.stats is None or self.settled)

    @property
    def blocks_known(self) -> bool:
        """Whether it can be routed by what it holds."""
        return self.ready and self.stats is not None and self.blocks_problem is None

    @property
    def blocks(self) -> str:
        """What is known of its blocks, in words."""
        if self.state is not InstanceState.HEALTHY:
            return "unknown: it is not healthy"
        if self.stats is None:
            return "not published; residency is learned from routed requests and reported usage"
        if not self.settled:
            return "being learned"
        if self.blocks_problem is not None:
            return f"unknown: {self.blocks_problem}; it is routed by load until they are learned"
        return "known"

    @property
    def known_role(self) -> EngineRole | None:
        """What it is for; None where nobody has said so, and it was never reached."""
        return self.role if self.life or self.assigned_role is not None or self.named_role is not None else None

    @property
    def stands_in(self) -> bool:
        """Whether it prefills for others by the gateway's word alone, and so could answer whole requests as well."""
        return self.role is EngineRole.PREFILL and self.stats is not None and self.stats.role is EngineRole.HYBRID

    @property
    def answers(self) -> bool:
        """Whether it may be asked for answers, if only where nobody else can."""
        return self.role is not EngineRole.PREFILL or self.stands_in

    @property
    def listed(self) -> bool:
        """Whether it has said which models it serves."""
        return bool(self.models) or self.life > 0

    def runs(self, engine: str, model: str) -> bool:
        """Whether it says that this engine serves a model of its."""
        return any(served.id == model and served.card.get("owned_by") == engine for served in self.models)

    def serves(self, model: str) -> bool:
        return any(served.id == model for served in self.models)
