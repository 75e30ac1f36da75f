"""Packing sequences into tensors."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from moonpool.base.errors import InvalidRequest
from moonpool.engine.kernels.plan import make_plan
from moonpool.engine.models.batch import PackedBatch


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def test_build() -> None:
    batch = PackedBatch.build([(ids(7, 8, 9), 15, (4, 2)), (ids(5), 0, [6]), (ids(1, 2), 31, (9, 8, 3, 1))], 16)
    assert batch.token_ids.tolist() == [7, 8, 9, 5, 1, 2]
    assert batch.positions.tolist() == [15, 16, 17, 0, 31, 32]
    assert batch.query_start.tolist() == [0, 3, 4, 6]
    assert batch.context_lens.tolist() == [18, 1, 33]
    assert batch.block_tables.tolist() == [[4, 2, 0, 0], [6, 0, 0, 0], [9, 8, 3, 1]]
    assert batch.block_ids.tolist() == [4, 2, 2, 6, 8, 3]
    assert batch.offsets.tolist() == [15, 0, 1, 0, 15, 0]
    assert batch.last_rows.tolist() == [2, 3, 5]
    assert batch.num_tokens == 6
    types = {getattr(batch, name).dtype for name in ("query_start", "context_lens", "block_tables")}
    assert types == {torch.int32}


def test_a_copy_has_the_same_tensors_and_its_source() -> None:
    parts = [(ids(7, 8, 9), 15, (4, 2)), (ids(5), 0, [6])]
    batch = PackedBatch.build(parts, 16, slot_of=np.arange(10) % 5)
    batch.rope_positions, batch.rope_shifts = batch.positions.expand(3, -1) - 2, torch.tensor([2, 2])
    copy = batch.to("cpu")
    tensors = [name for name in dir(batch) if isinstance(getattr(batch, name), torch.Tensor)]
    assert len(tensors) == 12
    for name in tensors:
        ours, theirs = getattr(copy, name), getattr(batch, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name
        assert not ours.data_ptr() % 64
    assert copy.host is batch
    assert batch.host is batch
    hidden = torch.arange(4.0)[:, None]
    assert copy.last_of(hidden, [1, 0]).tolist() == [[3.0], [2.0]]


@pytest.mark.parametrize(
    ("field", "sequences"),
    [
        ("sequences", []),
        ("sequences[1]", [(ids(1), 0, [0]), (b"", 0, [0])]),
        ("sequences[0]", [(b"abc", 0, [0])]),
        ("sequences[0]", [(ids(1), -1, [0])]),
        ("sequences[0].block_table", [(ids(1), 16, [0])]),
        ("sequences[0].block_table", [(ids(1), 0, [])]),
    ],
)
def test_wrong_sequences_are_named(field: str, sequences: list[tuple[bytes, int, list[int]]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PackedBatch.build(sequences, 16)
    assert caught.value.field == field


TABLES = ((4, 2, 9), (6, 7), (9, 8, 3, 1))
FIELDS = ("token_ids", "positions", "query_start", "context_lens", "block_tables", "block_ids", "offsets", "last_rows")


def at(lengths: Sequence[int], *rows: Sequence[int]) -> PackedBatch:
    """Sequences that get some tokens each, and have so many then."""
    parts = zip(rows, lengths, TABLES, strict=True)
    return PackedBatch.build([(ids(*row), length - len(row), table) for row, length, table in parts], 16)


@pytest.mark.parametrize("first", [((1,), (2,), (3,)), ((1, 1, 1), (2,), (3, 3))])
def test_the_next_step_is_packed_as_if_anew(first: Sequence[Sequence[int]]) -> None:
    """Over borders of blocks. In place, with its plan, where there was one token of each sequence."""
    batch = at((46, 15, 47), *first)
    kv = torch.zeros(10, 1, 2, 16, 8)
    for step, filled in ((1, [6, 3]), (2, [9])):
        before, plan = batch, make_plan(kv, batch.block_tables, batch.query_start, batch.context_lens)
        batch.plans["its"] = plan
        batch = before.after([step, 7, 5])
        anew = at((46 + step, 15 + step, 47 + step), [step], [7], [5])
        assert all(getattr(batch, name).tolist() == getattr(anew, name).tolist() for name in FIELDS)
        assert batch.filled() == filled
        if len(first[0]) > 1 and step == 1:
            assert batch is not before
            continue
        assert batch is before
        new = make_plan(kv, anew.block_tables, anew.query_start, anew.context_lens)
        assert plan.decode.tolist() == new.decode.tolist()
        assert (plan.tables, plan.context_lens) == (new.tables, new.context_lens)
    with pytest.raises(InvalidRequest, match=r"sequences\[0\].block_table: 3 blocks of 16 tokens do not hold 49"):
        batch.after([1, 1, 1])


def test_many_steps_are_packed_as_if_anew() -> None:
    """Most of them within the blocks that they are in."""
    batch = at((10, 20, 1), [1], [2], [3])
    filled = {}
    for step in range(1, 13):
        batch = batch.after([step, 7, 5])
        anew = at((10 + step, 20 + step, 1 + step), [step], [7], [5])
        assert all(getattr(batch, name).tolist() == getattr(anew, name).tolist() for name in FIELDS)
        if batch.filled():
            filled[step] = batch.filled()
    assert filled == {6: [4], 12: [7]}


def test_a_plan_goes_on_to_blocks_of_the_pool_only() -> None:
    batch = at((46, 15, 48), [1], [2], [3])
    plan = make_plan(torch.zeros(10, 1, 2, 16, 8), batch.block_tables, batch.query_start, batch.context_lens)
    batch.block_tables[2, 3] = 10
    with pytest.raises(ValueError, match="block_tables: an entry is outside the pool's 10 blocks"):
        plan.go_on(batch.block_tables.numpy())
