"""A step: one forward pass over a packed batch, as schedulers plan a step and engines run a step, and the results.

A *run* is several steps: the engine feeds each sequence's new token back without asking the scheduler. Also here: one
sequence's sampling step by step, and how layers are divided among pipeline stages.

Steps and results are frozen and picklable.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Self

from moonpool.base.errors import ConfigError
from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey, tokens_to_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import GREEDY, SampleSpec, SamplingParams, stream_seed
from moonpool.base.scheduling.thinking import ThinkingBudget
from moonpool.v1 import kv_pb2

MAX_WAIT_STEPS = 3.0
"""Longest wait before a patient step, as a multiple of the step's own seconds."""
SAVED, SAVED_S = 16, 1.5
"""Number of earlier steps that pass unused waiting time on to a patient step, and the longest such wait, seconds."""
STEP_TOKENS = 512
"""Tokens of the largest step, by default."""
MAX_RESULTS_TOGETHER = 16
"""Most results of patient steps that are sent together."""
REPORT_WITHIN_S = 0.05
"""Longest wait for the first of these results, seconds: the first step that ends later sends all results."""


def _unpickled_history() -> None:
    """What a pickled `TokenHistory` becomes at the channel's other end: None."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class TokenHistory:
    """A sequence's tokens and keys, for engines in this process that check the blocks' content.

    Stays in the I/O process: pickled for an engine process, a history is None.
    """

    chain_root: BlockKey
    """Parent of the first block's key."""
    token_ids: "array[int]"
    """All tokens so far, computed or not; typecode "i". The sequence owns the array, which may grow between steps."""
    keys: Sequence[BlockKey]
    """Known keys for leading full blocks."""
    media: Sequence[MediaItem] = ()
    """Pictures in the prompt."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled_history, ()


@frozen
class ScoredTokens:
    """Known tokens with log probabilities wanted. Each known token follows a token that the step computes."""

    token_ids: bytes
    """Little-endian int32; at least one token, at most as many as the step computes."""
    top: int
    """Number of most likely tokens that are reported beside each known token."""


@frozen
class SequenceStep:
    """One sequence's part of a step: compute some tokens' KV, and sample the next token if wanted."""

    token_ids: bytes
    """The tokens to compute, little-endian int32; at least one."""
    start: int
    """Position of the first token. The KV of earlier tokens is in the pool, or arrives through the step's gates."""
    block_table: tuple[int, ...]
    """The sequence's blocks in the pool, in order; they cover `start` + number of tokens."""
    sample: SampleSpec | None = None
    """Set if the token after the last is to be sampled."""
    scored: ScoredTokens | None = None
    """Set if log probabilities for known tokens are wanted."""
    full_hit: bool = False
    """The tokens' own KV is in the pool, too: the tokens are computed to sample the next token, and write no KV."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the run when they are sampled."""
    may_skip: bool = False
    """Whether the sequence may go without a token if a mask takes long (`StepResult.late`)."""
    lora: bytes = b""
    """The sequence's LoRA adapter's id; b"" = the base model. Every stage has the adapter."""
    history: TokenHistory | None = field(default=None, compare=False, repr=False)
    """The whole sequence; stays in the I/O process."""
    media: tuple[MediaItem, ...] = ()
    """Pictures of which the step computes tokens, with their files."""
    picture_rows: Mapping[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)
    """By digest: a picture's rows, in the encoder's element type; b"" if they are wanted once they are encoded."""
    rope_shift: int = 0
    """What RoPE's position of the first token is behind its own; where the token lies in a picture, of the picture's
    first token."""


@frozen
class SampledCandidates:
    """Result for a `SampleSpec` that wants more than one token."""

    tokens: tuple[int, ...]
    """One token for each sample; or the `SampleSpec.best` most likely tokens that are not banned, best first."""
    log_probabilities: tuple[float, ...] = ()
    """Log probabilities for the most likely tokens."""


