"""Blocks of an engine's pool that other instances read, the same for prefill and decode. Plain values, no I/O."""

from collections.abc import Iterator, Sequence

from moonpool.core.digest import digest_of
from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.sched.block_manager import BlockManager

SHARE = 4
"""One block of so many may be lent at once, to however many: reading takes no more from those who compute here."""


@frozen
class LendBlocks:
    """Another instance wants to read blocks. Answered by `Lent`; they are held until `TakeBack`."""

    number: int
    """Never used twice."""
    keys: tuple[BlockKey, ...]


@frozen
class TakeBack:
    """Nobody reads what was lent any more. Without effect where nothing was."""

    number: int
    damaged: tuple[BlockKey, ...] = ()
    """Of blocks whose bytes do not match their hashes: nobody finds them any more."""


@frozen
class Lent:
    """Blocks that may be read."""

    number: int
    blocks: tuple[int, ...]
    """Of the leading keys that are here, as far as they can be spared."""


class Lending:
    """What is lent of one pool.

    Blocks that have a key are full and do not change, so they are lent by a reference more. Nothing else waits for a
    reader: what is lent and was cached is missing to others for as long as the read takes, so there is a limit.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._lent: dict[int, tuple[int, ...]] = {}
        self._loans: dict[int, int] = {}  # of each block, how many
        self._most = max(1, manager.num_blocks // SHARE)

    def __iter__(self) -> Iterator[int]:
        """All blocks that are lent; one that is lent twice comes twice."""
        return (block for blocks in self._lent.values() for block in blocks)

    def handle(self, event: LendBlocks | TakeBack, spare: int) -> list[Lent]:
        """Lends, or takes back; `spare` = blocks that may be taken from those that are free or cached."""
        if isinstance(event, LendBlocks):
            return [self._lend(event, spare)]
        self._take_back(self._lent.pop(event.number, ()))
        self._manager.forget(event.damaged)
        return []

    def _take_back(self, blocks: Sequence[int]) -> None:
        self._manager.release(blocks)
        for block in blocks:
            self._loans[block] -= 1
            if not self._loans[block]:
                del self._loans[block]

    def _lend(self, event: LendBlocks, spare: int) -> Lent:
        blocks = []
        left = self._most - len(self._loans)
        for block in self._manager.match(event.keys):
            left -= block not in self._loans
            spare -= self._manager.is_cached(block)
            if min(left, spare) < 0:
                break
            blocks.append(block)
        if blocks:
            self._manager.acquire(blocks)
            for block in blocks:
                self._loans[block] = self._loans.get(block, 0) + 1
            self._lent[event.number] = tuple(blocks)
        return Lent(event.number, tuple(blocks))

    def digest(self) -> bytes:
        """Hash of what is lent."""
        return digest_of(self._lent)
