"""The page by which a stage's ranks meet: threads of one process, each with its own view."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moonpool.base.errors import Unavailable
from moonpool.base.kv.memory import shared_memory
from moonpool.engine.parallel.page import SLOT_FLOATS, TOLD_WORDS, RankPage, page_bytes
from moonpool.engine.parallel.ranks import Ranks

Work = Callable[[Ranks], Any]


class Group:
    def __init__(self, fd: int, ranks: int, timeout_s: float) -> None:
        self.ranks = [Ranks(RankPage(fd, rank, ranks, timeout_s)) for rank in range(ranks)]
        self._threads = ThreadPoolExecutor(ranks)

    def do(self, *work: Work) -> list[Any]:
        """What each rank's work gives; one work is all ranks'."""
        each = work if len(work) > 1 else work * len(self.ranks)
        begun = [self._threads.submit(own, rank) for own, rank in zip(each, self.ranks, strict=True)]
        return [done.result() for done in begun]


@pytest.fixture(params=[2, 3, 4])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    fd = shared_memory()
    os.truncate(fd, page_bytes(request.param))
    yield Group(fd, request.param, 30.0)
    os.close(fd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_on_all_ranks(group: Group, dtype: torch.dtype) -> None:
    """In the order of the ranks, whatever the order in which they come; many in a row."""
    drawn = torch.Generator().manual_seed(1)
    parts = [[torch.randn(7, 33, generator=drawn).to(dtype) for _ in group.ranks] for _ in range(40)]

    def sums(ranks: Ranks) -> list[torch.Tensor]:
        return [ranks.sum(each[ranks.rank]) for each in parts]

    found = group.do(sums)
    for number, each in enumerate(parts):
        expected = each[0].float()
        for part in each[1:]:
            expected = expected + part.float()
        for its in found:
            assert torch.equal(its[number], expected.to(dtype))


def test_what_is_longer_than_a_slot_goes_in_pieces(group: Group) -> None:
    rows = torch.arange(SLOT_FLOATS + 5, dtype=torch.float32)[:, None]
    for total in group.do(lambda ranks: ranks.sum(rows * (ranks.rank + 1))):
        assert torch.equal(total, rows * sum(range(1, len(group.ranks) + 1)))
    for shared in group.do(lambda ranks: ranks.share(rows if ranks.first else None, rows.shape, rows.dtype)):
        assert torch.equal(shared, rows)


def test_columns_of_unlike_widths_are_gathered_at_the_first_rank(group: Group) -> None:
    widths = [3 + rank for rank in range(len(group.ranks))]
    whole = torch.randn(5, sum(widths), generator=torch.Generator().manual_seed(2))
    parts = torch.split(whole, widths, 1)
    first, *others = group.do(lambda ranks: ranks.gather(parts[ranks.rank], widths))
    assert torch.equal(first, whole)
    assert all(other.numel() == 0 for other in others)


def test_the_first_rank_tells_and_runs_ahead_by_one(group: Group) -> None:
    told = [[number, *range(number)] for number in range(50)]

    def tell(ranks: Ranks) -> None:
        for words in told:
            ranks.tell(words)

    heard = group.do(tell, *[lambda ranks: [ranks.hear() for _ in told]] * (len(group.ranks) - 1))
    assert heard[1:] == [told] * (len(group.ranks) - 1)
    with pytest.raises(AssertionError, match="too many"):
        group.ranks[0].tell([1] * TOLD_WORDS)


def test_a_rank_that_does_not_come_is_named() -> None:
    fd = shared_memory()
    os.truncate(fd, page_bytes(2))
    group = Group(fd, 2, 0.02)
    with pytest.raises(Unavailable, match=r"rank 1 of the stage was not heard for 0\.02 s"):
        group.ranks[0].meet()
    with pytest.raises(Unavailable, match="rank 0"):
        group.ranks[1].hear()
    os.close(fd)
