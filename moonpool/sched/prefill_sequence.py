"""Data of `moonpool.sched.prefill_scheduler`: sequences, chunks, steps and their outcomes."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from moonpool.kv.keys import BlockKey
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import History, Step


class Load(Enum):
    """State of a sequence's prefix load."""

    IDLE = "idle"
    """Nothing is being loaded (not yet, not any more, or never)."""
    LOADING = "loading"
    """Slices are coming; the first layer is not there yet."""
    GATED = "gated"
    """The first layer is there: a step may follow layer by layer, behind gates."""


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """One prompt. The caller fills in the first part; the rest belongs to the scheduler, for others to read."""

    request_id: str
    token_ids: "array[int]"
    """Tokens whose KV is wanted (a continued stream's earlier output included); typecode "i"."""
    keys: Sequence[BlockKey]
    """Keys of all full blocks of token_ids."""
    sampling: SequenceSampling
    added_at: float = 0.0
    history: History | None = None
    """For engines that check what blocks hold."""

    started_at: float | None = None
    """When its blocks were bound."""
    first_step_at: float | None = None
    """When its first step was planned."""
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Leading tokens found in the own pool. May still grow when the first step is planned."""
    num_loaded: int = 0
    """Tokens after these that were loaded."""
    num_computed: int = 0
    """Leading tokens whose KV is in the pool in all layers: cached, loaded or computed. Never shrinks."""
    num_scheduled: int = 0
    """Leading tokens that are there or in flight (computing or, behind gates, loading)."""
    load: Load = Load.IDLE
    load_end: int = 0
    """Tokens that will be there when the running load is complete; 0 without one."""
    in_flight: int = 0
    """Chunks in flight."""
    gated: bool = False
    """The chunk in flight is gated: until it is done, nothing that depends on it is planned."""
    stale: bool = False
    """The chunks in flight count for nothing (their load failed): nothing is planned until they are done."""
    removed: bool = False
    """Wanted no more; leaves when nothing is in flight."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether all KV is there and the next token has been sampled."""
        return self.num_computed == self.num_tokens


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Consecutive tokens of one sequence in one step, in the order of the step's sequences."""

    sequence: PrefillSequence
    start: int
    """Position of the first token to compute."""
    end: int
    """One past the last."""
    first: bool
    """Nothing of the sequence was planned before: tokens before `start` are cached, loaded or loading."""

    @property
    def last(self) -> bool:
        """Whether the prompt ends here, so that a token is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What the engine is to run next."""

    step: Step
    chunks: tuple[PlannedChunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the end of a step meant."""

    chunks: tuple[PlannedChunk, ...]
    """Chunks that count: their tokens are computed now."""
    finished: tuple[PrefillSequence, ...]
    """Sequences whose last chunk is among them; they keep their blocks until `remove`."""
    removed: tuple[PrefillSequence, ...]
    """Sequences whose `remove` had waited for this; they have no blocks any more."""
