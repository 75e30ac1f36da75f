"""Times an engine over many sizes of steps, fits a profile's coefficients to half of them and tests them on the rest.

Works on any `Engine`.
"""

import itertools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from moonpool.engine.handle import Engine
from moonpool.engine.warmup import DecodeTime, PrefillTime, StepTimer
from moonpool.errors import ConfigError

CHUNKS = (16, 64, 128, 256, 512, 1024)
PREFIXES = (0, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512, 2048, 4096)
LONGEST_STEP_S = 2.0
"""Sizes at least as large as one that took longer are left out for the rest of the round."""
ROOM_TOKENS = PREFIXES[-1] + CHUNKS[-1]
"""Tokens that the pool must hold for all sizes."""

Coefficients = tuple[float, float, float]
Time = PrefillTime | DecodeTime


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, none negative, fitted to some sizes of steps and tested on others."""

    coefficients: Coefficients
    fitted: Sequence[Time]
    held_out: Sequence[Time]
    """Sizes that were not used for the fit."""

    def __str__(self) -> str:
        return f"median {self.median_error:.1%}, worst {self.worst_error:.1%}"

    def error(self, time: Time) -> float:
        """Predicted over measured, minus one."""
        return _seconds(self.coefficients, time.row) / time.seconds - 1.0

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
    room = min(max_tokens, engine.blocks * engine.layout.block_tokens)
    sizes = [(chunk, prefix) for prefix in PREFIXES for chunk in CHUNKS if prefix + chunk <= room]

    async def once(chunk: int, prefix: int) -> float:
        return (await timer.prefill(chunk, prefix, times=1)).seconds

    medians = await _medians(sizes, once, repeats, longest_s)
    return [PrefillTime(*size, seconds) for size, seconds in medians.items()]


async def measure_decode(
    engine: Engine, timer: StepTimer, *, max_tokens: int, repeats: int, longest_s: float = LONGEST_STEP_S
) -> list[DecodeTime]:
    """Median times of batches over contexts, as far as lengths, pool and `longest_s` allow.

    Raises:
        Unavailable: the engine failed.
    """
    room = min(max_tokens, engine.blocks * engine.layout.block_tokens)
    sizes = [(batch, context) for context in CONTEXTS for batch in BATCHES if context <= room]

    async def once(batch: int, context: int) -> float:
        return (await timer.decode(batch, context, times=1)).seconds

    medians = await _medians(sizes, once, repeats, longest_s)
    return [DecodeTime(batch, batch * context, seconds) for (batch, context), seconds in medians.items()]


async def _medians(
    sizes: Sequence[tuple[int, int]], once: Callable[[int, int], Awaitable[float]], repeats: int, longest_s: float
) -> dict[tuple[int, int], float]:
    """Median seconds of each size.

    All sizes are measured before any is repeated: a slow moment of the machine does not fall on all tries of one size.
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


def fit_profile(times: Sequence[Time]) -> Fit:
    """Fits half of the measured sizes and holds out the rest.

    The sizes are a grid; as on a chess board, no two neighbours are on the same side. So the held-out sizes have the
    range of the others, and half of the corners.

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
    return Fit(fit([time.row for time in fitted], [time.seconds for time in fitted]), fitted, held_out)


def fit(rows: Sequence[Coefficients], seconds: Sequence[float]) -> Coefficients:
    """The non-negative coefficients with the least sum of squared *relative* errors.

    Relative, because a profile is used for short steps as much as for long ones. With three coefficients all subsets
    of non-zero ones can be tried.
    """
    found: list[Coefficients] = []
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
        solved = _solve([[row[i] / t for i in used] for row, t in zip(rows, seconds, strict=True)])
        if solved is not None and min(solved) >= 0.0:
            values = dict(zip(used, solved, strict=True))
            found.append((values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)))
    return min(found, key=lambda coefficients: _squares(coefficients, rows, seconds))


def _seconds(coefficients: Coefficients, row: Coefficients) -> float:
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def _squares(coefficients: Coefficients, rows: Sequence[Coefficients], seconds: Sequence[float]) -> float:
    """Sum of squared relative errors."""
    return sum((_seconds(coefficients, row) / t - 1.0) ** 2 for row, t in zip(rows, seconds, strict=True))


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
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
