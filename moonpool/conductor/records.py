"""Records that conductors share through the kvstores: deletions and named contexts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from moonpool.base import world
from moonpool.base.cluster.records import MESSAGE_BYTES, ReplicatedRecords
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

log = get_logger(__name__)

CALL_TIMEOUT_S = 10.0

PULL_TIMEOUT_S = 2.0
"""Longest wait for a kvstore's new records. A slower kvstore is not waited for until the kvstore has answered."""

RECORDS_FRESH_S = 1.0
"""Age up to which `refresh` takes the last pull for current."""

RecordsListener = Callable[[Sequence[kv_pb2.Record]], None]

_StoreKey = tuple[str, int]  # a kvstore's id and epoch


class CoalescedWork:
    """Work that is shared by all callers, one run at a time.

    A caller during a run waits for the next run, because the present run may not include the caller's change. All
    callers during a run share the next run.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` is one run; callers do not get the run's exceptions."""
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._began = 0.0

    @property
    def idle(self) -> bool:
        """Whether no run is running or waited for."""
        return self._next is None and (self._running is None or self._running.done())

    @property
    def since_s(self) -> float:
        """Seconds since the present run began; 0 if there is none."""
        if self._running is None or self._running.done():
            return 0.0
        return asyncio.get_running_loop().time() - self._began

    def next(self) -> asyncio.Task[None]:
        """Return the next run to begin. Callers must not cancel the task."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
        return self._next

    async def aclose(self) -> None:
        tasks = [task for task in (self._running, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        self._began = asyncio.get_running_loop().time()
        await self._work()


class RecordSync:
    """Records that conductors share: kept here, and at every kvstore.

    Args:
        channels: to the kvstores.
        stores: the kvstores that have joined.
        clock: gives seconds since 1970.

    Attributes:
        records: those that are known here.
        listeners: called with records that are newer than the known ones, whoever wrote them.
        heard: a kvstore has told all its records, and one has answered the last pull, so what is not known here is not
            there.
    """

    def __init__(
        self,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        clock: Callable[[], float] = world.unix_time,
    ) -> None:
        self.records = ReplicatedRecords()
        self.clock = clock
        self.listeners: list[RecordsListener] = []
        self.heard = False
        self._channels = channels
        self._stores = stores
        self._seen: dict[_StoreKey, int] = {}  # the last sequence number of each store
        self._pulls: dict[_StoreKey, CoalescedWork] = {}
        self._pulled_at = float("-inf")
        self._heard_at = float("-inf")

    async def aclose(self) -> None:
        await asyncio.gather(*(pull.aclose() for pull in self._pulls.values()))

    def record(self, kind: str, tenant: str, record_id: str, value: bytes, expires_at: float) -> kv_pb2.Record:
        """Return a new version of the record with this kind, tenant and id."""
        version = self.records.version((kind, tenant, record_id), self.clock())
        return kv_pb2.Record(
            kind=kind, tenant=tenant, id=record_id, version=version, value=value, expires_at=expires_at
        )

    async def pull(self, within_s: float = PULL_TIMEOUT_S) -> None:
        """Get what other conductors wrote before this call.

        Callers share pulls (`CoalescedWork`). A kvstore that does not answer within `within_s` is skipped: records are
        at all other kvstores too.
        """
        self.records.prune(self.clock())
        began, asked_at = self.clock(), world.monotonic()
        stores = {(store.id, store.epoch): store for store in self._stores()}
        for gone in [key for key in self._pulls if key not in stores]:
            if self._pulls[gone].idle:
                del self._pulls[gone]
        pulls = [pull for key, store in stores.items() if (pull := self._pull(key, store)) is not None]
        if pulls:
            await asyncio.wait(pulls, timeout=min(within_s, PULL_TIMEOUT_S))
        self._pulled_at = began
        self.heard = self._heard_at >= asked_at

    async def refresh(self, within_s: float) -> None:
        """Pull, unless the last pull is at most `RECORDS_FRESH_S` old."""
        if not 0.0 <= self.clock() - self._pulled_at < RECORDS_FRESH_S:
            await self.pull(within_s)

    async def push(self, records: Sequence[kv_pb2.Record]) -> int:
        """Keep records here and at all kvstores; return how many kvstores have them now.

        Raises:
            InvalidRequest, Overloaded: the records cannot be kept.
        """
        self.merge(records)
        self.records.prune(self.clock())
        stores = self._stores()
        return sum(await asyncio.gather(*(self._try_sync(store, records) for store in stores)))

    def merge(self, records: Iterable[kv_pb2.Record]) -> None:
        """Keep records here alone.

        Raises:
            InvalidRequest, Overloaded: the records cannot be kept.
        """
        newer = self.records.merge(records)
        for listener in self.listeners if newer else ():
            listener(newer)

    async def exchange(self, store: kv_pb2.Instance) -> None:
        """Exchange all records with a kvstore that joins.

        Raises:
            MoonpoolError: the kvstore does not answer.
        """
        self._seen = {key: last for key, last in self._seen.items() if key[0] != store.id}
        await self._sync(store, ())
        records, number, more = self.records.after(0)
        while records:
            await self._sync(store, records)
            records, number, more = self.records.after(number) if more else ([], 0, False)

    def _pull(self, key: _StoreKey, store: kv_pb2.Instance) -> asyncio.Task[None] | None:
        """Return the next pull from a store; None if the present one takes too long."""

        async def pull() -> None:
            await self._try_sync(store, ())

        if key not in self._pulls:
            self._pulls[key] = CoalescedWork(pull)
        late = self._pulls[key].since_s > PULL_TIMEOUT_S
        task = self._pulls[key].next()
        return None if late else task

    async def _try_sync(self, store: kv_pb2.Instance, records: Sequence[kv_pb2.Record]) -> bool:
        """Sync with a store; return whether syncing worked."""
        try:
            await self._sync(store, records)
        except MoonpoolError as error:
            log.warning("records could not be sent to a kvstore", kvstore=store.id, error=str(error))
            return False
        return True

    async def _sync(self, store: kv_pb2.Instance, records: Sequence[kv_pb2.Record]) -> None:
        """Send a store records, and take the store's new records."""
        stub, key = KVStoreServiceStub(self._channels.get(store.address)), (store.id, store.epoch)
        for part in [*record_batches(records)] or [[]]:
            more = True
            while more:
                request = kvstore_pb2.SyncRecordsRequest(records=part, after=self._seen.get(key, 0))
                answer = await stub.SyncRecords(request, timeout=CALL_TIMEOUT_S)
                self.merge(answer.records)
                self._seen[key], more, part = answer.sequence, answer.more, []
        self.heard, self._heard_at = True, world.monotonic()


def record_batches(records: Iterable[kv_pb2.Record]) -> Iterator[list[kv_pb2.Record]]:
    """Return the records in lists that fit a message."""
    part, nbytes = list[kv_pb2.Record](), 0
    for record in records:
        part.append(record)
        nbytes += record.ByteSize()
        if nbytes >= MESSAGE_BYTES // 2:
            yield part
            part, nbytes = [], 0
    if part:
        yield part
