"""Recurrent layers in Triton against plain torch. Run by test_interpreter.py and test_gpu.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from moonpool.base.families.spec import RecurrentSpec
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.recurrent import RecurrentWeights, StateUndo
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator, slowly
from tools.gpu_check.recurrent_rows import random_layer

BLOCK, HIDDEN = 16, 24
SPECS = {
    "short_conv": RecurrentSpec("short_conv", 3, width=40),
    "mamba2": RecurrentSpec("mamba2", 4, 2, 1, 12, 20, conv_bias=True, gate_first=True),
    "gated_delta": RecurrentSpec("gated_delta", 4, 4, 2, 12, 20, in_turn=True),
    "lightning": RecurrentSpec("lightning", 1, 2, 2, 12, 20, decays=(-0.1, -0.7), norm_groups=2),
    "kimi_delta": RecurrentSpec("kimi_delta", 4, 2, 2, 12, 20, width=8),
}
SEQUENCES = [(18, 0), (1, 21), (5, 12), (1, 0)]
"""Rows, and tokens before them: prompts over two blocks, single rows, some at the first token."""
TOLERANCE = 2e-5
"""Of float32. In other types roundings flip, and small vectors that are normed grow."""
TIMES_TORCH = {torch.float32: 4, torch.float16: 4, torch.bfloat16: 10}
"""Errors beside those of torch in the same type. The interpreter cuts bfloat16 off: up to 5 times in 60 draws."""


def batch_of(sequences: Sequence[tuple[int, int]]) -> PackedBatch:
    parts, free = [], iter(range(1, 100))
    for rows, before in sequences:
        parts.append((bytes(4 * rows), before, [next(free) for _ in range(-(-(rows + before) // BLOCK))]))
    return PackedBatch.build(parts, BLOCK, DEVICE)


def computed(
    monkeypatch: pytest.MonkeyPatch,
    way: Literal["triton", "reference"],
    weights: RecurrentWeights,
    batch: PackedBatch,
    rows: Tensor,
    pool: Tensor,
    *,
    deterministic: bool = False,
    captured: bool = False,
) -> tuple[Tensor, Tensor, StateUndo]:
    """The layer's result, the pool behind it, and what takes the step back; `captured`: nothing does."""
    monkeypatch.setenv(VARIABLE, way)
    pool, undo = pool.clone(), StateUndo()
    batch = replace(batch, most_context=64 if captured else None)
    kv = pool.view(len(pool), 1, 1, 1, -1)
    angles = torch.stack((batch.positions.cos(), batch.positions.sin())).to(rows.dtype)
    turns = [each[:, None].expand(-1, 8).contiguous() for each in angles]
    kept = None if captured else undo
    found = weights(rows, batch, kv, kept, (turns[0], turns[1]), deterministic=deterministic)
    return found, pool, undo


def states(spec: RecurrentSpec, batch: PackedBatch, rng: torch.Generator) -> Tensor:
    """A pool of states as large as those of a model are, with room behind them."""
    pool = torch.randn((1 + int(batch.block_tables.max()), spec.state_elements + 8), generator=rng)
    return pool.to(DEVICE)


