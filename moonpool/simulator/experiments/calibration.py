"""Fits a simulated cluster to a real cluster's measurements, and compares both quantile by quantile.

The profile says what computing takes. A stack's other delays (calls, event loops, steps on a shared machine) are in a
few named numbers (`Extras`), found by simulating the measured requests.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import DONE, Request
from moonpool.simulator.experiments.report import Chart
from moonpool.simulator.traces.mooncake import TraceRequest

SHARES = tuple(tenth / 10 for tenth in range(1, 10))
"""Quantiles that are compared."""
SIMULATIONS = 200
"""That a fit may take."""
FIRST_STEP, LEAST_STEP = 0.8, 0.03
"""Search steps, in natural logarithms."""
WORTH = 0.999
"""A try must be better by a thousandth: parameters with hardly any effect stay."""
FACTORS = {"prefill", "decode", "host_slowdown", "links"}
"""Extras that multiply: their steps are a quarter of the steps for seconds, which can have any size."""
WANTED = {0.5: 0.15, 0.9: 0.25}
"""How far a simulated quantile may be from the measured quantile, as a share."""


@dataclass(frozen=True, slots=True)
class Extras:
    """A stack's delays beyond the profile; seconds and factors, the profile alone is (1, 0, 1, 0, 1, 1, 0, ...).

    Attributes:
        prefill, decode: factors by which prefill and decode steps take longer than the profile says.
        prefill_step_s: seconds added to each prefill step.
        decode_token_s: seconds added to each token in a decode step: telling a client.
        decode_run_s: mean seconds added to a run of decode steps: the way to the engine and back. A run ends with each
            sequence that joins or ends, so a first token from decode waits for the run's end, and a load peak has many
            ends.
        host_slowdown: factor by which steps take longer while another engine on the machine computes. Fitted if engines
            share a machine (`ClusterConfig.host_slowdown` above 1), else 1.
        links: factor by which KV is loaded and sent more slowly than the profile says.
        prompt_s: seconds until a prompt is at a prefill instance: tokenising, hashing, planning, a reservation.
        call_s: mean random seconds added to each message.
    """

    prefill: float = 1.0
    prefill_step_s: float = 0.002
    decode: float = 1.0
    decode_token_s: float = 0.0005
    decode_run_s: float = 0.002
    host_slowdown: float = 1.0
    links: float = 1.0
    prompt_s: float = 0.005
    call_s: float = 0.001

    def applied(self, config: ClusterConfig) -> ClusterConfig:
        """The cluster with these extras."""
        slowed = config.profile.speeds.slowed_prefill(self.prefill).slowed_decode(self.decode)
        speeds = replace(
            slowed,
            prefill_base_s=slowed.prefill_base_s + self.prefill_step_s,
            decode_per_sequence_s=slowed.decode_per_sequence_s + self.decode_token_s,
            load_bytes_per_s=config.load_bytes_per_s / self.links,
            transfer_bytes_per_s=config.transfer_bytes_per_s / self.links,
        )
        delays = replace(config.delays, prompt_s=self.prompt_s, more_s=self.call_s, run_s=self.decode_run_s)
        host_slowdown = max(1.0, self.host_slowdown)
        return replace(
            config, profile=replace(config.profile, speeds=speeds), delays=delays, host_slowdown=host_slowdown
        )

    def to_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


STARTS = tuple(
    Extras(prefill=prefill, decode=decode, decode_run_s=run_s, prompt_s=prompt_s)
    for prefill in (1.0, 1.5, 2.5)
    for decode, run_s in ((0.3, 0.004), (1.0, 0.001), (1.0, 0.01))
    for prompt_s in (0.005, 0.03)
)
"""Starting points for the search, which begins at the best."""
_Direction = Mapping[str, int]
"""Numbers that a move changes, each up (1) or down (-1) together with the others."""
DIRECTIONS: tuple[_Direction, ...] = (
    *({field.name: 1} for field in fields(Extras)),
    {"decode": -1, "decode_run_s": 1},
    {"prefill": -1, "prompt_s": 1},
)
"""The last directions are pairs in which a bit more on one side makes up for a bit less on the other."""


@dataclass(frozen=True, slots=True)
class Times:
    """Answered requests' seconds, in request order. 0 for an answer with a single token.

    Attributes:
        ttft_s: to the first token.
        tpot_s: the mean from one token to the next.
        second_s: from the first token to the second.
    """

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]
    second_s: Sequence[float] = ()

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Times":
        """The seconds of some requests."""
        done = [request for request in requests if request.outcome == DONE]
        first = [(request.first_at - request.arrived) / PS for request in done]
        gaps = [request.intervals for request in done]
        means = [sum(gap) / len(gap) / PS if gap else 0.0 for gap in gaps]
        return cls(first, means, [gap[0] / PS if gap else 0.0 for gap in gaps])

    @property
    def figures(self) -> dict[str, list[float]]:
        """Sorted values by name."""
        return {"TTFT": sorted(self.ttft_s), "TPOT": _present(self.tpot_s)}

    @property
    def points(self) -> list[float]:
        """Each time's nine quantiles."""
        times = map(_present, (self.ttft_s, self.tpot_s, self.second_s))
        return [quantile(values, share) for values in times for share in SHARES]


