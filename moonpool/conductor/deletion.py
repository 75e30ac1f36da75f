"""KV deletion in every tier of every instance, including instances that are away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import DELETION, deletion_from_record, selection_to_proto
from moonpool.base.errors import InvalidRequest, MoonpoolError, Unavailable, Unsupported
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.records import RecordSync, record_batches
from moonpool.v1 import conductor_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub

log = get_logger(__name__)

DELETION_KEPT_S = 30 * 86400.0
"""Seconds for which a deletion is repeated to joining instances. An instance that was away for longer must join with
an empty data folder."""

DELETION_WAIT_S = 4.0
"""Seconds after a conductor's start in which a deletion waits, so that instances have joined and delete, too."""

NAME_CHARS = range(16, 65)
"""Length of a deletion's name that a client chooses."""

FORGET_TIMEOUT_S = 90.0

JOIN_TIMEOUT_S = 8.0
"""Shorter than an instance's wait for the welcome. An instance that needs longer joins again and goes on from there."""

SWEEP_INTERVAL_S = 10.0
"""Between two pulls of other conductors' deletions, which also repeat deletions to members that owe them."""

SWEEPS_PER_TTL = 10
_STUBS = {
    kv_pb2.INSTANCE_KIND_PREFILL: PrefillServiceStub,
    kv_pb2.INSTANCE_KIND_DECODE: DecodeServiceStub,
    kv_pb2.INSTANCE_KIND_KVSTORE: KVStoreServiceStub,
}


