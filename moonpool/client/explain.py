"""The result of `explain`: the placement of a request, its timeline, and its phases, ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.client.types import Placement, Timing, Usage


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A phase of a request. Times are seconds since the request arrived at the conductor.

    Attributes:
        name: a key of `PHASE_NAMES`.
        begin_s: start of the phase.
        end_s: end of the phase; equal to `begin_s` if only one time is known.
        tokens: tokens of the prompt or the answer; 0 if the phase has no tokens.
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
"""Descriptions by name, in the order in which phases begin."""


def request_phases(found: Explanation) -> list[RequestPhase]:
    """The known phases of a request; empty before its first token."""
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
    """The phases from the placement to the first token.

    The prefill instance has another clock. Its times are shifted so that its first token is the conductor's.
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
    """Time of the last known token."""
    return max(line.timing.ttft_s, line.timing.e2e_s, line.token_s[-1] if line.token_s else 0.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill instance that was considered, with predicted times in seconds. Their sum is the time to first token.

    Attributes:
        instance: id of the instance.
        local_blocks: blocks of the prompt in the instance's pool.
        used_blocks: blocks of the prompt that would be reused.
        queue_s: waiting in the instance's queue.
        load_s: loading KV.
        prefill_s: computing the rest of the prompt.
        excluded: why the instance was excluded; "" if it was not.
        overhead_s: calls, and other time that does not depend on the prompt.
        source: kvstore or instance to load KV from; "" if nothing is loaded.
        cold_blocks: blocks to load that are only on the SSD of the source.
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
    """Tokens of a prompt whose KV was loaded or computed. Times are seconds since arrival at the prefill instance."""

    tokens: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The course of a request, until now or until its end.

    Attributes:
        tenant: owner of the request.
        arrived_at: arrival at the conductor, in seconds since 1970.
        usage: tokens so far.
        timing: times so far; `e2e_s` is 0 while the request runs.
        local_tokens: prompt tokens that were in the prefill instance's pool.
        loads: KV loaded from kvstores and other instances.
        chunks: prefill steps; at most the first 256.
        transfer_tail_s: seconds from the first token until decode had all KV; 0 if decode had all KV before the token.
        sent_bytes: KV sent to decode.
        token_s: times of tokens, in seconds since arrival; at most the first 512.
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
    """How a request was placed. Measured times are 0 until they are known.

    Attributes:
        placement: the instances; None if the request was refused.
        candidates: prefill instances that were considered.
        measured_ttft_s: measured time to first token, in seconds.
        measured_tpot_s: measured mean time per token, in seconds.
        refused: why the request was refused; "" if it was not.
        policy: name of the placement policy.
        waited_s: seconds that the request waited at the conductor for a placement.
        timeline: the course of the request.
        transport: transport on which the prompt's KV went to decode; "" before the first token, or if no KV was sent.
    """

    placement: Placement | None
    candidates: tuple[Candidate, ...]
    measured_ttft_s: float
    measured_tpot_s: float
    refused: str
    policy: str = ""
    waited_s: float = 0.0
    timeline: Timeline = Timeline()
    transport: str = ""
