"""Tile shapes and launch parameters of the attention kernels, and how a launch is cut along the keys.

A small table instead of an autotuner: the choice does not vary from run to run, the first request waits for no search,
and a captured CUDA graph holds what every other process runs. The table was derived from what the compiler reports; the
tiles over latent vectors and the parts were chosen among others on an H200 (docs/measured/gpu_h200.md).

Why these shapes (Hopper first; registers and shared memory as compiled, without spills):
- Decode reads every key and value once, so bytes in flight decide the speed. One key/value head's query heads are the
  rows of one product, padded to the 16 rows that a tensor core's instruction has anyway. A step loads 32 KiB whatever
  the head's size, two steps are under way while a third is computed, and 70 KiB of shared memory and 108 registers
  leave three programs on a multiprocessor: over 100 KiB in flight, where latency times bandwidth asks for about 25.
- Tensor cores decide prefill's speed: 128 rows halve the L2 traffic that 64 rows would need (6 TB/s at 400 TFLOP/s,
  more than there is), 8 warps are two warpgroups with 64 rows, and 64 keys are one block in the default pool, so that a
  step is one dense run of memory behind one block table entry. 128 keys would spill at two stages.
- Products of float32 run on the plain units, exactly: they are there to be right. Fewer warps or more rows spill.
- One-byte KV takes half the memory per step, and gets one stage more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from moonpool.engine.kernels.triton import is_gpu

#: Keys per part in deterministic mode: a property of the arithmetic, so it may depend on nothing.
EXACT_PART = 1024

#: A part shorter than this costs more in starting and joining than it gains; where all processors have work without a
#: split, than LONG_PART.
MIN_PART, LONG_PART = 256, 1024

#: Parts are joined one by one: the more keys there are, the longer the parts whose time and joining cost least.
JOINED_AS_KEYS = 32

#: Parts that a program which joins loads together.
JOINED_AHEAD = 4

#: Programs per multiprocessor that a split launch aims at: as many as run together; where there is work for all without
#: a split, some rounds, so that the last one costs little.
TOGETHER, ROUNDS = 2, 8
#: Rows of a sequence up to which "small" is chosen over "prefill".
SMALL_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration: query rows, keys per step, warps, and load pipeline depth."""

    rows: int
    keys: int
    warps: int
    stages: int

    def shared_bytes(self, dim: int, element: int, stored: int, rest: int = 0) -> int:
        """Return an upper bound of the shared memory that this takes, from what the compiler was seen to take.

        Args:
            dim: Padded elements of a value.
            element: Bytes per query element.
            stored: Bytes per pool element.
            rest: Padded elements of a latent vector behind its value; 0: keys and values are two planes.
        """
        if rest:
            dim += rest
            step, queries = self.keys * dim, self.rows * dim
        else:
            step, queries = 2 * self.keys * dim, 2 * self.rows * dim
        widened = step * element if stored < element else 0
        return (self.stages - 1) * step * stored + queries * element + widened


#: Mode -> tiles for padded head_dim up to 64, 128, 256, 512. "exact" is everything in deterministic mode: the same
#: instructions on the same tiles give the same bits. Sums of 512 elements and 64 rows would spill.
_TILES = {
    "decode": (Tile(16, 128, 4, 3), Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 4, 3)),
    "small": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    "prefill": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 32, 8, 2)),
    "exact": (Tile(64, 32, 4, 3), Tile(64, 32, 8, 3), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
#: Where a product is a warp's, with both factors in registers too: fewer keys or rows, which would spill. Heads of 512
#: keep two stages in 99 KiB.
_TILES_OF_WARPS = _TILES | {
    "small": (Tile(64, 64, 4, 3), Tile(64, 32, 8, 3), Tile(64, 32, 8, 2), Tile(32, 16, 8, 2)),
    "prefill": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 8, 2), Tile(32, 16, 8, 2)),
    "exact": (*_TILES["exact"][:3], Tile(32, 16, 8, 2)),
}
_FLOAT32_TILES = (Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 16, 2))


#: Over latent vectors, for few query heads and for many. Sums of 512 elements fill the registers: 64 rows would spill,
#: but where four warps multiply together and registers are to spare: neither is KV widened, nor are parts joined at
#: once. On an H200 these take half the time.
_LATENT_TILES = (Tile(16, 32, 4, 3), Tile(32, 32, 8, 3))
_LATENT_OF_WARPGROUPS = Tile(64, 64, 8, 2)
_LATENT_FLOAT32 = Tile(16, 16, 8, 2)
#: Shared memory from which there is room for the many.
_LATENT_SHARED = 96 << 10


def latent_group(heads: int, dtype: torch.dtype, stored: torch.dtype, limits: Limits, *, exact: bool) -> int:
    """Return how many query heads over latent vectors are rows of one program: a divisor of `heads`."""
    most = _latent_tile(dtype, limits, few=False, spare=stored == dtype and not exact).rows
    return max(count for count in range(1, most + 1) if heads % count == 0)


