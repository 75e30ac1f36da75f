"""The union of the two tiers: a key is here when one of them has it; its coming and going is told exactly once."""

import itertools
from collections.abc import Iterator, Sequence

from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from moonpool.kv.parts import PARTS
from services.kvstore.dram.tier import DramTier
from services.kvstore.ssd.tier import SsdTier


class StoreListener:
    """Hears what happens in a store; subclasses override what they want. No method may raise."""

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
        """`stored` are here from now on, `removed` are in no tier any more."""

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """A reader asks for a chain."""

    def room(self) -> None:
        """DRAM may have become free."""

    def work(self) -> None:
        """The SSD tier has something to do."""

    def sessions_changed(self) -> None:
        """A writing session or a lease has been opened or closed."""


class TieredStore:
    """The DRAM tier over the SSD tier.

    Args:
        dram: the DRAM tier.
        ssd: the SSD tier with what it recovered; None for none.
        listener: is told of changes.

    Attributes:
        damaged_blocks: blocks whose bytes in DRAM were found not to match their hashes.
    """

    def __init__(self, dram: DramTier, ssd: SsdTier | None, listener: StoreListener) -> None:
        self.dram = dram
        self.ssd = ssd
        self.listener = listener
        self._damaged: set[BlockKey] = set()
        self.damaged_blocks = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.dram or self.durable(key)

    def __iter__(self) -> Iterator[BlockKey]:
        return itertools.chain.from_iterable(map(self.part, range(PARTS)))

    def part(self, number: int) -> list[BlockKey]:
        """Every key of one part, once. Listing all parts, one after the other, misses no key that stays.

        A key belongs to one part only, in either tier, so that a block moving between the tiers is still found. A walk
        over one tier and then the other could miss it.
        """
        found = self.dram.part(number)
        if self.ssd is None:
            return list(found)
        return [*found, *itertools.filterfalse(found.__contains__, self.ssd.part(number))]

    def durable(self, key: bytes) -> bool:
        """Whether the block survives a restart."""
        return self.ssd is not None and key in self.ssd

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        """The block's format; None when it is not here."""
        block = self.dram.get(key)
        if block is not None:
            return block.info.format
        return None if self.ssd is None else self.ssd.format_of(key)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a chain are here."""
        dram, ssd = self.dram, self.ssd
        for count, key in enumerate(keys):
            if key not in dram and (ssd is None or key not in ssd):
                return count
        return len(keys)

    def size_of(self, key: BlockKey) -> int | None:
        """The block's bytes; None when it is not here."""
        block_format = self.format_of(key)
        return None if block_format is None else block_format.layout.block_bytes

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Blocks of `chain`, head first, were used together."""
        self.dram.touch(chain)
        if self.ssd is not None:
            self.ssd.touch(chain)

    def reserve(self, nbytes: int, tenant: str) -> bool:
        """Sets DRAM aside for blocks of a tenant, evicting others; False when too little may go."""
        victims = self.dram.reserve(nbytes, tenant)
        if victims is None:
            return False
        self.removed(victims)
        return True

    def unreserve(self, nbytes: int, tenant: str) -> None:
        """Gives reserved DRAM back."""
        if nbytes:
            self.dram.unreserve(nbytes, tenant)
            self.listener.room()

    def insert(self, blocks: Sequence[DramBlock]) -> list[DramBlock]:
        """Takes whole blocks into DRAM, in the place of reserved bytes, and announces the new ones.

        Returns:
            Those that were taken. A block that came to DRAM in another way meanwhile is not taken twice.
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
        if new:
            self.listener.changed(new, ())
        return taken

    def release(self, blocks: Sequence[DramBlock]) -> None:
        """Ends one hold on each."""
        for block in blocks:
            self.dram.release(block)
            if block.info.key in self._damaged and not block.holds:
                self._drop_damaged(block)
        if blocks:
            self.listener.room()

    def suspect(self, key: BlockKey) -> None:
        """Checks a block of which a reader says that its bytes do not match their hashes; drops it from DRAM if so.

        A damaged block that is held is not leased any more, and is dropped with its last hold.
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
        self.removed([block.info.key])

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """These have left a tier; announces those that are in no other."""
        lost = [key for key in keys if key not in self]
        if lost:
            self.listener.changed((), lost)
