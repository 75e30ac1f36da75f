"""A kvstore that keeps records and pins, and carries out deletions, as far as conductors can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.cluster.records import ReplicatedRecords
from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.keys import unpack_keys
from moonpool.v1 import kv_pb2, kvstore_pb2

from .fakes import FakeMember


@dataclass
class FakeStore(FakeMember):
    """What it holds are its `keys`; a deletion that names one drops it. `refusals` are raised by Forget, in order."""

    id: str = "kvstore-0"
    kind: kv_pb2.InstanceKind.ValueType = kv_pb2.INSTANCE_KIND_KVSTORE
    replicated: ReplicatedRecords = field(default_factory=ReplicatedRecords)
    pins: dict[str, kvstore_pb2.PinRequest] = field(default_factory=dict)
    forgotten: list[kv_pb2.ForgetRequest] = field(default_factory=list)
    refusals: list[MoonpoolError] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # ids of those that were asked to forget, first come first
    before_pin: list[asyncio.Event] = field(default_factory=list)  # awaited by Pin, in order
    pin_calls: int = 0
    synced: int = 0
    answers: asyncio.Event = field(default_factory=lambda: _set(asyncio.Event()))  # SyncRecords waits for it
    then: Callable[[], object] = lambda: None  # called when it is asked to forget

    async def SyncRecords(self, request: kvstore_pb2.SyncRecordsRequest, context: Any) -> Any:
        self.synced += 1
        self.note()
        await self.answers.wait()
        self.replicated.merge(request.records)
        records, sequence, more = self.replicated.after(request.after)
        return kvstore_pb2.SyncRecordsResponse(records=records, sequence=sequence, more=more)

    async def Forget(self, request: kv_pb2.ForgetRequest, context: Any) -> kv_pb2.ForgetResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        self.forgotten.append(request)
        self.order.append(self.id)
        self.then()
        named = {key for deletion in request.deletions for key in unpack_keys(deletion.selection.keys)}
        gone = [key for key in self.keys if key in named]
        self.keys = [key for key in self.keys if key not in named]
        return kv_pb2.ForgetResponse(blocks=len(gone), bytes=100 * len(gone))

    async def Pin(self, request: kvstore_pb2.PinRequest, context: Any) -> kvstore_pb2.PinResponse:
        self.pin_calls += 1
        self.note()
        if self.before_pin:
            await self.before_pin.pop(0).wait()
        self.pins[request.name] = request
        wanted = unpack_keys(request.keys)
        here = next((index for index, key in enumerate(wanted) if key not in self.keys), len(wanted))
        limit = kvstore_pb2.PIN_LIMIT_ABSENT if here < len(wanted) else kvstore_pb2.PIN_LIMIT_UNSPECIFIED
        return kvstore_pb2.PinResponse(blocks=here, bytes=100 * here, ttl_s=request.ttl_s, limit=limit)

    async def Unpin(self, request: kvstore_pb2.UnpinRequest, context: Any) -> kvstore_pb2.UnpinResponse:
        return kvstore_pb2.UnpinResponse(found=self.pins.pop(request.name, None) is not None)


def _set(event: asyncio.Event) -> asyncio.Event:
    event.set()
    return event
