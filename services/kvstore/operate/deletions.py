"""Deleting on behalf of conductors: each deletion once, answered when it is so on disk too."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from moonpool.cluster.selections import read_deletions
from moonpool.errors import Unavailable
from moonpool.kv.keys import BlockKey
from moonpool.kv.selection import EVERY_TENANT, Selection, check_ttls
from moonpool.streams.turns import in_turns
from moonpool.v1 import kv_pb2
from services.kvstore.core.forgetting import Forgotten, drop, expire, forget
from services.kvstore.operate.ledger import Ledger
from services.kvstore.operate.operations import Operations
from services.kvstore.operate.writer import WriteBehind

DROP_BLOCKS = 4096  # dropped before other tasks have a turn


@dataclasses.dataclass(slots=True)
class Deletions:
    """Deletes what `operations` keeps. `timeout_s` bounds the wait for the disk; `clock` gives seconds since 1970."""

    operations: Operations
    ledger: Ledger
    writer: WriteBehind | None
    timeout_s: float
    clock: Callable[[], float] = time.time
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)
    unsaved: dict[str, Forgotten] = dataclasses.field(default_factory=dict, init=False)
    """Carried out, but the ledger does not know it yet: the disk may not have taken them."""

    async def forget(self, deletions: Sequence[kv_pb2.Deletion], ttl_s: Mapping[str, float]) -> Forgotten:
        """Carries out what was not carried out before, and deletes what is older than its tenant's time to live.

        Returns what all of these deletions deleted, whenever they did. Those carried out together count as the first.
        Raises Unavailable when nobody finds the blocks any more, but the disk did not take it; to be asked again.
        """
        ttl_s = check_ttls(ttl_s)
        asked, total = await read_deletions(deletions), Forgotten()
        async with self.turn:
            for portion in asked:
                await self._carry_out({name: one for name, one in portion.items() if self._done(name) is None})
            if ttl_s:
                total = await in_turns(expire(self.operations.store, ttl_s, self.clock()))
        await self._erased()
        for portion in asked:
            counts = {name: count for name in portion if (count := self._done(name)) is not None}
            unsaved = counts.keys() & self.unsaved
            await self.ledger.applied({name: dataclasses.astuple(counts[name]) for name in unsaved})
            self.unsaved = {name: one for name, one in self.unsaved.items() if name not in unsaved}
            total = sum(counts.values(), start=total)
            await asyncio.sleep(0)
        return total

    async def _carry_out(self, new: Mapping[str, Selection]) -> None:
        if new:
            together = Selection.union(new.values())
            for name, selection in new.items():
                self.ledger.deletions.add(name, selection)
            done = await in_turns(forget(self.operations.store, together))
            self.operations.unpin_all(together.tenants)
            self.unsaved.update(dict.fromkeys(new, Forgotten()) | {next(iter(new)): done})

    async def catch_up(self) -> None:
        """Deletes what some folder, left out then, may hold still; all that is older where it is known no more what."""
        known, missing, store = self.ledger.deletions, self.ledger.incomplete, self.operations.store
        if missing:
            await in_turns(forget(store, Selection.union(known[name] for name in missing if name in known)))
            if over := [at for name, at in missing.items() if name not in known]:
                await in_turns(expire(store, {EVERY_TENANT: 0.0}, max(over)))
            with contextlib.suppress(Unavailable):
                await self._erased()
                await self.ledger.applied(dict.fromkeys(missing, (0, 0)))

    async def drop(self, keys: Sequence[BlockKey]) -> Forgotten:
        """Drops blocks that may be put again; raises Unavailable as `forget`."""
        dropped = Forgotten()
        async with self.turn:
            for at in range(0, len(keys), DROP_BLOCKS):
                dropped += drop(self.operations.store, keys[at : at + DROP_BLOCKS])
                await asyncio.sleep(0)
        await self._erased()
        return dropped

    async def _erased(self) -> None:
        if self.writer is not None and not await self.writer.erased(self.timeout_s):
            raise Unavailable("deleted, but not on disk yet, which does not take it")

    def __contains__(self, name: object) -> bool:
        """Whether a deletion was carried out: nobody finds such blocks here that are older."""
        return isinstance(name, str) and self._done(name) is not None

    def _done(self, name: str) -> Forgotten | None:
        counts = self.ledger.counts(name)
        return self.unsaved.get(name) if counts is None else Forgotten(*counts)
