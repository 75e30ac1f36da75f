"""What of the pool is free, promised and expected to be needed."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from moonpool.sched.block_manager import BlockManager
from services.decode.core.request import Request


def most_needed(lives: Iterable[tuple[int, int]]) -> int:
    """Blocks that are needed beyond those taken now at the worst moment, if all grow alike and end as expected.

    The worst moments are those before a sequence ends, as in the Past-Future scheduler (ASPLOS 2025).

    Args:
        lives: of each sequence the blocks that it will still take, and those that come free with its end.
    """
    most = freed = 0
    ends = sorted(lives)
    for index, (claim, frees) in enumerate(ends):
        most = max(most, (len(ends) - index) * claim - freed)
        freed += frees
    return most


class Room:
    """Counts over the pool's blocks.

    Args:
        blocks: of the pool.
        watermark: blocks that an admission leaves free beyond what is expected to be needed.
    """

    def __init__(self, blocks: BlockManager, watermark: int) -> None:
        self.blocks = blocks
        self.watermark = watermark
        self.promised = 0
        """Blocks promised and not bound. A promise is kept whatever happens."""
        self.claims = 0
        """Sum of the requests' claims: blocks expected to be needed. No more than an expectation."""

    @property
    def spare(self) -> int:
        """Blocks that can be taken now without breaking a promise."""
        return self.blocks.num_available - self.promised

    @property
    def unexpected(self) -> int:
        """Blocks that are not expected to be needed here."""
        return self.spare - self.claims - self.watermark

    def cost(self, held: list[int], new: int) -> int:
        """Blocks by which `spare` falls when blocks that were matched are acquired and others taken."""
        return new + sum(self.blocks.is_cached(block) for block in held)

    def frees(self, request: Request) -> int:
        """Blocks that nobody but a request refers to. Others share leading ones only."""
        if request.width > 1:
            return sum(self.blocks.ref_count(block) == count for block, count in Counter(request.refs).items())
        table = request.blocks
        return len(table) - bisect_left(table, True, key=lambda block: self.blocks.ref_count(block) == 1)

    def promise(self, request: Request, held: list[int], new: int) -> None:
        """Acquires the held prefix and promises blocks behind it."""
        self.blocks.acquire(held)
        [member] = request.members
        member.table = held
        request.promised = new
        self.promised += new

    def bind(self, request: Request) -> None:
        """Turns the promise into blocks; cannot fail."""
        [member] = request.members
        self.promised -= request.promised
        member.table += self.blocks.allocate(request.promised)
        request.promised = 0

    def keep(self, request: Request, leading: int) -> None:
        """So many leading blocks of a prompt are there: the full ones can be found by their keys."""
        [member] = request.members
        for block, key in zip(member.table[:leading], member.keys, strict=False):
            self.blocks.register(block, key, request.owner)

    def claim(self, request: Request, blocks: int) -> None:
        """Changes what a request is expected to need beyond what it has."""
        self.claims += blocks - request.claim
        request.claim = blocks

    def give_back(self, request: Request) -> None:
        """Takes all blocks and any promise from a request."""
        for member in request.members:
            self.blocks.release(member.table)
            member.table = []
        self.promised -= request.promised
        request.promised = 0

    def check_invariants(self, requests: list[Request]) -> None:
        """Asserts that the counts are those of the requests, and that promises can be kept."""
        self.blocks.check_invariants()
        assert 0 <= self.promised <= self.blocks.num_available, "a promise could not be kept"
        assert self.promised == sum(request.promised for request in requests)
        assert self.claims == sum(request.claim for request in requests)
        assert all(request.claim >= 0 for request in requests)
