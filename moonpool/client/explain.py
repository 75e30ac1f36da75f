"""The result of `explain`: a request's placements, timeline and phases, ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moonpool.client.types import Placement, Timing, Usage

PHASE_NAMES = {
    "gap": "no token comes: the request was placed again",
    "wait": "waits at the conductor for a place",
    "place": "is tokenised and placed, and room is promised",
    "lost": "is placed, and given up before a token came",
    "queue": "waits at the prefill instance",
    "load": "KV is loaded from a kvstore or another instance",
    "chunk": "a step computes a part of the prompt",
    "stream": "KV streams to decode",
    "prompt": "decode computes the missing part of the prompt",
    "steps": "decode generates the answer",
}
"""Descriptions by name, in the order in which a placement's phases begin."""


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A request's phase. Times are seconds since the request arrived at the conductor.

    Attributes:
        name: a key of `PHASE_NAMES`.
        begin_s: the phase's start.
        end_s: the phase's end; equal to `begin_s` if only one time is known.
        tokens: prompt or answer tokens; 0 if the phase has no tokens.
        attempt: number of the phase's placement, from 1 on.
    """

    name: str
    begin_s: float
    end_s: float
    tokens: int = 0
    attempt: int = 1


def request_phases(found: Explanation) -> list[RequestPhase]:
    """A request's known phases, placement by placement; empty before the first token."""
    phases: list[RequestPhase] = []
    began_s = heard_s = 0.0  # when the last placement was given up, and when the last token came
    for number, attempt in enumerate(found.attempts, 1):
        if attempt.first_token_s or attempt.ended_s:
            end_s = attempt.first_token_s or attempt.ended_s
            if heard_s:
                phases.append(RequestPhase("gap", heard_s, end_s, attempt=number))
            phases += (replace(phase, attempt=number) for phase in _phases_of(attempt, began_s))
        began_s, heard_s = attempt.ended_s, attempt.last_token_s or heard_s
    return phases


def _phases_of(attempt: Attempt, began_s: float) -> Iterator[RequestPhase]:
    """One placement's phases; the placement began at `began_s`.

    The prefill instance has another clock. Prefill's times are shifted so that prefill's first token is the
    conductor's.
    """
    searched_s = min(began_s + attempt.waited_s, attempt.placed_s)
    if attempt.waited_s:
        yield RequestPhase("wait", began_s, searched_s)
    if not attempt.first_token_s and not attempt.computed_s:
        yield RequestPhase("lost", searched_s, attempt.ended_s)
        return
    computed_s = attempt.computed_s or attempt.first_token_s
    if attempt.chunks:
        came_s = max(searched_s, computed_s - attempt.queue_s - attempt.prefill_s)
        yield RequestPhase("place", searched_s, came_s)
        yield RequestPhase("queue", came_s, min(came_s + attempt.queue_s, computed_s))
        yield from (_phase_until("load", load, came_s) for load in attempt.loads)
        chunks = [_phase_until("chunk", chunk, came_s) for chunk in attempt.chunks]
        yield from chunks
        if attempt.sent_bytes:
            yield RequestPhase("stream", chunks[0].begin_s, computed_s + attempt.transfer_tail_s)
    elif attempt.first_token_s:
        yield RequestPhase("prompt", searched_s, computed_s, attempt.prompt_tokens - attempt.local_tokens)
    if attempt.tokens:
        yield RequestPhase("steps", attempt.first_token_s, attempt.last_token_s, attempt.tokens)


