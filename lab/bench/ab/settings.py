"""One side of a comparison as it is typed: ``policy=mq(lifetime=2) ddr=64GiB instances=4``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from engines.sim.profile import Profile, load_profile
from kvcontrol.kv_policy import DEFAULT_POLICY
from kvgate.failure import CommandError
from kvgate.renamed import deprecated
from lab.simulate.study import Study
from lab.simulate.tier_size import times_hbm

SETTINGS: Final[Mapping[str, str]] = {
    "policy": "eviction policy of HBM and tiers",
    "routing": "routing policy, ours or a peer's formula",
    "instances": "engines in the fleet",
    "hbm": "HBM of an engine, in blocks of the trace",
    "ddr": "DDR of an engine, like 64GiB",
    "nvme": "NVMe of an engine, like 1TiB",
    "profile": "kind of engine",
    "slow": "factor on the time of an engine's steps",
}
"""What may differ between the two sides, and what each means."""
_RENAMED: Final = {"router": "routing"}


def study_of(text: str, base: Study, *, side: str, block_tokens: int) -> Study:
    """Return the study of one side: ``base`` with what ``text`` sets.

    Raises ``CommandError`` for a name or a number that there isn't; ``ValueError`` for what can't be simulated.
    """
    wanted = _read(text, side)
    if "profile" in wanted:
        base = replace(base, profile=load_profile(wanted["profile"]))
    if "hbm" in wanted:
        base = replace(base, profile=_with_hbm(base.profile, _whole(wanted["hbm"], side, "hbm"), block_tokens))
    shape = base.profile.engine
    return replace(
        base,
        policy=wanted.get("policy", DEFAULT_POLICY),
        routers=(wanted.get("routing", base.routers[0]),),
        instances=_whole(wanted["instances"], side, "instances") if "instances" in wanted else base.instances,
        ddr=times_hbm(wanted.get("ddr", "0"), f"{side} ddr", shape),
        nvme=times_hbm(wanted.get("nvme", "0"), f"{side} nvme", shape),
        slow=_number(wanted.get("slow", "1"), side, "slow"),
    )


def _read(text: str, side: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split():
        name, is_there, value = part.partition("=")
        if not is_there or not value:
            raise CommandError(f"{side} {text!r}: {part!r} is not written like name=value")
        if name in _RENAMED:
            deprecated(f"{name}=", f"{_RENAMED[name]}=")
            name = _RENAMED[name]
        if name not in SETTINGS:
            raise CommandError(f"{side} {text!r}: unknown setting {name!r}; known: {', '.join(SETTINGS)}")
        if name in found:
            raise CommandError(f"{side} {text!r}: {name} is set twice")
        found[name] = value
    if not found:
        raise CommandError(f"{side} sets nothing", f"set one or more of {', '.join(SETTINGS)}, like policy=lru")
    return found


def _with_hbm(profile: Profile, blocks: int, block_tokens: int) -> Profile:
    shape = profile.engine
    return replace(profile, engine=replace(shape, hbm_blocks=-(-blocks * block_tokens // shape.block_tokens)))


def _whole(text: str, side: str, name: str) -> int:
    if not text.isdecimal() or not int(text):
        raise CommandError(f"{side}: {name} is {text!r}; expected a whole number above 0")
    return int(text)


def _number(text: str, side: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"{side}: {name} is {text!r}; expected a number") from None
