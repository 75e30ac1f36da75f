"""Measures an engine's speed: a few steps at start, or many sizes of steps to fit a profile's coefficients.

Works on any `Engine`. Step ids end at 0, so that schedulers can begin with 1. A fit uses half of the measured sizes
and is tested on the rest.
"""

import itertools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from moonpool.base.errors import ConfigError
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.latency import Speeds, attention_pairs
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.interface import Engine
from moonpool.engine.messages import EngineSpec
from moonpool.engine.platforms.registry import engine_platform

_FIRST_STEP_ID = -1000
LONG_TOKENS = 512
"""Of the longest step that is timed."""
_LONG_SECONDS = 0.25  # on a CPU, the long prefill is chosen to take about so long at most
CHUNKS = (16, 64, 128, 256, 512, 1024)
PREFIXES = (0, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512, 2048, 4096)
LONGEST_STEP_S = 2.0
"""Sizes at least as large as a size that took longer are left out for the rest of the round."""
MAX_MEASURED_TOKENS = PREFIXES[-1] + CHUNKS[-1]
"""Tokens that the pool must hold for all sizes."""
Coefficients = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TimedSizes:
    """The largest of what is timed at start.

    Attributes:
        long: tokens of the longest prompt.
        prefix: tokens before the prompt.
        batch: sequences of the larger decode steps.
        context: tokens of each in the deepest step.
        on_device: a few tokens take a device as long as many, and the device's caches must not hold all contexts: each
            sequence in a batch has separate blocks.
    """

    long: int = LONG_TOKENS
    prefix: int = 1024
    batch: int = 8
    context: int = 1024
    on_device: bool = False

    @classmethod
    def of(cls, spec: EngineSpec) -> Self:
        """Return what is timed of an engine: more on a device, as far as steps are large and have graphs."""
        if engine_platform(spec.device).in_host_pool:
            return cls()
        batch = min(32, spec.graph_rows or 32)
        return cls(max(LONG_TOKENS, spec.max_num_batched_tokens), 4096, batch, 4096, on_device=True)


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
    def row(self) -> Coefficients:
        """What base, per token, per pair and per token of context are multiplied by."""
        return 1.0, self.tokens, self.pairs, self.prefix


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Seconds that one decode step took."""

    sequences: int
    context: int
    """Context tokens in all sequences together."""
    seconds: float

    @property
    def size(self) -> tuple[int, int]:
        """(sequences, context of each)."""
        return self.sequences, self.context // self.sequences

    @property
    def row(self) -> Coefficients:
        """What base, per sequence and per token of context are multiplied by."""
        return 1.0, self.sequences, self.context


def fit_prefill(
    short: PrefillTime, long: PrefillTime, few_behind: PrefillTime, many_behind: PrefillTime
) -> tuple[float, float, float, float]:
    """(base, per token, per pair, per token of context), none negative, from four times.

    Timings are noisy and may not grow with size: a negative coefficient becomes 0, and the others then explain the long
    time. Attention gets at most half of the long step: in short prompts attention's share is less, and an error there
    grows with the square of a prompt's length. Reading the prefix gets at most half of what the prefix adds.

    Args:
        short: nothing before it.
        long: nothing before it.
        few_behind: the tokens of `short` behind a prefix.
        many_behind: the tokens of `long` behind the same prefix.
    """
    prefix, few, many = many_behind.prefix, short.tokens, long.tokens
    added_s, few_s = max(0.0, many_behind.seconds - long.seconds), few_behind.seconds - short.seconds
    read_s = max(0.0, (many * few_s - few * added_s) / (many - few)) if many > few else 0.0
    read_s = min(read_s, 0.5 * added_s)
    per_context = read_s / prefix if prefix else 0.0
    per_pair = (added_s - read_s) / (many * prefix) if prefix else 0.0
    per_pair = min(per_pair, 0.5 * long.seconds / long.pairs)
    # Seconds of each without its pairs.
    short_s, long_s = (max(0.0, t.seconds - per_pair * t.pairs) for t in (short, long))
    span = long.tokens - short.tokens
    per_token = max(0.0, (long_s - short_s) / span) if span > 0 else long_s / long.tokens
    per_token = min(per_token, long_s / long.tokens)
    return max(0.0, long_s - per_token * long.tokens), per_token, per_pair, per_context


def fit_decode(alone: DecodeTime, many: DecodeTime, deep: DecodeTime) -> tuple[float, float, float]:
    """(base, per sequence, per context token), none negative; `deep` has the sequences of `many` and more context."""
    context_span = deep.context - many.context
    per_context = max(0.0, (deep.seconds - many.seconds) / context_span) if context_span > 0 else 0.0
    one_s, many_s = (max(0.0, t.seconds - per_context * t.context) for t in (alone, many))
    span = many.sequences - alone.sequences
    per_sequence = max(0.0, (many_s - one_s) / span) if span > 0 else 0.0
    per_sequence = min(per_sequence, many_s / many.sequences)
    return max(0.0, many_s - per_sequence * many.sequences), per_sequence, per_context


_ON_A_CPU = TimedSizes()


class StepTimer:
    """Times steps on blocks that are not in use yet: the quickest of some tries. One per engine.

    `apart`: a batch's sequences have separate blocks, as far as there are enough; else they share theirs.
    """

    def __init__(self, engine: Engine, *, apart: bool = False) -> None:
        self._engine, self._apart = engine, apart
        self._bt = engine.layout.block_size
        self._step_id = _FIRST_STEP_ID

    async def prefill(self, tokens: int, prefix: int = 0, *, times: int = 2) -> PrefillTime:
        """One chunk after a prefix."""
        sequence = self._sequence(tokens, prefix)
        return PrefillTime(tokens, prefix, await self._best([sequence], times))

    async def decode(self, sequences: int, context: int, *, times: int = 2) -> DecodeTime:
        """Return a batch of so many sequences, each with so much context.

        On a device no step fills a block: few steps do, and their time includes copies to the host.
        """
        if self._apart and context > 1 and context % self._bt == 0:
            context -= 1
        steps = [self._sequence(1, context - 1, row if self._apart else 0) for row in range(sequences)]
        return DecodeTime(sequences, sequences * context, await self._best(steps, times))

    def _sequence(self, tokens: int, prefix: int, row: int = 0) -> SequenceStep:
        count, blocks = -(-(tokens + prefix) // self._bt), self._engine.blocks
        table = tuple((row * count + block) % blocks for block in range(count))
        return SequenceStep(bytes(4 * tokens), prefix, table, SampleSpec())

    async def _best(self, sequences: Sequence[SequenceStep], times: int) -> float:
        best = float("inf")
        for _ in range(times):
            result = await self._engine.run(Step(self._step_id, tuple(sequences)))
            self._step_id += 1
            best = min(best, (result.end_ns - result.start_ns) / 1e9)
        return best


async def measure(engine: Engine, *, max_tokens: int = 0, sizes: TimedSizes = _ON_A_CPU) -> Speeds:
    """The engine's speeds; takes under two seconds where a step of 16 tokens takes 0.05 s. Leaves garbage in blocks.

    Args:
        engine: Idle, with an unused pool.
        max_tokens: Longest sequence the model takes; 0 = no limit.
        sizes: What is timed at most.

    Raises:
        Unavailable: The engine failed.
    """
    room = engine.blocks * engine.layout.block_size
    room = min(room, max_tokens) if max_tokens else room
    timer = StepTimer(engine, apart=sizes.on_device)
    await timer.prefill(min(16, room), times=1)  # memory, threads and code are touched for the first time
    half = max(1, room // 2)
    short = await timer.prefill(min(16, half), times=3)
    affordable = int(short.tokens * max(2.0, _LONG_SECONDS / max(short.seconds, 1e-9)))
    most = sizes.long if sizes.on_device else min(sizes.long, affordable)
    long = await timer.prefill(max(short.tokens, min(half, most)))
    prefix = min(room - long.tokens, sizes.prefix)
    many_behind = await timer.prefill(long.tokens, prefix)
    few_behind = await timer.prefill(short.tokens, prefix, times=3)
    base, per_token, per_pair, per_context = fit_prefill(short, long, few_behind, many_behind)

    shallow = min(16, room)
    alone = await timer.decode(1, shallow)
    many = await timer.decode(sizes.batch, shallow)
    deep = await timer.decode(sizes.batch, min(room, sizes.context))
    decode_base, per_sequence, decode_per_context = fit_decode(alone, many, deep)
    return Speeds(
        prefill_base_s=base,
        prefill_per_token_s=per_token,
        prefill_per_pair_s=per_pair,
        decode_base_s=decode_base,
        decode_per_sequence_s=per_sequence,
        decode_per_context_token_s=decode_per_context,
        prefill_per_context_token_s=per_context,
    )


Time = PrefillTime | DecodeTime


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """Coefficients, none negative, fitted to some sizes of steps and tested on others."""

    coefficients: Coefficients
    fitted: Sequence[Time]
    held_out: Sequence[Time]
    """Sizes that were not used for the fit."""

    def __str__(self) -> str:
        return f"median {self.median_error:.1%}, worst {self.worst_error:.1%}"

    def error(self, time: Time) -> float:
        """Predicted over measured, minus one."""
        return _predicted_seconds(self.coefficients, time.row) / time.seconds - 1.0

    @property
    def median_error(self) -> float:
        """Median size of the relative errors on held-out sizes."""
        return statistics.median(abs(self.error(time)) for time in self.held_out)

    @property
    def worst_error(self) -> float:
        """Size of the largest relative error on held-out sizes."""
        return max(abs(self.error(time)) for time in self.held_out)


async def measure_prefill(
    engine: Engine, timer: StepTimer, *, max_tokens: int, repeats: int, longest_s: float = LONGEST_STEP_S
) -> list[PrefillTime]:
    """Median times of chunks after prefixes, as far as lengths, pool and `longest_s` allow.

    Raises:
        Unavailable: the engine failed.
    """
    room = min(max_tokens, engine.blocks * engine.layout.block_size)
    sizes = [(chunk, prefix) for prefix in PREFIXES for chunk in CHUNKS if prefix + chunk <= room]

    async def once(chunk: int, prefix: int) -> float:
        return (await timer.prefill(chunk, prefix, times=1)).seconds

    medians = await _median_times(sizes, once, repeats, longest_s)
    return [PrefillTime(*size, seconds) for size, seconds in medians.items()]


async def measure_decode(
    engine: Engine, timer: StepTimer, *, max_tokens: int, repeats: int, longest_s: float = LONGEST_STEP_S
) -> list[DecodeTime]:
    """Median times of batches over contexts, as far as lengths, pool and `longest_s` allow.

    Raises:
        Unavailable: the engine failed.
    """
    room = min(max_tokens, engine.blocks * engine.layout.block_size)
    sizes = [(batch, context) for context in CONTEXTS for batch in BATCHES if context <= room]

    async def once(batch: int, context: int) -> float:
        return (await timer.decode(batch, context, times=1)).seconds

    medians = await _median_times(sizes, once, repeats, longest_s)
    return [DecodeTime(batch, batch * context, seconds) for (batch, context), seconds in medians.items()]


async def _median_times(
    sizes: Sequence[tuple[int, int]], once: Callable[[int, int], Awaitable[float]], repeats: int, longest_s: float
) -> dict[tuple[int, int], float]:
    """Median seconds of each size.

    All sizes are measured before any is repeated: a slow moment on the machine does not fall on all tries for one size.
    """
    seconds: dict[tuple[int, int], list[float]] = {}
    for _ in range(repeats):
        too_long: list[tuple[int, int]] = []
        for size in sizes:
            if any(size[0] >= long[0] and size[1] >= long[1] for long in too_long):
                continue
            took = await once(*size)
            seconds.setdefault(size, []).append(took)
            if took > longest_s:
                too_long.append(size)
    return {size: statistics.median(found) for size, found in seconds.items()}


def fit_profile(times: Sequence[Time]) -> ProfileFit:
    """Fit half of the measured sizes and hold out the rest.

    The sizes are a grid; as on a chess board, no two neighbours are on the same side. So the held-out sizes have the
    others' range, and half of the corners.

    Raises:
        ConfigError: too few sizes were measured.
    """
    columns, rows = (sorted({time.size[axis] for time in times}) for axis in (0, 1))
    sides: tuple[list[Time], list[Time]] = ([], [])
    for time in times:
        sides[(columns.index(time.size[0]) + rows.index(time.size[1])) % 2].append(time)
    fitted, held_out = sides
    if not held_out:
        raise ConfigError("model", f"{len(times)} sizes of steps fit its length, too few for a fit and its test")
    return ProfileFit(fit([time.row for time in fitted], [time.seconds for time in fitted]), fitted, held_out)


def fit(rows: Sequence[Coefficients], seconds: Sequence[float]) -> Coefficients:
    """Return the non-negative coefficients with the least sum of squared *relative* errors.

    Relative, because a profile is used for short steps as much as for long ones. With so few coefficients all subsets
    of non-zero coefficients can be tried.
    """
    found: list[Coefficients] = []
    every = range(len(rows[0]))
    for used in itertools.chain.from_iterable(itertools.combinations(every, size + 1) for size in every):
        solved = _least_squares([[row[i] / t for i in used] for row, t in zip(rows, seconds, strict=True)])
        if solved is not None and min(solved) >= 0.0:
            values = dict(zip(used, solved, strict=True))
            found.append(tuple([values.get(i, 0.0) for i in every]))
    return min(found, key=lambda coefficients: _squared_errors(coefficients, rows, seconds))


def _predicted_seconds(coefficients: Coefficients, row: Coefficients) -> float:
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def _squared_errors(coefficients: Coefficients, rows: Sequence[Coefficients], seconds: Sequence[float]) -> float:
    """Sum of squared relative errors."""
    return sum((_predicted_seconds(coefficients, row) / t - 1.0) ** 2 for row, t in zip(rows, seconds, strict=True))


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares of `rows @ x = 1` by the normal equations, scaled; None when the rows do not determine x."""
    n = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(n)]
    scaled = [[row[i] / scale[i] for i in range(n)] for row in rows]
    matrix = [[sum(r[i] * r[j] for r in scaled) for j in range(n)] + [sum(r[i] for r in scaled)] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(n):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] / scale[i] for i in range(n)]
