"""KV deletion in every tier of every instance, including instances that are away.

And the records by which conductors share it.

A deletion is written to the kvstores' records first, then carried out by engines and by kvstores; an instance that
joins carries out what it has missed before it becomes a member.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

import grpc.aio

from moonpool.cluster.proto_conversion import DELETION, deletion_from_record, selection_to_proto
from moonpool.cluster.records import MESSAGE_BYTES, ReplicatedRecords
from moonpool.errors import InvalidRequest, MoonpoolError, Unavailable, Unsupported
from moonpool.kv.delete_kv import KVSelection
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2, kvstore_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub


class CoalescedWork:
    """One piece of work, done again and again, one round at a time.

    Who asks while a round is under way may lack what came after its beginning, so he waits for the next one, with all
    the others who ask meanwhile.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` is one round; it raises nothing that matters to those who wait."""
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._began = 0.0

    @property
    def idle(self) -> bool:
        """Whether no round is under way or waited for."""
        return self._next is None and (self._running is None or self._running.done())

    @property
    def since_s(self) -> float:
        """Seconds since the round that is under way has begun; 0 when none is."""
        if self._running is None or self._running.done():
            return 0.0
        return asyncio.get_running_loop().time() - self._began

    def next(self) -> asyncio.Task[None]:
        """The next round to begin. Who waits for it must not cancel it."""
        if self._next is None:
            self._next = asyncio.create_task(self._round(self._running))
        return self._next

    async def aclose(self) -> None:
        """Ends what is under way."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        self._began = asyncio.get_running_loop().time()
        await self._work()


log = get_logger(__name__)


CALL_TIMEOUT_S = 10.0


PULL_TIMEOUT_S = 2.0
"""So long a kvstore's news are waited for. One that takes longer is not waited for until it has told them."""


RECORDS_FRESH_S = 1.0
"""What was asked so lately is taken for what is so by those who only read."""


RecordsListener = Callable[[Sequence[kv_pb2.Record]], None]


_StoreKey = tuple[str, int]  # a store's id and incarnation


class RecordLedger:
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
        self.book = ReplicatedRecords()
        self.clock = clock
        self.heard: list[RecordsListener] = []
        self._channels = channels
        self._stores = stores
        self._seen: dict[_StoreKey, int] = {}  # the last number of each store
        self._asking: dict[_StoreKey, CoalescedWork] = {}
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

    async def pull(self, within_s: float = PULL_TIMEOUT_S) -> None:
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
            await asyncio.wait(answers, timeout=min(within_s, PULL_TIMEOUT_S))
        self._pulled_at = began

    async def fresh(self, within_s: float) -> None:
        """As `pull`, unless that was done a moment ago."""
        if not 0.0 <= self.clock() - self._pulled_at < RECORDS_FRESH_S:
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

    def _ask(self, place: _StoreKey, store: kv_pb2.Instance) -> asyncio.Task[None] | None:
        """A store's answer to a question that is not put yet; None when it has been late since the last one."""

        async def ask() -> None:
            await self._told(store, ())

        if place not in self._asking:
            self._asking[place] = CoalescedWork(ask)
        late = self._asking[place].since_s > PULL_TIMEOUT_S
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
        for part in [*record_batches(records)] or [[]]:
            more = True
            while more:
                request = kvstore_pb2.SyncRecordsRequest(records=part, after=self._seen.get(place, 0))
                try:
                    answer = await stub.SyncRecords(request, timeout=CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    raise from_rpc_error(error) from None
                self.merge(answer.records)
                self._seen[place], more, part = answer.sequence, answer.more, []


def record_batches(records: Iterable[kv_pb2.Record]) -> Iterator[list[kv_pb2.Record]]:
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


DELETION_KEPT_S = 30 * 86400.0
"""How long a deletion is repeated to those who join. Who was away for longer must come with an empty data folder."""


NAME_CHARS = range(16, 65)
"""Of a deletion that a client names."""


FORGET_TIMEOUT_S = 90.0


JOIN_TIMEOUT_S = 8.0
"""Less than an instance waits for its welcome; it tries again, and goes on where it was."""


AGAIN_S = 10.0
"""Between two looks at what other conductors have deleted, and at what instances have not carried out."""


SWEEPS_PER_TTL = 10


_STUBS = {
    kv_pb2.INSTANCE_KIND_PREFILL: PrefillServiceStub,
    kv_pb2.INSTANCE_KIND_DECODE: DecodeServiceStub,
    kv_pb2.INSTANCE_KIND_KVSTORE: KVStoreServiceStub,
}


class KVDeletions:
    """All deletions of one conductor.

    Args:
        ledger: where they are kept.
        channels: to instances.
        members: instances that are joined.
        on_its_way: is told what was deleted, also by another conductor, to mark the requests that are being served.
        ttl_s: how long KV may stay in one place, by tenant.
    """

    def __init__(
        self,
        ledger: RecordLedger,
        channels: Channels,
        members: Callable[[], Sequence[kv_pb2.Instance]],
        on_its_way: Callable[[KVSelection], None],
        ttl_s: Mapping[str, float],
    ) -> None:
        self.ledger = ledger
        self._channels = channels
        self._members = members
        self._on_its_way = on_its_way
        self._ttl_s = ttl_s
        self._told: dict[tuple[str, int], set[str]] = {}  # deletions that a member has carried out
        self._learnt = asyncio.Event()  # who joined has brought deletions that members have not heard of
        ledger.heard.append(self._heard)

    @property
    def deletions(self) -> int:
        """How many are repeated to those who join."""
        return sum(1 for _ in self.ledger.book.of(DELETION))

    @property
    def owed(self) -> int:
        """How many members are not known to have carried out, over all members."""
        return sum(len(self._missing(member)) for member in self._members())

    async def delete(self, selection: KVSelection, name: str = "") -> conductor_pb2.DeleteKVResponse:
        """Deletes everywhere; the answer says what each member did.

        Args:
            selection: what.
            name: of the deletion; "" = a new one. One that was ordered before is not ordered once more, and what was
                deleted then is not counted again.

        Raises:
            InvalidRequest: nothing is chosen, or the name is wrong or that of another deletion.
        """
        if not selection:
            raise InvalidRequest("selection", "names nothing: give keys, tenants or namespaces")
        record = await self._named(name, selection) if name else self._new(secrets.token_hex(16), selection)
        recorded = await self.ledger.push([record])
        response = conductor_pb2.DeleteKVResponse(id=record.id, recorded=recorded)
        for chosen in _engines_first(self._members()):
            response.instances.extend(await asyncio.gather(*map(self._report, chosen)))
        log.info("KV deleted", deletion=record.id, blocks=sum(one.blocks for one in response.instances))
        return response

    async def _named(self, name: str, selection: KVSelection) -> kv_pb2.Record:
        if len(name) not in NAME_CHARS or not name.isprintable():
            raise InvalidRequest("id", f"has {NAME_CHARS[0]} to {NAME_CHARS[-1]} printable characters, or none")
        await self.ledger.pull()
        known = self.ledger.book.get(DELETION, "", name)
        if known is None:
            return self._new(name, selection)
        if deletion_from_record(known) != selection:
            raise InvalidRequest("id", "is that of another deletion")
        return known

    def _new(self, name: str, selection: KVSelection) -> kv_pb2.Record:
        deletion = kv_pb2.Deletion(id=name, selection=selection_to_proto(selection))
        expires_at = self.ledger.clock() + DELETION_KEPT_S
        return self.ledger.record(DELETION, "", name, deletion.SerializeToString(), expires_at)

    def _heard(self, records: Sequence[kv_pb2.Record]) -> None:
        """Marks what is on its way here of what was deleted, by this conductor or by another one."""
        for record in records:
            if record.kind == DELETION and record.value:
                self._on_its_way(deletion_from_record(record))

    async def admit(self, instance: kv_pb2.Instance) -> None:
        """An instance wants to join: it carries out what it has not heard of, and members what it has brought.

        Raises:
            Unavailable: it has not done so yet, and is to try again.
        """
        try:
            if instance.kind == kv_pb2.INSTANCE_KIND_KVSTORE:
                await self.ledger.exchange(instance)
            await self.ledger.pull()
            await self._bring_up(instance, JOIN_TIMEOUT_S)
            if self.owed:
                self._learnt.set()
        except Unsupported:
            if self.deletions or self._ttl_s:
                raise Unavailable(
                    f"{instance.id} does not know how to delete KV, and there is some to delete"
                ) from None
        except MoonpoolError as error:
            raise Unavailable(f"{instance.id} has not deleted yet what it must: {error}") from error

    async def run(self) -> None:
        """Repeats deletions to members that have not carried them out, and deletes what is too old; until cancelled."""
        pause_s = min([AGAIN_S, *(seconds / SWEEPS_PER_TTL for seconds in self._ttl_s.values())])
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._learnt.wait()
            self._learnt.clear()
            try:
                await self.sweep()
            except Exception as error:
                log.exception("a round of deletions failed; it is repeated", error=str(error))

    async def sweep(self) -> None:
        """One round of `run`."""
        await self.ledger.pull()
        members = self._members()
        here = {(member.id, member.incarnation) for member in members}
        self._told = {place: told for place, told in self._told.items() if place in here}
        known = list(self.ledger.book.of(DELETION))  # what comes meanwhile is for engines first, in the next round
        waiting = [member for member in members if self._ttl_s or self._missing(member, known)]
        for chosen in _engines_first(waiting):
            answers = await asyncio.gather(
                *(self._bring_up(member, FORGET_TIMEOUT_S, known) for member in chosen), return_exceptions=True
            )
            for member, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, BaseException):
                    log.warning("KV not deleted yet", instance=member.id, error=str(answer))

    def _missing(self, member: kv_pb2.Instance, known: Sequence[kv_pb2.Record] | None = None) -> list[kv_pb2.Record]:
        """Those of the `known` deletions, all by default, that a member is not known to have carried out."""
        told = self._told.get((member.id, member.incarnation), set())
        return [r for r in (self.ledger.book.of(DELETION) if known is None else known) if r.id not in told]

    async def _report(self, member: kv_pb2.Instance) -> conductor_pb2.InstanceDeletion:
        try:
            answer = await self._bring_up(member, FORGET_TIMEOUT_S)
        except MoonpoolError as error:
            log.warning("KV not deleted yet", instance=member.id, error=str(error))
            return conductor_pb2.InstanceDeletion(instance=member.id, error=str(error))
        return conductor_pb2.InstanceDeletion(instance=member.id, blocks=answer.blocks, bytes=answer.bytes)

    async def _bring_up(
        self, member: kv_pb2.Instance, timeout_s: float, known: Sequence[kv_pb2.Record] | None = None
    ) -> kv_pb2.ForgetResponse:
        """Has a member carry out what it is not known to have; arguments as of `_missing`.

        Raises:
            MoonpoolError: it did not.
        """
        done, missing = kv_pb2.ForgetResponse(), self._missing(member, known)
        stub = _STUBS[member.kind](self._channels.get(member.address))
        ttl_s = dict(self._ttl_s)
        for part in record_batches(missing) if missing or not ttl_s else [[]]:
            deletions = [kv_pb2.Deletion.FromString(record.value) for record in part]
            try:
                request = kv_pb2.ForgetRequest(deletions=deletions, ttl_s=ttl_s)
                answer: kv_pb2.ForgetResponse = await stub.Forget(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            self._told.setdefault((member.id, member.incarnation), set()).update(record.id for record in part)
            done.blocks += answer.blocks
            done.bytes += answer.bytes
        return done


def _engines_first(members: Sequence[kv_pb2.Instance]) -> tuple[list[kv_pb2.Instance], list[kv_pb2.Instance]]:
    """Engines, then kvstores: what an engine is writing must have come to its store before that deletes."""
    stores = [member for member in members if member.kind == kv_pb2.INSTANCE_KIND_KVSTORE]
    return [member for member in members if member.kind != kv_pb2.INSTANCE_KIND_KVSTORE], stores