@frozen
class Step:
    """One forward pass over a packed batch."""

    step_id: int
    """Grows from step to step."""
    sequences: tuple[SequenceStep, ...]
    """At least one part. One sequence may have several parts with one token each, at consecutive positions: in each
    layer, all parts' KV is written before any part attends. So guessed next tokens are checked.
    """
    gated: bool = False
    """Before each layer, wait until the layer's gate is open: then every sequence's prefix has this layer.

    With recurrent layers in several stages, all sequences of a gated step begin at borders of blocks: the step may be
    given up in a later stage, and the stages before would not take back a state within a block.
    """
    layer_events: bool = False
    """Send `LayerDone` after each layer."""
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks (from, to) to copy in all layers first, because a sequence is about to write to a block that others refer
    to. No block is a target twice, or a target and a source.
    """
    patient: bool = False
    """No client waits for single tokens. The host's other work may go first (`MAX_WAIT_STEPS`), and results from a
    run's steps may come together (`MAX_RESULTS_TOGETHER`).
    """
    steps: int = 1
    """Most steps in the run that begins with this step. The run ends earlier if a step samples an end token, if a step
    has no token for a sequence, or if the run is stopped. All sequences in a run sample, and have blocks for the whole
    run.
    """


def without_files(step: Step) -> Step:
    """Return a step as stages behind the first get it: without files and rows of pictures, which the encoder reads.

    Files and rows of one step may be hundreds of megabytes.
    """
    if not any(part.media for part in step.sequences):
        return step
    parts = [
        replace(part, media=tuple([replace(item, content=b"") for item in part.media]), picture_rows={})
        for part in step.sequences
    ]
    return replace(step, sequences=tuple(parts))


def longest_wait_s(step_s: float) -> float:
    """Longest wait for a patient step that takes `step_s`, in seconds. Earlier steps' unused waiting time counts."""
    return MAX_WAIT_STEPS * max(step_s, min(SAVED * step_s, SAVED_S / MAX_WAIT_STEPS))


def finished_blocks(step: Step, block_size: int) -> list[tuple[int, int]]:
    """Pool blocks that may be sent after a step, each with the number of valid tokens.

    These are the blocks that become full, and, if layers are reported, a prompt's part-filled last block.
    """
    found: dict[int, int] = {}
    for sequence in step.sequences:
        if sequence.full_hit:
            continue
        end = sequence.start + len(sequence.token_ids) // 4
        first, last = sequence.start // block_size, end // block_size
        found.update((block, block_size) for block in sequence.block_table[first:last])
        if end % block_size and step.layer_events and sequence.sample is not None:
            found[sequence.block_table[last]] = end % block_size
    return list(found.items())


