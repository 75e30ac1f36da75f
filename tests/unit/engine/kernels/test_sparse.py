"""Chosen keys: those of the highest sums, of each row alone; attention over them is exact."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels.kv_quantization import DTYPES
from moonpool.engine.kernels.reference import dequantize, write_kv
from moonpool.engine.kernels.sparse import ChosenKeys, choose_keys, chosen_attention

BLOCK, WIDTH, HEADS, TOPK = 16, 24, 4, 20
SEQUENCES = ((7, 90), (1, 50), (5, 18), (1, 20), (40, 40), (0, 64), (1, 33), (1, 70))
"""Rows and context of each sequence: longer than TOPK, at most TOPK, rows before and behind it, no row; single rows."""
STARTS = [0, *torch.tensor([rows for rows, _ in SEQUENCES]).cumsum(0).tolist()]
LENGTHS = [context for _, context in SEQUENCES]
LISTS = torch.tensor(STARTS).int(), torch.tensor(LENGTHS).int()


class Pool:
    """Blocks in no order, whose free slots hold NaN, and the keys of each sequence."""

    def __init__(self, width: int, stored: torch.dtype | None, seed: int) -> None:
        print("seed", seed)
        drawn = torch.Generator().manual_seed(seed)
        shape = (40, 1, 1, BLOCK, width)
        self.kv = torch.zeros(shape, dtype=stored) if stored else torch.full(shape, torch.nan)
        self.scales = torch.full(shape[:4], torch.nan) if stored else None
        order = torch.randperm(40, generator=drawn).tolist()
        self.tables = torch.zeros((len(SEQUENCES), 6), dtype=torch.int32)
        self.keys = []
        for s, context in enumerate(LENGTHS):
            blocks = torch.tensor([order.pop() for _ in range(-(-context // BLOCK))])
            self.tables[s, : len(blocks)] = blocks
            at = torch.arange(context)
            places = blocks[at // BLOCK], at % BLOCK
            write_kv(torch.randn(context, 1, width, generator=drawn), None, self.kv, self.scales, *places)
            found = (places[0], 0, 0, places[1])
            self.keys.append(
                dequantize(self.kv[found], None if self.scales is None else self.scales[found], torch.float64)
            )
        self.q = torch.randn(STARTS[-1], HEADS, width, generator=drawn)
        self.weights = torch.randn(STARTS[-1], HEADS, generator=drawn)

    def chosen(self, *, deterministic: bool = False) -> ChosenKeys:
        chosen = choose_keys(
            self.q, self.weights, self.kv, self.scales, self.tables, *LISTS, 0.3, TOPK, deterministic=deterministic
        )
        assert chosen is not None
        return chosen


def best(sums: Tensor) -> list[int]:
    """The tokens with the highest sums, earlier ones first where sums are equal; in rising order."""
    ranked = sorted(range(len(sums)), key=lambda token: (-float(sums[token]), token))
    return sorted(ranked[:TOPK])


def rows_of(pool: Pool) -> list[tuple[int, int, int]]:
    """Row, sequence, and tokens that the row may see."""
    spans = enumerate(pairwise(STARTS))
    return [(row, s, LENGTHS[s] - end + row + 1) for s, (begin, end) in spans for row in range(begin, end)]


@pytest.mark.parametrize("stored", [None, *DTYPES.values()])
def test_rows_see_the_keys_with_the_highest_sums(stored: torch.dtype | None) -> None:
    pool = Pool(WIDTH, stored, 1)
    chosen = pool.chosen()
    assert chosen.whole is not None
    assert chosen.rows is not None
    longer = {s for s, context in enumerate(LENGTHS) if context > TOPK}
    found = dict(zip(chosen.rows.tolist(), range(len(chosen.rows)), strict=True))
    for row, s, seen in rows_of(pool):
        assert (row in found) == (s in longer) == (row not in chosen.whole.rows.tolist())
        if s not in longer:
            continue
        scores = (pool.q[row].double() @ pool.keys[s][:seen].T * 0.3).relu()
        wanted = best(pool.weights[row].double() @ scores)
        places = chosen.places[found[row]][: chosen.numbers[found[row]]].tolist()
        table = pool.tables[s].tolist()
        assert [table.index(place // BLOCK) * BLOCK + place % BLOCK for place in places] == wanted


def test_of_equal_sums_the_earlier_keys_are_taken() -> None:
    pool = Pool(WIDTH, None, 2)
    pool.weights[:] = 0.0
    chosen = pool.chosen()
    assert chosen.rows is not None
    for row, s in ((0, 0), (STARTS[7], 7)):
        at = chosen.rows.tolist().index(row)
        table = pool.tables[s].tolist()
        wanted = [table[token // BLOCK] * BLOCK + token % BLOCK for token in range(TOPK)]
        assert chosen.places[at].tolist() == wanted


def test_short_sequences_choose_nothing() -> None:
    pool = Pool(WIDTH, None, 3)
    assert choose_keys(pool.q, pool.weights, pool.kv, None, pool.tables, *LISTS, 0.3, 90) is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stored", [None, *DTYPES.values()])
def test_attention_is_that_over_the_chosen_keys(stored: torch.dtype | None, *, deterministic: bool) -> None:
    """The pools of an indexer and of latent vectors have the same blocks."""
    index, latent = Pool(WIDTH, None, 4), Pool(40, stored, 4)
    latent.tables = index.tables
    chosen = index.chosen(deterministic=deterministic)
    out = chosen_attention(latent.q, latent.kv, latent.scales, chosen, 0.2, 32, deterministic=deterministic)
    for row, s, seen in rows_of(latent):
        keys = latent.keys[s][:seen]
        if LENGTHS[s] > TOPK:
            scores = (index.q[row].double() @ index.keys[s][:seen].T * 0.3).relu()
            keys = keys[best(index.weights[row].double() @ scores)]
        wanted = torch.softmax(latent.q[row].double() @ keys.T * 0.2, -1) @ keys[:, :32]
        assert torch.allclose(out[row].double(), wanted, atol=2e-6), row


def test_behind_a_rows_keys_nothing_is_read() -> None:
    """Not even where other blocks, never written, hold what is no number."""
    drawn = torch.Generator().manual_seed(4)
    kv = torch.full((3, 1, 1, BLOCK, WIDTH), torch.nan)
    kv[2] = torch.randn(kv[2].shape, generator=drawn)
    q, places = torch.randn(2, HEADS, WIDTH, generator=drawn), torch.tensor([[35, 37, 0], [33, 40, 41]])
    found = []
    for width in (3, 2):
        numbers = torch.tensor([2, width], dtype=torch.int32)
        chosen = ChosenKeys(torch.arange(2), places[:, :width].int(), numbers, None)
        found.append(chosen_attention(q, kv, None, chosen, 0.3, WIDTH - 8, deterministic=False))
    assert torch.isfinite(found[0]).all()
    torch.testing.assert_close(found[0][0], found[1][0])
