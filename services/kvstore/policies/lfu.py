"""Least frequently used, and LengthAware, the policy of the Mooncake paper (arXiv 2407.00079, cache pool analysis)."""

import bisect
import collections
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey

_Rank = tuple[int, int]  # (uses, -position)


class LFU:
    """Fewest uses since it came first, its arrival counted; of those the one unused for longest.

    Keys lie in one queue per rank, so that a use costs two dictionary operations.
    """

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, _Rank] = {}
        self._queues: dict[_Rank, collections.OrderedDict[BlockKey, None]] = {}
        self._order: list[_Rank] = []  # ranks that have a queue, ascending

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self._ranks
        self._enter(info.key, (1, -self._position(info)))

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            uses, back = rank = self._ranks[key]
            self._leave(key, rank)
            self._enter(key, (uses + 1, back))

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Not a use."""

    def removed(self, key: BlockKey) -> None:
        self._leave(key, self._ranks.pop(key))

    def candidates(self) -> Iterator[BlockKey]:
        for rank in self._order:
            yield from self._queues[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def _position(self, info: BlockInfo) -> int:
        """Breaks ties of blocks used equally often; the greatest leaves first."""
        return 0

    def _enter(self, key: BlockKey, rank: _Rank) -> None:
        self._ranks[key] = rank
        if rank not in self._queues:
            self._queues[rank] = collections.OrderedDict()
            bisect.insort(self._order, rank)
        self._queues[rank][key] = None

    def _leave(self, key: BlockKey, rank: _Rank) -> None:
        queue = self._queues[rank]
        del queue[key]
        if not queue:
            del self._queues[rank]
            del self._order[bisect.bisect_left(self._order, rank)]

    def check_invariants(self) -> None:
        assert self._order == sorted(self._queues)
        assert all(self._queues.values())
        assert self._ranks == {key: rank for rank, queue in self._queues.items() for key in queue}


class LengthAware(LFU):
    """Fewest uses first; of those the latest position in its chain; then the one unused for longest.

    A block's position is its parent's plus one, and 0 when the parent is not known. Parent and child come one after the
    other, so the block seen last is remembered even when it has left meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: tuple[BlockKey, int] | None = None  # key and position of the block seen last

    def _position(self, info: BlockInfo) -> int:
        rank = self._ranks.get(info.parent)
        if rank is not None:
            return 1 - rank[1]
        if self._latest is not None and self._latest[0] == info.parent:
            return self._latest[1] + 1
        return 0

    def _enter(self, key: BlockKey, rank: _Rank) -> None:
        super()._enter(key, rank)
        self._latest = (key, -rank[1])
