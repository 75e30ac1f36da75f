"""Speed of attention, KV writes, block copies, norms and sampling beside what the hardware copies and multiplies."""

import time
from collections.abc import Callable

import torch

from benchmarks.ceilings import On
from benchmarks.frame import Row
from tools.gpu_check.kernel_rows import (
    SAMPLED,
    SIZES,
    Shape,
    Sizes,
    choice_rows,
    chosen_rows,
    flashinfer_rows,
    kernel_rows,
    latent_rows,
    sampling_rows,
)
from tools.gpu_check.recurrent_rows import BATCHES, recurrent_rows
from tools.gpu_check.recurrent_rows import SMALL as SMALL_LAYERS
from tools.gpu_check.recurrent_rows import SPECS as LAYERS
from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 130
RUNS, FEWEST_OF_TARGET = 2, 0.5
"""Measured pairs of each figure; the share of a target below which the stage fails."""
SHAPE = Shape(block_size=64)
SMALL = Shape(heads=14, kv_heads=2, head_dim=64, block_size=64)
SMALL_SIZES = Sizes(decode=((64, 1024), (256, 1024)), prefill=((4096, 4096),))
LATENT = Shape(heads=128, kv_heads=1, head_dim=576, block_size=64, rest=64)
FEW_LATENT = Shape(heads=16, kv_heads=1, head_dim=576, block_size=64, rest=64)
"""A rank's heads, or a small model's."""
LATENT_SIZES = Sizes(decode=((32, 8192),), prefill=((4096, 4096),))
INDEXER = {True: (torch.bfloat16, 64, 128), False: (torch.float32, 4, 16)}
"""(type, heads, elements of a head), whether on a GPU"""
CHOSEN = {True: ((32, 8192, 2048),), False: ((2, 64, 16),)}
"""(rows, context, chosen keys), whether on a GPU"""
TINY = Sizes(decode=((2, 64),), prefill=((32, 32), (16, 48)), written=64, copied=2, normed=(4, 64))


def check(where: Where, figures: Figures) -> None:
    """Tell each figure; fail on those that miss half of their target, all named."""
    if where.on_gpu:
        on = On(where.torch_device, RUNS)
        cases = [(SHAPE, SIZES), (SMALL, SMALL_SIZES)]
        latent = [(LATENT, LATENT_SIZES), (FEW_LATENT, LATENT_SIZES)]
    else:
        on = On(where.torch_device, 1, _seconds, 1 << 16, 64)
        cases = [(Shape(heads=4, kv_heads=2, head_dim=16, layers=2, dtype=torch.float32), TINY)]
        latent = [(Shape(heads=4, kv_heads=1, head_dim=24, dtype=torch.float32, rest=8), TINY)]
    figures["copy, GB/s"] = round(on.copied() / 1e9, 1)
    figures["matrix product, TFLOP/s"] = round(on.multiplied(cases[0][0].dtype) / 1e12, 1)
    slow = []
    for shape, sizes in cases:
        slow += [tell(row, figures) for row in kernel_rows(on, shape, sizes)]
    for shape, sizes in latent:
        slow += [tell(row, figures) for row in latent_rows(on, shape, sizes)]
        slow += [tell(row, figures) for chosen in CHOSEN[where.on_gpu] for row in chosen_rows(on, shape, *chosen)]
    for chosen in CHOSEN[where.on_gpu]:
        slow += [tell(row, figures) for row in choice_rows(on, *INDEXER[where.on_gpu], *chosen)]
    small = SMALL_LAYERS, torch.float32, ((2, 1, 20), (1, 20, 0))
    of_layers = (LAYERS, torch.bfloat16, BATCHES) if where.on_gpu else small
    slow += [tell(row, figures) for row in recurrent_rows(on, *of_layers)]
    for rows, vocab in SAMPLED if where.on_gpu else ((2, 500),):
        slow += [tell(row, figures) for row in sampling_rows(on, rows, vocab)]
    try:
        slow += [tell(row, figures) for row in flashinfer_rows(on, *cases[0])]
    except Exception as error:  # an optional peer with calls that differ between versions
        figures["FlashInfer"] = f"skipped: {type(error).__name__}: {error}"
    expect(not any(slow) or not where.on_gpu, "; ".join(filter(None, slow)))


def tell(row: Row, figures: Figures) -> str:
    """Tell a figure; return the fault, "" if none."""
    target = f", target {row.target}" if row.target else ""
    figures[f"{row.name}, beside {row.limit_name}"] = f"{row.value:.4g} {row.unit}, {row.ratio:.2f} of it{target}"
    if row.target and row.ratio < FEWEST_OF_TARGET * row.target:
        return f"{row.name}: {row.ratio:.2f} of {row.limit_name}, target {row.target}"
    return ""


def _seconds(call: Callable[[], object]) -> float:
    """Seconds for one call on a CPU."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    stage_main("kernel_speed", check)
