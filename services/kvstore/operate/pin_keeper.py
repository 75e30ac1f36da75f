"""The pins of a store: what they change in its tiers, and when they end."""

import asyncio
from collections.abc import Callable, Collection, Container, Sequence

from moonpool.kv.keys import BlockKey
from services.kvstore.core.tiered_store import TieredStore
from services.kvstore.operate.writer import within
from services.kvstore.tenancy.pins import PinOutcome


class PinKeeper:
    """Pins blocks in either tier; `run` ends each pin when its time is over, on the event loop's `clock`."""

    def __init__(self, tiers: TieredStore, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._pins = tiers.dram.pins
        self._clock = clock
        self._pinned = asyncio.Event()

    async def run(self) -> None:
        while True:
            self.expire()
            await within(self._pins.next_expiry - self._clock(), self._pinned)
            self._pinned.clear()

    def pin(self, tenant: str, name: str, keys: Sequence[BlockKey], ttl_s: float) -> PinOutcome:
        self.expire()
        outcome, changed = self._pins.pin(tenant, name, keys, self._size_of, now=self._clock(), ttl_s=ttl_s)
        self._changed(changed)
        self._pinned.set()
        return outcome

    def _size_of(self, key: BlockKey) -> int | None:
        block_format = self._tiers.format_of(key)
        return None if block_format is None else block_format.layout.block_bytes

    def unpin(self, tenant: str, name: str) -> bool:
        changed = self._pins.unpin(tenant, name)
        self._changed(changed)
        return bool(changed)

    def end_all(self, tenants: Container[str]) -> None:
        self._changed(self._pins.end_all(tenants))

    def expire(self) -> None:
        self._changed(self._pins.expire(self._clock()))

    def _changed(self, keys: Collection[BlockKey]) -> None:
        if keys:
            self._tiers.dram.pins_changed(keys)
            self._tiers.listener.room()
