"""Packing sequences into tensors."""

from array import array

import pytest
import torch

from moonpool.errors import InvalidRequest
from moonpool.model import PackedBatch


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
    assert batch.to("cpu").positions.tolist() == batch.positions.tolist()


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