def _present(values: Sequence[float]) -> list[float]:
    return sorted(filter(None, values))


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, between neighbours in proportion; 0 for none."""
    if not values:
        return 0.0
    at = share * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def serve(config: ClusterConfig, requests: Sequence[TraceRequest]) -> list[Request]:
    """Simulate a cluster; return the requests as they ended, in the order of the trace."""
    ended: list[Request] = []
    cluster = Cluster(config, ended.append)
    cluster.feed(requests)
    cluster.run()
    return sorted(ended, key=lambda request: request.number)


def distance(times: Times, other: Times) -> float:
    """Mean |ln ratio| over all requests and over the quantiles, for both figures; infinite for other requests.

    Requests tell what depends on their lengths, quantiles how much chance adds to each. The mean time per token does
    not show whether each token or only a run's start takes long: the quantiles do.
    """
    if len(times.ttft_s) != len(other.ttft_s):
        return math.inf
    by_request = [*_logs(times.ttft_s, other.ttft_s), *_logs(times.tpot_s, other.tpot_s)]
    shape = [*_logs(times.points, other.points)]
    return sum(sum(logs) / len(logs) for logs in (by_request, shape) if logs)


def _logs(ours: Sequence[float], theirs: Sequence[float]) -> Iterator[float]:
    return (abs(math.log(a / b)) for a, b in zip(ours, theirs, strict=True) if a > 0 and b > 0)


def fit(
    config: ClusterConfig, requests: Sequence[TraceRequest], measured: Times, *, simulations: int = SIMULATIONS
) -> tuple[Extras, float]:
    """The extras with which a simulation comes nearest to what was measured, and their `distance`.

    A pattern search (Hooke and Jeeves, 1961): each number in turn is made larger or smaller by a factor as long as that
    helps, and so are a few pairs (`WAYS`). Then all numbers move on in the same direction. The factor is reduced if no
    move helps. What did not help is tried again then. Equal arguments give equal results.

    Args:
        config: the cluster without extras.
        requests: what was sent.
        measured: what came.
        simulations: at most.
    """
    search = _Search(lambda extras: distance(Times.of(serve(extras.applied(config), requests)), measured), simulations)
    ways = [way for way in DIRECTIONS if "host_slowdown" not in way or config.host_slowdown > 1.0]
    for start in STARTS:
        search.better(replace(start, host_slowdown=config.host_slowdown))
    step, tried = FIRST_STEP, ways
    while search.left > 0 and step > LEAST_STEP:
        before, least = search.best, search.least
        tried = [way for way in tried if search.moves(way, step)]
        on = {name: value / getattr(before, name) for name, value in search.best.to_json().items()}
        while search.best != before and search.better(_moved(search.best, on)):
            pass
        if search.least > 0.95 * least:
            step, tried = step / 2, ways
    return search.best, search.least


class _Search:
    """The best extras so far, and how many more may be tried."""

    def __init__(self, off: Callable[[Extras], float], left: int) -> None:
        self._off = off
        self.left = left - 1
        self.best = Extras()
        self.least = off(self.best)

    def moves(self, way: _Direction, step: float) -> bool:
        """Go a way on or back as often as that helps; return whether a move helped."""
        before = self.best
        for sign in (1, -1):
            factors = {name: math.exp(sign * up * _size(name, step)) for name, up in way.items()}
            while self.better(_moved(self.best, factors)):
                pass
        return self.best != before

    def better(self, other: Extras) -> bool:
        """Try extras; return whether these extras are the best now."""
        if self.left <= 0:
            return False
        self.left -= 1
        found = self._off(other)
        if found > WORTH * self.least:
            return False
        self.best, self.least = other, found
        return True


def _size(name: str, step: float) -> float:
    return step / 4 if name in FACTORS else step


def _moved(extras: Extras, factors: Mapping[str, float]) -> Extras:
    return replace(extras, **{name: getattr(extras, name) * factor for name, factor in factors.items()})


@dataclass(frozen=True, slots=True)
class Line:
    """One figure's quantile, seconds."""

    figure: str
    measured_s: float
    simulated_s: float
    wanted: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated_s / self.measured_s

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return abs(self.ratio - 1.0)

    def to_json(self) -> dict[str, object]:
        """By name."""
        return {**asdict(self), "ratio": self.ratio, "met": self.error <= self.wanted}


def compare(measured: Times, simulated: Times) -> list[Line]:
    """Quantiles with a bound, for figures that were measured."""
    return [
        Line(f"{name} p{100 * share:.0f}", quantile(ours, share), quantile(theirs, share), wanted)
        for name, ours, theirs in _figures(measured, simulated)
        for share, wanted in WANTED.items()
    ]


def charts(measured: Times, simulated: Times) -> list[Chart]:
    """Each figure's nine quantiles."""
    return [
        Chart(
            f"{name}, measured and simulated",
            "percentile",
            "seconds",
            {
                kind: [(100 * share, quantile(values, share)) for share in SHARES]
                for kind, values in (("measured", ours), ("simulated", theirs))
            },
        )
        for name, ours, theirs in _figures(measured, simulated)
    ]


def _figures(measured: Times, simulated: Times) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    others = simulated.figures
    return [(name, values, others[name]) for name, values in measured.figures.items() if values and others[name]]
