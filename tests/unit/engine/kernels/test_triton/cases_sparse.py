"""An indexer's choice in Triton against every key's sum. Run by test_interpreter.py and test_gpu.py.

Queries, keys and weights are small whole numbers: sums are exact, and many are equal.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels.triton import ops, sparse
from tests.unit.engine.kernels.test_triton.pools import DEVICE, generator, make, slowly

SEQUENCES = ((5, 90), (1, 50), (4, 22), (0, 30), (1, 20), (1, 1))
"""Rows and context of each sequence."""
BLOCK, HEADS, WIDTH, SCALE = 16, 5, 24, 0.25


class Choice:
    """A batch, what Triton chooses, and what is right."""

    def __init__(
        self, sequences: tuple[tuple[int, int], ...], topk: int, dtype: torch.dtype, stored: torch.dtype | None
    ) -> None:
        drawn, self.sequences, self.topk, self.dtype = generator(), sequences, topk, dtype
        blocks = sum(-(-context // BLOCK) for _, context in sequences) + 2
        order = torch.randperm(blocks, generator=drawn).tolist()
        shape = (blocks, 1, 1, BLOCK, WIDTH)
        values = torch.randint(-3, 4, shape, generator=drawn).float()
        self.tables = torch.full((len(sequences), max(context for _, context in sequences) // BLOCK + 2), 2**30).int()
        for s, (_, context) in enumerate(sequences):
            for at in range(-(-context // BLOCK)):
                self.tables[s, at] = order.pop()
        self.scales = None
        if stored is not None:
            self.scales = 2.0 ** torch.randint(-2, 3, shape[:4], generator=drawn)
        self.exact = (values if self.scales is None else values * self.scales[..., None]).double()
        self.kv = values.to(stored or dtype)
        self.starts = torch.tensor([0] + [rows for rows, _ in sequences]).cumsum(0).int()
        self.lengths = torch.tensor([context for _, context in sequences]).int()
        rows = int(self.starts[-1])
        self.q = torch.randint(-3, 4, (rows, HEADS, WIDTH), generator=drawn).to(dtype)
        self.weights = torch.randint(-2, 3, (rows, HEADS), generator=drawn).float()
        self.places = torch.full((rows, topk), -1, dtype=torch.int32, device=DEVICE)
        self.numbers = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)

    def choose(self, longest: int) -> None:
        """Have Triton choose."""
        given = self.q, self.weights, self.kv, self.scales, self.tables, self.starts, self.lengths
        on = [None if tensor is None else tensor.to(DEVICE) for tensor in given]
        ops.choose_keys(*on, SCALE, longest, self.places, self.numbers)  # type: ignore[arg-type, call-arg]

    def check(self) -> None:
        """Compare with every key's sum."""
        for s, (begin, end) in enumerate(pairwise(self.starts.tolist())):
            at = torch.arange(int(self.lengths[s]))
            blocks, slots = self.tables[s, at // BLOCK].long(), at % BLOCK
            keys = self.exact[blocks, 0, 0, slots]
            for row in range(begin, end):
                seen = int(self.lengths[s]) - (end - 1 - row)
                sums = self.weights[row].double() @ (self.q[row].double() @ keys[:seen].T * SCALE).relu()
                chosen = best(sums, self.topk)
                wanted = (blocks[chosen] * BLOCK + slots[chosen]).tolist()
                assert self.numbers[row] == len(wanted)
                assert self.places[row].tolist() == wanted + [0] * (self.topk - len(wanted)), (s, row)


def best(sums: Tensor, topk: int) -> Tensor:
    """The tokens of the highest sums, the earlier of equal ones, rising."""
    return (-sums).sort(stable=True).indices[:topk].sort().values


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, None), (torch.bfloat16, torch.float8_e4m3fn),
        *slowly((torch.bfloat16, None), (torch.float16, torch.int8), (torch.float32, torch.float8_e4m3fn)),
    ],
)  # fmt: skip
def test_the_highest_sums_are_chosen(
    dtype: torch.dtype, stored: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows of a batch, some at a time; also of rows that see fewer keys."""
    monkeypatch.setattr(sparse, "SUM_BYTES", 4 * 90 * 9)
    choice = Choice(SEQUENCES, 20, dtype, stored)
    choice.choose(90)
    choice.check()


def test_sums_of_a_long_context() -> None:
    """More than a program looks at together, in a launch for longer contexts still."""
    choice = Choice(((1, 4500), (2, 9)), 300, torch.bfloat16, None)
    choice.choose(1 << 20)
    choice.check()


def test_all_keys_are_attended_as_by_blocks() -> None:
    """To the bit in deterministic mode: so a row's bits do not depend on the longest sequence of its batch."""
    case = make([(3, 40), (1, 7), (1, 33)], group=4, kv_heads=1, head_dim=72, rest=8)
    rows, topk = len(case.q), 48
    index = torch.randn((*case.kv.shape[:4], 16), generator=generator()).to(DEVICE)
    places, numbers = torch.empty((rows, topk), dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    places, numbers = places.to(DEVICE), numbers.to(DEVICE)
    q, weights = torch.ones((rows, 2, 16), device=DEVICE), torch.ones((rows, 2), device=DEVICE)
    lists = case.tables, case.starts, case.lengths
    ops.choose_keys(q, weights, index, None, *lists, 1.0, 40, places, numbers)
    out = case.empty()
    ops.chosen_attention(case.q, case.kv, None, places, numbers, case.scale, out, deterministic=True)
    assert torch.equal(out, case.prefill(deterministic=True))
