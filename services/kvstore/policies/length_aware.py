"""LengthAware, the policy of the Mooncake paper (arXiv 2407.00079, section on cache pool analysis)."""

import bisect
import collections
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey

_Rank = tuple[int, int]  # (uses, -position)


class LengthAware:
    """Least often used first; of those the one that stands latest in its chain; then the one unused for longest.

    A block's position is its parent's plus one; that of a block whose parent is not known is 0. Parent and child come
    one after the other, so the one that came or was used last is remembered even when it has left meanwhile.
    """

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, _Rank] = {}
        self._queues: dict[_Rank, collections.OrderedDict[BlockKey, None]] = {}
        self._order: list[_Rank] = []  # those that have a queue, ascending
        self._latest: tuple[BlockKey, int] | None = None  # key and position of the block seen last

    def added(self, info: BlockInfo) -> None:
        """That it came is its first use."""
        assert info.key not in self._ranks
        position = self._position_after(info.parent)
        self._latest = (info.key, position)
        self._enter(info.key, (1, -position))

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """One use more for each."""
        for key in chain:
            uses, back = rank = self._ranks[key]
            self._leave(key, rank)
            self._enter(key, (uses + 1, back))
            self._latest = (key, -back)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """No use."""

    def removed(self, key: BlockKey) -> None:
        """Forgets the key and how often it was used."""
        self._leave(key, self._ranks.pop(key))

    def candidates(self) -> Iterator[BlockKey]:
        """Fewest uses first, among them the latest position."""
        for rank in self._order:
            yield from self._queues[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def _position_after(self, parent: BlockKey) -> int:
        rank = self._ranks.get(parent)
        if rank is not None:
            return 1 - rank[1]
        if self._latest is not None and self._latest[0] == parent:
            return self._latest[1] + 1
        return 0

    def _enter(self, key: BlockKey, rank: _Rank) -> None:
        self._ranks[key] = rank
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = collections.OrderedDict()
            bisect.insort(self._order, rank)
        queue[key] = None

    def _leave(self, key: BlockKey, rank: _Rank) -> None:
        queue = self._queues[rank]
        del queue[key]
        if not queue:
            del self._queues[rank]
            del self._order[bisect.bisect_left(self._order, rank)]

    def check_invariants(self) -> None:
        """Every key is in the queue of its rank, and nowhere else."""
        assert self._order == sorted(self._queues)
        assert all(self._queues.values())
        assert self._ranks == {key: rank for rank, queue in self._queues.items() for key in queue}
