"""The eviction policies: LRU, LFU, LengthAware and S3-FIFO, which keep keys in queues, and all by name."""

import bisect
import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from moonpool.base.kv.blocks import BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.kv_aware import KVAware

SMALL_SHARE = 10  # S3-FIFO's small queue may be 1 / `SMALL_SHARE` of all keys
GHOSTS_PER_MAIN = 2  # keys remembered after they left the small queue, per key that fits the main queue
MOST_USES = 3  # that count

_Queue = collections.OrderedDict[BlockKey, None]
_Rank = tuple[int, int]  # (uses, -position)


class LRU(EvictionPolicy):
    """Least recently used first; among blocks used together a chain's tail leaves before the head.

    Blocks behind a missing block cannot be used, so the head counts as used last (as SGLang's radix cache and Mooncake
    evict).
    """

    def __init__(self) -> None:
        self.order: _Queue = collections.OrderedDict()

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self.order
        self.order[info.key] = None

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in reversed(chain):
            self.order.move_to_end(key)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        self.touched(chain)

    def removed(self, key: BlockKey) -> None:
        del self.order[key]

    def candidates(self) -> Iterator[BlockKey]:
        return iter(self.order)


class LFU(EvictionPolicy):
    """Least frequently used: evicts the block with the fewest uses, and among equals the one unused for longest.

    Keys lie in one queue per rank, so that a use costs two dictionary operations.
    """

    def __init__(self) -> None:
        self.ranks: dict[BlockKey, _Rank] = {}
        self.queues: dict[_Rank, _Queue] = {}
        self.order: list[_Rank] = []  # ranks that have a queue, ascending

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self.ranks
        self._enter(info.key, (1, -self._position(info)))

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            uses, back = rank = self.ranks[key]
            self._leave(key, rank)
            self._enter(key, (uses + 1, back))

    def removed(self, key: BlockKey) -> None:
        self._leave(key, self.ranks.pop(key))

    def candidates(self) -> Iterator[BlockKey]:
        for rank in self.order:
            yield from self.queues[rank]

    def _position(self, info: BlockInfo) -> int:
        """Break ties of blocks used equally often; the greatest leaves first."""
        return 0

    def _enter(self, key: BlockKey, rank: _Rank) -> None:
        self.ranks[key] = rank
        if rank not in self.queues:
            self.queues[rank] = collections.OrderedDict()
            bisect.insort(self.order, rank)
        self.queues[rank][key] = None

    def _leave(self, key: BlockKey, rank: _Rank) -> None:
        queue = self.queues[rank]
        del queue[key]
        if not queue:
            del self.queues[rank]
            del self.order[bisect.bisect_left(self.order, rank)]


class LengthAware(LFU):
    """Fewest uses first; among those the latest position in the chain; then the one unused for longest.

    This is the policy of the Mooncake paper (arXiv 2407.00079, cache pool analysis). A block's position is the parent's
    plus one, and 0 if the parent is unknown. Parent and child come one after the other, so the block seen last is
    remembered even after eviction.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[BlockKey, _Rank] = {}  # of the block seen last

    def _position(self, info: BlockInfo) -> int:
        rank = self.ranks.get(info.parent) or self._latest.get(info.parent)
        return 1 - rank[1] if rank is not None else 0

    def _enter(self, key: BlockKey, rank: _Rank) -> None:
        super()._enter(key, rank)
        self._latest = {key: rank}


class S3FIFO(EvictionPolicy):
    """S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23).

    New blocks queue in a small FIFO. A block that reaches the front unused leaves; a used block moves to the main
    queue, as does a block that is back soon after leaving. In the main queue every use is worth another round.
    """

    def __init__(self) -> None:
        self.small: _Queue = collections.OrderedDict()
        self.main: _Queue = collections.OrderedDict()
        self.ghosts: _Queue = collections.OrderedDict()
        self.uses: dict[BlockKey, int] = {}  # since entering the queue, at most `MOST_USES`

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self.uses
        queue = self.main if info.key in self.ghosts else self.small
        self.ghosts.pop(info.key, None)
        queue[info.key] = None
        self.uses[info.key] = 0

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            self.uses[key] = min(self.uses[key] + 1, MOST_USES)

    def removed(self, key: BlockKey) -> None:
        held = len(self.uses)
        del self.uses[key]
        if key in self.small:
            self.ghosts[key] = None
        del (self.small if key in self.small else self.main)[key]
        while len(self.ghosts) > GHOSTS_PER_MAIN * (held - held // SMALL_SHARE):
            self.ghosts.popitem(last=False)

    def candidates(self) -> Iterator[BlockKey]:
        """In the order in which they leave when no new ones come; used blocks at the fronts move on now."""
        self._settle()
        return self._walk()

    def _settle(self) -> None:
        while self.uses:
            queue = self.small if _takes_small(len(self.small), len(self.main)) else self.main
            key = next(iter(queue))
            uses = self.uses[key]
            if not uses:
                return
            del queue[key]
            self.main[key] = None
            self.uses[key] = 0 if queue is self.small else uses - 1

    def _walk(self) -> Iterator[BlockKey]:
        moved: dict[BlockKey, int] = {}  # uses of blocks that moved on
        behind: list[BlockKey] = []  # these, in the main queue behind the others
        small, main = iter(self.small), itertools.chain(self.main, behind)
        small_left, main_left = len(self.small), len(self.main)
        while small_left or main_left:
            from_small = _takes_small(small_left, main_left)
            key = next(small if from_small else main)
            uses = moved.get(key, self.uses[key])
            small_left -= from_small
            main_left += (uses > 0) - (not from_small)
            if not uses:
                yield key
                continue
            behind.append(key)
            moved[key] = 0 if from_small else uses - 1


def _takes_small(small: int, main: int) -> bool:
    return not main or small >= max(1, (small + main) // SMALL_SHARE)


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "length-aware": LengthAware,
    "s3-fifo": S3FIFO,
    "kv-aware": KVAware,
}
"""By the name that `--eviction` takes."""
