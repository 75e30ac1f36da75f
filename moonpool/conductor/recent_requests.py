"""Figures about the last requests, for `ClusterState`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from moonpool.v1 import conductor_pb2

RECENT_WINDOW_S = 60.0
MAX_REMEMBERED = 1024
MAX_LISTED = 32
"""Requests listed individually."""
_Figures = tuple[float, int, int, int, float, float]
"""Of a request: end, seconds; tokens of prompt, cached prompt and answer; TTFT and TPOT, seconds."""


class RecentRequests:
    """Figures about the last answered requests, and a list of the last requests, however they ended.

    `clock` gives seconds.
    The figures are plain numbers because the event loop waits while they are added up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: deque[_Figures] = deque(maxlen=MAX_REMEMBERED)
        self._last: deque[tuple[float, conductor_pb2.EndedRequest]] = deque(maxlen=MAX_LISTED)

    def add(self, request_id: str, tenant: str, finished: conductor_pb2.Finished) -> None:
        """Count and list an answered request."""
        usage, timing = finished.usage, finished.timing
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self._ended.append((self._clock(), *counts, timing.ttft_s, timing.tpot_s))
        self._list(conductor_pb2.EndedRequest(request_id=request_id, tenant=tenant, usage=usage, timing=timing))

    def add_refused(self, request_id: str, tenant: str, reason: str) -> None:
        """List a refused request; the request's figures count nowhere."""
        self._list(conductor_pb2.EndedRequest(request_id=request_id, tenant=tenant, refused=reason))

    def add_unanswered(
        self, request_id: str, timeline: conductor_pb2.Timeline, *, failed: str = "", cancelled: bool = False
    ) -> None:
        """List a request without a whole answer; the request's figures count nowhere."""
        self._list(
            conductor_pb2.EndedRequest(
                request_id=request_id,
                tenant=timeline.tenant,
                usage=timeline.usage,
                timing=timeline.timing,
                failed=failed,
                cancelled=cancelled,
            )
        )

    def _list(self, request: conductor_pb2.EndedRequest) -> None:
        self._last.append((self._clock(), request))

    def state(self) -> conductor_pb2.RecentState:
        """Return the sums and quantiles of the last `RECENT_WINDOW_S` seconds."""
        now = self._clock()
        for ended_at, request in self._last:
            request.ended_ago_s = now - ended_at
        last = [request for _, request in reversed(self._last)]
        state = conductor_pb2.RecentState(window_s=min(RECENT_WINDOW_S, now - self._began), last=last)
        while self._ended and now - self._ended[0][0] > RECENT_WINDOW_S:
            self._ended.popleft()
        state.requests = len(self._ended)
        if self._ended:
            _, prompts, cached, answers, ttfts, tpots = zip(*self._ended, strict=True)
            usage = (sum(prompts), sum(cached), sum(answers))
            state.usage.prompt_tokens, state.usage.cached_tokens, state.usage.completion_tokens = usage
            state.ttft_s.CopyFrom(quantiles(ttfts))
            state.tpot_s.CopyFrom(quantiles([tpot for tpot in tpots if tpot]))
        return state


def quantiles(values: Sequence[float]) -> conductor_pb2.Quantiles:
    """Return p50 and p99 among some values, each an actual value; 0 without values."""
    if not values:
        return conductor_pb2.Quantiles()
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.99))
    return conductor_pb2.Quantiles(p50=p50, p99=p99)
