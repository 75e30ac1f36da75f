"""Measures an engine's speeds by a few short steps at start, before the first request.

Works on any `Engine`. Step ids end at 0, so that schedulers can begin with 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.cost import Speeds, attention_pairs
from moonpool.engine.handle import Engine
from moonpool.sampling import SampleSpec
from moonpool.sched.steps import SequenceStep, Step

_FIRST_STEP_ID = -1000
LONG_TOKENS = 512
"""Of the longest step that is timed."""
_LONG_SECONDS = 0.25  # the long prefill is chosen to take about so long at most
_PREFIX_TOKENS = 1024
_BATCH = 8


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Seconds that one step with one chunk took."""

    tokens: int
    prefix: int
    seconds: float

    @property
    def pairs(self) -> float:
        """(token computed, token attended to) pairs."""
        return float(attention_pairs(self.tokens, self.prefix))

    @property
    def size(self) -> tuple[int, int]:
        """(chunk, prefix)."""
        return self.tokens, self.prefix

    @property
    def row(self) -> tuple[float, float, float]:
        """What base, per token and per pair are multiplied by."""
        return 1.0, self.tokens, self.pairs


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Seconds that one decode step took."""

    sequences: int
    context: int
    """Tokens of context of all sequences together."""
    seconds: float

    @property
    def size(self) -> tuple[int, int]:
        """(sequences, context of each)."""
        return self.sequences, self.context // self.sequences

    @property
    def row(self) -> tuple[float, float, float]:
        """What base, per sequence and per token of context are multiplied by."""
        return 1.0, self.sequences, self.context


def fit_prefill(short: PrefillTime, long: PrefillTime, prefixed: PrefillTime) -> tuple[float, float, float]:
    """(base, per token, per pair), none negative, from three times; `prefixed` has the tokens of `long`.

    Timings are noisy and may not grow with size: a negative coefficient becomes 0, and the others then explain the
    long time. Attention gets at most half of the long step: in short prompts its share is less, and an error in it
    grows with the square of a prompt's length.
    """
    pair_span = prefixed.pairs - long.pairs
    per_pair = max(0.0, (prefixed.seconds - long.seconds) / pair_span) if pair_span > 0 else 0.0
    per_pair = min(per_pair, 0.5 * long.seconds / long.pairs)
    # Seconds of each without its pairs.
    short_s, long_s = (max(0.0, t.seconds - per_pair * t.pairs) for t in (short, long))
    span = long.tokens - short.tokens
    per_token = max(0.0, (long_s - short_s) / span) if span > 0 else long_s / long.tokens
    per_token = min(per_token, long_s / long.tokens)
    return max(0.0, long_s - per_token * long.tokens), per_token, per_pair


def fit_decode(one: DecodeTime, many: DecodeTime, deep: DecodeTime) -> tuple[float, float, float]:
    """(base, per sequence, per context token), none negative; `deep` has the sequences of `many` and more context."""
    context_span = deep.context - many.context
    per_context = max(0.0, (deep.seconds - many.seconds) / context_span) if context_span > 0 else 0.0
    one_s, many_s = (max(0.0, t.seconds - per_context * t.context) for t in (one, many))
    span = many.sequences - one.sequences
    per_sequence = max(0.0, (many_s - one_s) / span) if span > 0 else 0.0
    per_sequence = min(per_sequence, many_s / many.sequences)
    return max(0.0, many_s - per_sequence * many.sequences), per_sequence, per_context


class StepTimer:
    """Times steps on blocks that are not in use yet: the quickest of some tries. One per engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bt = engine.layout.block_tokens
        self._step_id = _FIRST_STEP_ID

    async def prefill(self, tokens: int, prefix: int = 0, *, times: int = 2) -> PrefillTime:
        """One chunk after a prefix."""
        sequence = self._sequence(tokens, prefix)
        return PrefillTime(tokens, prefix, await self._best([sequence], times))

    async def decode(self, sequences: int, context: int, *, times: int = 2) -> DecodeTime:
        """A batch of so many sequences, each with so much context."""
        steps = [self._sequence(1, context - 1)] * sequences  # they share their blocks: only the time is of interest
        return DecodeTime(sequences, sequences * context, await self._best(steps, times))

    def _sequence(self, tokens: int, prefix: int) -> SequenceStep:
        blocks = -(-(tokens + prefix) // self._bt)
        return SequenceStep(bytes(4 * tokens), prefix, tuple(range(blocks)), SampleSpec())

    async def _best(self, sequences: Sequence[SequenceStep], times: int) -> float:
        best = float("inf")
        for _ in range(times):
            result = await self._engine.run(Step(self._step_id, tuple(sequences)))
            self._step_id += 1
            best = min(best, (result.end_ns - result.start_ns) / 1e9)
        return best


async def measure(engine: Engine, *, max_tokens: int = 0) -> Speeds:
    """The engine's speeds; takes under two seconds where a step of 16 tokens takes 0.05 s. Leaves garbage in blocks.

    Args:
        engine: Idle, its pool unused.
        max_tokens: Longest sequence the model takes; 0 = no limit.

    Raises:
        Unavailable: The engine failed.
    """
    room = engine.blocks * engine.layout.block_tokens
    room = min(room, max_tokens) if max_tokens else room
    timer = StepTimer(engine)
    await timer.prefill(min(16, room), times=1)  # memory, threads and code are touched for the first time
    half = max(1, room // 2)
    short = await timer.prefill(min(16, half), times=3)
    affordable = int(short.tokens * max(2.0, _LONG_SECONDS / max(short.seconds, 1e-9)))
    long = await timer.prefill(max(short.tokens, min(half, LONG_TOKENS, affordable)))
    prefixed = await timer.prefill(long.tokens, min(room - long.tokens, _PREFIX_TOKENS))
    base, per_token, per_pair = fit_prefill(short, long, prefixed)

    shallow = min(16, room)
    one = await timer.decode(1, shallow)
    many = await timer.decode(_BATCH, shallow)
    deep = await timer.decode(_BATCH, min(room, _PREFIX_TOKENS))
    decode_base, per_sequence, per_context = fit_decode(one, many, deep)
    return Speeds(
        prefill_base_s=base,
        prefill_per_token_s=per_token,
        prefill_per_pair_s=per_pair,
        decode_base_s=decode_base,
        decode_per_sequence_s=per_sequence,
        decode_per_context_token_s=per_context,
    )
