"""A request, and one attempt to serve it on a prefill and a decode instance."""

from dataclasses import dataclass, field

from blake3 import blake3

from moonpool.kv.keys import BlockKey
from simulator.traces.mooncake import TraceRequest


@dataclass(slots=True, eq=False)
class Request:
    """What a client wants, and what it got. Times are picoseconds."""

    number: int
    arrived: int
    tokens: int
    """Of the prompt."""
    answer: int
    """Tokens wanted."""
    keys: tuple[BlockKey, ...]
    """Of the prompt's full blocks."""
    max_tokens: int = 0
    """Longest answer that was asked for; 0 = the answer's own length."""
    made: int = 0
    """Tokens that the client has of the answer."""
    attempts: int = 0
    reused: int = 0
    """Prompt tokens that the last attempt did not compute."""
    predicted_ttft_s: float = 0.0
    first_at: int = 0
    last_at: int = 0
    """Of its latest token."""
    ended_at: int = 0
    outcome: str = ""
    """How it ended; empty before."""
    intervals: list[int] = field(default_factory=list)
    """Between tokens."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a request. What an instance still does for an attempt that is over has no effect."""

    request: Request
    fence: int
    """Counts the attempts of the request."""
    prefill: int
    decode: int
    store: int
    """-1: nothing is loaded."""
    loaded_blocks: int
    """Leading blocks that the store is to hold."""
    write_to: int
    """The store that shall hold the chain; -1: none."""
    begun: int = 0
    tokens: int = 0
    """To prefill: the prompt, and what the client has of the answer."""
    left: int = 0
    """Tokens of the answer that were still to be made when it began."""
    prefill_claim: int = 0
    decode_claim: int = 0
    """Where the conductor counts it; 0 = nowhere."""
    busy_s: float = 0.0
    """Seconds that it is predicted to keep its prefill instance busy; 0 once it has its first token."""
    held: int = 0
    """Leading blocks that decode has already."""
    prefill_s: float = 0.0
    """That computing what is not loaded is predicted to take."""
    whole: bool = False
    """Decode has all KV: the prefill instance does not matter any more."""
    over: bool = False


def keys_of(request: TraceRequest, block_tokens: int) -> tuple[BlockKey, ...]:
    """The block keys of a trace's request: of its full blocks, uniform bytes as real keys are."""
    full = request.hash_ids[: request.input_length // block_tokens]
    return tuple(BlockKey(blake3(hash_id.to_bytes(16, "little")).digest()) for hash_id in full)


def answer_key(request: Request, index: int) -> BlockKey:
    """Of a full block with tokens of the answer: a trace does not name it, and nobody else has it."""
    return BlockKey(b"answer".ljust(16, b"\0") + (request.number << 32 | index).to_bytes(16, "little"))


def keys_of_chain(attempt: Attempt, block_tokens: int, blocks: int = -1) -> tuple[BlockKey, ...]:
    """Of the leading full blocks; by default of those whose KV comes from prefill."""
    keys = attempt.request.keys
    full = attempt.tokens // block_tokens if blocks < 0 else blocks
    return (*keys[:full], *(answer_key(attempt.request, index) for index in range(len(keys), full)))