def _phase_until(name: str, part: TimedTokens, came_s: float) -> RequestPhase:
    return RequestPhase(name, came_s + part.begin_s, came_s + part.end_s, part.tokens)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill instance that was considered, with predicted times in seconds. Their sum is the time to first token.

    Attributes:
        instance: the instance's id.
        local_blocks: the prompt's blocks in the instance's pool.
        used_blocks: the prompt's blocks that would be reused.
        queue_s: waiting in the instance's queue.
        load_s: loading KV.
        prefill_s: computing the rest of the prompt.
        excluded: why the instance was excluded; "" if considered.
        overhead_s: calls, and other time that does not depend on the prompt.
        source: kvstore or instance to load KV from; "" if nothing is loaded.
        cold_blocks: blocks to load that are only on the source's SSD.
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
    """Prompt tokens with KV that was loaded or computed. Times are seconds since arrival at the prefill instance."""

    tokens: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request's placement, and the outcome. Times are seconds since the request arrived at the conductor.

    Attributes:
        placement: the instances.
        cause: why the request was placed anew; "" for the first placement.
        candidates: prefill instances that were considered.
        waited_s: seconds that the request waited at the conductor for this placement.
        placed_s: the placement's time.
        prompt_tokens: tokens that need KV: prompt and answer so far.
        local_tokens: part of `prompt_tokens` in the computing instance's pool.
        loaded_tokens: part of `prompt_tokens` loaded from kvstores and other instances.
        queue_s: seconds of waiting at the prefill instance.
        prefill_s: seconds of loading and computing at the prefill instance.
        loads: KV that was loaded.
        chunks: prefill steps; at most the first 256.
        computed_s: time at which prefill had computed; 0 while computing, or if decode computes.
        transfer_tail_s: seconds from then until decode had all KV; 0 if decode had all KV before.
        sent_bytes: KV sent to decode.
        transport: transport on which the KV went; "" if no KV was sent.
        tokens: new tokens in the answer.
        first_token_s: the first new token's time; 0 if no token came.
        last_token_s: the last new token's time.
        ended_s: time at which the placement was given up; 0 if not given up.
        overtaken_tokens: tokens computed while their load was under way, as the load took longer.
        encode_s: seconds of `prefill_s` that went into pictures.
        rows_s: seconds before `queue_s` in which encoded pictures were read from kvstores.
        rows_tokens: tokens of these pictures.
    """

    placement: Placement
    cause: str = ""
    candidates: tuple[Candidate, ...] = ()
    waited_s: float = 0.0
    placed_s: float = 0.0
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    loads: tuple[TimedTokens, ...] = ()
    chunks: tuple[TimedTokens, ...] = ()
    computed_s: float = 0.0
    transfer_tail_s: float = 0.0
    sent_bytes: int = 0
    transport: str = ""
    tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    overtaken_tokens: int = 0
    encode_s: float = 0.0
    rows_s: float = 0.0
    rows_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A request's course, until now or until the end.

    After several placements, the course of the placement that gave the first token.

    Attributes:
        tenant: the request's owner.
        arrived_at: arrival at the conductor, in seconds since 1970.
        usage: tokens so far.
        timing: times so far; `e2e_s` is 0 while the request runs.
        local_tokens: prompt tokens that were in the prefill instance's pool.
        loads: KV loaded from kvstores and other instances.
        chunks: prefill steps; at most the first 256.
        transfer_tail_s: seconds from the first token until decode had all KV; 0 if decode had all KV before the token.
        sent_bytes: KV sent to decode.
        token_s: token times, in seconds since arrival; at most the first 512.
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
        placement: the instances of the last placement; None if the request was refused.
        candidates: prefill instances that were considered.
        measured_ttft_s: measured time to first token, in seconds.
        measured_tpot_s: measured mean time per token, in seconds.
        refused: why the request was refused; "" if not refused.
        policy: the placement policy's name.
        waited_s: seconds that the request waited at the conductor for a placement.
        timeline: the request's course.
        transport: transport on which the prompt's KV went to decode; "" before the first token, or if no KV was sent.
        attempts: all placements, in their order.
        regret_s: seconds to first token that the last placement lost against the best alternative, by later
            measurements; 0 until the request has ended.
        better: instance that would have been sooner; "" if none would.
        decode_regret_s: seconds from the first token to the last that the placement lost likewise at decode; 0 until
            the answer is complete.
        better_decode: decode instance that would have been sooner; "" if none would.
        failed: why the request ended without a whole answer, though neither refused nor cancelled; "" if not failed.
        cancelled: the client stopped the request, or left, before the answer was whole.
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
    attempts: tuple[Attempt, ...] = ()
    regret_s: float = 0.0
    better: str = ""
    decode_regret_s: float = 0.0
    better_decode: str = ""
    failed: str = ""
    cancelled: bool = False