class KVDeletions:
    """Deletions of KV in every tier of every instance, and the members that still owe one.

    A deletion is written to the kvstores' records first. Then engines carry the deletion out, then kvstores: KV that an
    engine is writing must have reached the kvstore before the kvstore deletes. A failing member is asked again in the
    next sweep, and a joining instance carries out missed deletions before becoming a member. A deletion has an id: each
    member carries the deletion out once, however often ordered.

    Args:
        sync: the records that conductors share.
        channels: to instances.
        members: the instances that have joined.
        on_deleted: called with what was deleted, also by another conductor, to mark open requests.
        ttl_s: how long KV may stay in one place, seconds by tenant.
        wait_s: seconds from now in which a deletion waits, for instances to join.
    """

    def __init__(
        self,
        sync: RecordSync,
        channels: Channels,
        members: Callable[[], Sequence[kv_pb2.Instance]],
        on_deleted: Callable[[KVSelection], None],
        ttl_s: Mapping[str, float],
        wait_s: float,
    ) -> None:
        self.sync = sync
        self._channels = channels
        self._members = members
        self._on_deleted = on_deleted
        self._ttl_s = ttl_s
        self._settled_at = world.monotonic() + wait_s
        self._done: dict[tuple[str, int], set[str]] = {}  # ids of deletions that a member has carried out
        self._sweep_now = asyncio.Event()  # a joining kvstore has brought deletions that members do not know
        sync.listeners.append(self._on_records)

    @property
    def deletions(self) -> int:
        """Number of deletions that are repeated to joining instances."""
        return sum(1 for _ in self.sync.records.of(DELETION))

    @property
    def owed(self) -> int:
        """Number of deletions that members are not known to have carried out, over all members."""
        return sum(len(self._missing(member)) for member in self._members())

    async def delete(self, selection: KVSelection, name: str = "") -> conductor_pb2.DeleteKVResponse:
        """Delete everywhere; the response says what each member did.

        A conductor that has just begun waits first, for instances to join.

        Args:
            selection: the KV to delete.
            name: the deletion's id; "" draws one. A deletion with the same id is not carried out again, and the blocks
                are not counted again.

        Raises:
            InvalidRequest: the selection is empty, or the name is wrong or belongs to another deletion.
        """
        if not selection:
            raise InvalidRequest("selection", "names nothing: give keys, tenants or namespaces")
        await asyncio.sleep(self._settled_at - world.monotonic())
        record = await self._named(name, selection) if name else self.new(world.random_hex(16), selection)
        recorded = await self.sync.push([record])
        response = conductor_pb2.DeleteKVResponse(id=record.id, recorded=recorded)
        for chosen in _engines_first(self._members()):
            response.instances.extend(await asyncio.gather(*map(self._report, chosen)))
        log.info("KV deleted", deletion=record.id, blocks=sum(instance.blocks for instance in response.instances))
        return response

    async def _named(self, name: str, selection: KVSelection) -> kv_pb2.Record:
        await self.sync.pull()
        begun = self.begun(name)
        if begun is not None and begun != selection:
            raise InvalidRequest("id", "is that of another deletion")
        return self.sync.records.get(DELETION, "", name) or self.new(name, selection)

    def begun(self, name: str) -> KVSelection | None:
        """Return what a deletion deletes that this conductor knows by its id; None: knows none.

        Raises:
            InvalidRequest: this is no id.
        """
        if len(name) not in NAME_CHARS or not name.isprintable():
            raise InvalidRequest("id", f"has {NAME_CHARS[0]} to {NAME_CHARS[-1]} printable characters, or none")
        known = self.sync.records.get(DELETION, "", name)
        return None if known is None else deletion_from_record(known)

    def new(self, name: str, selection: KVSelection) -> kv_pb2.Record:
        """Return the record of a deletion that begins."""
        deletion = kv_pb2.Deletion(id=name, selection=selection_to_proto(selection))
        expires_at = self.sync.clock() + DELETION_KEPT_S
        return self.sync.record(DELETION, "", name, deletion.SerializeToString(), expires_at)

    def _on_records(self, records: Sequence[kv_pb2.Record]) -> None:
        """Report deletions from this conductor or another."""
        for record in records:
            if record.kind == DELETION and record.value:
                self._on_deleted(deletion_from_record(record))

    async def admit(self, instance: kv_pb2.Instance) -> None:
        """Let a joining instance carry out missed deletions.

        The next sweep sends members the deletions that the instance brought.

        Raises:
            Unavailable: the instance has not carried them out yet, and shall try again.
        """
        try:
            if instance.kind == kv_pb2.INSTANCE_KIND_KVSTORE:
                await self.sync.exchange(instance)
            await self.sync.pull()
            await self._catch_up(instance, JOIN_TIMEOUT_S)
            if self.owed:
                self._sweep_now.set()
        except Unsupported:
            if self.deletions or self._ttl_s:
                raise Unavailable(
                    f"{instance.id} does not know how to delete KV, and there is some to delete"
                ) from None
        except MoonpoolError as error:
            raise Unavailable(f"{instance.id} has not deleted yet what it must: {error}") from error

    async def run(self) -> None:
        """Sweep again and again, until cancelled."""
        pause_s = min([SWEEP_INTERVAL_S, *(seconds / SWEEPS_PER_TTL for seconds in self._ttl_s.values())])
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._sweep_now.wait()
            self._sweep_now.clear()
            try:
                await self.sweep()
            except Exception as error:
                log.exception("a round of deletions failed; will retry", error=str(error))

    async def sweep(self) -> None:
        """Repeat deletions to members that owe them, and let members delete KV older than the member's TTL."""
        await self.sync.pull()
        members = self._members()
        here = {(member.id, member.epoch) for member in members}
        self._done = {key: done for key, done in self._done.items() if key in here}
        known = list(self.sync.records.of(DELETION))  # later ones wait for the next sweep, which begins with engines
        waiting = [member for member in members if self._ttl_s or self._missing(member, known)]
        for chosen in _engines_first(waiting):
            answers = await asyncio.gather(
                *(self._catch_up(member, FORGET_TIMEOUT_S, known) for member in chosen), return_exceptions=True
            )
            for member, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, BaseException):
                    log.warning("KV not deleted yet", instance=member.id, error=str(answer))

    def _missing(self, member: kv_pb2.Instance, known: Sequence[kv_pb2.Record] | None = None) -> list[kv_pb2.Record]:
        """The `known` deletions (None = all) that a member is not known to have carried out."""
        done = self._done.get((member.id, member.epoch), set())
        return [r for r in (self.sync.records.of(DELETION) if known is None else known) if r.id not in done]

    async def _report(self, member: kv_pb2.Instance) -> conductor_pb2.InstanceDeletion:
        try:
            answer = await self._catch_up(member, FORGET_TIMEOUT_S)
        except MoonpoolError as error:
            log.warning("KV not deleted yet", instance=member.id, error=str(error))
            return conductor_pb2.InstanceDeletion(instance=member.id, error=str(error))
        return conductor_pb2.InstanceDeletion(instance=member.id, blocks=answer.blocks, bytes=answer.bytes)

    async def _catch_up(
        self, member: kv_pb2.Instance, timeout_s: float, known: Sequence[kv_pb2.Record] | None = None
    ) -> kv_pb2.ForgetResponse:
        """Let a member carry out missed deletions; see `_missing`.

        Raises:
            MoonpoolError: the member failed.
        """
        total, missing = kv_pb2.ForgetResponse(), self._missing(member, known)
        stub = _STUBS[member.kind](self._channels.get(member.address))
        ttl_s = dict(self._ttl_s)
        for part in record_batches(missing) if missing or not ttl_s else [[]]:
            deletions = [kv_pb2.Deletion.FromString(record.value) for record in part]
            request = kv_pb2.ForgetRequest(deletions=deletions, ttl_s=ttl_s)
            answer: kv_pb2.ForgetResponse = await stub.Forget(request, timeout=timeout_s)
            self._done.setdefault((member.id, member.epoch), set()).update(record.id for record in part)
            total.blocks += answer.blocks
            total.bytes += answer.bytes
        return total


def _engines_first(members: Sequence[kv_pb2.Instance]) -> tuple[list[kv_pb2.Instance], list[kv_pb2.Instance]]:
    """Return the engines, and kvstores after them."""
    stores = [member for member in members if member.kind == kv_pb2.INSTANCE_KIND_KVSTORE]
    return [member for member in members if member.kind != kv_pb2.INSTANCE_KIND_KVSTORE], stores
