"""A step: one forward pass over a packed batch, as schedulers plan it and engines run it, and its results.

A *run* is a step with those that follow it: the engine gives each sequence its new token back and goes on by itself.

Frozen and picklable.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.logprobs import Logprobs
from moonpool.sampling import SampleSpec

PATIENCE = 3.0
"""Times what they take that patient steps wait at most."""
SAVED, SAVED_S = 16, 1.5
"""Steps whose patience one may use, and seconds that it may wait by that at most."""
TOLD_TOGETHER = 16
"""Results of a run's patient steps that come together, at most."""
TELL_S = 0.05
"""Seconds that the first of them may wait: results come with the first step that is over later than that."""


def _nothing() -> None:
    """The value of a `History` at the other end of a channel: None."""


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


@frozen
class Scored:
    """Known tokens whose log probabilities are wanted: those after the leading ones that a step computes."""

    token_ids: bytes
    """Little-endian int32; at least one, at most as many as are computed."""
    top: int
    """Most likely tokens that are told beside each."""


@frozen
class SequenceStep:
    """One sequence's share of a step: compute the KV of some tokens, and sample the next one if wanted."""

    token_ids: bytes
    """The tokens to compute, little-endian int32; at least one."""
    start: int
    """Position of the first of them = tokens whose KV is there already (or comes through the gates)."""
    block_table: tuple[int, ...]
    """Blocks of the sequence in the pool, in order; must cover start + number of tokens."""
    sample: SampleSpec | None = None
    """Set when the token after the last one is to be sampled."""
    scored: Scored | None = None
    """Set when log probabilities of known tokens are wanted."""
    full_hit: bool = False
    """Their KV is there already, too: they are computed for the token that follows them, and write nothing."""
    end_token_ids: frozenset[int] = frozenset()
    """A run is over when one of them is sampled."""
    history: History | None = field(default=None, compare=False, repr=False)
    """The whole sequence; never leaves the I/O process."""


@frozen
class Several:
    """What a sequence's `SampleSpec` gets that wants more than one token."""

    tokens: tuple[int, ...]
    """One for each sample; or the `SampleSpec.best` most likely ones that are not banned, the best first."""
    log_probabilities: tuple[float, ...] = ()
    """Of each of the most likely tokens."""


@frozen
class Step:
    """One forward pass over a packed batch."""

    step_id: int
    """Grows from step to step."""
    sequences: tuple[SequenceStep, ...]
    """At least one."""
    gated: bool = False
    """Before each layer, wait until its gate is open: this layer of every sequence's prefix is there."""
    layer_events: bool = False
    """Send `LayerDone` after each layer."""
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks (from, to) that are copied in all layers before anything else: a sequence is about to write to a block
    that others refer to. No block is a target twice, or a target and a source."""
    patient: bool = False
    """Nobody waits for its tokens one by one: what else this host computes may go first (`PATIENCE`), and results of a
    run's steps may come together (`TOLD_TOGETHER`)."""
    steps: int = 1
    """Of the run that begins with it, at most. It ends before with a step that samples an end token, or nothing for a
    sequence, and with the one in which it is cut. All its sequences sample, and have blocks for all of it."""


def longest_wait_s(step_s: float) -> float:
    """Seconds that a patient step may wait at most, where it takes `step_s`: what earlier ones did not wait counts."""
    return PATIENCE * max(step_s, min(SAVED * step_s, SAVED_S / PATIENCE))


def finished_blocks(step: Step, block_tokens: int) -> list[tuple[int, int]]:
    """Blocks (of the pool) that a step makes ready to leave, each with its valid tokens.

    Those are the blocks that become full, and where layers are reported the part-filled last block of a prompt.
    """
    found: dict[int, int] = {}
    for sequence in step.sequences:
        if sequence.full_hit:
            continue
        end = sequence.start + len(sequence.token_ids) // 4
        first, last = sequence.start // block_tokens, end // block_tokens
        found.update((block, block_tokens) for block in sequence.block_table[first:last])
        if end % block_tokens and step.layer_events and sequence.sample is not None:
            found[sequence.block_table[last]] = end % block_tokens
    return list(found.items())


@frozen
class LayerDone:
    """The step's KV of one layer is in the pool."""

    step_id: int
    layer: int
    """Index in the model."""
    start_ns: int
    """When its computation began (after the gate), time.monotonic_ns."""
    end_ns: int


@frozen
class StepResult:
    """What a step came to, when all stages are done with it and its blocks are quiet."""

    sampled: tuple[int | None, ...]
    """One entry per sequence of the step, None where nothing was to be sampled, or for nothing; () when aborted."""
    aborted: bool
    """Some layer was not computed: KV of the step's tokens is not to be used."""
    start_ns: int
    """First stage's beginning, time.monotonic_ns."""
    end_ns: int
    """Last stage's end."""
    several: Mapping[int, Several] = field(default_factory=dict)
    """By index, for sequences of the step that wanted more than one token; the first of the tokens is in `sampled`."""
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """By index, of all sampled tokens of sequences that wanted them (`SamplingParams.logprobs`)."""
    scores: Mapping[int, Logprobs] = field(default_factory=dict)
    """By index, of `SequenceStep.scored`."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """By index, why nothing was sampled for a sequence that wanted it: its answer cannot go on in its format."""
    share: float = 1.0
    """Of the cores that it wanted, that it had, as a mean over its time: others of the host had the rest."""
    waited_ns: int = 0
    """From its beginning on, for as long a patient step let others of the host go before."""
    earlier: "tuple[StepResult, ...]" = ()
    """Of steps of the same run that are told with this one, the first one first."""
