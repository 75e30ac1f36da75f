"""The requests that were answered lately: how many, how quickly, and how much of their prompts was cached."""

from collections import deque
from collections.abc import Callable, Sequence

from moonpool.v1 import conductor_pb2

WINDOW_S = 60.0
REMEMBERED = 1024
TOLD = 32
"""Requests that are told one by one."""

_Figures = tuple[float, int, int, int, float, float]
"""Of a request: when it ended; tokens of its prompt, those cached and its answer's; TTFT and TPOT."""


class Recent:
    """Requests in the order of their ends; `clock` gives seconds.

    Their figures are plain numbers, which are quickly added up: others wait for that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: deque[_Figures] = deque(maxlen=REMEMBERED)
        self._last: deque[conductor_pb2.EndedRequest] = deque(maxlen=TOLD)

    def add(self, request_id: str, timeline: conductor_pb2.Timeline) -> None:
        """A request was answered."""
        usage, timing = timeline.usage, timeline.timing
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self._ended.append((self._clock(), *counts, timing.ttft_s, timing.tpot_s))
        self._last.append(
            conductor_pb2.EndedRequest(request_id=request_id, tenant=timeline.tenant, usage=usage, timing=timing)
        )

    def state(self) -> conductor_pb2.RecentState:
        """What the contract tells of them."""
        now = self._clock()
        state = conductor_pb2.RecentState(window_s=min(WINDOW_S, now - self._began), last=list(self._last)[::-1])
        while self._ended and now - self._ended[0][0] > WINDOW_S:
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
    """Those of some values, each of them a value; 0 of none."""
    if not values:
        return conductor_pb2.Quantiles()
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.99))
    return conductor_pb2.Quantiles(p50=p50, p99=p99)
