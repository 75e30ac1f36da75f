"""Deleting KV from every tier of every instance, also of those that are away, and for its age.

A deletion is written to the kvstores' records first: from then on they take no such block from an engine that has not
carried it out. Then it is carried out, by engines and then by kvstores. Whoever joins carries out all deletions that it
has not heard of before it is a member. So nothing comes back, also from an engine that was away or hung meanwhile. Each
instance carries out a deletion once, by its id, however often and by however many conductors it is ordered.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence

import grpc.aio

from moonpool.cluster.selections import DELETION, deletion_from_record, selection_to_proto
from moonpool.errors import InvalidRequest, MoonpoolError, Unavailable, Unsupported
from moonpool.kv.selection import Selection
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from services.conductor.ledger import Ledger, messages

log = get_logger(__name__)

KEEP_S = 30 * 86400.0
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


class Forgetting:
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
        ledger: Ledger,
        channels: Channels,
        members: Callable[[], Sequence[kv_pb2.Instance]],
        on_its_way: Callable[[Selection], None],
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

    async def delete(self, selection: Selection, name: str = "") -> conductor_pb2.DeleteKVResponse:
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

    async def _named(self, name: str, selection: Selection) -> kv_pb2.Record:
        if len(name) not in NAME_CHARS or not name.isprintable():
            raise InvalidRequest("id", f"has {NAME_CHARS[0]} to {NAME_CHARS[-1]} printable characters, or none")
        await self.ledger.pull()
        known = self.ledger.book.get(DELETION, "", name)
        if known is None:
            return self._new(name, selection)
        if deletion_from_record(known) != selection:
            raise InvalidRequest("id", "is that of another deletion")
        return known

    def _new(self, name: str, selection: Selection) -> kv_pb2.Record:
        deletion = kv_pb2.Deletion(id=name, selection=selection_to_proto(selection))
        expires_at = self.ledger.clock() + KEEP_S
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
        for part in messages(missing) if missing or not ttl_s else [[]]:
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
