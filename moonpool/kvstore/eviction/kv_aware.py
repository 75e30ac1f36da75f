"""Moonpool's own policy: chains leave tail first, and the tail least likely to be used again leaves first."""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence

from moonpool.base.kv.blocks import NO_PARENT, BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.reuse_stats import ReturnRates
from moonpool.kvstore.eviction.base import EvictionPolicy

MEMORY = 8  # weight halves after this many times as many references as blocks held
HORIZON = 16  # a sampled key is followed for this many times as many references as blocks are held
POPULAR_USES = 4  # a block used so often is shared by many requests; the latest chain tells little about it
MAX_GROWTH = 12  # classes by growth: 1, 2-3, 4-7, ... blocks; all from 2^11 on are one
REFIT_LEAST = 1024  # references between two estimates at least; half the number of held blocks if that is more

FRESH, POPULAR, FIRST_GROWTH = 0, 1, 2
KINDS = TAIL = FIRST_GROWTH + 2 * MAX_GROWTH
"""Classes; a growth's last block, until used, belongs to the class with a number higher by `TAIL`."""


@dataclasses.dataclass(slots=True)
class Growth:
    """The blocks that one request added to a chain; `continued`: older blocks precede them."""

    continued: bool
    blocks: int = 0

    @property
    def kind(self) -> int:
        """The class for the chain's blocks until another request continues the chain."""
        return FIRST_GROWTH + min(self.blocks.bit_length(), MAX_GROWTH) - 1 + MAX_GROWTH * self.continued


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A block in the tree. A node without a held block stays only for held descendants."""

    key: BlockKey
    parent: "Node | None" = None
    children: int = 0
    growth: Growth | None = None  # while the block is held
    kind: int = FRESH
    since: int = 0  # time of the last use
    uses: int = 0  # since arrival
    queued: int = 0  # number of the entry among the leaves, 0 for none

    @property
    def held(self) -> bool:
        return self.growth is not None


_Entry = tuple[int, int, Node]  # time of the last use, number, leaf
_Place = tuple[float, int, int, Node, int, int]
"""Worth, time of the last use, number, node; class and index of the entry in that class's heap, or -1 for none."""


