"""Pins: chains that a kvstore keeps whatever comes, until a time; renewed, completed, and ended in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.keys import BlockKey, unpack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.retention import RetainedChain, RetentionOwner
from moonpool.conductor.records import CALL_TIMEOUT_S
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

log = get_logger(__name__)

MAX_TTL_S = 7 * 86400.0
"""The longest TTL of a pin, and so of what is pinned."""
REPIN_PAUSE_S = 0.5
"""Shortest pause between two attempts to pin the rest of a chain that is used."""
MAX_PIN_TIMES = 4096
"""Chains with a remembered last attempt to pin."""


@dataclass(frozen=True, slots=True)
class PinnedPart:
    """What a kvstore has pinned of a chain.

    Attributes:
        store: the kvstore; None = there is none.
        blocks: leading blocks that are pinned.
        nbytes: their bytes.
        error: the reason if that is not all; "" = all of the chain is pinned.
    """

    store: kv_pb2.Instance | None = None
    blocks: int = 0
    nbytes: int = 0
    error: str = ""


class ChainPins:
    """Pins chains at kvstores, one attempt per owner at a time.

    Who keeps a chain gives the attempt: a function that reads what is to be kept, and calls `pin`.

    Args:
        stores: the kvstores that have joined.
        held: number of a chain's leading blocks that each instance holds.
        channels: to kvstores.
        start_task: runs work in the background.
    """

    def __init__(
        self,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        held: Callable[[Sequence[BlockKey]], Mapping[str, int]],
        channels: Channels,
        start_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._stores = stores
        self._held = held
        self._channels = channels
        self._start_task = start_task
        self._pinning: dict[RetentionOwner, bool] = {}  # whose chain is being pinned; True: once more afterwards
        self._last_pin: dict[RetentionOwner, float] = {}  # end of the last attempt

    def best_store(self, keys: Sequence[BlockKey]) -> tuple[kv_pb2.Instance | None, int]:
        """Return the kvstore that holds most of a chain, and the number of leading blocks there."""
        held = self._held(keys)
        stores = [(held.get(store.id, 0), store) for store in self._stores()]
        blocks, best = max(stores, key=lambda found: found[0], default=(0, None))
        return best, blocks

    # --- when to pin -------------------------------------------------------------------------------------------------

    def complete(self, owner: RetentionOwner, attempt: Callable[[], Awaitable[None]]) -> None:
        """Pin the rest of a chain that was used, soon: its KV may be stored again. Attempts under way suffice."""
        if owner not in self._pinning:
            self._start(owner, attempt, REPIN_PAUSE_S)

    def renew(self, owner: RetentionOwner, attempt: Callable[[], Awaitable[None]]) -> None:
        """Pin a chain now; once more if the chain is being pinned."""
        if not self._again(owner):
            self._start(owner, attempt, 0.0)

    async def renewed(self, owner: RetentionOwner, attempt: Callable[[], Awaitable[None]]) -> None:
        """Pin a chain and wait for that; if being pinned now, order another attempt without waiting."""
        if not self._again(owner):
            self._pinning[owner] = False
            await self._run(owner, attempt, 0.0)

    def _again(self, owner: RetentionOwner) -> bool:
        """Order another attempt if one is under way; return whether it is."""
        if owner in self._pinning:
            self._pinning[owner] = True
        return owner in self._pinning

    def _start(self, owner: RetentionOwner, attempt: Callable[[], Awaitable[None]], pause_s: float) -> None:
        self._pinning[owner] = False
        now = asyncio.get_running_loop().time()
        after_s = max(0.0, self._last_pin.get(owner, -pause_s) + pause_s - now)
        self._start_task(self._run(owner, attempt, after_s))

    async def _run(self, owner: RetentionOwner, attempt: Callable[[], Awaitable[None]], after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            while True:
                self._pinning[owner] = False
                await attempt()
                if not self._pinning[owner]:
                    return
        finally:
            del self._pinning[owner]
            if len(self._last_pin) >= MAX_PIN_TIMES:
                self._last_pin.clear()
            self._last_pin[owner] = asyncio.get_running_loop().time()

    # --- at kvstores -------------------------------------------------------------------------------------------------

    async def pin(self, chain: RetainedChain, now: float) -> PinnedPart:
        """Pin a chain, until the chain's end, at the kvstore that holds most of it. A pin at another kvstore ends."""
        keys = unpack_keys(chain.keys)
        store, _ = self.best_store(keys)
        if store is None:
            return PinnedPart(error="not pinned: no kvstore is there")
        if chain.stores not in ((), (store.id,)):
            await self.unpin(chain)
        tenant, name = chain.owner
        ttl_s = min(MAX_TTL_S, chain.until - now)
        request = kvstore_pb2.PinRequest(name=name, keys=chain.keys, ttl_s=ttl_s, tenant=tenant)
        try:
            stub = KVStoreServiceStub(self._channels.get(store.address))
            pinned: kvstore_pb2.PinResponse = await stub.Pin(request, timeout=CALL_TIMEOUT_S)
        except MoonpoolError as failure:
            return PinnedPart(store, error=f"not pinned: {failure}")
        limit = kvstore_pb2.PinLimit.Name(pinned.limit).removeprefix("PIN_LIMIT_").lower()
        error = "" if pinned.blocks == len(keys) else f"not all of it is pinned: {limit}"
        return PinnedPart(store, pinned.blocks, pinned.bytes, error)

    async def unpin(self, chain: RetainedChain, store: kv_pb2.Instance | None = None) -> None:
        """End a chain's pin, by default at the chain's kvstore."""
        store = store or next((store for store in self._stores() if store.id in chain.stores), None)
        if store is None:
            return
        tenant, name = chain.owner
        request = kvstore_pb2.UnpinRequest(name=name, tenant=tenant)
        try:
            await KVStoreServiceStub(self._channels.get(store.address)).Unpin(request, timeout=CALL_TIMEOUT_S)
        except MoonpoolError as error:
            log.warning("a pin was not ended", pin=name, error=str(error))