@pytest.mark.parametrize("deterministic", [False, *slowly((True,))])
@pytest.mark.parametrize("dtype", [DTYPES[0], *slowly(*((dtype,) for dtype in DTYPES[1:]))])
@pytest.mark.parametrize("kind", SPECS)
def test_a_step_gives_what_torch_gives(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, *, deterministic: bool
) -> None:
    rng, spec, batch = generator(), SPECS[kind], batch_of(SEQUENCES)
    drawn = rng.get_state()
    weights = random_layer(spec, HIDDEN, dtype, DEVICE, rng)
    rows = torch.randn((batch.num_tokens, HIDDEN), generator=rng).to(DEVICE, dtype)
    pool = states(spec, batch, rng)
    pool[:, : spec.channels * (spec.conv - 1)] = pool[:, : spec.channels * (spec.conv - 1)].to(dtype).float()
    by_torch = computed(monkeypatch, "reference", weights, batch, rows, pool)[:2]
    found, own, undo = computed(monkeypatch, "triton", weights, batch, rows, pool, deterministic=deterministic)
    exactly = random_layer(spec, HIDDEN, torch.float32, DEVICE, rng.set_state(drawn), rounded=dtype)
    exact = computed(monkeypatch, "reference", exactly, batch, rows.float(), pool)[:2]
    for ours, theirs, right in zip((found, own), by_torch, exact, strict=True):
        error, others = (float((each.float() - right).square().mean().sqrt()) for each in (ours, theirs))
        print(f"error {error:.2e}, torch's {others:.2e}")
        assert error <= TIMES_TORCH[dtype] * others + TOLERANCE * float(right.abs().max())
    undo.restore([1, 2])
    for sequence in (1, 2):
        slot = int(batch.slot_tables[sequence, (SEQUENCES[sequence][1] - 1) // BLOCK])
        assert torch.equal(own[slot], pool[slot])


@pytest.mark.parametrize("kind", ["gated_delta", "short_conv"])
def test_a_prompt_in_chunks_has_the_states_of_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also chunks that end within a block, after fewer tokens than a convolution sees."""
    rng, spec = generator(), SPECS[kind]
    weights = random_layer(spec, HIDDEN, torch.float32, DEVICE, rng)
    rows = torch.randn((21, HIDDEN), generator=rng).to(DEVICE)
    whole = batch_of([(21, 0)])
    pool = states(spec, whole, rng)
    expected, behind, _ = computed(monkeypatch, "triton", weights, whole, rows, pool)
    found = []
    for begin, end in ((0, 1), (1, 3), (3, 18), (18, 19), (19, 21)):
        part = batch_of([(end - begin, begin)])
        part_found, pool, _ = computed(monkeypatch, "triton", weights, part, rows[begin:end], pool)
        found.append(part_found)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool, behind, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "sequences", "deterministic"),
    [
        ("gated_delta", [(5, 12), (1, 21)], False),
        ("short_conv", [(5, 12), (1, 0)], False),
        ("mamba2", [(1, 21), (1, 0), (1, 15)], True),
        *slowly(*((kind, SEQUENCES, False) for kind in ("gated_delta", "mamba2", "lightning", "kimi_delta"))),
    ],
)
def test_captured_work_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, sequences: Sequence[tuple[int, int]], *, deterministic: bool
) -> None:
    """It does not know the lengths, and keeps no states; padding has no slots."""
    rng, spec = generator(), SPECS[kind]
    weights, batch = random_layer(spec, HIDDEN, torch.float32, DEVICE, rng), batch_of(sequences)
    rows = torch.randn((batch.num_tokens, HIDDEN), generator=rng).to(DEVICE)
    pool = states(spec, batch, rng)
    expected, behind, _ = computed(monkeypatch, "triton", weights, batch, rows, pool, deterministic=deterministic)
    found, own, _ = computed(
        monkeypatch, "triton", weights, batch, rows, pool, deterministic=deterministic, captured=True
    )
    assert torch.equal(found, expected)
    assert torch.equal(own, behind)
    padded = replace(batch, slot_ids=torch.full_like(batch.slot_ids, -1))
    _, own, _ = computed(monkeypatch, "triton", weights, padded, rows, pool, captured=True)
    assert torch.equal(own, pool)


@pytest.mark.parametrize("kind", slowly(("gated_delta",)))
def test_a_row_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rng, spec = generator(), SPECS[kind]
    weights, batch = random_layer(spec, HIDDEN, torch.float32, DEVICE, rng), batch_of(SEQUENCES)
    rows = torch.randn((batch.num_tokens, HIDDEN), generator=rng).to(DEVICE)
    pool = states(spec, batch, rng)
    together, behind, _ = computed(monkeypatch, "triton", weights, batch, rows, pool, deterministic=True)
    alone = PackedBatch.build([(bytes(4 * 5), 12, batch.block_tables[2].tolist())], BLOCK, DEVICE)
    found, own, _ = computed(monkeypatch, "triton", weights, alone, rows[19:24], pool, deterministic=True)
    assert torch.equal(found, together[19:24])
    used = batch.block_tables[2, :2].tolist()
    assert torch.equal(own[used], behind[used])
