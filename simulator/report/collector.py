"""Adds up requests as they end, and forgets them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from simulator.cluster.config import Slo
from simulator.cluster.requests import DONE, Request
from simulator.kernel.clock import PS
from simulator.report.quantiles import Quantiles, digits

LONGEST_SHARE = 10
"""A request's TBT is the mean of its longest 1 / `LONGEST_SHARE` of intervals."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What requests went through. Seconds; shares are of all requests, refused ones included."""

    requests: int
    outcomes: dict[str, int]
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    goodput_per_s: float
    goodput_share: float
    reused_share: float
    """Prompt tokens that were not computed, of all."""
    ttft_s: dict[str, float] = field(default_factory=dict)
    tbt_s: dict[str, float] = field(default_factory=dict)
    tpot_s: dict[str, float] = field(default_factory=dict)
    e2e_s: dict[str, float] = field(default_factory=dict)
    ttft_error: dict[str, float] = field(default_factory=dict)
    """|predicted - measured| / measured of the TTFT."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class Collector:
    """Sums over requests that have ended."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._outcomes: Counter[str] = Counter()
        self._ttft, self._tbt, self._tpot, self._e2e, self._error = (Quantiles() for _ in range(5))
        self._tokens = self._prompt_tokens = self._reused_tokens = self._good = 0
        self._begin: int | None = None
        self._end = 0

    def add(self, request: Request) -> None:
        """A request has ended."""
        self._outcomes[request.outcome] += 1
        self._begin = request.arrived if self._begin is None else min(self._begin, request.arrived)
        self._end = max(self._end, request.ended_at)
        if request.outcome != DONE:
            return
        self._tokens += request.made
        self._prompt_tokens += request.tokens
        self._reused_tokens += request.reused
        intervals = request.intervals
        ttft, tbt = (request.first_at - request.arrived) / PS, longest_mean(intervals) / PS
        e2e = (request.ended_at - request.arrived) / PS
        self._ttft.add(ttft)
        self._e2e.add(e2e)
        self._error.add(abs(request.predicted_ttft_s - ttft) / ttft)
        if intervals:
            self._tbt.add(tbt)
            self._tpot.add(sum(intervals) / len(intervals) / PS)
        self._good += ttft <= self._slo.ttft_s and tbt <= self._slo.tbt_s

    def summary(self) -> Summary:
        """The sums so far."""
        requests = self._outcomes.total()
        duration = (self._end - (self._begin or 0)) / PS
        each_s = 1 / duration if duration else 0.0
        return Summary(
            requests=requests,
            outcomes=dict(sorted(self._outcomes.items())),
            duration_s=digits(duration, 6),
            requests_per_s=digits(self._outcomes[DONE] * each_s),
            tokens_per_s=digits(self._tokens * each_s),
            goodput_per_s=digits(self._good * each_s),
            goodput_share=digits(self._good / requests if requests else 0.0),
            reused_share=digits(self._reused_tokens / self._prompt_tokens if self._prompt_tokens else 0.0),
            ttft_s=self._ttft.summary(),
            tbt_s=self._tbt.summary(),
            tpot_s=self._tpot.summary(),
            e2e_s=self._e2e.summary(),
            ttft_error=self._error.summary(),
        )


def longest_mean(intervals: Sequence[int]) -> float:
    """Mean of the longest tenth of intervals, at least one; 0 for none."""
    if not intervals:
        return 0.0
    longest = sorted(intervals)[-math.ceil(len(intervals) / LONGEST_SHARE) :]
    return sum(longest) / len(longest)
