"""Finds the least-cost mix of prefill, decode and kvstore instances that serves a trace within its limits.

More prefill or decode instances are taken to be never worse, so each number is found by bisection; every mix that is
compared is simulated.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from moonpool.errors import MoonpoolError
from simulator.cluster.config import ClusterConfig, Slo
from simulator.experiments.frame import Source, simulate
from simulator.planning.hardware import Hardware
from simulator.report.collector import Summary

STORES = (0, 1, 2, 4)
"""Numbers of kvstores that are tried."""
_MORE_PREFILLS = 2
"""Mixes with so many more prefill instances than needed at least are tried for fewer decode instances."""


class NoPlan(MoonpoolError):  # noqa: N818 - it is an answer, not a defect
    """No mix within the bound keeps the limits; says what came nearest."""


@dataclass(frozen=True, slots=True, order=True)
class Mix:
    """Numbers of instances."""

    prefill: int
    decode: int
    kvstore: int

    def __str__(self) -> str:
        return f"{self.prefill} prefill, {self.decode} decode, {self.kvstore} kvstore"


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found.

    Attributes:
        best: the mix of least cost.
        summary: of its run.
        tried: the goodput share of every mix that was simulated.
        sensitivity: what changes (in words) -> goodput share.
    """

    best: Mix
    cost_per_hour: float
    summary: Summary
    tried: dict[Mix, float]
    sensitivity: dict[str, float]


class Search:
    """One search.

    Args:
        base: the cluster, but for the numbers of instances.
        hardware: what instances cost.
        source: the trace.
        goal: share of requests that must be good.
        bound: instances of a kind at most.
        progress: takes a line per mix.
    """

    def __init__(
        self,
        base: ClusterConfig,
        hardware: Hardware,
        source: Source,
        goal: float,
        bound: int,
        progress: Callable[[str], None],
    ) -> None:
        self._base, self._hardware, self._source = base, hardware, source
        self._goal, self._bound, self._progress = goal, bound, progress
        self._runs: dict[Mix, Summary] = {}

    def plan(self) -> Plan:
        """The best mix, and what it is sensitive to.

        Raises:
            NoPlan: none within the bound is good enough.
        """
        best: Mix | None = None
        for kvstore in STORES:
            for mix in self._frontier(kvstore):
                if best is None or (self._cost(mix), mix) < (self._cost(best), best):
                    best = mix
        if best is None:
            mix, nearest = max(self._runs.items(), key=lambda run: run[1].goodput_share)
            raise NoPlan(
                f"no mix of at most {self._bound} instances of a kind reaches a goodput of {self._goal:.1%}; "
                f"{mix} reach {nearest.goodput_share:.1%}"
            )
        tried = {mix: summary.goodput_share for mix, summary in sorted(self._runs.items())}
        return Plan(best, self._cost(best), self._runs[best], tried, self._sensitivity(best))

    def _cost(self, mix: Mix) -> float:
        return self._hardware.cost(mix.prefill, mix.decode, mix.kvstore)

    def _run(self, mix: Mix) -> Summary:
        if mix not in self._runs:
            self._runs[mix] = summary = self._simulate(mix, self._base)
            self._progress(f"{mix}: goodput {summary.goodput_share:.1%}, cost {self._cost(mix):g} an hour")
        return self._runs[mix]

    def _simulate(self, mix: Mix, base: ClusterConfig) -> Summary:
        config = replace(base, prefill=mix.prefill, decode=mix.decode, kvstore=mix.kvstore)
        return simulate(config, self._source.read())[0]

    def _good(self, prefill: int, decode: int, *, kvstore: int) -> bool:
        return self._run(Mix(prefill, decode, kvstore)).goodput_share >= self._goal

    def _frontier(self, kvstore: int) -> Iterator[Mix]:
        """Mixes with so many kvstores of which no instance can be spared."""
        enough = next((n for n in _doubled(self._bound) if self._good(n, n, kvstore=kvstore)), None)
        if enough is None:
            return
        least = _least(range(1, enough + 1), lambda n: self._good(n, enough, kvstore=kvstore))
        for prefill in range(least, min(least + _MORE_PREFILLS, enough) + 1):
            yield Mix(prefill, _least(range(1, enough + 1), partial(self._good, prefill, kvstore=kvstore)), kvstore)

    def _sensitivity(self, best: Mix) -> dict[str, float]:
        found = {"as planned": self._run(best).goodput_share}
        for name, mix in _neighbours(best):
            found[name] = self._run(mix).goodput_share
        slo, rate = self._base.slo, self._base.rate
        for name, base in (
            ("20 % more requests a second", replace(self._base, rate=rate * 1.2)),
            ("20 % fewer requests a second", replace(self._base, rate=rate / 1.2)),
            ("half the TTFT limit", replace(self._base, slo=Slo(slo.ttft_s / 2, slo.tbt_s))),
            ("three quarters of the TBT limit", replace(self._base, slo=Slo(slo.ttft_s, slo.tbt_s * 0.75))),
        ):
            found[name] = self._simulate(best, base).goodput_share
            self._progress(f"{name}: goodput {found[name]:.1%}")
        return found


def _neighbours(mix: Mix) -> Iterator[tuple[str, Mix]]:
    for kind in ("prefill", "decode", "kvstore"):
        count = getattr(mix, kind)
        if count > (kind != "kvstore"):
            yield f"one {kind} fewer", replace(mix, **{kind: count - 1})
        yield f"one {kind} more", replace(mix, **{kind: count + 1})


def _doubled(bound: int) -> Iterable[int]:
    """1, 2, 4, ... and the bound."""
    number = 1
    while number < bound:
        yield number
        number *= 2
    yield bound


def _least(numbers: range, good: Callable[[int], bool]) -> int:
    """The least number that is good, the last one being good, by bisection."""
    low, high = numbers.start, numbers.stop - 1
    while low < high:
        middle = (low + high) // 2
        if good(middle):
            high = middle
        else:
            low = middle + 1
    return high
