"""Fits a simulated cluster to what a real one was measured to do: what services and links add to a profile.

The profile says what computing takes. What else a stack takes (calls, its event loops, steps on a shared machine) is in
a few named numbers (`Extras`), found by simulating the measured requests again and again. They are then used to foresee
other requests; how well that works, only those tell.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from simulator.cluster.cluster import Cluster
from simulator.cluster.conductor import DONE
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import Request
from simulator.kernel.clock import PS
from simulator.traces.mooncake import TraceRequest

SHARES = tuple(tenth / 10 for tenth in range(1, 10))
"""Quantiles that are compared."""
HEAVY = {0.5: 3.0, 0.9: 2.0}
"""How much some of them count; the others count once."""
FIRST_STEP, LEAST_STEP = 0.6, 0.03
"""Steps of the search, in natural logarithms."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a stack adds to its profile; seconds and factors, the profile alone is (1, 0, 1, 0, 1, 0, ...).

    Attributes:
        prefill, decode: times as long as the profile says steps of prefill and decode take.
        prefill_step_s, decode_step_s: what each step takes on top.
        links: times as slow as the profile says KV is loaded and sent.
        prompt_s: until a prompt is at its prefill instance: tokenising, hashing, planning, a promise of room.
        call_s: mean of what chance adds to each message.
    """

    prefill: float = 1.0
    prefill_step_s: float = 0.002
    decode: float = 1.0
    decode_step_s: float = 0.002
    links: float = 1.0
    prompt_s: float = 0.005
    call_s: float = 0.001

    def applied(self, config: ClusterConfig) -> ClusterConfig:
        """The cluster with these extras."""
        slowed = config.profile.speeds.slowed_prefill(self.prefill).slowed_decode(self.decode)
        speeds = replace(
            slowed,
            prefill_base_s=slowed.prefill_base_s + self.prefill_step_s,
            decode_base_s=slowed.decode_base_s + self.decode_step_s,
            load_bytes_per_s=config.load_bytes_per_s / self.links,
            transfer_bytes_per_s=config.transfer_bytes_per_s / self.links,
        )
        delays = replace(config.delays, prompt_s=self.prompt_s, more_s=self.call_s)
        return replace(config, profile=replace(config.profile, speeds=speeds), delays=delays)

    def to_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Times:
    """Sorted seconds of requests that were answered: to the first token, and the mean from one to the next."""

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Times":
        """Those of some requests."""
        done = [request for request in requests if request.outcome == DONE]
        first = [(request.first_at - request.arrived) / PS for request in done]
        mean = [sum(request.intervals) / len(request.intervals) / PS for request in done if request.intervals]
        return cls(sorted(first), sorted(mean))


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, between neighbours in proportion; 0 for none."""
    if not values:
        return 0.0
    at = share * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def serve(config: ClusterConfig, requests: Sequence[TraceRequest]) -> list[Request]:
    """Simulates a cluster; the requests as they ended, in order of their coming."""
    ended: list[Request] = []
    cluster = Cluster(config, ended.append)
    cluster.feed(requests)
    cluster.run()
    return sorted(ended, key=lambda request: request.number)


def distance(one: Times, other: Times) -> float:
    """Mean of |ln ratio| over the quantiles of both figures; infinite when one has values and the other none."""
    total = weights = 0.0
    for ours, theirs in ((one.ttft_s, other.ttft_s), (one.tpot_s, other.tpot_s)):
        if bool(ours) != bool(theirs):
            return math.inf
        for share in SHARES if ours else ():
            weight = HEAVY.get(share, 1.0)
            total += weight * abs(math.log(quantile(ours, share) / quantile(theirs, share)))
            weights += weight
    return total / weights if weights else 0.0


def fit(
    config: ClusterConfig, requests: Sequence[TraceRequest], measured: Times, *, simulations: int = 150
) -> tuple[Extras, float]:
    """The extras with which a simulation comes nearest to what was measured, and how near: mean |ln ratio|.

    A pattern search: each number in turn is made larger and smaller by a factor, and the factor is reduced when nothing
    helps. Equal arguments give equal results.

    Args:
        config: the cluster without extras.
        requests: what was sent.
        measured: what came.
        simulations: at most.
    """
    best = Extras()

    def off(extras: Extras) -> float:
        return distance(Times.of(serve(extras.applied(config), requests)), measured)

    least, left, step = off(best), simulations - 1, FIRST_STEP
    while left > 0 and step > LEAST_STEP:
        before = least
        for name in [field.name for field in fields(Extras)]:
            for other in _moved(best, name, step):
                if left <= 0:
                    break
                left -= 1
                found = off(other)
                if found < least:
                    best, least = other, found
                    break
        if least > 0.99 * before:
            step /= 2
    return best, least


def _moved(extras: Extras, name: str, step: float) -> Iterator[Extras]:
    for factor in (math.exp(step), math.exp(-step)):
        yield replace(extras, **{name: getattr(extras, name) * factor})
