"""Least frequently used."""

import bisect
import collections
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockInfo
from moonpool.kv.keys import BlockKey


class LFU:
    """Least often used first since it came; of those the one whose last use is longest ago.

    Keys lie in one queue per number of uses, so that a use costs two dictionary operations.
    """

    def __init__(self) -> None:
        self._uses: dict[BlockKey, int] = {}
        self._queues: dict[int, collections.OrderedDict[BlockKey, None]] = {}
        self._counts: list[int] = []  # numbers of uses that have a queue, ascending

    def added(self, info: BlockInfo) -> None:
        """That it came is its first use."""
        assert info.key not in self._uses
        self._enter(info.key, 1)

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """One use more for each."""
        for key in chain:
            uses = self._uses[key]
            self._leave(key, uses)
            self._enter(key, uses + 1)

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """No use."""

    def removed(self, key: BlockKey) -> None:
        """Forgets the key and how often it was used."""
        self._leave(key, self._uses.pop(key))

    def candidates(self) -> Iterator[BlockKey]:
        """Fewest uses first."""
        for count in self._counts:
            yield from self._queues[count]

    def __len__(self) -> int:
        return len(self._uses)

    def _enter(self, key: BlockKey, uses: int) -> None:
        self._uses[key] = uses
        queue = self._queues.get(uses)
        if queue is None:
            queue = self._queues[uses] = collections.OrderedDict()
            bisect.insort(self._counts, uses)
        queue[key] = None

    def _leave(self, key: BlockKey, uses: int) -> None:
        queue = self._queues[uses]
        del queue[key]
        if not queue:
            del self._queues[uses]
            del self._counts[bisect.bisect_left(self._counts, uses)]

    def check_invariants(self) -> None:
        """Every key is in the queue of its number of uses, and nowhere else."""
        assert self._counts == sorted(self._queues)
        assert all(self._queues.values())
        assert self._uses == {key: uses for uses, queue in self._queues.items() for key in queue}
