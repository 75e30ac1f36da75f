"""Measuring an engine over many sizes of steps, and fitting a profile's coefficients to the times.

Owns which sizes are measured and the least squares. Works on any `Engine`; knows nothing of files or commands.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.engine.handle import Engine
from moonpool.engine.warmup import DecodeTime, PrefillTime, StepTimer

CHUNKS = (16, 64, 128, 256, 512, 1024)
PREFIXES = (0, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512, 2048, 4096)
LONGEST_STEP_S = 2.0
"""Sizes at least as large as one that took longer are left out until the next round."""
ROOM_TOKENS = PREFIXES[-1] + CHUNKS[-1]
"""Tokens that the pool must hold for all sizes."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, none negative, and how well they explain the times."""

    coefficients: tuple[float, float, float]
    errors: tuple[float, ...]
    """Predicted over measured, minus one, per time."""

    def __str__(self) -> str:
        return f"mean {self.mean_error:.1%}, worst {self.worst_error:.1%}"

    @property
    def mean_error(self) -> float:
        """Mean of the relative errors' sizes."""
        return sum(map(abs, self.errors)) / len(self.errors)

    @property
    def worst_error(self) -> float:
        """Size of the largest relative error."""
        return max(map(abs, self.errors))


async def measure_prefill(engine: Engine, timer: StepTimer, *, max_tokens: int, repeats: int) -> list[PrefillTime]:
    """Quickest times of chunks after prefixes, as far as lengths, pool and patience allow.

    All sizes are measured before any is repeated: a machine's bad moments then do not fall on all tries of one size.

    Raises:
        Unavailable: the engine failed.
    """
    room = min(max_tokens, engine.blocks * engine.layout.block_tokens)
    sizes = [(chunk, prefix) for prefix in PREFIXES for chunk in CHUNKS if prefix + chunk <= room]
    best: dict[tuple[int, int], PrefillTime] = {}
    for _ in range(repeats):
        left = sizes
        for chunk, prefix in sizes:
            if (chunk, prefix) not in left:
                continue
            time = await timer.prefill(chunk, prefix, times=1)
            best[chunk, prefix] = min(time, best.get((chunk, prefix), time), key=lambda found: found.seconds)
            if time.seconds > LONGEST_STEP_S:
                left = [size for size in left if size[0] < chunk or size[1] < prefix]
    return list(best.values())


async def measure_decode(engine: Engine, timer: StepTimer, *, max_tokens: int, repeats: int) -> list[DecodeTime]:
    """Quickest times of batches over contexts, as far as lengths, pool and patience allow.

    Raises:
        Unavailable: the engine failed.
    """
    room = min(max_tokens, engine.blocks * engine.layout.block_tokens)
    sizes = [(batch, context) for context in CONTEXTS for batch in BATCHES if context <= room]
    best: dict[tuple[int, int], DecodeTime] = {}
    for _ in range(repeats):
        left = sizes
        for batch, context in sizes:
            if (batch, context) not in left:
                continue
            time = await timer.decode(batch, context, times=1)
            best[batch, context] = min(time, best.get((batch, context), time), key=lambda found: found.seconds)
            if time.seconds > LONGEST_STEP_S:
                left = [size for size in left if size[0] < batch or size[1] < context]
    return list(best.values())


def fit_prefill_profile(times: Sequence[PrefillTime]) -> Fit:
    """(base, per token, per pair)."""
    return fit([(1.0, time.tokens, time.pairs) for time in times], [time.seconds for time in times])


def fit_decode_profile(times: Sequence[DecodeTime]) -> Fit:
    """(base, per sequence, per token of context)."""
    return fit([(1.0, time.sequences, time.context) for time in times], [time.seconds for time in times])


def fit(rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> Fit:
    """The coefficients without negative ones that have the least sum of squared *relative* errors.

    Relative, because a profile is used for short steps as much as for long ones. With three coefficients all subsets
    that may be other than zero can be tried.
    """
    assert rows
    best: Fit | None = None
    for size in (1, 2, 3):
        for used in itertools.combinations(range(3), size):
            solved = _solve([[row[i] / t for i in used] for row, t in zip(rows, seconds, strict=True)])
            if solved is None or min(solved) < 0.0:
                continue
            found = [0.0, 0.0, 0.0]
            for place, value in zip(used, solved, strict=True):
                found[place] = value
            candidate = _judged((found[0], found[1], found[2]), rows, seconds)
            if best is None or _squares(candidate) < _squares(best):
                best = candidate
    assert best is not None, "times are positive: the mean alone is a fit"
    return best


def _judged(
    coefficients: tuple[float, float, float], rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]
) -> Fit:
    predicted = (sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows)
    return Fit(coefficients, tuple(p / t - 1.0 for p, t in zip(predicted, seconds, strict=True)))


def _squares(fit: Fit) -> float:
    return sum(error * error for error in fit.errors)


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares of `rows · x = 1` by the normal equations, scaled; None when the rows do not determine x."""
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
