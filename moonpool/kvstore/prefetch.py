"""Brings sessions' blocks from the SSD tier into DRAM before they are asked for."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from moonpool.base.errors import Overloaded
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.operations import WARM_PORTION_BLOCKS, StoreOperations

log = get_logger(__name__)
PREFETCH_BYTES_PER_S = 1 << 30
"""Bytes that are read into DRAM in a second, on average, one session after the other (ADR 67)."""
MAX_WAITING = 256
"""Sessions whose blocks wait to be read; further ones are passed over."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """Blocks of a session, head first, and what was known of the session when they were ordered."""

    hint: SessionHint
    keys: Sequence[BlockKey]
    told_at: float


@dataclasses.dataclass(eq=False, slots=True)
class Prefetcher:
    """Reads one session's blocks after the other, in the order in which they were ordered.

    Attributes:
        operations: the store's.
        bytes_per_s: bytes read in a second, on average.
        sleep: waits so many seconds.
        blocks: brought into DRAM.
        cancelled: sessions that came, ended, or were told of anew before their last block was read.
    """

    operations: StoreOperations
    bytes_per_s: int = PREFETCH_BYTES_PER_S
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    blocks: int = 0
    cancelled: int = 0
    _waiting: dict[bytes, _Wanted] = dataclasses.field(default_factory=dict)
    _ordered: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        """Sessions whose blocks wait or are read."""
        return len(self._waiting)

    def told(self, hint: SessionHint, keys: Sequence[BlockKey]) -> None:
        """The conductor says what is known of a session, and which blocks are wanted; none cancels earlier ones."""
        self.operations.store.tiers.dram.policy.hint(hint)
        self.cancelled += self._waiting.pop(hint.session, None) is not None
        if keys and len(self._waiting) < MAX_WAITING:
            self._waiting[hint.session] = _Wanted(hint, keys, self.operations.clock())
            self._ordered.set()

    async def run(self) -> None:
        """Read what is ordered; never returns."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            await self.fetch()

    async def fetch(self) -> None:
        """Read what is ordered until nothing waits."""
        while self._waiting:
            await self._fetch_one(next(iter(self._waiting.values())))

    async def _fetch_one(self, wanted: _Wanted) -> None:
        """Read the blocks, head first, until they are there, cannot be read, or are not wanted any more."""
        hint, dram = wanted.hint, self.operations.store.tiers.dram
        for start in range(0, len(wanted.keys), WARM_PORTION_BLOCKS):
            portion = wanted.keys[start : start + WARM_PORTION_BLOCKS]
            cold = [key for key in portion if key not in dram]
            if not cold:
                continue
            try:
                nbytes = await self.operations.promote(portion)
            except Overloaded as error:
                log.debug("blocks are not prefetched", error=str(error))
                break
            came = sum(key in dram for key in cold)
            self.blocks += came
            await self.sleep(nbytes / self.bytes_per_s)
            if came < len(cold) or self._waiting.get(hint.session) is not wanted:
                break
        if self._waiting.get(hint.session) is wanted:
            del self._waiting[hint.session]
            dram.policy.hint(hint.after(self.operations.clock() - wanted.told_at))
