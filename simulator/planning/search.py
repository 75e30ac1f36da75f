"""Finds the least-cost mix of prefill, decode and kvstore instances that serves a trace within its limits.

More prefill or decode instances are taken to be never worse, so each number is found by bisection; every mix that is
compared is simulated. With so many kvstores, the search begins at a mix of which no instance can be spared, and walks
from there both ways: fewer instances of one kind against more of the other one, as long as that can cost less. Of
kvstores more can be worse; so numbers are tried, first the doubled ones, then those beside the best.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from moonpool.errors import MoonpoolError
from simulator.cluster.config import ClusterConfig, Slo
from simulator.planning.hardware import Hardware
from simulator.report.collector import Summary

STORES = (0, 1, 2, 4)
"""Numbers of kvstores that are always tried, within the bound."""


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
        serve: serves the trace with a cluster.
        goal: share of requests that must be good.
        bound: instances of a kind at most.
        progress: takes a line per mix.
    """

    def __init__(
        self,
        base: ClusterConfig,
        hardware: Hardware,
        serve: Callable[[ClusterConfig], Summary],
        goal: float,
        bound: int,
        progress: Callable[[str], None],
    ) -> None:
        self._base, self._hardware, self._serve = base, hardware, serve
        self._goal, self._bound, self._progress = goal, bound, progress
        self._runs: dict[Mix, Summary] = {}
        self._looked: set[int] = set()
        self._best: Mix | None = None

    def plan(self) -> Plan:
        """The best mix, and what it is sensitive to.

        Raises:
            NoPlan: none within the bound is good enough.
        """
        best = self._search()
        if best is None:
            mix, nearest = max(self._runs.items(), key=lambda run: run[1].goodput_share)
            raise NoPlan(
                f"no mix of at most {self._bound} instances of a kind reaches a goodput of {self._goal:.1%}; "
                f"{mix} reach {nearest.goodput_share:.1%}"
            )
        tried = {mix: summary.goodput_share for mix, summary in sorted(self._runs.items())}
        return Plan(best, self._cost(best), self._runs[best], tried, self._sensitivity(best))

    def _search(self) -> Mix | None:
        for kvstore in STORES:
            self._look(kvstore)
        while self._best is not None and self._best.kvstore >= STORES[-1] and self._look(2 * self._best.kvstore):
            pass
        while self._best is not None and any(self._look(self._best.kvstore + step) for step in (-1, 1)):
            pass
        return self._best

    def _look(self, kvstore: int) -> bool:
        """Looks for a better mix than the best with so many kvstores; whether there is one."""
        before = self._best
        if kvstore in self._looked or not 0 <= kvstore <= self._bound or not self._better(Mix(1, 1, kvstore)):
            return False
        self._looked.add(kvstore)
        start = self._start(kvstore)
        if start is not None:
            self._offer(start)
            self._walk(start, "decode", "prefill")
            self._walk(start, "prefill", "decode")
        return self._best != before

    def _cost(self, mix: Mix) -> float:
        return self._hardware.cost(mix.prefill, mix.decode, mix.kvstore)

    def _run(self, mix: Mix) -> Summary:
        if mix not in self._runs:
            self._runs[mix] = summary = self._simulate(mix, self._base)
            self._progress(f"{mix}: goodput {summary.goodput_share:.1%}, cost {self._cost(mix):g} an hour")
        return self._runs[mix]

    def _simulate(self, mix: Mix, base: ClusterConfig) -> Summary:
        return self._serve(replace(base, prefill=mix.prefill, decode=mix.decode, kvstore=mix.kvstore))

    def _good(self, mix: Mix) -> bool:
        return self._run(mix).goodput_share >= self._goal

    def _least(self, low: int, high: int, mix: Callable[[int], Mix]) -> int:
        """The least number from `low` on with which the mix is good, `high` being so, by bisection."""
        while low < high:
            middle = (low + high) // 2
            if self._good(mix(middle)):
                high = middle
            else:
                low = middle + 1
        return high

    def _better(self, mix: Mix) -> bool:
        """Whether it would be better than the best so far, if it is good."""
        return self._best is None or (self._cost(mix), mix) < (self._cost(self._best), self._best)

    def _offer(self, mix: Mix) -> None:
        """A mix that is good."""
        if self._better(mix):
            self._best = mix

    def _start(self, kvstore: int) -> Mix | None:
        """A mix with so many kvstores of which no instance can be spared; None: none within the bound is good."""
        enough = next((n for n in _doubled(self._bound) if self._good(Mix(n, n, kvstore))), None)
        if enough is None:
            return None
        prefill = self._least(1, enough, lambda n: Mix(n, enough, kvstore))
        return Mix(prefill, self._least(1, enough, lambda n: Mix(prefill, n, kvstore)), kvstore)

    def _walk(self, start: Mix, fewer: str, more: str) -> None:
        """Mixes with fewer instances of one kind and more of the other one, as long as they can be better.

        The fewer there are of one kind, the more are needed of the other one. So a mix that would hardly be better and
        is not good ends all with as many of the one kind and fewer of the other.
        """

        def mix(few: int, many: int) -> Mix:
            return replace(start, **{fewer: few, more: many})

        def most(few: int) -> int:
            return max((n for n in range(1, self._bound + 1) if self._better(mix(few, n))), default=0)

        few, low = getattr(start, fewer) - 1, getattr(start, more) + 1
        widest = most(1)
        if few < 1 or widest < low or not self._good(mix(few, widest)):
            return
        fewest = self._least(1, few, lambda n: mix(n, widest))
        for n in range(few, fewest - 1, -1):
            many = most(n)
            if many >= low and self._good(mix(n, many)):
                low = self._least(low, many, partial(mix, n))
                self._offer(mix(n, low))
            else:
                low = max(low, many + 1)

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
