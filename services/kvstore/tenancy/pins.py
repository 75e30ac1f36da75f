"""Pins: named sets of blocks that stay for a time, within budgets of bytes.

Pins are not stored: after a restart they are gone. A key may be in several pins; it stays until the last has ended, and
costs its tenant once. Time is an argument.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from moonpool.errors import InvalidRequest, Overloaded
from moonpool.kv.blocks import MAX_TENANT_BYTES
from moonpool.kv.keys import BlockKey
from services.kvstore.tenancy.tenants import DEFAULT_ROW

MAX_NAME_BYTES = 256
"""Longest name of a pin, as UTF-8."""

MAX_ENTRIES = 1 << 18
"""Keys of all pins together, each as often as it is pinned."""

MAX_TTL_S = 7 * 86400.0
"""Longest life of a pin without being renewed."""


class PinLimit(enum.Enum):
    """Why a pin keeps fewer blocks than it was asked for."""

    NONE = "none"
    ABSENT = "absent"
    TENANT_BUDGET = "tenant_budget"
    STORE_BUDGET = "store_budget"


@dataclasses.dataclass(frozen=True, slots=True)
class PinOutcome:
    """What a pin keeps.

    Attributes:
        blocks: how many leading keys.
        nbytes: their bytes.
        expires_at: when it ends unless it is renewed.
        limit: why it is not all of them.
    """

    blocks: int
    nbytes: int
    expires_at: float
    limit: PinLimit


@dataclasses.dataclass(frozen=True, slots=True)
class PinChange:
    """Keys that are pinned from now on, and keys that are not any more."""

    pinned: Sequence[BlockKey] = ()
    unpinned: Sequence[BlockKey] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    keys: Sequence[BlockKey]
    expires_at: float


class Pins:
    """All pins of a store.

    Args:
        budget_bytes: what all pins together may keep.
        tenant_bytes: budgets of tenants that have their own; None in it for the whole.
        default_bytes: that of each other tenant; None for the whole.
        max_pins: names at once.
        max_entries: keys of all pins together, each as often as it is pinned.
    """

    def __init__(
        self,
        budget_bytes: int = 0,
        tenant_bytes: Mapping[str, int | None] | None = None,
        default_bytes: int | None = None,
        *,
        max_pins: int = 1024,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._tenant_bytes = tenant_bytes or {}
        self._default_bytes = default_bytes
        self._max_pins = max_pins
        self._max_entries = max_entries
        self._pins: dict[tuple[str, str], _Pin] = {}
        self._sizes: dict[BlockKey, int] = {}
        self._counts: collections.Counter[tuple[str, BlockKey]] = collections.Counter()
        self._keepers: collections.Counter[BlockKey] = collections.Counter()  # tenants that pin a key
        self._used: collections.Counter[str] = collections.Counter()
        self._entries = 0
        self._next_expiry: float | None = None
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    @property
    def keys(self) -> int:
        """How many blocks are pinned."""
        return len(self._sizes)

    @property
    def next_expiry(self) -> float | None:
        """When the next pin ends; None when there is none."""
        return self._next_expiry

    def used(self, tenant: str) -> int:
        """Bytes that a tenant's pins keep."""
        return self._used[tenant]

    def of_row(self, name: str) -> int:
        """Bytes of a tenant that has a row, or of all that have none together under "*"."""
        if name != DEFAULT_ROW:
            return self._used[name]
        return sum(used for tenant, used in self._used.items() if tenant not in self._tenant_bytes)

    def pin(
        self,
        tenant: str,
        name: str,
        keys: Sequence[BlockKey],
        size_of: Callable[[BlockKey], int | None],
        *,
        now: float,
        ttl_s: float,
    ) -> tuple[PinOutcome, PinChange]:
        """Keeps the leading ones of `keys` that are here and fit the budgets; replaces the tenant's pin of that name.

        Call `expire` first: a pin whose time is over still counts here.

        Args:
            tenant: whose budget it takes.
            name: the pin's.
            keys: a chain; the order counts.
            size_of: bytes of a block that is here, None for one that is not.
            now: the time.
            ttl_s: seconds until it ends unless it is renewed.

        Raises:
            InvalidRequest: naming the field of the request.
            Overloaded: there are as many pins as may be.
        """
        _check(tenant, name, keys, ttl_s)
        old = self._pins.get((tenant, name))
        self._check_room(len(keys) - (len(old.keys) if old is not None else 0), now, new=old is None)
        before = {key for key in (*keys, *(old.keys if old is not None else ())) if key in self._sizes}
        if old is not None:
            self._drop(tenant, self._pins.pop((tenant, name)))
        taken, nbytes, limit = self._take(tenant, keys, size_of)
        if taken:
            self._pins[tenant, name] = _Pin(taken, now + ttl_s)
            self._entries += len(taken)
        self._settle()
        change = PinChange([key for key in taken if key not in before], self._not_kept(before))
        return PinOutcome(len(taken), nbytes, now + ttl_s, limit), change

    def _check_room(self, entries: int, now: float, *, new: bool) -> None:
        if (new and len(self._pins) >= self._max_pins) or self._entries + entries > self._max_entries:
            raise Overloaded(
                f"{len(self._pins)} pins of {self._entries} blocks are as many as may be",
                reason="kvstore_pins",
                retry_after_s=0.0 if self._next_expiry is None else self._next_expiry - now,
            )

    def _take(
        self, tenant: str, keys: Sequence[BlockKey], size_of: Callable[[BlockKey], int | None]
    ) -> tuple[list[BlockKey], int, PinLimit]:
        quota = self._tenant_bytes.get(tenant, self._default_bytes)
        taken: list[BlockKey] = []
        nbytes = 0
        for key in keys:
            size = size_of(key)
            if size is None:
                return taken, nbytes, PinLimit.ABSENT
            size = self._sizes.get(key, size)
            if not self._counts[tenant, key] and quota is not None and self._used[tenant] + size > quota:
                return taken, nbytes, PinLimit.TENANT_BUDGET
            if key not in self._sizes and self.nbytes + size > self.budget_bytes:
                return taken, nbytes, PinLimit.STORE_BUDGET
            self._keep(tenant, key, size)
            taken.append(key)
            nbytes += size
        return taken, nbytes, PinLimit.NONE

    def _keep(self, tenant: str, key: BlockKey, size: int) -> None:
        if key not in self._sizes:
            self._sizes[key] = size
            self.nbytes += size
        if not self._counts[tenant, key]:
            self._used[tenant] += size
            self._keepers[key] += 1
        self._counts[tenant, key] += 1

    def _drop(self, tenant: str, pin: _Pin) -> None:
        self._entries -= len(pin.keys)
        for key in pin.keys:
            self._counts[tenant, key] -= 1
            if self._counts[tenant, key]:
                continue
            del self._counts[tenant, key]
            size = self._sizes[key]
            self._used[tenant] -= size
            if not self._used[tenant]:
                del self._used[tenant]
            self._keepers[key] -= 1
            if not self._keepers[key]:
                del self._keepers[key], self._sizes[key]
                self.nbytes -= size

    def unpin(self, tenant: str, name: str) -> PinChange | None:
        """Ends a pin; None when there is none."""
        pin = self._pins.pop((tenant, name), None)
        return None if pin is None else self._end([(tenant, pin)])

    def expire(self, now: float) -> PinChange:
        """Ends the pins whose time is over."""
        if self._next_expiry is None or now < self._next_expiry:
            return PinChange()
        over = [place for place, pin in self._pins.items() if pin.expires_at <= now]
        return self._end([(place[0], self._pins.pop(place)) for place in over])

    def _end(self, pins: Sequence[tuple[str, _Pin]]) -> PinChange:
        for tenant, pin in pins:
            self._drop(tenant, pin)
        self._settle()
        return PinChange((), self._not_kept({key for _, pin in pins for key in pin.keys}))

    def _settle(self) -> None:
        self._next_expiry = min((pin.expires_at for pin in self._pins.values()), default=None)

    def _not_kept(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if key not in self._sizes]

    def check_invariants(self) -> None:
        """What is kept is what the pins name, counted once per tenant and once in all."""
        counts = collections.Counter((tenant, key) for (tenant, _), pin in self._pins.items() for key in pin.keys)
        assert +self._counts == counts
        assert +self._keepers == collections.Counter(key for _, key in counts)
        assert set(self._sizes) == {key for _, key in counts}
        used: collections.Counter[str] = collections.Counter()
        for tenant, key in counts:
            used[tenant] += self._sizes[key]
        assert +self._used == used
        assert self.nbytes == sum(self._sizes.values()) <= self.budget_bytes
        assert self._next_expiry == min((pin.expires_at for pin in self._pins.values()), default=None)
        assert len(self._pins) <= self._max_pins
        assert self._entries == sum(len(pin.keys) for pin in self._pins.values()) <= self._max_entries


def _check(tenant: str, name: str, keys: Sequence[BlockKey], ttl_s: float) -> None:
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest("name", f"must have 1 to {MAX_NAME_BYTES} bytes")
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidRequest("tenant", f"has more than {MAX_TENANT_BYTES} bytes")
    if not keys:
        raise InvalidRequest("keys", "a pin has at least one key")
    if len(set(keys)) != len(keys):
        raise InvalidRequest("keys", "a key occurs twice")
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise InvalidRequest("ttl_s", f"must be in (0, {MAX_TTL_S:g}], is {ttl_s:g}")
