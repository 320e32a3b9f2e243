"""Fleets as candidates: what each of their instances has, what they cost, and the smallest that keeps the goals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

from lab.plan.search import least_enough
from lab.plan.slo import Shortfall, Slo
from lab.simulate.board import Told
from lab.simulate.outcome import FleetOutcome
from lab.simulate.study import Study

GIB: Final = 2**30
_JITTER: Final = 0.1
"""Spread of steps' times with other seeds, where the plan itself has none."""

Shown = Callable[[str, float], AbstractContextManager[Told]]
"""See ``FleetBoard.shown``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is chosen for every instance of a fleet, and how the fleet is routed. Tiers in bytes an instance."""

    ddr_bytes: int
    nvme_bytes: int
    policy: str
    routing: str

    def __str__(self) -> str:
        tiers = [
            f"{size / GIB:g} GiB {name}" for name, size in (("DDR", self.ddr_bytes), ("NVMe", self.nvme_bytes)) if size
        ]
        return ", ".join([" + ".join(["HBM", *tiers]), self.policy, self.routing])


def kinds(ddr: Iterable[int], nvme: Iterable[int], policies: Iterable[str], routing: Iterable[str]) -> list[Kind]:
    """Return all combinations, those of one set of tiers together; NVMe needs DDR."""
    tiers = [(below, disk) for below in ddr for disk in nvme if below or not disk]
    policies, routing = list(policies), list(routing)
    return [
        Kind(ddr_bytes=below, nvme_bytes=disk, policy=policy, routing=router)
        for below, disk in dict.fromkeys(tiers)
        for policy in dict.fromkeys(policies)
        for router in dict.fromkeys(routing)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars an hour: of an instance, and of a GiB of the tiers that it has."""

    instance: float
    ddr_gib: float
    nvme_gib: float

    def usd_per_hour(self, kind: Kind, instances: int) -> float:
        tiers = kind.ddr_bytes / GIB * self.ddr_gib + kind.nvme_bytes / GIB * self.nvme_gib
        return instances * (self.instance + tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fleet that was simulated; it keeps the goals where it has no shortfalls."""

    kind: Kind
    instances: int
    usd_per_hour: float
    outcome: FleetOutcome
    shortfalls: tuple[Shortfall, ...]

    @property
    def keeps(self) -> bool:
        return not self.shortfalls

    @property
    def worst(self) -> float:
        """By which factor the goal is missed that is missed most, 1 where none is."""
        return max((each.factor for each in self.shortfalls), default=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """What came of one kind: the smallest fleet, or the nearest one where none is enough; ``trials`` are those of the
    ``tried`` that were simulated to the end, as a fleet that is certain to miss a goal isn't.
    """

    kind: Kind
    least: Trial | None
    nearest: Trial
    trials: tuple[Trial, ...]
    tried: int
    exceptions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sureness:
    """The smallest fleets of one kind with other seeds of jitter; None where none of up to ``most`` instances suffices.

    ``tried`` has how many seeds kept the goals and how many were tried, by the number of instances.
    """

    jitter: float
    most: int
    smallest: tuple[int | None, ...]
    tried: Mapping[int, tuple[int, int]]

    def spread(self, planned: int) -> tuple[int, int]:
        """Return the smallest and the largest of these fleets and the planned one."""
        sizes = [planned, *(self.most + 1 if each is None else each for each in self.smallest)]
        return min(sizes), max(sizes)

    def words(self, planned: int) -> str:
        """Return one sentence for people."""
        least, most = self.spread(planned)
        how = f"{len(self.smallest)} {'seed' if len(self.smallest) == 1 else 'seeds'} of {self.jitter:.0%} jitter"
        need = "needs" if len(self.smallest) == 1 else "need"
        if least == most:
            return f"{how} {need} the same number"
        return f"{how} {need} {least} to {f'more than {self.most}' if most > self.most else most}"


class Sizing:
    """Simulates fleets of one workload. ``study`` says what all have in common; its instances and tiers don't count."""

    def __init__(self, study: Study, slo: Slo, prices: Prices, *, most: int, shown: Shown) -> None:
        self.study = study
        self.slo = slo
        self.prices = prices
        self.most = most
        self._shown = shown
        self.workload = study.workload()

    def size_all(self, kinds: Sequence[Kind]) -> list[Sized]:
        """Find the smallest fleet of each kind. Where the search begins is what was found for the same policies before,
        with other tiers.
        """
        sized: list[Sized] = []
        before: dict[tuple[str, str], int] = {}
        first = 1
        for place, kind in enumerate(kinds, start=1):
            found = self._size(kind, before.get((kind.policy, kind.routing), first), f"{place} of {len(kinds)}")
            sized.append(found)
            first = found.least.instances if found.least else self.most
            before[kind.policy, kind.routing] = first
        return sized

    def _size(self, kind: Kind, first: int, which: str) -> Sized:
        trials: dict[int, Trial] = {}

        def enough(instances: int) -> bool:
            trials[instances] = self._try(kind, instances, which)
            return trials[instances].keeps

        found = least_enough(enough, first=first, most=self.most)
        whole = [each for each in trials.values() if each.outcome.complete]
        return Sized(
            kind=kind,
            least=None if found.least is None else trials[found.least],
            nearest=min(whole, key=lambda each: (each.worst, each.usd_per_hour)),
            trials=tuple(whole),
            tried=len(trials),
            exceptions=found.exceptions,
        )

    def sureness(self, chosen: Trial, seeds: int) -> Sureness:
        """Size the kind of a fleet again with other seeds: its number, the next one, and further where they differ."""
        most = min(self.most, 2 * chosen.instances + 1)
        jitter = self.study.jitter or _JITTER
        smallest: list[int | None] = []
        tried: dict[int, tuple[int, int]] = {}
        for seed in range(1, seeds + 1):

            def enough(instances: int, seed: int = seed) -> bool:
                study = replace(self.study_of(chosen.kind, instances), seed=self.study.seed + seed, jitter=jitter)
                keeps = self._tried(study, chosen.kind, f"seed {seed} of {seeds}").keeps
                kept, count = tried.get(instances, (0, 0))
                tried[instances] = kept + keeps, count + 1
                return keeps

            smallest.append(least_enough(enough, first=chosen.instances, most=most).least)
        return Sureness(jitter=jitter, most=most, smallest=tuple(smallest), tried=dict(sorted(tried.items())))

    def _try(self, kind: Kind, instances: int, which: str) -> Trial:
        return self._tried(self.study_of(kind, instances), kind, which)

    def _tried(self, study: Study, kind: Kind, which: str) -> Trial:
        workload, instances = self.workload, study.instances
        hopeless = self.slo.hopeless(workload.size)
        if instances == self.most:  # the last one tried is to say by how much it misses
            hopeless = _never
        with self._shown(f"{which}: {instances} x {kind}", workload.spans_s) as told:
            outcome = study.run(kind.routing, workload, told, hopeless)
        shortfalls = self.slo.shortfalls(outcome)
        if not outcome.complete:
            shortfalls = shortfalls or (
                Shortfall(goal="stopped", factor=float("inf"), words="a goal was missed early"),
            )
        return Trial(
            kind=kind,
            instances=instances,
            usd_per_hour=self.prices.usd_per_hour(kind, instances),
            outcome=outcome,
            shortfalls=shortfalls,
        )

    def study_of(self, kind: Kind, instances: int) -> Study:
        """Return the study of one fleet."""
        shape = self.study.profile.engine
        hbm_bytes = shape.hbm_blocks * shape.block_bytes
        return replace(
            self.study,
            instances=instances,
            ddr=kind.ddr_bytes / hbm_bytes,
            nvme=kind.nvme_bytes / hbm_bytes,
            policy=kind.policy,
        )


def _never(_: object) -> bool:
    return False


def frontier(trials: Iterable[Trial]) -> list[Trial]:
    """Return the fleets that keep the goals and that no other beats: as cheap, as quick and finding as much, and better
    in one of them; the first of those that are equal. Cheapest first. O(n^2).
    """
    unlike: dict[tuple[float, float, float], Trial] = {}
    for each in trials:
        if each.keeps:
            unlike.setdefault(_figures(each), each)
    good = [unlike[figures] for figures in sorted(unlike)]
    return [each for each in good if not any(_beats(other, each) for other in good)]


def _figures(trial: Trial) -> tuple[float, float, float]:
    return trial.usd_per_hour, trial.outcome.ttft_of_answerable(0.99), -trial.outcome.hit_rate


def _beats(other: Trial, trial: Trial) -> bool:
    pairs = list(zip(_figures(other), _figures(trial), strict=True))
    return other is not trial and all(mine <= theirs for mine, theirs in pairs)


def cheapest(sized: Iterable[Sized]) -> Trial | None:
    """Return the cheapest smallest fleet, the quicker of equally cheap ones; None where no kind has any."""
    return min((each.least for each in sized if each.least), key=_figures, default=None)
