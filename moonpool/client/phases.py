"""The phases of a request, as bars on one line of time: what `Explain` tells of it, made ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.client.types import Explanation, TimedTokens, Timeline


@dataclass(frozen=True, slots=True)
class Phase:
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


NAMES = {
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


def phases(found: Explanation) -> list[Phase]:
    """The phases of a request that are known; none of one that has no token yet."""
    line = found.timeline
    if not line.timing.ttft_s:
        return []
    waited_s, ttft_s = min(found.waited_s, line.timing.ttft_s), line.timing.ttft_s
    waits = [Phase("wait", 0.0, waited_s)] if waited_s else []
    return [*waits, *_prefill(line, waited_s), Phase("steps", ttft_s, _last_s(line), line.usage.completion_tokens)]


def _prefill(line: Timeline, placed_from_s: float) -> Iterator[Phase]:
    """What comes before the first token, from a time on.

    The instance's clock is another one; its times are laid so that its first token is the conductor's.
    """
    timing = line.timing
    if not line.chunks:
        yield Phase("prompt", placed_from_s, timing.ttft_s, line.usage.prompt_tokens - line.usage.cached_tokens)
        return
    came_s = max(placed_from_s, timing.ttft_s - timing.queue_s - timing.prefill_s)
    yield Phase("place", placed_from_s, came_s)
    yield Phase("queue", came_s, min(came_s + timing.queue_s, timing.ttft_s))
    yield from (_laid("load", load, came_s) for load in line.loads)
    chunks = [_laid("chunk", chunk, came_s) for chunk in line.chunks]
    yield from chunks
    if line.sent_bytes:
        yield Phase("stream", chunks[0].begin_s, timing.ttft_s + line.transfer_tail_s)


def _laid(name: str, part: TimedTokens, came_s: float) -> Phase:
    return Phase(name, came_s + part.begin_s, came_s + part.end_s, part.tokens)


def _last_s(line: Timeline) -> float:
    """When the last token came that is known of."""
    return max(line.timing.ttft_s, line.timing.e2e_s, line.token_s[-1] if line.token_s else 0.0)
