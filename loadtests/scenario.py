"""A scenario: who asks what, how many of them when, and what must hold. A TOML file in ``scenarios/`` or anywhere.

Everything is checked when it is read; a message names the file, the key and what is allowed. Lengths are tokens.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

FOLDER = Path(__file__).parent / "scenarios"


class ScenarioError(ValueError):
    """A scenario can't be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A person who talks: one of ``system_prompts`` shared ones, a first message, then turns with thought between."""

    share: int = 0
    system_tokens: int = 200
    system_prompts: int = 1
    first_tokens: int = 60
    turn_tokens: int = 40
    answer_tokens: int = 64
    turns: int = 6
    think_s: float = 5.0

    @property
    def least_tokens(self) -> int:
        return self.system_tokens + self.first_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A program in a loop: instructions and tools that all share, a task, then the results of its tools one by one."""

    share: int = 0
    system_tokens: int = 2000
    system_prompts: int = 1
    task_tokens: int = 300
    result_tokens: int = 250
    answer_tokens: int = 48
    steps: int = 12
    think_s: float = 0.5

    @property
    def least_tokens(self) -> int:
        return self.system_tokens + self.task_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rag:
    """Questions about ``chosen`` of ``documents``, some of them asked for far more than others (Zipf's ``skew``)."""

    share: int = 0
    system_tokens: int = 200
    documents: int = 200
    document_tokens: int = 600
    chosen: int = 4
    question_tokens: int = 30
    answer_tokens: int = 96
    skew: float = 1.1
    think_s: float = 3.0

    @property
    def least_tokens(self) -> int:
        return self.system_tokens + self.chosen * self.document_tokens + self.question_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Work that nobody waits for: one instruction, another text each time, one after another without a pause."""

    share: int = 0
    system_tokens: int = 200
    prompt_tokens: int = 1500
    answer_tokens: int = 128
    think_s: float = 0.0

    @property
    def least_tokens(self) -> int:
        return self.system_tokens + self.prompt_tokens + self.answer_tokens


Kind = Chat | Agent | Rag | Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many users when: ``steady``; ``bursts`` of ``peak`` for ``burst_s`` in each period; or ``diurnal``, a cosine
    from ``users`` to ``peak`` and back in each period. ``ramp_s`` is how long it takes to come to the first ones.
    """

    shape: str = "steady"
    users: int = 4
    peak: int = 0
    period_s: float = 60.0
    burst_s: float = 10.0
    ramp_s: float = 5.0
    duration_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What must hold at the end. Each is off at None; times are milliseconds, over all users."""

    requests_min: float | None = None
    failed_ratio_max: float | None = 0.0
    shed_ratio_max: float | None = 0.0
    ttft_p50_ms_max: float | None = None
    ttft_p95_ms_max: float | None = None
    itl_p95_ms_max: float | None = None
    e2e_p95_ms_max: float | None = None
    cached_ratio_min: float | None = None


SHAPES = ("steady", "bursts", "diurnal")
_KINDS: Mapping[str, type[Kind]] = {"chat": Chat, "agent": Agent, "rag": Rag, "batch": Batch}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``kinds`` are those that have users, by name."""

    name: str
    description: str
    load: Load
    thresholds: Thresholds
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def least_tokens(self) -> int:
        """How long a context must be at least, but for what the chat template adds."""
        return max(each.least_tokens for each in self.kinds.values())

    def scaled(self, scale: float) -> "Scenario":
        """Return it with all lengths times ``scale``, none below one token."""
        return replace(self, kinds={name: _scaled(kind, scale) for name, kind in self.kinds.items()})


def names() -> list[str]:
    """Return the scenarios that come along."""
    return sorted(each.stem for each in FOLDER.glob("*.toml"))


def read_scenario(name: str) -> Scenario:
    """Return a scenario by its name, or by the path of its file. Raises ``ScenarioError``."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScenarioError(f"unknown scenario {name!r}; known: {', '.join(names())}, or name a .toml") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    allowed = {"description", "load", "thresholds", *_KINDS}
    if unknown := said.keys() - allowed:
        raise ScenarioError(f"{path}: there is no {min(unknown)!r}; allowed are {', '.join(sorted(allowed))}")
    kinds = {name: _table(path, name, said[name], kind) for name, kind in _KINDS.items() if name in said}
    kinds = {name: kind for name, kind in kinds.items() if kind.share}
    if not kinds:
        raise ScenarioError(f"{path}: nobody has a share: give one of {', '.join(_KINDS)} a share of 1 or more")
    load = _table(path, "load", said.get("load", {}), Load)
    _check_load(path, load)
    return Scenario(
        name=path.stem,
        description=str(said.get("description", "")),
        load=load,
        thresholds=_table(path, "thresholds", said.get("thresholds", {}), Thresholds),
        kinds=kinds,
    )


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


_Table = TypeVar("_Table", bound=_Dataclass)


def _table(path: Path, name: str, said: object, kind: type[_Table]) -> _Table:
    if not isinstance(said, dict):
        raise ScenarioError(f"{path}: {name} is a table: [{name}]")
    known = get_type_hints(kind)
    names = [each.name for each in fields(kind)]
    for key, value in said.items():
        if key not in names:
            raise ScenarioError(f"{path}: [{name}] has no {key!r}; it has {', '.join(names)}")
        if known[key] is str:
            if value not in SHAPES:
                raise ScenarioError(f"{path}: [{name}] {key} = {value!r}; allowed are {', '.join(SHAPES)}")
        elif isinstance(value, bool) or not isinstance(value, int if known[key] is int else int | float):
            what = "a whole number" if known[key] is int else "a number"
            raise ScenarioError(f"{path}: [{name}] {key} = {value!r}; {what} is allowed")
        elif not 0 <= value < float("inf"):
            raise ScenarioError(f"{path}: [{name}] {key} = {value!r}; 0 or more is allowed")
        elif known[key] is int and value < 1 and key not in {"share", "peak"}:
            raise ScenarioError(f"{path}: [{name}] {key} = {value!r}; 1 or more is allowed")
    return kind(**said)


def _check_load(path: Path, load: Load) -> None:
    if load.shape != "steady" and load.peak < load.users:
        raise ScenarioError(f"{path}: [load] peak = {load.peak}; {load.users} (users) or more is allowed")
    if load.shape != "steady" and load.period_s <= 0:
        raise ScenarioError(f"{path}: [load] period_s = {load.period_s}; more than 0 is allowed")


def _scaled(kind: Kind, scale: float) -> Kind:
    lengths = [each.name for each in fields(kind) if each.name.endswith("_tokens")]
    return replace(kind, **{name: max(1, round(getattr(kind, name) * scale)) for name in lengths})
