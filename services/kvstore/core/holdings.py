"""What the store holds: the DRAM tier over the durable backend, and who hears of changes.

Owns the union of the two tiers: a key is here when one of them has it, its coming and going is told exactly once. Must
not know of sessions, streams, threads or clocks.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.parts import PARTS
from services.kvstore.dram.tier import DramTier
from services.kvstore.ssd.backend import Backend

Changed = Callable[[Sequence[BlockKey], Sequence[BlockKey]], None]
"""Told keys that are here from now on, and keys that are not here any more."""


class Holdings:
    """Both tiers.

    Args:
        dram: the DRAM tier.
        backend: the durable tier with what it recovered; None for none.

    Attributes:
        on_change: who hears of keys coming and going.
        on_room: called when DRAM may have become free.
    """

    def __init__(self, dram: DramTier, backend: Backend | None) -> None:
        self.dram = dram
        self.backend = backend
        self.on_change: list[Changed] = []
        self.on_room: list[Callable[[], None]] = []
        self._damaged: set[BlockKey] = set()
        self.damaged_blocks = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.dram or self.durable(key)

    def __iter__(self) -> Iterator[BlockKey]:
        return itertools.chain.from_iterable(map(self.part, range(PARTS)))

    def part(self, number: int) -> list[BlockKey]:
        """Every key of one part, once: whoever lists all parts, one after the other, misses none that stays.

        A key is of one part only, in whichever tier it is. What moves between the tiers, or within one, so stays where
        it is looked for, while a walk over one tier and then the other could miss it.
        """
        found = self.dram.part(number)
        if self.backend is None:
            return list(found)
        return [*found, *itertools.filterfalse(found.__contains__, self.backend.part(number))]

    def durable(self, key: bytes) -> bool:
        """Whether the block survives a restart."""
        return self.backend is not None and key in self.backend

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        """The block's format; None when it is not here."""
        block = self.dram.get(key)
        if block is not None:
            return block.info.format
        return None if self.backend is None else self.backend.format_of(key)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a chain are here."""
        dram, backend = self.dram, self.backend
        for count, key in enumerate(keys):
            if key not in dram and (backend is None or key not in backend):
                return count
        return len(keys)

    def size_of(self, key: BlockKey) -> int | None:
        """The block's bytes; None when it is not here."""
        block_format = self.format_of(key)
        return None if block_format is None else block_format.layout.block_bytes

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of `chain`, head first, were used together."""
        self.dram.touch(chain)
        if self.backend is not None:
            self.backend.touch(chain)

    def reserve(self, nbytes: int, tenant: str) -> bool:
        """Sets DRAM aside, evicting what must go for it; False when there is too little that may go.

        Args:
            nbytes: how much.
            tenant: for whose blocks.
        """
        victims = self.dram.reserve(nbytes, tenant)
        if victims is None:
            return False
        self.gone(victims)
        return True

    def unreserve(self, nbytes: int, tenant: str) -> None:
        """Gives reserved DRAM back."""
        if nbytes:
            self.dram.unreserve(nbytes, tenant)
            self.room()

    def insert(self, blocks: Sequence[DramBlock]) -> list[DramBlock]:
        """Takes whole blocks into DRAM, in the place of reserved bytes, and announces those that were nowhere.

        Returns:
            Those that were taken: a block that came to DRAM in another way meanwhile is not taken twice.
        """
        taken: list[DramBlock] = []
        new: list[BlockKey] = []
        for block in blocks:
            if block.info.key in self.dram:
                self.dram.unreserve(block.info.nbytes, block.info.tenant)
                continue
            if not self.durable(block.info.key):
                new.append(block.info.key)
            self.dram.insert(block)
            taken.append(block)
        self._tell(new, ())
        return taken

    def let_go(self, blocks: Sequence[DramBlock]) -> None:
        """Ends one hold on each."""
        for block in blocks:
            self.dram.let_go(block)
            if block.info.key in self._damaged and not block.holds:
                self._drop_damaged(block)
        if blocks:
            self.room()

    def suspect(self, key: BlockKey) -> None:
        """A reader says that a block's bytes do not match their hashes: looks, and drops it from DRAM if they do not.

        A block that others hold is no source for new readers from now on, and is dropped with the last hold.
        """
        block = self.dram.get(key)
        if block is None or key in self._damaged or block.is_intact:
            return
        self.damaged_blocks += 1
        self._damaged.add(key)
        if not block.holds:
            self._drop_damaged(block)

    def is_damaged(self, key: BlockKey) -> bool:
        """Whether the block in DRAM is damaged and waits for its last hold to end."""
        return key in self._damaged

    def _drop_damaged(self, block: DramBlock) -> None:
        self._damaged.remove(block.info.key)
        self.dram.drop(block)
        self.gone([block.info.key])

    def gone(self, keys: Sequence[BlockKey]) -> None:
        """These have left a tier; announces those that are in no other."""
        self._tell((), [key for key in keys if key not in self])

    def room(self) -> None:
        """DRAM may have become free."""
        for listener in self.on_room:
            listener()

    def _tell(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        if stored or removed:
            for listener in self.on_change:
                listener(stored, removed)
