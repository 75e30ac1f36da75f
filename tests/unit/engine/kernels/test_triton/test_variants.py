"""Which batches compile every variant of the attention kernels."""

import random

import pytest
import torch

from moonpool.engine.kernels.triton.tiles import Limits
from moonpool.engine.kernels.triton.variants import JOINED, MANY, PART, SINGLES, WHOLE, AttentionShape, BatchShape

HOPPER, SMALL = Limits(132, 227 << 10, float8=True, warpgroups=True), Limits(20, 99 << 10)
HEADS = [(14, 2, 64), (9, 3, 64), (32, 8, 128), (16, 1, 256), (16, 2, 512), (64, 64, 128), (16, 1, 576), (128, 1, 576)]


@pytest.mark.parametrize("limits", [HOPPER, SMALL])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("tokens", "longest"), [(16, 16), (320, 4096), (512, 700), (8192, 131_072)])
def test_no_batch_takes_a_variant_that_they_leave_out(
    limits: Limits, deterministic: bool, tokens: int, longest: int
) -> None:
    draw = random.Random(tokens)
    for heads, kv_heads, head_dim in HEADS:
        rest = 64 if head_dim == 576 else 0
        shape = AttentionShape(torch.bfloat16, torch.bfloat16, heads, kv_heads, head_dim, deterministic, limits, rest)
        batches = shape.batches(tokens, longest)
        assert all(batch.tokens <= tokens and batch.rows <= batch.context <= longest for batch in batches)
        known = {shape.variant(SINGLES if batch.rows == 1 else MANY, batch) for batch in batches}
        for _ in range(300):
            rows = [min(longest, 1 << draw.randrange(tokens.bit_length())) for _ in range(draw.randint(1, 9))]
            rows = [count for number, count in enumerate(rows) if sum(rows[: number + 1]) <= tokens] or [1]
            singles = sum(count == 1 for count in rows)
            context = max(*rows, draw.randint(1, longest))
            for which in [SINGLES] * bool(singles) + [MANY] * (singles < len(rows)):
                cut = shape.launch(which, sum(rows), len(rows), context, singles if which == MANY else 0)
                assert (which, cut.tile, cut.split) in known, (rows, context)


def test_there_is_a_batch_for_each_kind_of_launch() -> None:
    def splits(*, deterministic: bool) -> set[tuple[int, int, int]]:
        shape = AttentionShape(torch.bfloat16, torch.bfloat16, 32, 8, 128, deterministic, HOPPER)
        variants = [shape.variant(SINGLES if taken.rows == 1 else MANY, taken) for taken in shape.batches(2048, 32_768)]
        return {(which, tile.rows, split) for which, tile, split in variants}

    assert splits(deterministic=False) == {
        (which, rows, split) for which, rows in ((SINGLES, 16), (MANY, 64), (MANY, 128)) for split in (WHOLE, PART)
    }
    assert splits(deterministic=True) == {(which, 64, split) for which in (SINGLES, MANY) for split in (JOINED, PART)}


def test_what_is_cheap_is_run() -> None:
    shape = AttentionShape(torch.bfloat16, torch.bfloat16, 32, 8, 128, False, HOPPER)
    batches = shape.batches(8192, 131_072)
    assert BatchShape(1, 1, 125) in batches
    assert max(batch.tokens for batch in batches) < 1024
    assert max(batch.context for batch in batches) < 4096