class KVAware(EvictionPolicy):
    """Offers the chain tree's leaves, the least likely to be used again first.

    A block is useless without the blocks before, so only leaves may leave: a chain goes tail first. Leaves are ordered
    by how soon their class at their age is expected to be used again, estimated by `ReturnRates`. The class tells what
    the latest request on the block's chain did: by how many blocks the request made the chain longer, in powers of two
    (a question adds few, a document many), and whether the request was the first to continue the chain (a
    conversation's turn). Blocks that many requests share have a class of their own. A chain's last block has a separate
    class.
    """

    def __init__(self, refit_least: int = REFIT_LEAST) -> None:
        self.nodes: dict[BlockKey, Node] = {}  # every held block, and blocks not held that have held descendants
        self._refit_least = refit_least
        self.held = 0
        self.leaves: list[list[_Entry]] = [[] for _ in range(2 * KINDS)]  # a heap per class, with outdated entries
        self._number = 0  # of the newest entry
        self._now = 0
        self._fit_at = 0
        self._forget_at = 0
        self.rates = ReturnRates(KINDS)

    def added(self, info: BlockInfo) -> None:
        """A block belongs to the growth with which the block's parent came, unless the parent was used since."""
        node = self._at(info.key)
        assert not node.held
        if node.parent is None and info.parent != NO_PARENT:
            self._attach(node, self._at(info.parent))
        self._now += 1
        node.since, node.uses, node.kind = self._now, 0, FRESH
        node.growth = _growth_after(node.parent)
        node.growth.blocks += 1
        self.held += 1
        self.rates.used(node.key, FRESH, self._now)
        self._queue(node)

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """Where parents are not known, the head counts as the youngest."""
        self._now += len(chain)
        for key in reversed(chain):
            node = self.nodes[key]
            node.since = self._now
            node.uses += 1
            if node.uses >= POPULAR_USES:
                node.kind = POPULAR
            self.rates.used(key, node.kind, self._now)
            self._queue(node)
        self._learn()

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """Set the class for a chain's new blocks, once the chain's growth is known."""
        if not chain:
            return
        for key in reversed(chain):
            self.nodes[key].since = self._now
            self._queue(self.nodes[key])
        last = self.nodes[chain[-1]]
        growth = last.growth
        assert growth is not None
        kind = growth.kind if last.children or last.uses else growth.kind + TAIL
        for node in itertools.chain([last], _ancestors(last)):
            if node.uses >= POPULAR_USES:
                break
            if node.held and node.kind != kind:
                node.kind = kind
                self.rates.classify(node.key, kind)
                self._queue(node)
            kind = growth.kind
        self._learn()

    def removed(self, key: BlockKey) -> None:
        """Keep the block's place in the tree while blocks behind are held."""
        node = self.nodes[key]
        assert node.held
        node.growth, node.queued = None, 0
        self.held -= 1
        while not (node.children or node.held):
            del self.nodes[node.key]
            if node.parent is None:
                return
            node = node.parent
            node.children -= 1
            self._queue(node)

    def candidates(self) -> Iterator[BlockKey]:
        """Leaves, the least worth first; a block follows once all blocks behind the block have been named."""
        frontier: list[_Place] = []
        for kind, heap in enumerate(self.leaves):
            while heap and not is_current(heap[0]):
                heapq.heappop(heap)
            self._look(frontier, kind, 0)
        unnamed: dict[Node, int] = {}  # unnamed children, for parents with a named child
        numbers = itertools.count(-1, -1)
        while frontier:
            _, _, number, node, kind, index = heapq.heappop(frontier)
            if index >= 0:
                self._look(frontier, kind, 2 * index + 1)
                self._look(frontier, kind, 2 * index + 2)
                if node.queued != number:
                    continue
            yield node.key
            parent = _freed_by(node, unnamed)
            if parent is not None:
                worth = self.rates.worth(parent.kind, self._now - parent.since)
                heapq.heappush(frontier, (worth, parent.since, next(numbers), parent, parent.kind, -1))

    def _look(self, frontier: "list[_Place]", kind: int, index: int) -> None:
        heap = self.leaves[kind]
        if index < len(heap):
            since, number, node = heap[index]
            worth = self.rates.worth(kind, self._now - since)
            heapq.heappush(frontier, (worth, since, number, node, kind, index))

    def _at(self, key: BlockKey) -> Node:
        """The block's node; may be needed before the block comes, as a parent."""
        return self.nodes.get(key) or self.nodes.setdefault(key, Node(key))

    def _attach(self, node: Node, parent: Node) -> None:
        """Make `parent` the parent unless that makes a circle: a writer may name any parent."""
        if parent is node or (node.children and node in _ancestors(parent)):
            return
        node.parent = parent
        parent.children += 1
        parent.queued = 0

    def _queue(self, node: Node) -> None:
        """Queue a leaf in the leaf's class; an earlier entry of the leaf becomes invalid."""
        if node.children or not node.held:
            return
        self._number += 1
        node.queued = self._number
        heapq.heappush(self.leaves[node.kind], (node.since, self._number, node))

    def _learn(self) -> None:
        held = max(self.held, self._refit_least)
        if self._now >= self._forget_at:
            self._forget_at = self._now + MEMORY * held
            self.rates.forget(self._now, HORIZON * held)
        if self._now >= self._fit_at:
            self._fit_at = self._now + max(self.held // 2, self._refit_least)
            self.rates.fit(self._now)
            for heap in self.leaves:
                heap[:] = filter(is_current, heap)
                heapq.heapify(heap)


def is_current(entry: _Entry) -> bool:
    """Whether an entry is the leaf's last."""
    return entry[2].queued == entry[1]


def _growth_after(parent: Node | None) -> Growth:
    if parent is None or parent.growth is None:
        return Growth(continued=False)
    if not parent.uses:
        return parent.growth
    popular = parent.uses >= POPULAR_USES
    return Growth(continued=parent.uses == 1 or (parent.growth.continued and not popular))


def _ancestors(node: Node) -> Iterator[Node]:
    """The blocks before `node`, nearest first."""
    while node.parent is not None:
        node = node.parent
        yield node


def _freed_by(node: Node, unnamed: dict[Node, int]) -> Node | None:
    """The held block before `node` if all children have been named; None while there is none."""
    for parent in _ancestors(node):
        unnamed[parent] = unnamed.get(parent, parent.children) - 1
        if unnamed[parent]:
            return None
        if parent.held:
            return parent
    return None
