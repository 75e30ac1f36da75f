"""Deletion of KV in a store: what conductors order, what a left-out folder missed, and single blocks."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import read_deletions
from moonpool.base.errors import Unavailable
from moonpool.base.kv.delete_kv import EVERY_TENANT, KVSelection, check_ttls
from moonpool.base.kv.keys import BlockKey
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.async_utils import run_in_steps
from moonpool.kvstore.core.store import DeletedCount
from moonpool.kvstore.operations import StoreOperations
from moonpool.kvstore.record_store import RecordStore
from moonpool.kvstore.ssd.encryption import Keyring, KeysGone
from moonpool.kvstore.write_behind import WriteBehind
from moonpool.v1 import kv_pb2

log = get_logger(__name__)
DROP_BLOCKS = 4096
"""Blocks that are dropped before other tasks have a turn."""
LOOK_S = 1.0
"""Seconds between two looks at the file of encryption keys."""


@dataclasses.dataclass(slots=True)
class DeletionWorker:
    """Deletes KV from a store, each deletion once.

    Attributes:
        operations: the store, and the store's pins.
        records: records of deletions, and which were carried out.
        writer: writes to the SSD tier; None = no SSD tier.
        timeout_s: longest wait for the disk to overwrite deleted records.
        clock: seconds since 1970.
        turn: held by the deletion that is being carried out.
        unsaved: deletions that were carried out but are not in the records yet, because the disk may not have
            overwritten the deleted records.
    """

    operations: StoreOperations
    records: RecordStore
    writer: WriteBehind | None
    timeout_s: float
    clock: Callable[[], float] = world.unix_time
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)
    unsaved: dict[str, DeletedCount] = dataclasses.field(default_factory=dict, init=False)

    async def forget(self, deletions: Sequence[kv_pb2.Deletion], ttl_s: Mapping[str, float]) -> DeletedCount:
        """Carry out new deletions, and delete blocks that are older than their tenant's time to live.

        Returns:
            What all these deletions deleted, now or before. Deletions carried out together count as the first of them.

        Raises:
            Unavailable: readers find the blocks no more, but the disk has not overwritten them; to be asked again.
        """
        ttl_s = check_ttls(ttl_s)
        asked, total = await read_deletions(deletions), DeletedCount()
        async with self.turn:
            for portion in asked:
                await self._carry_out(
                    {name: selection for name, selection in portion.items() if self._done(name) is None}
                )
            if ttl_s:
                total = await run_in_steps(self.operations.store.delete_expired(ttl_s, self.clock()))
        await self._erased()
        for portion in asked:
            counts = {name: count for name in portion if (count := self._done(name)) is not None}
            unsaved = [name for name in counts if name in self.unsaved]
            await self.records.applied({name: dataclasses.astuple(counts[name]) for name in unsaved})
            self.unsaved = {name: selection for name, selection in self.unsaved.items() if name not in unsaved}
            total = sum(counts.values(), start=total)
            await asyncio.sleep(0)
        return total

    async def _carry_out(self, new: Mapping[str, KVSelection]) -> None:
        if new:
            together = KVSelection.union(new.values())
            for name, selection in new.items():
                self.records.deletions.add(name, selection)
            done = await run_in_steps(self.operations.store.delete_selected(together))
            self.operations.unpin_all(together.tenants)
            self.unsaved.update(dict.fromkeys(new, DeletedCount()) | {next(iter(new)): done})

    async def keys_gone(self, gone: KeysGone) -> None:
        """Keys have left the file: deletes what they encrypt, and all of tenants that have no row any more."""
        store = self.operations.store
        async with self.turn:
            deleted = await run_in_steps(store.delete_selected(KVSelection(tenants=gone.tenants)))
            self.operations.unpin_all(gone.tenants)
            deleted += await run_in_steps(store.delete_encrypted(gone.ids))
        log.warning(
            "keys have left encryption_keys; what they encrypt is deleted",
            key_ids=sorted(gone.ids),
            tenants=sorted(gone.tenants),
            blocks=deleted.blocks,
        )

    async def catch_up(self) -> None:
        """Repeat deletions that a left-out data folder missed.

        If the selection of such a deletion is not known any more, every block that is older goes.
        """
        known, missing, store = self.records.deletions, self.records.incomplete, self.operations.store
        if missing:
            await run_in_steps(
                store.delete_selected(KVSelection.union(known[name] for name in missing if name in known))
            )
            if over := [at for name, at in missing.items() if name not in known]:
                await run_in_steps(store.delete_expired({EVERY_TENANT: 0.0}, max(over)))
            with contextlib.suppress(Unavailable):
                await self._erased()
                await self.records.applied(dict.fromkeys(missing, (0, 0)))

    async def drop(self, keys: Sequence[BlockKey]) -> DeletedCount:
        """Drop blocks, which may be put again.

        Raises:
            Unavailable: as in `forget`.
        """
        dropped = DeletedCount()
        async with self.turn:
            for at in range(0, len(keys), DROP_BLOCKS):
                dropped += self.operations.store.delete_keys(keys[at : at + DROP_BLOCKS])
                await asyncio.sleep(0)
        await self._erased()
        return dropped

    async def _erased(self) -> None:
        if self.writer is not None and not await self.writer.erased(self.timeout_s):
            raise Unavailable("deleted, but not on disk yet, which does not take it")

    def __contains__(self, name: object) -> bool:
        """Whether the deletion of this id was carried out: readers find no such blocks that are older."""
        return isinstance(name, str) and self._done(name) is not None

    def _done(self, name: str) -> DeletedCount | None:
        counts = self.records.counts(name)
        return self.unsaved.get(name) if counts is None else DeletedCount(*counts)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyWatch:
    """Looks at the file of encryption keys; what keys encrypt that leave the file is deleted. `run` until cancelled."""

    keyring: Keyring
    deletions: DeletionWorker
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        while True:
            await self.sleep(LOOK_S)
            gone = await asyncio.to_thread(self.keyring.renew)
            if gone is not None:
                await self.deletions.keys_gone(gone)
