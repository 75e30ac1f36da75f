"""The conductor's copy of the records that kvstores keep: contexts, tags, deletions.

Kvstores are the only durable place; a conductor that starts is right again when they have joined. Every record goes to
all kvstores that are there, and to those that join later; what other conductors have written is asked for before it is
needed. docs/adr/0022-contexts.md has the reasons.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc.aio

from moonpool.cluster.records import MESSAGE_BYTES, RecordBook
from moonpool.errors import MoonpoolError
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

log = get_logger(__name__)

CALL_TIMEOUT_S = 10.0


class Ledger:
    """Records, shared with the kvstores that `stores` gives; `clock` gives seconds since 1970."""

    def __init__(
        self,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.book = RecordBook()
        self.clock = clock
        self._channels = channels
        self._stores = stores
        self._seen: dict[tuple[str, int], int] = {}  # by store and incarnation: the last number

    def record(self, kind: str, tenant: str, record_id: str, value: bytes, expires_at: float) -> kv_pb2.Record:
        """A record that replaces what is in its place."""
        version = self.book.version((kind, tenant, record_id), self.clock())
        return kv_pb2.Record(
            kind=kind, tenant=tenant, id=record_id, version=version, value=value, expires_at=expires_at
        )

    async def pull(self) -> None:
        """Learns what other conductors have written. A kvstore that does not answer is passed over."""
        await self._with_all(())

    async def push(self, records: Sequence[kv_pb2.Record]) -> int:
        """Keeps records here and at all kvstores; how many of these have them now.

        Raises:
            InvalidRequest, Overloaded: they cannot be kept.
        """
        self.book.merge(records)
        return await self._with_all(records)

    async def exchange(self, store: kv_pb2.Instance) -> None:
        """A kvstore joins: it and this conductor tell each other what they have.

        Raises:
            MoonpoolError: it does not answer.
        """
        self._seen = {place: last for place, last in self._seen.items() if place[0] != store.id}
        await self._sync(store, ())
        records, number, more = self.book.after(0)
        while records:
            await self._sync(store, records)
            records, number, more = self.book.after(number) if more else ([], 0, False)

    async def _with_all(self, records: Sequence[kv_pb2.Record]) -> int:
        self.book.prune(self.clock())
        stores = self._stores()
        answers = await asyncio.gather(*(self._sync(store, records) for store in stores), return_exceptions=True)
        for store, answer in zip(stores, answers, strict=True):
            if isinstance(answer, MoonpoolError):
                log.warning("records not shared", kvstore=store.id, error=str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        return sum(answer is None for answer in answers)

    async def _sync(self, store: kv_pb2.Instance, records: Sequence[kv_pb2.Record]) -> None:
        """Gives a store records, and takes what is new there."""
        stub, place = KVStoreServiceStub(self._channels.get(store.address)), (store.id, store.incarnation)
        for part in [*messages(records)] or [[]]:
            more = True
            while more:
                request = kvstore_pb2.SyncRecordsRequest(records=part, after=self._seen.get(place, 0))
                try:
                    answer = await stub.SyncRecords(request, timeout=CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    raise from_rpc_error(error) from None
                self.book.merge(answer.records)
                self._seen[place], more, part = answer.sequence, answer.more, []


def messages(records: Iterable[kv_pb2.Record]) -> Iterator[list[kv_pb2.Record]]:
    """Records in parts that fit a message."""
    part, nbytes = list[kv_pb2.Record](), 0
    for record in records:
        part.append(record)
        nbytes += record.ByteSize()
        if nbytes >= MESSAGE_BYTES // 2:
            yield part
            part, nbytes = [], 0
    if part:
        yield part
