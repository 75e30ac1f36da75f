"""The requests that were answered lately: how many, how quickly, and how much of their prompts was cached."""

from collections import deque
from collections.abc import Callable, Sequence

from moonpool.v1 import conductor_pb2

WINDOW_S = 60.0
REMEMBERED = 4096
TOLD = 32
"""Requests that are told one by one."""


class Recent:
    """Requests in the order of their ends; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: deque[tuple[float, conductor_pb2.EndedRequest]] = deque(maxlen=REMEMBERED)

    def add(self, request_id: str, timeline: conductor_pb2.Timeline) -> None:
        """A request was answered."""
        ended = conductor_pb2.EndedRequest(
            request_id=request_id, tenant=timeline.tenant, usage=timeline.usage, timing=timeline.timing
        )
        self._ended.append((self._clock(), ended))

    def state(self) -> conductor_pb2.RecentState:
        """What the contract tells of them."""
        now = self._clock()
        window_s = min(WINDOW_S, now - self._began)
        lately = [ended for at, ended in self._ended if now - at <= WINDOW_S]
        usages, timings = [ended.usage for ended in lately], [ended.timing for ended in lately]
        return conductor_pb2.RecentState(
            window_s=window_s,
            requests=len(lately),
            usage=conductor_pb2.Usage(
                prompt_tokens=sum(usage.prompt_tokens for usage in usages),
                cached_tokens=sum(usage.cached_tokens for usage in usages),
                completion_tokens=sum(usage.completion_tokens for usage in usages),
            ),
            ttft_s=quantiles([timing.ttft_s for timing in timings]),
            tpot_s=quantiles([timing.tpot_s for timing in timings if timing.tpot_s]),
            last=[ended for _, ended in list(self._ended)[: -TOLD - 1 : -1]],
        )


def quantiles(values: Sequence[float]) -> conductor_pb2.Quantiles:
    """Those of some values, each of them a value; 0 of none."""
    if not values:
        return conductor_pb2.Quantiles()
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.99))
    return conductor_pb2.Quantiles(p50=p50, p99=p99)
