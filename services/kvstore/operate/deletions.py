"""Deleting on behalf of conductors: each deletion once, answered when it is so on disk too."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from moonpool.cluster.selections import selection_from_proto
from moonpool.errors import Unavailable
from moonpool.kv.selection import check_ttls
from moonpool.v1 import kv_pb2
from services.kvstore.core.forgetting import Forgotten, expire, forget
from services.kvstore.core.store import BlockStore
from services.kvstore.operate.ledger import Ledger
from services.kvstore.operate.pin_keeper import PinKeeper
from services.kvstore.operate.writer import WriteBehind


@dataclasses.dataclass(frozen=True, slots=True)
class Deletions:
    """Deletes from one store. `timeout_s` bounds the wait for the disk; `clock` gives seconds since 1970."""

    store: BlockStore
    pins: PinKeeper
    ledger: Ledger
    writer: WriteBehind | None
    timeout_s: float
    clock: Callable[[], float] = time.time

    async def forget(self, deletions: Sequence[kv_pb2.Deletion], ttl_s: Mapping[str, float]) -> Forgotten:
        """Carries out what was not carried out before, and deletes what is older than its tenant's time to live.

        Raises:
            InvalidRequest: a selection or a time is wrong.
            Unavailable: nobody finds the blocks any more, but the disk did not take it; to be asked again.
        """
        ttl_s = check_ttls(ttl_s)
        new = {one.id: selection_from_proto(one.selection) for one in deletions if not self.ledger.is_applied(one.id)}
        done = [forget(self.store, selection) for selection in new.values()]
        for selection in new.values():
            self.pins.end_all(selection.tenants)
        if ttl_s:
            done.append(expire(self.store, ttl_s, self.clock()))
        if self.writer is not None and not await self.writer.erased(self.timeout_s):
            raise Unavailable("deleted, but not on disk yet, which does not take it")
        await self.ledger.applied(new)
        return Forgotten(sum(one.blocks for one in done), sum(one.nbytes for one in done))
