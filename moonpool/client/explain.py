"""What `explain` returns: how a request was placed, its timeline, and its phases ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.client.types import Placement, Timing, Usage


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """What was done between two times, in seconds since the request came to the conductor.

    Attributes:
        name: "wait", "place", "queue", "load", "chunk", "stream", "prompt" or "steps" (`NAMES` says what they are).
        begin_s, end_s: equal where nothing is known but when it was.
        tokens: of the prompt or the answer; 0 where they say nothing.
    """

    name: str
    begin_s: float
    end_s: float
    tokens: int = 0


PHASE_NAMES = {
    "wait": "waits at the conductor for a place",
    "place": "is tokenised and placed, and room is promised",
    "queue": "waits at the prefill instance",
    "load": "KV is loaded from a kvstore or another instance",
    "chunk": "a step computes a part of the prompt",
    "stream": "KV streams to decode",
    "prompt": "decode computes what it lacks of the prompt",
    "steps": "decode generates the answer",
}
"""Phases in the order in which they begin."""


def request_phases(found: Explanation) -> list[RequestPhase]:
    """The phases of a request that are known; none of one that has no token yet."""
    line = found.timeline
    if not line.timing.ttft_s:
        return []
    waited_s, ttft_s = min(found.waited_s, line.timing.ttft_s), line.timing.ttft_s
    waits = [RequestPhase("wait", 0.0, waited_s)] if waited_s else []
    return [
        *waits,
        *_prefill_phases(line, waited_s),
        RequestPhase("steps", ttft_s, _last_token_s(line), line.usage.completion_tokens),
    ]


def _prefill_phases(line: Timeline, placed_from_s: float) -> Iterator[RequestPhase]:
    """What comes before the first token, from a time on.

    The instance's clock is another one; its times are laid so that its first token is the conductor's.
    """
    timing = line.timing
    if not line.chunks:
        yield RequestPhase("prompt", placed_from_s, timing.ttft_s, line.usage.prompt_tokens - line.usage.cached_tokens)
        return
    came_s = max(placed_from_s, timing.ttft_s - timing.queue_s - timing.prefill_s)
    yield RequestPhase("place", placed_from_s, came_s)
    yield RequestPhase("queue", came_s, min(came_s + timing.queue_s, timing.ttft_s))
    yield from (_phase_until("load", load, came_s) for load in line.loads)
    chunks = [_phase_until("chunk", chunk, came_s) for chunk in line.chunks]
    yield from chunks
    if line.sent_bytes:
        yield RequestPhase("stream", chunks[0].begin_s, timing.ttft_s + line.transfer_tail_s)


def _phase_until(name: str, part: TimedTokens, came_s: float) -> RequestPhase:
    return RequestPhase(name, came_s + part.begin_s, came_s + part.end_s, part.tokens)


def _last_token_s(line: Timeline) -> float:
    """When the last token came that is known of."""
    return max(line.timing.ttft_s, line.timing.e2e_s, line.token_s[-1] if line.token_s else 0.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Predicted seconds of one prefill instance; their sum is the time to first token. `excluded`: why it was left out.

    `overhead_s` are calls and all else that does not grow with the prompt. `source` is whom it would load from: a
    kvstore, or another prefill or decode instance; empty where it loads nothing. `cold_blocks`: of what it would load,
    blocks that are on the source's SSD only.
    """

    instance: str
    local_blocks: int
    used_blocks: int
    queue_s: float
    load_s: float
    prefill_s: float
    excluded: str
    overhead_s: float = 0.0
    source: str = ""
    cold_blocks: int = 0


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """Tokens of a prompt whose KV came, and when: seconds since the prompt came to its prefill instance."""

    tokens: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a request has gone through, up to now or to its end.

    Attributes:
        tenant: whose it is.
        arrived_at: when it came to the conductor, seconds since 1970.
        usage: tokens so far.
        timing: times so far; `e2e_s` is 0 while it runs.
        local_tokens: prompt tokens that were in the prefill instance's pool.
        loads: what it loaded from kvstores and other instances.
        chunks: what it computed, step by step; at most the first 256 steps.
        transfer_tail_s: from the first token until all KV was at decode; 0 = before it, or it did not go there.
        sent_bytes: KV that went to decode.
        token_s: when tokens came, seconds since the arrival; at most the first 512 times.
    """

    tenant: str = ""
    arrived_at: float = 0.0
    usage: Usage = Usage()  # noqa: RUF009  # frozen
    timing: Timing = Timing()  # noqa: RUF009  # frozen
    local_tokens: int = 0
    loads: tuple[TimedTokens, ...] = ()
    chunks: tuple[TimedTokens, ...] = ()
    transfer_tail_s: float = 0.0
    sent_bytes: int = 0
    token_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a request was placed; `placement` is None when it was refused, and `refused` says why.

    Measured times are 0 as long as they are not known. `policy` is the name of that by which prefill was chosen.
    """

    placement: Placement | None
    candidates: tuple[Candidate, ...]
    measured_ttft_s: float
    measured_tpot_s: float
    refused: str
    policy: str = ""
    waited_s: float = 0.0
    """Seconds that it waited at the conductor for a place."""
    timeline: Timeline = Timeline()
    lane: str = ""
    """The lane on which the prompt's KV went to decode; empty before the first token, and where none went."""
