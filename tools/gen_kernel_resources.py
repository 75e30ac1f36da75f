"""Writes what GPU kernels take to a file of tests, which compare it: `python -m tools.gen_kernel_resources`.

Compiles every kernel for some models and for GPUs that may be absent, in some minutes of processor time.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from moonpool.engine.kernels.triton.variants import (
    JOINED,
    MANY,
    PART,
    ROW_EACH,
    SINGLES,
    WHOLE,
    AttentionShape,
    BatchShape,
)
from tools.compiled_kernels import AMPERE, HOPPER, Gpu, Launch, Resources, caught, compile_for, resources_of

PAGE = Path(__file__).parents[1] / "tests/unit/engine/kernels/test_triton/resources.md"
GPUS = (HOPPER, AMPERE)
STEP_TOKENS, LONGEST = 8192, 131_072
HEAD = """# What the GPU kernels take

`python -m tools.gen_kernel_resources` writes this page: {version} compiled each kernel as services launch it, for
{gpus}. No GPU was there, and nothing ran. `make test` compiles kernels of the first model again for {first},
each constant with each of its values, and compares them with this page; `make test-all` compiles all of them.

- **Registers** are those of a thread, of 255. A kernel that keeps more than two in memory (spills) fails the tests.
- **KiB** is shared memory of a program. More than {limits} fails the tests.
- **At once** are the programs that fit on a multiprocessor by registers, shared memory and threads.
- **Rows**: a launch is for sequences with one row (`each`: a decode step; `single`: those of a mixed batch) or `many`.
- **Split**: a program takes the `whole` context, or one `part` of it, or all parts one by one (`joined`).
- **Tile**: rows of queries x keys of a step; of other kernels what they are compiled for.
"""
_WHICH = {ROW_EACH: "each", SINGLES: "single", MANY: "many"}
_SPLITS = {WHOLE: "whole", PART: "part", JOINED: "joined"}
_SIZES = ("PADDED", "CHUNK", "HEADS", "BLOCK", "RUN", "BY_WEIGHT")
_REGISTERS, _PROCESSOR_BYTES, _WARPS = 65536, {"sm_90": 228 << 10, "sm_80": 164 << 10}, 64
_LARGE = (32, 8, 128, 4096, 14_336)
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, for which kernels are compiled, and the pool.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: elements of a head; of a latent vector.
        hidden: elements of a token between layers.
        intermediate: elements of the feed-forward network.
        stored: type of the pool; None: bfloat16, as all else.
        block_size: tokens of a block.
        deterministic: the mode.
        rest: of latent vectors, elements behind a value; 0: keys and values are two planes.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    stored: torch.dtype | None = None
    block_size: int = 64
    deterministic: bool = False
    rest: int = 0

    def launched(self, gpu: Gpu) -> list[Launch]:
        """Return one launch for each kernel that services compile for the model."""
        with caught(gpu.limits) as launched:
            self._run(gpu)
        return list({launch.specialised: launch for launch in launched}.values())

    def _run(self, gpu: Gpu) -> None:
        from moonpool.engine.kernels.triton import ops, sampling

        x = _empty(2, self.hidden)
        ops.rms_norm(x, None, x[0], 1e-6, x)
        ops.rms_norm(x, x, x[0], 1e-6, x)
        ops.silu_mul(_empty(2, 2 * self.intermediate), _empty(2, self.intermediate))
        kv, scales = self._pool()
        ids = _empty(2, dtype=torch.int64)
        if self.rest:
            turned = self.heads + 1, self.rest
            ops.rope(_empty(2, *turned), _empty(2, self.rest), _empty(2, self.rest), _empty(2, *turned))
            ops.write_kv(_empty(2, 1, self.head_dim), None, kv, scales, ids, ids)
        else:
            qkv, angles = _empty(2, self.heads + 2 * self.kv_heads, self.head_dim), _empty(2, self.head_dim)
            qk, v, out = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :], _empty(2, self.heads, self.head_dim)
            ops.norm_rope_write(qk, v, out, None, (angles, angles), kv, scales, ids, ids)
        ops.copy_blocks(kv[None], ids, ids)
        logits, numbers = _empty(2, 128 * sampling.RUN, dtype=torch.float32), _empty(2, dtype=torch.float64)
        sampling.weights_of(logits, logits[:, 0], logits[:, 0], logits)
        for by_weight in (False, True):
            sampling.keep_leading(logits, numbers, by_weight=by_weight)
        sampling.pick(logits, ids, numbers)
        dtype, heads = torch.bfloat16, (self.heads, self.kv_heads, self.head_dim)
        sizes = AttentionShape(dtype, kv.dtype, *heads, self.deterministic, gpu.limits, self.rest)
        for batch in sizes.batches(STEP_TOKENS, LONGEST):
            self._attend(batch)

    def _attend(self, batch: BatchShape) -> None:
        from moonpool.engine.kernels.triton import ops

        kv, scales = self._pool()
        q, out = (_empty(batch.tokens, self.heads, self.head_dim - rest) for rest in (0, self.rest))
        tables = _empty(batch.sequences, -(-batch.context // self.block_size), dtype=torch.int32)
        starts, lengths = (_empty(batch.sequences + more, dtype=torch.int32) for more in (1, 0))
        scale = self.head_dim**-0.5
        ops.prefill_attention(
            q, kv, scales, tables, starts, lengths, scale, out, max_context=batch.context,
            singles=batch.sequences if batch.rows == 1 else 0, deterministic=self.deterministic,
        )  # fmt: skip
        if batch.rows == 1:
            ops.decode_attention(
                q, kv, scales, tables, lengths, scale, out, max_context=batch.context, deterministic=self.deterministic
            )

    def _pool(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (4, self.kv_heads, 1 if self.rest else 2, self.block_size, self.head_dim)
        if self.stored is None:
            return _empty(*shape), None
        return _empty(*shape, dtype=self.stored), _empty(*shape[:-1], dtype=torch.float32)


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(size, dtype=dtype, device="meta")


SHAPES = {
    "llama-3-8b": Shape(*_LARGE),
    "qwen2.5-0.5b": Shape(14, 2, 64, 896, 4864),
    "smollm2-135m": Shape(9, 3, 64, 576, 1536),
    "gemma-2-9b (heads of 256)": Shape(16, 8, 256, 3584, 14_336),
    "gemma-4-31b (heads of 512)": Shape(32, 4, 512, 5376, 21_504),
    "gemma-4-31b, KV in int8": Shape(32, 4, 512, 5376, 21_504, stored=torch.int8),
    "llama-3-8b, KV in int8": Shape(*_LARGE, stored=torch.int8),
    "llama-3-8b, KV in float8": Shape(*_LARGE, stored=torch.float8_e4m3fn),
    "llama-3-8b, blocks of 16": Shape(*_LARGE, block_size=16),
    "llama-3-8b, deterministic": Shape(*_LARGE, deterministic=True),
    "deepseek-v3 (latent vectors)": Shape(128, 1, 576, 7168, 18_432, rest=64),
}


def title(launch: Launch) -> tuple[str, str, str, str]:
    """Return the first cells of a launch's row: kernel, rows, split, tile."""
    named = launch.named
    if launch.name == "attention":
        tile = f"{named['ROWS']} x {named['KEYS']}, {named['num_warps']} warps, {named['num_stages']} stages"
        return launch.name, _WHICH[named["WHICH"]], _SPLITS[named["SPLIT"]], tile
    if launch.name == "join_parts":
        return launch.name, _WHICH[named["WHICH"]], "", f"{named['ROWS']}, {named['num_warps']} warps"
    constants = [f"{name.lower()} {value}" for name, value in named.items() if name.startswith(_SIZES)]
    residual = ["residual"] * (launch.name == "_norm" and launch.arguments[1] is not None)
    return launch.name.removeprefix("_"), "", "", ", ".join(constants + residual)