def _latent_tile(dtype: torch.dtype, limits: Limits, *, few: bool, spare: bool) -> Tile:
    if dtype == torch.float32:
        return _LATENT_FLOAT32
    if few or limits.shared_bytes < _LATENT_SHARED:
        return _LATENT_TILES[0]
    wide = limits.warpgroups and spare and not limits.narrow_latent
    return _LATENT_OF_WARPGROUPS if wide else _LATENT_TILES[1]


def tile_for(
    mode: str, dtype: torch.dtype, stored: torch.dtype, head_dim: int, group: int, limits: Limits, rest: int = 0
) -> Tile:
    """Return the tile for `mode`.

    Args:
        mode: "decode", one row per sequence; "small", up to SMALL_ROWS rows; "prefill"; or "exact".
        dtype: Of the queries.
        stored: Of the pool.
        head_dim: Elements of a head.
        group: Query heads per key/value head.
        limits: Of the device.
        rest: Elements of a latent vector behind its value; 0: keys and values are two planes.
    """
    dim, rest = max(padded(head_dim - rest), 16), rest and max(padded(rest), 16)
    modes = _TILES if limits.warpgroups else _TILES_OF_WARPS
    tiles = _FLOAT32_TILES if dtype == torch.float32 else modes[mode]
    tile = tiles[sum(dim > size for size in (64, 128, 256))]
    if rest:
        few, spare = mode == "decode" and group <= _LATENT_TILES[0].rows, stored == dtype and mode != "exact"
        tile = _latent_tile(dtype, limits, few=few, spare=spare)
    tile = replace(
        tile,
        rows=max(tile.rows, padded(group)),
        # Over latent vectors a further stage would spill.
        stages=min(tile.stages + (not rest and stored.itemsize < dtype.itemsize), limits.stages),
    )
    # The pipeline's depth is no part of the arithmetic.
    while tile.stages > 1 and tile.shared_bytes(dim, dtype.itemsize, stored.itemsize, rest) > limits.shared_bytes:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def part_keys(programs: int, max_context: int, processors: int, step: int) -> int:
    """Return how many keys one program in a launch should take, a multiple of `step`.

    Args:
        programs: Programs in the launch without a split.
        max_context: Most keys that any sequence may have.
        processors: Multiprocessors of the device.
        step: Keys of a tile.
    """
    if programs < processors:
        rounds, least = TOGETHER, max(MIN_PART, math.isqrt(JOINED_AS_KEYS * max_context))
    else:
        rounds, least = ROUNDS, LONG_PART
    parts = -(-rounds * processors // max(programs, 1))
    keys = max(-(-max_context // parts), least)
    return -(-keys // step) * step


def join_shape(rows: int, dim: int) -> tuple[int, int]:
    """Return (warps, elements per head) for a program that joins parts with padded `rows` and `dim`.

    A thread has 16 result numbers, and four times as many from the parts that are loaded ahead.
    """
    width = min(dim, max(8192 // rows, 16))
    return min(max(rows * width // 512, 1), 16), width


def padded(size: int) -> int:
    """Return the power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Limits:
    """A device's limits, as far as launches depend on them. The defaults are for interpreted kernels."""

    processors: int = 4
    shared_bytes: int = 227 << 10  # per program
    stages: int = 8
    float8: bool = False  # converts float8_e4m3fn natively; elsewhere bits are moved
    warpgroups: bool = False  # multiplies by four warps together, from shared memory
    thirds: bool = False  # tensor cores multiply float32 in three parts, which keep the digits
    narrow_latent: bool = False  # 64 rows over latent vectors give wrong results


@cache
def limits_of(device: torch.device) -> Limits:
    """Return the limits of `device`."""
    if not is_gpu(device):
        return Limits()
    properties = torch.cuda.get_device_properties(device)
    processors = int(properties.multi_processor_count)
    if torch.version.hip is not None:
        return Limits(processors, int(properties.shared_memory_per_block), stages=2)  # the compiler's own depth
    shared = int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
    capability = properties.major, properties.minor
    wide = {"float8": capability >= (8, 9), "warpgroups": properties.major == 9}
    return Limits(processors, shared, thirds=capability >= (8, 0), narrow_latent=device in NARROWED, **wide)


NARROWED: set[torch.device] = set()
"""Devices on which 64 rows over latent vectors gave wrong results (`moonpool.engine.kernels.self_check`)."""


def narrow_latent(device: torch.device) -> bool:
    """Take the former tile over latent vectors on `device` from now on; returns whether that is another one."""
    limits = limits_of(device)
    if not limits.warpgroups or limits.narrow_latent:
        return False
    NARROWED.add(device)
    limits_of.cache_clear()
    return True
