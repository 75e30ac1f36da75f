"""One request at a decode instance, as the core sees it."""

from dataclasses import dataclass, field
from enum import Enum

from moonpool.kv.keys import BlockKey


class State(Enum):
    """Where a request stands."""

    PROMISED = "promised"
    """Room is promised; the held prefix alone is in its table."""
    RECEIVING = "receiving"
    """Its prompt's blocks are bound and KV comes."""
    WHOLE = "whole"
    """All KV is there; the first token is not known."""
    READY = "ready"
    """KV is there for all tokens but the last; it waits for a place in the batch, or for a block."""
    RUNNING = "running"
    """In the batch."""
    CATCHING_UP = "catching up"
    """Comes back from preemption: KV that is gone is computed, chunk by chunk."""
    SWAPPING_OUT = "swapping out"
    PARKED = "parked"
    """Preempted, without blocks."""
    SWAPPING_IN = "swapping in"
    LOADING = "loading"
    """Its full blocks are being read from a kvstore."""
    LEAVING = "leaving"
    """Has ended, but a step or a copy still uses its blocks."""
    LOGGED = "logged"
    """Parked without a conductor: not one of the core's requests until it is adopted."""


NOBODY = 0
"""The stream of those that have lost their conductor."""

ACTIVE = (State.READY, State.RUNNING, State.CATCHING_UP)
"""States in which a sequence may be preempted, when no step is running."""


@dataclass(slots=True, eq=False)
class Request:
    """A request. What changes it keeps the sums of `Room` and `Batch` right."""

    id: int
    keys: list[BlockKey]
    """Of its full blocks, the prompt's and then the answer's."""
    tokens: int
    """Tokens so far, once it has started with the first one sampled; less `Batch.ticks` while it is in the batch."""
    prompt_tokens: int
    total_tokens: int
    tbt_slo_s: float
    conductor: str
    stores: int
    until: float = 0.0
    """When it ends if it was not started, however often its lease is renewed."""
    state: State = State.PROMISED
    table: list[int] = field(default_factory=list)
    """Its blocks, each referred to once."""
    promised: int = 0
    """Blocks promised and not bound."""
    expected_blocks: int = 0
    """Blocks that it is expected to need at its end."""
    claim: int = 0
    """Blocks that it is expected to need and has neither got nor been promised."""
    stream: int | None = None
    """Stream of the conductor that has started or adopted it."""
    resumable: bool = False
    fence: int = 0
    finish: int = 0
    """Why it ended with its first token."""
    computed: int = 0
    """Leading tokens whose KV is there, while it catches up."""
    preemptions: int = 0
    recompute: bool = False
    """Was parked to be computed anew wholly."""
    saved: int = 0
    """Its leading blocks that are swapped out."""
    stored: list[int] = field(default_factory=list)
    """Leading full blocks that each of its kvstores is presumed to have."""

    def comes_with(self, tokens: int) -> None:
        """It comes back, and so many leading tokens have their KV: ready with all but the last."""
        self.computed = tokens
        self.state = State.READY if tokens >= self.tokens - 1 else State.CATCHING_UP

    @property
    def is_started(self) -> bool:
        """Whether the first token is known."""
        return self.stream is not None
