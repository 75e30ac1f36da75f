"""A step: one forward pass over a packed batch, as schedulers plan it and engines run it, and its results.

A *run* is several steps: the engine feeds each sequence its new token back without asking the scheduler. Also here:
the sampling of one sequence step by step, and the division of layers among pipeline stages.

Steps and results are frozen and picklable.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from moonpool.errors import ConfigError
from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey, tokens_to_bytes
from moonpool.logprobs import Logprobs
from moonpool.sampling_params import GREEDY, SampleSpec, SamplingParams, stream_seed
from moonpool.v1 import kv_pb2

MAX_WAIT_STEPS = 3.0
"""Times what they take that patient steps wait at most."""
SAVED, SAVED_S = 16, 1.5
"""Steps whose patience one may use, and seconds that it may wait by that at most."""
MAX_RESULTS_TOGETHER = 16
"""Results of a run's patient steps that come together, at most."""
REPORT_WITHIN_S = 0.05
"""Seconds that the first of them may wait: results come with the first step that is over later than that."""


def _unpickled_history() -> None:
    """The value of a `History` at the other end of a channel: None."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class TokenHistory:
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
        return _unpickled_history, ()


@frozen
class ScoredTokens:
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
    scored: ScoredTokens | None = None
    """Set when log probabilities of known tokens are wanted."""
    full_hit: bool = False
    """Their KV is there already, too: they are computed for the token that follows them, and write nothing."""
    end_token_ids: frozenset[int] = frozenset()
    """A run is over when one of them is sampled."""
    history: TokenHistory | None = field(default=None, compare=False, repr=False)
    """The whole sequence; never leaves the I/O process."""


@frozen
class SampledCandidates:
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
    return MAX_WAIT_STEPS * max(step_s, min(SAVED * step_s, SAVED_S / MAX_WAIT_STEPS))


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
    several: Mapping[int, SampledCandidates] = field(default_factory=dict)
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


@frozen
class SequenceSampling:
    """How the tokens of a request's sequences are chosen, and when they end."""

    prompt_tokens: int
    """Length of the original prompt: the token after it has output position 0, also in a continued stream."""
    params: SamplingParams = GREEDY
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence (already without end-of-sequence tokens when those are ignored)."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens not to be chosen before `params.min_tokens`."""
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Of each the last token is not chosen after the others, all of them the answer's."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: int,
        end_token_ids: Iterable[int],
        bad_tokens: Iterable[Sequence[int]] = (),
    ) -> Self:
        """Of a request; `end_token_ids` are the model's end-of-sequence tokens."""
        stop = frozenset(params.stop_token_ids)
        all_ends = stop.union(end_token_ids)
        return cls(
            prompt_tokens,
            params,
            end_token_ids=stop if params.ignore_eos else all_ends,
            banned_token_ids=tuple(sorted(all_ends)),
            bad_tokens=tuple(tuple(tokens) for tokens in bad_tokens),
        )

    @property
    def candidates(self) -> int:
        """Tokens that deferred answers choose among: any end token, and enough others. 0 = each token is sampled."""
        return self.params.width + len(self.end_token_ids) if self.params.deferred else 0

    def ends_with(self, token: int, tokens: int, model_tokens: int) -> bool:
        """Whether the sequence ends with this token, its `tokens`-th with the prompt's."""
        return token in self.end_token_ids or tokens >= self.total_tokens(model_tokens)

    def total_tokens(self, model_tokens: int) -> int:
        """Longest the sequence can become, prompt and output, where the model takes `model_tokens`."""
        return min(self.prompt_tokens + self.params.max_tokens, model_tokens)

    def at(self, tokens: "array[int]", sample_index: int = 0) -> SampleSpec:
        """Parameters for sampling the token after `tokens` (the prompt and everything generated so far).

        After the prompt alone that is the first token of each of the request's samples. `sample_index`: which of the
        samples has these tokens; see `moonpool.sampling_params.stream_seed`.
        """
        position = len(tokens) - self.prompt_tokens
        return SampleSpec(
            self.params,
            seed=stream_seed(self.params.seed or 0, sample_index),
            samples=1 if position else self.params.n,
            best=self.candidates,
            position=position,
            history=tokens.tobytes() if self.params.penalised else None,
            prompt_tokens=self.prompt_tokens,
            banned=self._banned(tokens, position),
            answer=tokens[self.prompt_tokens :].tobytes() if self.params.response_format else b"",
        )

    def steady(self, tokens: int, model_tokens: int) -> int:
        """How many of the next tokens are chosen as `SampleSpec.after` has it, of a sequence that has so many tokens.

        The last of them may be the answer's last.
        """
        left, answer = self.total_tokens(model_tokens) - tokens, tokens - self.prompt_tokens
        if self.bad_tokens:
            return 1
        return min(left, self.params.min_tokens - answer) if answer < self.params.min_tokens else left

    def _banned(self, tokens: "array[int]", position: int) -> tuple[int, ...]:
        """Tokens that must not come at an output position; worked out anew each time, so there is no state to lose."""
        banned = self.banned_token_ids if position < self.params.min_tokens else ()
        return banned + tuple(bad[-1] for bad in self.bad_tokens if _ends_before_bad_token(bad, tokens, position))

    def scored(self, tokens: "array[int]", start: int, end: int) -> ScoredTokens | None:
        """Which prompt tokens get log probabilities where the tokens [start, end) of the prompt are computed."""
        top, last = self.params.prompt_logprobs, min(end + 1, self.prompt_tokens)
        if top is None or last <= start + 1:
            return None
        return ScoredTokens(tokens_to_bytes(tokens[start + 1 : last]), top)

    def finish(self, tokens: "array[int]", model_tokens: int) -> "kv_pb2.FinishReason.ValueType":
        """Why the sequence ends with the last of `tokens`, or FINISH_REASON_UNSPECIFIED when it goes on.

        An end token counts at any position: before `min_tokens` it is banned and cannot be sampled.
        """
        if len(tokens) > self.prompt_tokens and tokens[-1] in self.end_token_ids:
            return kv_pb2.FINISH_REASON_STOP
        if len(tokens) >= self.total_tokens(model_tokens):
            return kv_pb2.FINISH_REASON_LENGTH
        return kv_pb2.FINISH_REASON_UNSPECIFIED


def _ends_before_bad_token(bad: tuple[int, ...], tokens: "array[int]", position: int) -> bool:
    """Whether an answer with so many tokens ends with all but the last token of a bad word."""
    before = len(bad) - 1
    return before <= position and tokens[len(tokens) - before :].tolist() == list(bad[:-1])


def stage_ranges(layers: int, stages: int) -> list[tuple[int, int]]:
    """Half-open layer ranges of the stages, as even as can be; earlier stages take the odd layers.

    The last stage has the vocabulary projection besides, so it should never be the longer one.

    Raises:
        ConfigError: `stages` is not between 1 and `layers`.
    """
    if not 1 <= stages <= layers:
        raise ConfigError("pipeline_parallel_size", f"must be between 1 and the model's {layers} layers, not {stages}")
    short, longer = divmod(layers, stages)
    ends = [short * (i + 1) + min(i + 1, longer) for i in range(stages)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
