"""Our own policy: chains leave tail first, and the first tail to leave is the one least likely to be wanted again.

Owns the tree of the held blocks (a block's parent is the one before it in its chain), the classes into which blocks
fall, and the order of the tree's leaves. How likely blocks of a class come back is learnt in `returns`.
"""

import heapq
from collections.abc import Iterator, Sequence

from moonpool.kv.keys import BlockKey
from services.kvstore.blocks import NO_PARENT, BlockInfo
from services.kvstore.policies.returns import ReturnRates

MEMORY = 4
"""What was seen loses half its weight while as many blocks are referred to as are held, so many times."""
HORIZON = 16
"""A sampled key is followed until as many blocks were referred to as are held, so many times."""
POPULAR_USES = 4
"""A block used so often since it came is shared by many; what its latest chain was says little about it."""
MAX_GROWTH = 12
"""Classes by growth: 1, 2-3, 4-7, ... blocks; all beyond 2^11 are one."""

POPULAR, TAIL, FIRST_GROWTH = 0, 1, 2
KINDS = FIRST_GROWTH + 2 * MAX_GROWTH
_REFIT_PART, _REFIT_LEAST = 4, 1024


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

    def __init__(self, key: BlockKey, parent: "Node | None") -> None:
        self.key = key
        self.parent = parent
        self.children = 0
        self.held = False
        self.growth: Growth | None = None
        self.kind = POPULAR
        self.since = 0  # time of its last use
        self.uses = 0  # since it came
        self.queued = 0  # number of its entry among the leaves, 0 for none


_Entry = tuple[int, int, Node]  # (time of the last use, number, leaf)


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
        self._leaves: list[list[_Entry]] = [[] for _ in range(KINDS)]  # a heap per class, with entries out of date
        self._entries = 0  # in all heaps
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
        parent = node.parent
        self._now += 1
        node.held, node.since, node.uses = True, self._now, 0
        node.growth = self._growth_after(parent)
        node.growth.blocks += 1
        node.kind = node.growth.kind
        self._held += 1
        self._rates.used(node.key, node.kind, self._now)
        self._queue(node)

    def touched(self, chain: Sequence[BlockKey]) -> None:
        """They are as young as can be."""
        for key in chain:
            node = self._nodes[key]
            self._now += 1
            node.since = self._now
            node.uses += 1
            if node.uses >= POPULAR_USES:
                node.kind = POPULAR
            self._rates.used(key, node.kind, self._now)
            self._queue(node)
        self._learn()

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        """How much the chain has grown is known now, and what that says of all its blocks."""
        node = self._nodes[chain[-1]] if chain else None
        if node is None or node.growth is None:
            return
        kind = node.growth.kind
        if not node.children and not node.uses:
            self._classify(node, TAIL)
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
        node.held, node.queued, node.growth = False, 0, None
        self._held -= 1
        while node is not None and not node.children and not node.held:
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.children -= 1
                self._queue(node)

    # Who is next

    def candidates(self) -> Iterator[BlockKey]:
        """Leaves, the least worth first; a block follows when all behind it have gone."""
        frontier: list[tuple[float, int, int, Node, int]] = []  # worth, since, number, node, index in its heap or -1
        for kind in range(KINDS):
            self._look(frontier, kind, 0)
        children: dict[Node, int] = {}  # those that have not been named
        while frontier:
            _, _, number, node, index = heapq.heappop(frontier)
            if index >= 0:
                self._look(frontier, node.kind, 2 * index + 1)
                self._look(frontier, node.kind, 2 * index + 2)
    def __len__(self) -> int:
        return self._held