def written_blocks(sequence: SequenceStep, block_size: int) -> Sequence[int]:
    """Pool blocks that a sequence's part of a step writes to."""
    if sequence.full_hit:
        return ()
    end = sequence.start + len(sequence.token_ids) // 4
    return sequence.block_table[sequence.start // block_size : -(-end // block_size)]


@frozen
class LayerDone:
    """One layer's KV from the step is in the pool."""

    step_id: int
    layer: int
    """Index in the model."""
    start_ns: int
    """Begin of the computation, after the gate, in nanoseconds on `time.monotonic_ns`."""
    end_ns: int


ENCODER, MEMORY, STORE = "encoder", "memory", "kvstore"
"""Kinds of sources of a picture's rows."""


@frozen
class PlacedPicture:
    """A picture whose first rows a step put into a prompt."""

    index: int
    """The sequence's index in the step."""
    tokens: int
    """Tokens of the picture."""
    source: str
    """Where its rows came from: `ENCODER`, `MEMORY`, which keeps rows, or `STORE`: they came with the step."""
    ns: int
    """Nanoseconds until they were there."""
    digest: bytes = b""
    """The picture's."""
    rows: bytes = field(default=b"", compare=False, repr=False)
    """The rows, if they were encoded and wanted (`SequenceStep.picture_rows`)."""


@frozen
class StepResult:
    """A step's result. All stages have ended the step, and no stage writes to the step's blocks any more."""

    sampled: tuple[int | None, ...]
    """Each sequence's sampled token; None if no token was wanted or found; () if aborted."""
    aborted: bool
    """Some layer was not computed: the step's KV must not be used."""
    start_ns: int
    """Begin of the first stage, in nanoseconds on `time.monotonic_ns`."""
    end_ns: int
    """End of the last stage."""
    several: Mapping[int, SampledCandidates] = field(default_factory=dict)
    """By index: tokens for sequences that wanted several. The first token is in `sampled`."""
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """By index: log probabilities for all sampled tokens, if wanted (`SamplingParams.logprobs`)."""
    scores: Mapping[int, Logprobs] = field(default_factory=dict)
    """By index: log probabilities for `SequenceStep.scored`."""
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    """By index: prompts' embeddings (`SamplingParams.embedding`), little-endian float32."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """By index: why no token was sampled. The answer cannot continue in the wanted format."""
    share: float = 1.0
    """Mean part of the wanted cores that the step had; other processes on the host had the rest."""
    waited_ns: int = 0
    """Nanoseconds from `start_ns` on for which a patient step let other work on the host go first."""
    earlier: "tuple[StepResult, ...]" = ()
    """Results from the run's earlier steps that come with this result, oldest first."""
    late: frozenset[int] = frozenset()
    """Sequences that got no token because their mask takes long. They may ask again for the same token."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures that the step put into prompts."""

    @property
    def encode_s(self) -> float:
        """Seconds of the step that went into pictures."""
        return sum(picture.ns for picture in self.pictures) / 1e9


@frozen
class SequenceSampling:
    """How tokens for a request's sequences are chosen, and when sequences end."""

    prompt_tokens: int
    """The original prompt's length: the token after the prompt has output position 0, also in a continued stream."""
    params: SamplingParams = GREEDY
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence; without the model's end tokens if these are ignored."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never chosen before `params.min_tokens`."""
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Token runs: the last token is never chosen after the others, if all others are in the answer."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never chosen, because the checkpoint says so."""
    thinking: ThinkingBudget | None = None
    """How many tokens the answer may think; None = any number."""
    media: tuple[tuple[int, int], ...] = ()
    """Where the prompt's pictures stand, [begin, end): their tokens say nothing, so no penalty counts them."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: int,
        end_token_ids: Iterable[int],
        bad_tokens: Iterable[Sequence[int]] = (),
        thinking: ThinkingBudget | None = None,
        suppressed: Iterable[int] = (),
        media: tuple[tuple[int, int], ...] = (),
    ) -> Self:
        """A request's sampling; `end_token_ids` are the model's end tokens."""
        stop = frozenset(params.stop_token_ids)
        all_ends = stop.union(end_token_ids)
        return cls(
            prompt_tokens,
            params,
            end_token_ids=stop if params.ignore_eos else all_ends,
            banned_token_ids=tuple(sorted(all_ends)),
            bad_tokens=tuple(tuple(tokens) for tokens in bad_tokens),
            thinking=thinking,
            suppressed=tuple(suppressed),
            media=media,
        )

    @property
    def candidates(self) -> int:
        """Tokens that deferred answers choose among: any end token, and enough others. 0 = each token is sampled."""
        return self.params.width + len(self.end_token_ids) if self.params.deferred else 0

    def ends_with(self, token: int, tokens: int, model_tokens: int) -> bool:
        """Whether the sequence ends with this token, which makes `tokens` tokens with the prompt."""
        return token in self.end_token_ids or tokens >= self.total_tokens(model_tokens)

    def total_tokens(self, model_tokens: int) -> int:
        """Most tokens in the sequence, prompt and answer, for a model that takes `model_tokens`."""
        return min(self.prompt_tokens + self.params.max_tokens, model_tokens)

    def at(self, tokens: "array[int]", sample_index: int = 0) -> SampleSpec:
        """Parameters for sampling the token after `tokens` (the prompt and everything generated so far).

        After the prompt alone, this is each sample's first token. `sample_index`: the sample that has these tokens; see
        `moonpool.base.sampling_params.stream_seed`.
        """
        position = len(tokens) - self.prompt_tokens
        forced = None if self.thinking is None else self.thinking.forced(tokens, self.prompt_tokens)
        history, marks = None, 0
        if self.params.penalised:
            history, marks = self._without_media(tokens), sum(end - begin for begin, end in self.media)
        return SampleSpec(
            self.params,
            seed=stream_seed(self.params.seed or 0, sample_index),
            samples=1 if position else self.params.n,
            best=self.candidates,
            position=position,
            history=history,
            prompt_tokens=self.prompt_tokens - marks,
            banned=self._banned(tokens, position) if forced is None else (),
            forced=forced,
            answer=tokens[self.prompt_tokens :].tobytes() if self.params.response_format else b"",
        )

    def _without_media(self, tokens: "array[int]") -> bytes:
        """The tokens without those of pictures, little-endian int32."""
        kept, start = bytearray(), 0
        for begin, end in (*self.media, (len(tokens), 0)):
            kept += tokens[start:begin].tobytes()
            start = end
        return bytes(kept)

    def steady(self, tokens: "array[int]", model_tokens: int) -> int:
        """Number of next tokens that a run may choose on its own (`SampleSpec.after`); the last may end the answer.

        `tokens`: prompt and answer. `model_tokens`: the model's longest sequence.
        """
        left, answer = self.total_tokens(model_tokens) - len(tokens), len(tokens) - self.prompt_tokens
        if self.bad_tokens:
            return 1
        if self.thinking is not None and (free := self.thinking.steady(tokens, self.prompt_tokens)) is not None:
            left = min(left, free)
        return min(left, self.params.min_tokens - answer) if answer < self.params.min_tokens else left

    def _banned(self, tokens: "array[int]", position: int) -> tuple[int, ...]:
        """Tokens that are banned at a position in the answer, found from the tokens alone: no state is kept."""
        banned = self.banned_token_ids if position < self.params.min_tokens else ()
        ends = (bad[-1] for bad in self.bad_tokens if _ends_before_bad_token(bad, tokens, position))
        return (*self.suppressed, *banned, *ends)

    def scored(self, tokens: "array[int]", start: int, end: int) -> ScoredTokens | None:
        """Prompt tokens that get log probabilities in a step that computes the prompt's tokens [start, end)."""
        top, last = self.params.prompt_logprobs, min(end + 1, self.prompt_tokens)
        if top is None or last <= start + 1:
            return None
        return ScoredTokens(tokens_to_bytes(tokens[start + 1 : last]), top)

    def finish(self, tokens: "array[int]", model_tokens: int) -> "kv_pb2.FinishReason.ValueType":
        """Why the sequence ends with the last of `tokens`; FINISH_REASON_UNSPECIFIED if the sequence goes on.

        An end token counts at any position: before `min_tokens`, end tokens are banned and cannot be sampled.
        """
        if len(tokens) > self.prompt_tokens and tokens[-1] in self.end_token_ids:
            return kv_pb2.FINISH_REASON_STOP
        if len(tokens) >= self.total_tokens(model_tokens):
            return kv_pb2.FINISH_REASON_LENGTH
        return kv_pb2.FINISH_REASON_UNSPECIFIED


def _ends_before_bad_token(bad: tuple[int, ...], tokens: "array[int]", position: int) -> bool:
    """Whether the answer so far ends with all but the last token of a bad word."""
    before = len(bad) - 1
    return before <= position and tokens[len(tokens) - before :].tolist() == list(bad[:-1])


def max_steps_in_flight(stages: int) -> int:
    """Return the most steps that an engine of so many stages holds at once.

    In a pipeline one more step than stages: it waits at the first stage, which so begins the next step without a round
    trip to the scheduler. One stage takes one step: a step decided later may still hold a prompt that has just come.
    """
    return 1 if stages == 1 else stages + 1


def stage_ranges(
    layers: int, stages: int, joined: Collection[int] = (), costs: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Half-open layer ranges of the stages: the longest stage is as short as can be, and the others are as even.

    Args:
        layers: of the model.
        stages: of the pipeline.
        joined: layers with which no stage begins; the stage before takes them.
        costs: of the layers, in any unit; none: all are equal. Of equal divisions earlier stages take more layers.

    Raises:
        ConfigError: `stages` is not between 1 and the number of layers with which a stage can begin.
    """
    begins = [layer for layer in range(layers) if layer not in joined]
    if not 1 <= stages <= len(begins):
        most = f"the model's {len(begins)} layers" if not joined else f"{len(begins)}, with which a stage can begin"
        raise ConfigError("pipeline_parallel_size", f"must be between 1 and {most}, not {stages}")
    ends = _stage_ends((*begins, layers), stages, tuple(costs) or (1,) * layers)
    return list(zip([0, *ends[:-1]], ends, strict=True))


@lru_cache(maxsize=64)
def _stage_ends(borders: tuple[int, ...], stages: int, costs: tuple[int, ...]) -> tuple[int, ...]:
    """The stages' ends; each is one of the `borders`, of which the last is the number of layers."""
    before = list(accumulate(costs, initial=0))  # by layer: the cost of all layers before

    def division(begin: int, end: int, others: tuple[int, int, tuple[int, ...]]) -> tuple[int, int, tuple[int, ...]]:
        cost, (longest, squares, ends) = before[borders[end]] - before[borders[begin]], others
        return max(cost, longest), squares + cost * cost, (-borders[end], *ends)

    last, none = len(borders) - 1, (0, 0, ())
    best = {begin: division(begin, last, none) for begin in range(last)}
    for more in range(1, stages):  # stages behind
        best = {
            begin: min(division(begin, end, best[end]) for end in range(begin + 1, last - more + 1))
            for begin in range(last - more)
        }
    return tuple(-end for end in best[0][2])
