"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23)."""

import collections
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey

_SMALL_SHARE = 10
"""The small queue may be 1 / `_SMALL_SHARE` of all keys."""
_GHOSTS_PER_MAIN = 2
"""Keys remembered after they left the small queue, per key that fits the main queue."""
_MOST_USES = 3

_Queue = collections.OrderedDict[BlockKey, None]


class S3FIFO:
    """New blocks queue in a small FIFO; those used there, or back soon after they left it, move to the main FIFO.

    A block that reaches the front of the small queue unused leaves; one that was used moves to the main queue, where
    every use is worth another round. The sizes follow from the number of keys when room is made, that is, when the tier
    is full.
    """

    def __init__(self) -> None:
        self._small: _Queue = collections.OrderedDict()
        self._main: _Queue = collections.OrderedDict()
        self._ghosts: _Queue = collections.OrderedDict()
        self._uses: dict[BlockKey, int] = {}  # since it came to its queue, at most `_MOST_USES`

    def added(self, info: BlockInfo) -> None:
        assert info.key not in self._uses
        if info.key in self._ghosts:
            del self._ghosts[info.key]
            self._main[info.key] = None
        else:
            self._small[info.key] = None
        self._uses[info.key] = 0

    def touched(self, chain: Sequence[BlockKey]) -> None:
        for key in chain:
            self._uses[key] = min(self._uses[key] + 1, _MOST_USES)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Not a use."""

    def removed(self, key: BlockKey) -> None:
        """Remembers a key that leaves the small queue for a while."""
        if key in self._main:
            del self._main[key]
        else:
            del self._small[key]
            self._ghosts[key] = None
        del self._uses[key]
        held = len(self._uses) + 1
        while len(self._ghosts) > _GHOSTS_PER_MAIN * (held - held // _SMALL_SHARE):
            self._ghosts.popitem(last=False)

    def candidates(self) -> Iterator[BlockKey]:
        """The blocks in the order in which they leave when no new ones come.

        Used blocks at the fronts move on now, until an unused one is at the front. Until that one leaves, asking again
        changes nothing.
        """
        self._settle()
        return self._walk()

    def __len__(self) -> int:
        return len(self._uses)

    def _settle(self) -> None:
        while self._uses:
            from_small = _takes_small(len(self._small), len(self._main))
            key = next(iter(self._small if from_small else self._main))
            uses = self._uses[key]
            if not uses:
                return
            if from_small:
                del self._small[key]
            self._main[key] = None
            self._main.move_to_end(key)
            self._uses[key] = 0 if from_small else uses - 1

    def _walk(self) -> Iterator[BlockKey]:
        small, main = iter(self._small), iter(self._main)
        small_left, main_left = len(self._small), len(self._main)
        again: collections.deque[tuple[BlockKey, int]] = collections.deque()  # requeued behind the main queue
        while small_left or main_left:
            from_small = _takes_small(small_left, main_left)
            key = next(small if from_small else main, None)
            if key is None:
                key, uses = again.popleft()
            else:
                uses = self._uses[key]
            if from_small:
                small_left -= 1
                main_left += 1 if uses else 0
            elif not uses:
                main_left -= 1
            if uses:
                again.append((key, 0 if from_small else uses - 1))
            else:
                yield key

    def check_invariants(self) -> None:
        assert not self._small.keys() & self._main.keys()
        assert self._uses.keys() == self._small.keys() | self._main.keys()
        assert not self._ghosts.keys() & self._uses.keys()
        assert all(0 <= uses <= _MOST_USES for uses in self._uses.values())


def _takes_small(small: int, main: int) -> bool:
    """Whether the next block leaves the small queue."""
    return not main or small >= max(1, (small + main) // _SMALL_SHARE)
