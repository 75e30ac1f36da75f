"""Policies that keep keys in queues: LRU, LFU, LengthAware and S3-FIFO."""

import bisect
import collections
import itertools
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.policies.base import EvictionPolicy

SMALL_SHARE = 10  # S3-FIFO's small queue may be 1 / `SMALL_SHARE` of all keys
GHOSTS_PER_MAIN = 2  # keys remembered after they left the small queue, per key that fits the main queue
MOST_USES = 3  # that count

_Queue = collections.OrderedDict[BlockKey, None]
_Rank = tuple[int, int]  # (uses, -position)


class LRU(EvictionPolicy):
    """Least recently used first; of blocks used together a chain's tail leaves before its head.

    Blocks behind a missing one cannot be used, so the head counts as used last (as SGLang's radix cache and Mooncake
    evict).
    """

    def __init__(self) -> None:
        self._order: _Queue = collections.OrderedDict()

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self._order
        self._order[info.key] = None

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in reversed(chain):
            self._order.move_to_end(key)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Puts blocks that came head first in their order of leaving."""
        self.touched(chain)

    def removed(self, key: BlockKey) -> None:
        del self._order[key]

    def candidates(self) -> Iterator[BlockKey]:
        return iter(self._order)


class LFU(EvictionPolicy):
    """Fewest uses since it came first, its arrival counted; of those the one unused for longest.

    Keys lie in one queue per rank, so that a use costs two dictionary operations.
    """

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, _Rank] = {}
        self._queues: dict[_Rank, _Queue] = {}
        self._order: list[_Rank] = []  # ranks that have a queue, ascending

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self._ranks
        self._enter(info.key, (1, -self._position(info)))

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            uses, back = rank = self._ranks[key]
            self._leave(key, rank)
            self._enter(key, (uses + 1, back))

    def removed(self, key: BlockKey) -> None:
        self._leave(key, self._ranks.pop(key))

    def candidates(self) -> Iterator[BlockKey]:
        for rank in self._order:
            yield from self._queues[rank]

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

    This is the policy of the Mooncake paper (arXiv 2407.00079, cache pool analysis). A block's position is its parent's
    plus one, and 0 when the parent is not known. Parent and child come one after the other, so the block seen last is
    remembered even when it has left meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[BlockKey, _Rank] = {}  # of the block seen last

    def _position(self, info: BlockInfo) -> int:
        rank = self._ranks.get(info.parent) or self._latest.get(info.parent)
        return 1 - rank[1] if rank is not None else 0

    def _enter(self, key: BlockKey, rank: _Rank) -> None:
        super()._enter(key, rank)
        self._latest = {key: rank}


class S3FIFO(EvictionPolicy):
    """S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23).

    New blocks queue in a small FIFO. A block that reaches its front unused leaves; one that was used moves to the main
    queue, as does one that is back soon after it left. In the main queue every use is worth another round. The sizes
    follow from the number of keys when room is made, that is, when the tier is full.
    """

    def __init__(self) -> None:
        self._small: _Queue = collections.OrderedDict()
        self._main: _Queue = collections.OrderedDict()
        self._ghosts: _Queue = collections.OrderedDict()
        self._uses: dict[BlockKey, int] = {}  # since it came to its queue, at most `MOST_USES`

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self._uses
        queue = self._main if info.key in self._ghosts else self._small
        self._ghosts.pop(info.key, None)
        queue[info.key] = None
        self._uses[info.key] = 0

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            self._uses[key] = min(self._uses[key] + 1, MOST_USES)

    def removed(self, key: BlockKey) -> None:
        """Remembers a key that leaves the small queue for a while."""
        held = len(self._uses)
        del self._uses[key]
        if key in self._small:
            self._ghosts[key] = None
        del (self._small if key in self._small else self._main)[key]
        while len(self._ghosts) > GHOSTS_PER_MAIN * (held - held // SMALL_SHARE):
            self._ghosts.popitem(last=False)

    def candidates(self) -> Iterator[BlockKey]:
        """The blocks in the order in which they leave when no new ones come.

        Used blocks at the fronts move on now, until an unused one is at the front. Until that one leaves, asking again
        changes nothing.
        """
        self._settle()
        return self._walk()

    def _settle(self) -> None:
        while self._uses:
            queue = self._small if _takes_small(len(self._small), len(self._main)) else self._main
            key = next(iter(queue))
            uses = self._uses[key]
            if not uses:
                return
            del queue[key]
            self._main[key] = None
            self._uses[key] = 0 if queue is self._small else uses - 1

    def _walk(self) -> Iterator[BlockKey]:
        moved: dict[BlockKey, int] = {}  # uses of blocks that moved on
        behind: list[BlockKey] = []  # these, in the main queue behind the others
        small, main = iter(self._small), itertools.chain(self._main, behind)
        small_left, main_left = len(self._small), len(self._main)
        while small_left or main_left:
            from_small = _takes_small(small_left, main_left)
            key = next(small if from_small else main)
            uses = moved.get(key, self._uses[key])
            small_left -= from_small
            main_left += (uses > 0) - (not from_small)
            if not uses:
                yield key
                continue
            behind.append(key)
            moved[key] = 0 if from_small else uses - 1

    def check_invariants(self) -> None:
        assert not self._small.keys() & self._main.keys()
        assert self._uses.keys() == self._small.keys() | self._main.keys()
        assert not self._ghosts.keys() & self._uses.keys()
        assert all(0 <= uses <= MOST_USES for uses in self._uses.values())


def _takes_small(small: int, main: int) -> bool:
    """Whether the next block leaves the small queue."""
    return not main or small >= max(1, (small + main) // SMALL_SHARE)