def at_once(gpu: Gpu, warps: int, taken: Resources) -> int:
    """Return how many programs fit on a multiprocessor."""
    registers = -(-taken.registers // 8) * 8 * 32 * warps
    shared = _PROCESSOR_BYTES[gpu.name] // (taken.shared_bytes + 1024)
    return min(_REGISTERS // registers, shared, _WARPS // warps, 32)


def measured(gpu: Gpu, launches: Sequence[Launch]) -> list[Resources]:
    """Compile launches, as many at the same time as there are processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda launch: resources_of(compile_for(gpu, launch)), launches))


def table(shape: Shape, gpus: Sequence[Gpu] = GPUS) -> dict[Row, list[tuple[int, Resources] | None]]:
    """Return rows: what was launched -> of each GPU (programs at once, what they take); None: not launched there."""
    rows: dict[Row, list[tuple[int, Resources] | None]] = {}
    for number, gpu in enumerate(gpus):
        launches = shape.launched(gpu)
        for launch, taken in zip(launches, measured(gpu, launches), strict=True):
            cells = rows.setdefault(title(launch), [None] * len(gpus))
            cells[number] = at_once(gpu, launch.named.get("num_warps", 4), taken), taken
    return rows


def page() -> str:
    """The text of `PAGE`."""
    gpus = " and ".join(gpu.name for gpu in GPUS)
    limits = " and ".join(f"{gpu.limits.shared_bytes >> 10} ({gpu.name})" for gpu in GPUS)
    version = f"Triton {importlib.metadata.version('triton')}"
    parts = [HEAD.format(version=version, gpus=gpus, limits=limits, first=GPUS[0].name)]
    for name, shape in SHAPES.items():
        columns = "".join(f" {gpu.name} registers | KiB | at once |" for gpu in GPUS)
        parts.append(
            f"\n## {name}\n\n| kernel | rows | split | tile |{columns}\n|---|---|---|---|{'--:|' * 3 * len(GPUS)}\n"
        )
        for row, cells in table(shape).items():
            numbers = "".join(_cells(cell) for cell in cells)
            parts.append(f"| {' | '.join(row)} |{numbers}\n")
    return "".join(parts)


def _cells(cell: tuple[int, Resources] | None) -> str:
    if cell is None:
        return "  |  |  |"
    programs, taken = cell
    spilled = f" + {taken.stack_bytes} bytes spilled" if taken.stack_bytes else ""
    return f" {taken.registers}{spilled} | {taken.shared_bytes / 1024:.1f} | {programs} |"


def told(text: str, name: str) -> dict[Row, list[tuple[int, float] | None]]:
    """Return a page's figures for a model: row -> for each GPU (registers, KiB)."""
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    rows: dict[Row, list[tuple[int, float] | None]] = {}
    for line in section.splitlines()[3:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = [cells[at : at + 2] for at in range(4, len(cells), 3)]
        rows[tuple(cells[:4])] = [(int(re.match(r"\d+", a)[0]), float(b)) if a else None for a, b in numbers]  # type: ignore[index]
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
