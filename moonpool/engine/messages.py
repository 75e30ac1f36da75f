"""What travels between an I/O process and its engine processes: frozen, picklable, free of torch.

Owns the vocabulary of the local channel. Knows nothing of how messages are carried, of requests, or of gRPC.

A *step* is one forward pass over a packed batch of sequences, run by all stages in the order in which steps were sent.
Its way: `Step` to every stage; each stage answers `LayerDone` per layer (when asked for) and one `StepDone`; the last
stage's `StepDone` carries the sampled tokens. `OpenGate` and `AbortStep` may come at any time in between, even before
the step has begun, and are ignored once it is done. Step ids grow from step to step.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout

if TYPE_CHECKING:
    from moonpool.engine.emulation import Emulation


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is to run: the same for all of its stages."""

    checkpoint: str
    """Folder of the checkpoint (already resolved: engines never reach for a hub)."""
    dtype: str
    """Element type of weights and KV: "float32", "bfloat16" or "float16"."""
    layout: KVLayout
    """Arrangement of the KV of all layers."""
    blocks: int
    """Blocks in the KV pool."""
    stages: int = 1
    """Engine processes; each runs consecutive layers."""
    threads: int = 0
    """Compute threads of each stage; 0 = this process's cores divided by the stages, at least one."""
    device: str = "cpu"
    """Device of the stages; only "cpu" is built yet."""
    deterministic: bool = False
    """Results of a sequence do not depend on what else is in a step."""
    max_tokens: int = 0
    """Longest sequence in tokens (prompt and output); 0 = the model's own limit. Bounds the warm-up's lengths."""
    gate_timeout_s: float = 30.0
    """A stage that waits so long for one gate aborts the step, seconds."""
    step_timeout_s: float = 300.0
    """A step that is not done after so long means a hung worker: the engine fails, seconds."""
    measure: bool = True
    """Time a few steps at start to learn `Engine.speeds`; off, the speeds are all defaults (tests)."""
    emulation: "Emulation | None" = None
    """Set when compute is emulated: then there is no engine process, and nothing is read of the checkpoint."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Everything that one sampled token is a function of, besides the logits. Names as in the contract's Sampling."""

    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of single tokens."""
    seed: int = 0
    """Of the counter-based generator, 64 bits unsigned."""
    sample_index: int = 0
    position: int = 0
    """Output position of the token to be sampled, 0 for the first."""
    history: bytes | None = None
    """All tokens so far (prompt, then output), little-endian int32; only when penalties are active."""
    prompt_tokens: int = 0
    """How many of them are the prompt's."""
    banned: tuple[int, ...] = ()
    """Tokens that must not be chosen (end tokens while min_tokens is not reached)."""


def _nothing() -> None:
    """What a history is at the other end of a channel."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class History:
    """What a sequence consists of, for engines in this process that check what its blocks hold.

    Belongs to the I/O process: it is not sent to engine processes (pickled, it is None).
    """

    chain_root: BlockKey
    """Parent of the first block's key."""
    token_ids: "array[int]"
    """All tokens so far, computed or not; typecode "i". The sequence's own: it may grow between steps."""
    keys: Sequence[BlockKey]
    """Keys of its leading full blocks, as far as they are known."""

    def __reduce__(self) -> tuple[object, ...]:
        return _nothing, ()


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step: compute the KV of some tokens, and perhaps sample the next one."""

    token_ids: bytes
    """The tokens to compute, little-endian int32; at least one."""
    start: int
    """Position of the first of them = tokens whose KV is there already (or comes through the gates)."""
    block_table: tuple[int, ...]
    """Blocks of the sequence in the pool, in order; must cover start + number of tokens."""
    sample: SampleSpec | None = None
    """Set when the token after the last one is to be sampled."""
    loading_tokens: int = field(default=0, compare=False)
    """Tokens of the prefix that are being loaded behind the step's gates."""
    history: History | None = field(default=None, compare=False, repr=False)
    """The whole sequence; never leaves the I/O process."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a packed batch."""

    step_id: int
    """Grows from step to step."""
    sequences: tuple[SequenceStep, ...]
    """At least one."""
    gated: bool = False
    """Before each layer, wait until its gate is open (the prefix's slices of that layer are loaded)."""
    layer_events: bool = False
    """Send `LayerDone` after each layer."""


@dataclass(frozen=True, slots=True)
class LayerDone:
    """The step's KV of one layer is in the pool."""

    step_id: int
    layer: int
    """Index in the model."""
    start_ns: int
    """When its computation began (after the gate), time.monotonic_ns."""
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """One stage is done with a step and touches its blocks no more."""

    step_id: int
    stage: int
    sampled: tuple[int | None, ...]
    """One entry per sequence, None where nothing was wanted; () from earlier stages and of an aborted step."""
    aborted: bool
    """Not all layers were computed; nothing was sampled."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class OpenGate:
    """The prefix's slices of this layer and all lower ones are in the pool."""

    step_id: int
    layer: int


@dataclass(frozen=True, slots=True)
class AbortStep:
    """Give the step up before its next layer."""

    step_id: int


@dataclass(frozen=True, slots=True)
class StageSpec:
    """First message to a worker: which stage of what it is."""

    engine: EngineSpec
    stage: int
    layer_begin: int
    layer_end: int
    rendezvous: str
    """Private folder in which the stages find each other; empty when there is one stage."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The stage has loaded its layers and is linked to its neighbours."""

    load_s: float
    """Seconds it took."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot go on; it exits after this message."""

    message: str
    kind: str = ""
    """Class name in moonpool.errors that says it best, for example "CheckpointError"; empty = Internal."""
    field: str = ""
    """The field at fault, where the error names one."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish the steps already sent, then exit."""


ToWorker = StageSpec | Step | OpenGate | AbortStep | Shutdown
FromWorker = Ready | LayerDone | StepDone | Failed
