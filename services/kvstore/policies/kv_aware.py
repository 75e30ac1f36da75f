"""Our own policy: chains leave tail first, and the first tail to leave is the one least likely to be wanted again.

Owns the tree of the held blocks (a block's parent is the one before it in its chain), the classes into which blocks
fall, and the order of the tree's leaves. How likely blocks of a class come back is learnt in `returns`.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import NO_PARENT, BlockInfo
from moonpool.kv.keys import BlockKey
from services.kvstore.policies.returns import ReturnRates

MEMORY = 8
"""What was seen loses half its weight while as many blocks are referred to as are held, so many times."""
HORIZON = 16
"""A sampled key is followed until as many blocks were referred to as are held, so many times."""
POPULAR_USES = 4
"""A block used so often since it came is shared by many; what its latest chain was says little about it."""
MAX_GROWTH = 12
"""Classes by growth: 1, 2-3, 4-7, ... blocks; all beyond 2^11 are one."""

FRESH, POPULAR, FIRST_GROWTH = 0, 1, 2
KINDS = TAIL = FIRST_GROWTH + 2 * MAX_GROWTH
"""Classes; a growth's last block has a class of its own, so much higher than the others'."""
_REFIT_PART, _REFIT_LEAST = 2, 1024
_SPARE_ENTRIES = 64


class Growth:
    """Blocks that came in one go: what one request added to its chain.

    Attributes:
        continued: the chain had been there and was continued here for the first time.
        blocks: how many came.
    """

    __slots__ = ("blocks", "continued")

    def __init__(self, continued: bool) -> None:
        self.continued = continued
        self.blocks = 0

    @property
    def kind(self) -> int:
        """The class of the chain's blocks until somebody continues it."""
        return FIRST_GROWTH + min(self.blocks.bit_length(), MAX_GROWTH) - 1 + MAX_GROWTH * self.continued


class Node:
    """A block in the tree; one that is not held is there for its held descendants only."""

    __slots__ = ("children", "growth", "held", "key", "kind", "parent", "queued", "since", "uses")

    def __init__(self, key: BlockKey) -> None:
        self.key = key
        self.parent: Node | None = None
        self.children = 0
        self.held = False
        self.growth: Growth | None = None
        self.kind = FRESH
        self.since = 0  # time of its last use
        self.uses = 0  # since it came
        self.queued = 0  # number of its entry among the leaves, 0 for none


_Entry = tuple[int, int, Node]
"""Time of the last use, number, leaf."""
_Place = tuple[float, int, int, Node, int, int]
"""Worth, time of the last use, number, node; class and index of its entry in that class's heap, or -1 for none."""


