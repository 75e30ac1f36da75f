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
from services.conductor.rounds import Rounds

log = get_logger(__name__)

CALL_TIMEOUT_S = 10.0
PULL_S = 2.0
"""So long a kvstore's news are waited for. One that takes longer is not waited for until it has told them."""
FRESH_S = 1.0
"""What was asked so lately is taken for what is so by those who only read."""
Heard = Callable[[Sequence[kv_pb2.Record]], None]
_Place = tuple[str, int]  # a store's id and incarnation


class Ledger:
    """Records, shared with the kvstores that `stores` gives; `clock` gives seconds since 1970.

    Attributes:
        heard: are told of records that are newer than what was here, whoever has written them.
    """

    def __init__(
        self,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.book = RecordBook()
        self.clock = clock
        self.heard: list[Heard] = []
        self._channels = channels
        self._stores = stores
        self._seen: dict[_Place, int] = {}  # the last number of each store
        self._asking: dict[_Place, Rounds] = {}
        self._pulled_at = float("-inf")

    async def aclose(self) -> None:
        """Asks no more."""
        await asyncio.gather(*(asking.aclose() for asking in self._asking.values()))

    def record(self, kind: str, tenant: str, record_id: str, value: bytes, expires_at: float) -> kv_pb2.Record:
        """A record that replaces what is in its place."""
        version = self.book.version((kind, tenant, record_id), self.clock())
        return kv_pb2.Record(
            kind=kind, tenant=tenant, id=record_id, version=version, value=value, expires_at=expires_at
        )

    async def pull(self, within_s: float = PULL_S) -> None:
        """Learns what other conductors had written before this was called.

        Who asks while a kvstore is being asked waits for its next answer, together with all others. One that does not
        answer in time is passed over: what is written is at all the others too.
        """
        self.book.prune(self.clock())
        began, places = self.clock(), {(store.id, store.incarnation): store for store in self._stores()}
        for gone in self._asking.keys() - places.keys():
            if self._asking[gone].idle:
                del self._asking[gone]
        answers = [answer for place, store in places.items() if (answer := self._ask(place, store)) is not None]
        if answers:
            await asyncio.wait(answers, timeout=min(within_s, PULL_S))
        self._pulled_at = began

    async def fresh(self, within_s: float) -> None:
        """As `pull`, unless that was done a moment ago."""
        if not 0.0 <= self.clock() - self._pulled_at < FRESH_S:
            await self.pull(within_s)

    async def push(self, records: Sequence[kv_pb2.Record]) -> int:
        """Keeps records here and at all kvstores; how many of these have them now.

        Raises:
            InvalidRequest, Overloaded: they cannot be kept.
        """
        self.merge(records)
        self.book.prune(self.clock())
        stores = self._stores()
        return sum(await asyncio.gather(*(self._told(store, records) for store in stores)))

    def merge(self, records: Iterable[kv_pb2.Record]) -> None:
        """Takes records that are not to be told to kvstores, now.

        Raises:
            InvalidRequest, Overloaded: they cannot be kept.
        """
        newer = self.book.merge(records)
        for hear in self.heard if newer else ():
            hear(newer)

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

    def _ask(self, place: _Place, store: kv_pb2.Instance) -> asyncio.Task[None] | None:
        """A store's answer to a question that is not put yet; None when it has been late since the last one."""

        async def ask() -> None:
            await self._told(store, ())

        if place not in self._asking:
            self._asking[place] = Rounds(ask)
        late = self._asking[place].since_s > PULL_S
        answer = self._asking[place].next()
        return None if late else answer

    async def _told(self, store: kv_pb2.Instance, records: Sequence[kv_pb2.Record]) -> bool:
        """As `_sync`; whether it worked."""
        try:
            await self._sync(store, records)
        except MoonpoolError as error:
            log.warning("records could not be sent to a kvstore", kvstore=store.id, error=str(error))
            return False
        return True

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
                self.merge(answer.records)
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
