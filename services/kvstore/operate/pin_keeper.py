"""Pins with a clock: ends each pin when its time is over."""

import asyncio
from collections.abc import Sequence

from moonpool.kv.keys import BlockKey
from services.kvstore.core.store import BlockStore
from services.kvstore.tenancy.pins import PinOutcome


class PinKeeper:
    """The pins of a store as its service uses them; on the event loop it was made on.

    Args:
        store: the store.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def pin(self, tenant: str, name: str, keys: Sequence[BlockKey], ttl_s: float) -> PinOutcome:
        """See `Pins.pin`."""
        try:
            return self._store.pin(tenant, name, keys, now=self._loop.time(), ttl_s=ttl_s)
        finally:
            self._arm()

    def unpin(self, tenant: str, name: str) -> bool:
        """Ends a pin; False when there is none."""
        found = self._store.unpin(tenant, name)
        self._arm()
        return found

    def _arm(self) -> None:
        self.close()
        at = self._store.pins.next_expiry
        if at is not None:
            self._timer = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self._store.expire_pins(self._loop.time())
        self._arm()

    def close(self) -> None:
        """Ends no more pins."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
