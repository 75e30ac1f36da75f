"""Pins contexts' KV where it is stored, and writes down how that went: one pin at a time for each context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc.aio

from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from services.conductor.contexts import MAX_TTL_S, Contexts, place_of
from services.conductor.ledger import CALL_TIMEOUT_S, Ledger

log = get_logger(__name__)

AGAIN_S = 0.5
"""A context that is not wholly pinned is pinned again after its uses, so often at most."""
MAX_TRIED = 4096
"""Contexts of which it is remembered when they were pinned."""

Held = Callable[[Sequence[BlockKey]], Mapping[str, int]]
Begin = Callable[[Coroutine[Any, Any, None]], None]
_Place = tuple[str, str]  # a context's tenant and id


class Pinning:
    """The pins of contexts.

    Args:
        contexts: the records' content.
        ledger: has the records.
        channels: to kvstores.
        stores: kvstores that are joined.
        held: how many leading blocks of a chain each instance holds.
        begin: does something besides.
    """

    def __init__(
        self,
        contexts: Contexts,
        ledger: Ledger,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        held: Held,
        begin: Begin,
    ) -> None:
        self._contexts = contexts
        self._ledger = ledger
        self._channels = channels
        self._stores = stores
        self._held = held
        self._begin = begin
        self._again: dict[_Place, bool] = {}  # contexts that are being pinned; whether once more then
        self._tried: dict[_Place, float] = {}  # when each was pinned last

    def best(self, keys: Sequence[BlockKey]) -> tuple[kv_pb2.Instance | None, int]:
        """The kvstore that holds most of a chain, and how many blocks."""
        held = self._held(keys)
        stores = [(held.get(store.id, 0), store) for store in self._stores()]
        blocks, best = max(stores, key=lambda one: one[0], default=(0, None))
        return best, blocks

    def used(self, context: pb.Context) -> None:
        """A context was used, which may have been stored again: what is not pinned of it is pinned, in a moment."""
        if context.pinned_blocks < context.blocks and place_of(context) not in self._again:
            self._start(place_of(context), AGAIN_S)

    def wanted(self, context: pb.Context) -> None:
        """Pins what a kvstore has of a context, until its time is over. While it is being pinned: once more."""
        place = place_of(context)
        if place in self._again:
            self._again[place] = True
        elif context.keys:
            self._start(place, 0.0)

    async def now(self, context: pb.Context) -> None:
        """As `wanted`, and waits for it; while it is being pinned, not."""
        place = place_of(context)
        if place in self._again:
            self._again[place] = True
        else:
            self._again[place] = False
            await self._pin(place, 0.0)

    def _start(self, place: _Place, pause_s: float) -> None:
        self._again[place] = False
        now = asyncio.get_running_loop().time()
        self._begin(self._pin(place, max(0.0, self._tried.get(place, -pause_s) + pause_s - now)))

    async def unpin(self, context: pb.Context, store: kv_pb2.Instance | None = None) -> None:
        """Ends a context's pin, at the store that has it by default."""
        store = store or next((one for one in self._stores() if one.id == context.kvstore), None)
        if store is not None:
            request = kvstore_pb2.UnpinRequest(name=_name(context), tenant=context.made.tenant)
            try:
                await KVStoreServiceStub(self._channels.get(store.address)).Unpin(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning("a context's pin was not ended", context=context.id, error=str(from_rpc_error(error)))

    async def _pin(self, place: _Place, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            while True:
                self._again[place] = False
                await self._once(place)
                if not self._again[place]:
                    return
        finally:
            del self._again[place]
            self._note(place)

    def _note(self, place: _Place) -> None:
        if len(self._tried) >= MAX_TRIED:
            self._tried.clear()
        self._tried[place] = asyncio.get_running_loop().time()

    async def _once(self, place: _Place) -> None:
        """One attempt, by what is known of the context now."""
        context = self._contexts.get(*place)
        if context is None:
            return
        keys, now = unpack_keys(context.keys), self._ledger.clock()
        store, _ = self.best(keys)
        ttl_s = min(MAX_TTL_S, context.expires_at - now)
        if ttl_s <= 0:
            return
        if store is None:
            await self._ledger.push([self._contexts.pinned(context, error="not pinned: no kvstore is there")])
            return
        if context.kvstore not in ("", store.id):
            await self.unpin(context)
        pinned, error = await self._ask(store, context, keys, ttl_s)
        await self._ledger.pull()
        latest = self._contexts.get(*place)
        if latest is None:  # deleted meanwhile
            await self.unpin(context, store)
            return
        if latest.expires_at != context.expires_at:  # renewed meanwhile, perhaps by another conductor that pinned first
            self._again[place] = True
        records = [self._contexts.pinned(latest, store.id, pinned.blocks, pinned.bytes, error)]
        if pinned.blocks == latest.blocks and latest.status != pb.CONTEXT_STATUS_READY:
            records.append(self._contexts.filled(latest, pb.CONTEXT_STATUS_READY))
        await self._ledger.push(records)

    async def _ask(
        self, store: kv_pb2.Instance, context: pb.Context, keys: Sequence[BlockKey], ttl_s: float
    ) -> tuple[kvstore_pb2.PinResponse, str]:
        """What the store has pinned, and why not all."""
        request = kvstore_pb2.PinRequest(
            name=_name(context), keys=context.keys, ttl_s=ttl_s, tenant=context.made.tenant
        )
        try:
            stub = KVStoreServiceStub(self._channels.get(store.address))
            pinned: kvstore_pb2.PinResponse = await stub.Pin(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return kvstore_pb2.PinResponse(), f"not pinned: {from_rpc_error(error)}"
        limit = kvstore_pb2.PinLimit.Name(pinned.limit).removeprefix("PIN_LIMIT_").lower()
        return pinned, "" if pinned.blocks == len(keys) else f"not all of it is pinned: {limit}"


def _name(context: pb.Context) -> str:
    """Of its pin."""
    return f"context:{context.id}"
