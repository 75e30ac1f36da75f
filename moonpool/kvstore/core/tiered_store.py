"""The two tiers as one store. A key is here if either tier has the key."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from moonpool.base.kv.blocks import BlockFormat, DramBlock
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.kvstore.dram.tier import DramTier
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.tier import SsdTier


class StoreListener:
    """Is told what happens in a store; subclasses override what they need. No method may raise."""

    def changed(self, stored: Sequence[BlockKey], removed: Sequence[BlockKey], cooled: Sequence[BlockKey] = ()) -> None:
        """`stored` are in DRAM from now on, `removed` are in no tier any more, `cooled` on SSD only."""

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """A reader asks for a chain."""

    def room(self) -> None:
        """DRAM may have become free."""

    def work(self) -> None:
        """The SSD tier has something to do."""

    def transfers_changed(self) -> None:
        """A writing transfer or a lease has been opened or closed."""


class TieredStore:
    """The DRAM tier over the SSD tier, if there is one."""

    def __init__(self, dram: DramTier, ssd: SsdTier | None, listener: StoreListener) -> None:
        self.dram = dram
        self.ssd = ssd
        self.catalogue = Catalogue() if ssd is None else ssd.catalogue
        self.durable: Callable[[bytes], bool] = self.catalogue.__contains__
        self.listener = listener

    def __contains__(self, key: bytes) -> bool:
        return key in self.dram or self.durable(key)

    def part(self, number: int) -> list[BlockKey]:
        """Every key in one part, once. A walk over all parts misses no key that stays: no key changes parts."""
        found = self.dram.parts[number]
        return [*found, *itertools.filterfalse(found.__contains__, self.catalogue.parts[number])]

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        block = self.dram.get(key)
        if block is not None:
            return block.info.format
        kind = self.catalogue.kind_of(key)
        return None if kind is None else kind.format

    def cold(self, keys: Iterable[BlockKey]) -> Iterable[BlockKey]:
        """Those of `keys` that are not in DRAM."""
        return itertools.filterfalse(self.dram.__contains__, keys)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a chain are here."""
        dram, ssd = self.dram, self.catalogue
        return next((count for count, key in enumerate(keys) if key not in dram and key not in ssd), len(keys))

    def touch(self, chain: Sequence[BlockKey]) -> None:
        self.dram.touch(chain)
        self.catalogue.touch(chain)

    def reserve(self, nbytes: Mapping[str, int]) -> bool:
        """Reserve DRAM by tenant, evicting others; none, and False, if too little can be evicted."""
        taken: dict[str, int] = {}
        for tenant, count in nbytes.items():
            victims = self.dram.reserve(count, tenant)
            if victims is None:
                self.unreserve(taken)
                return False
            self.removed(victims)
            taken[tenant] = count
        return True

    def unreserve(self, nbytes: Mapping[str, int]) -> None:
        for tenant, count in nbytes.items():
            self.dram.unreserve(count, tenant)
        if nbytes:
            self.listener.room()

    def insert(self, blocks: Sequence[DramBlock]) -> list[DramBlock]:
        """Take whole blocks into DRAM, in the place of reserved bytes, and announce them.

        Returns those that were taken: all but blocks that have come to DRAM in another way meanwhile.
        """
        taken: list[DramBlock] = []
        for block in blocks:
            if block.info.key in self.dram:
                self.dram.unreserve(block.info.nbytes, block.info.account)
            else:
                taken.append(block)
        self.dram.insert(taken)
        if taken:
            self.listener.changed([block.info.key for block in taken], ())
        return taken

    def release(self, blocks: Sequence[DramBlock]) -> None:
        for block in blocks:
            self.dram.release(block)
        if blocks:
            self.listener.room()

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """Announce those of `keys`, which have left a tier, that are not in DRAM."""
        away = list(self.cold(keys))
        if away:
            gone = [key for key in away if not self.durable(key)]
            self.listener.changed((), gone, [key for key in away if self.durable(key)])


def find_blocks(tiers: TieredStore, keys: Sequence[BlockKey], namespace: bytes) -> tuple[list[int], list[KVLayout]]:
    """Which blocks in a namespace are here, each separately.

    Returns for each key 0, or the number of the key's layout from 1; and the layouts.
    """
    formats = map(tiers.format_of, keys)
    known = [there.layout if there is not None and there.namespace == namespace else None for there in formats]
    numbers = {layout: number for number, layout in enumerate(dict.fromkeys(filter(None, known)), 1)}
    return [0 if layout is None else numbers[layout] for layout in known], list(numbers)