class KVAware:
    """Order by what KV is: a block is worth nothing without those before it, and a conversation is not a document.

    Only leaves may leave, so a chain goes tail first and a block never before one that needs it. Leaves are ordered by
    how soon their class at their age is expected to be used again, as `ReturnRates` has learnt it. A block's class is
    what the latest request on its chain did:

    - by how much it made the chain longer, in powers of two: a question makes it a little longer, a document a lot;
    - whether it was the first to continue a chain that was there before (a turn of a conversation);
    - apart from these the chain's very last block, and blocks that many requests share.

    Until something is learnt, and wherever there is nothing to learn, that is the order of LRU.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._held = 0
        self._leaves: list[list[_Entry]] = [[] for _ in range(2 * KINDS)]  # a heap per class, with entries out of date
        self._entries = 0  # in all heaps
        self._queued = 0  # leaves
        self._number = 0
        self._now = 0
        self._fit_at = 0
        self._forget_at = 0
        self._rates = ReturnRates(KINDS)

    # What happens

    def added(self, info: BlockInfo) -> None:
        """A block came. It belongs to the growth its parent came with, unless that was used since."""
        node = self._node(info)
        assert not node.held
        self._now += 1
        node.held, node.since, node.uses = True, self._now, 0
        node.growth = _growth_after(node.parent)
        node.growth.blocks += 1
        node.kind = FRESH
        self._held += 1
        self._rates.used(node.key, node.kind, self._now)
        self._queue(node)

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """They are as young as can be; where parents are not known, the head counts as the youngest."""
        self._now += len(chain)
        for key in reversed(chain):
            node = self._nodes[key]
            node.since = self._now
            node.uses += 1
            if node.uses >= POPULAR_USES:
                node.kind = POPULAR
            self._rates.used(key, node.kind, self._now)
            self._queue(node)
        self._learn()

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """How much the chain has grown is known now, and what that says of all its blocks."""
        for key in reversed(chain):
            self._nodes[key].since = self._now
            self._queue(self._nodes[key])
        node: Node | None = self._nodes[chain[-1]] if chain else None
        if node is None or node.growth is None:
            return
        kind = node.growth.kind
        if not node.children and not node.uses:
            self._classify(node, kind + TAIL)
            node = node.parent
        while node is not None and node.uses < POPULAR_USES:
            self._classify(node, kind)
            node = node.parent
        self._learn()

    def removed(self, key: BlockKey) -> None:
        """Forgets the block, but not its place while blocks behind it are held."""
        node: Node | None = self._nodes[key]
        assert node is not None
        assert node.held
        self._unqueue(node)
        node.held, node.growth = False, None
        self._held -= 1
        while node is not None and not node.children and not node.held:
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.children -= 1
                self._queue(node)
        self._tidy()

    # Who is next

    def candidates(self) -> Iterator[BlockKey]:
        """Leaves, the least worth first; a block follows once all behind it have been named."""
        frontier: list[_Place] = []
        for kind, heap in enumerate(self._leaves):
            while heap and heap[0][2].queued != heap[0][1]:
                heapq.heappop(heap)
                self._entries -= 1
            self._look(frontier, kind, 0)
        unnamed: dict[Node, int] = {}  # children that were not named, of the parents of those that were
        numbers = itertools.count(-1, -1)
        while frontier:
            _, _, number, node, kind, index = heapq.heappop(frontier)
            if index >= 0:
                self._look(frontier, kind, 2 * index + 1)
                self._look(frontier, kind, 2 * index + 2)
                if node.queued != number:
                    continue
            yield node.key
            parent = node.parent
            while parent is not None:
                unnamed[parent] = unnamed.get(parent, parent.children) - 1
                if unnamed[parent]:
                    break
                if parent.held:
                    worth = self._rates.worth(parent.kind, self._now - parent.since)
                    heapq.heappush(frontier, (worth, parent.since, next(numbers), parent, parent.kind, -1))
                    break
                parent = parent.parent

    def _look(self, frontier: "list[_Place]", kind: int, index: int) -> None:
        """Puts an entry of a class's heap among those of which the least is next."""
        heap = self._leaves[kind]
        if index < len(heap):
            since, number, node = heap[index]
            worth = self._rates.worth(kind, self._now - since)
            heapq.heappush(frontier, (worth, since, number, node, kind, index))

    def __len__(self) -> int:
        return self._held

    # Parts

    def _node(self, info: BlockInfo) -> Node:
        """The block's place in the tree, and its parent's, which may come later."""
        node = self._nodes.get(info.key)
        if node is None:
            node = self._nodes[info.key] = Node(info.key)
        if node.parent is None and info.parent != NO_PARENT:
            parent = self._nodes.get(info.parent)
            if parent is None:
                parent = self._nodes[info.parent] = Node(info.parent)
            if not _descends(parent, node):  # writers' word is not checked elsewhere
                node.parent = parent
                parent.children += 1
                self._unqueue(parent)
        return node

    def _classify(self, node: Node, kind: int) -> None:
        if node.held and node.kind != kind:
            node.kind = kind
            self._rates.classify(node.key, kind)
            self._queue(node)

    def _queue(self, node: Node) -> None:
        """Gives a leaf its place among the leaves of its class; what is no leaf has none."""
        if node.children or not node.held:
            return
        self._unqueue(node)
        self._queued += 1
        self._number += 1
        node.queued = self._number
        heapq.heappush(self._leaves[node.kind], (node.since, self._number, node))
        self._entries += 1
        self._tidy()

    def _tidy(self) -> None:
        """Drops entries out of date when they are the most."""
        if self._entries > 2 * self._queued + _SPARE_ENTRIES:
            self._leaves = [[entry for entry in heap if entry[2].queued == entry[1]] for heap in self._leaves]
            for heap in self._leaves:
                heapq.heapify(heap)
            self._entries = sum(map(len, self._leaves))

    def _unqueue(self, node: Node) -> None:
        """Its entry, if it has one, is out of date."""
        self._queued -= node.queued > 0
        node.queued = 0

    def _learn(self) -> None:
        if self._now >= self._forget_at:
            self._forget_at = self._now + MEMORY * max(self._held, _REFIT_LEAST)
            self._rates.forget(self._now, HORIZON * max(self._held, _REFIT_LEAST))
        if self._now >= self._fit_at:
            self._fit_at = self._now + max(self._held // _REFIT_PART, _REFIT_LEAST)
            self._rates.fit(self._now)

    def check_invariants(self) -> None:
        """The tree is one, all leaves are queued where their class says, and nothing is kept without need."""
        children: dict[Node, int] = {}
        for key, node in self._nodes.items():
            assert node.key == key
            assert node.held or node.children
            if node.parent is not None:
                assert self._nodes[node.parent.key] is node.parent
                children[node.parent] = children.get(node.parent, 0) + 1
        assert all(node.children == children.get(node, 0) for node in self._nodes.values())
        nodes = [node for node in self._nodes.values() if node.held]
        assert len(nodes) == self._held
        assert all((node.growth is not None) == node.held for node in self._nodes.values())
        queued = {node: kind for kind, heap in enumerate(self._leaves) for _, n, node in heap if n == node.queued}
        assert queued == {node: node.kind for node in nodes if not node.children}
        assert all(node.queued == 0 for node in self._nodes.values() if node not in queued)
        assert len(queued) == self._queued
        assert self._entries == sum(map(len, self._leaves)) <= 2 * self._queued + _SPARE_ENTRIES
        self._rates.check_invariants()


def _growth_after(parent: Node | None) -> Growth:
    """What a block belongs to that comes behind `parent`."""
    if parent is None or parent.growth is None:
        return Growth(continued=False)
    if not parent.uses:
        return parent.growth
    popular = parent.uses >= POPULAR_USES
    return Growth(continued=parent.uses == 1 or (parent.growth.continued and not popular))


def _descends(node: Node, ancestor: Node) -> bool:
    if not ancestor.children:
        return node is ancestor
    place: Node | None = node
    while place is not None and place is not ancestor:
        place = place.parent
    return place is not None
