"""A store's tenants: guarantees and quotas per tier, and pins, which keep named sets of blocks for a time.

Pins are not stored: they end with the process. A key may be in several pins; a pinned block stays until the last pin
has ended, and costs the tenant once.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from moonpool.base.errors import ConfigError, InvalidRequest, Overloaded
from moonpool.base.kv.blocks import MAX_TENANT_BYTES
from moonpool.base.kv.keys import BlockKey
from moonpool.base.sizes import parse_size

DEFAULT_ROW = "*"  # names the row for tenants without a row of their own; each such tenant gets the row's grants
MAX_TENANT_ROWS = 64  # each is a set of gauges
ByteCount = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
QuotaKind = Literal["dram", "ssd", "pins"]  # in which a tenant has bytes: a tier, or the blocks kept by pins in either
MAX_NAME_BYTES = 256  # of a pin, as UTF-8
MAX_ENTRIES = 1 << 18  # keys of all pins together; a key in several pins counts for each
MAX_TTL_S = 7 * 86400.0  # of a pin that is not renewed
MAX_PINS = 1024
"""Pins of a store at once."""


class TenantRow(BaseModel):
    """One tenant's quotas and guarantees, in bytes: blocks in DRAM, pinned blocks, records on SSD.

    Other tenants cannot evict the tenant's blocks below the guarantee. The tenant never has more than the quota;
    None = no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dram_guarantee_bytes: ByteCount = 0
    dram_quota_bytes: ByteCount | None = None
    ssd_guarantee_bytes: ByteCount = 0
    ssd_quota_bytes: ByteCount | None = None
    pin_bytes: ByteCount | None = None

    def guarantee(self, what: QuotaKind) -> int:
        return {"dram": self.dram_guarantee_bytes, "ssd": self.ssd_guarantee_bytes, "pins": 0}[what]

    def quota(self, what: QuotaKind) -> int | None:
        return {"dram": self.dram_quota_bytes, "ssd": self.ssd_quota_bytes, "pins": self.pin_bytes}[what]


def check_rows(rows: Mapping[str, TenantRow], dram_bytes: int, ssd_bytes: int) -> None:
    """Checks that the tiers can grant the rows; raises ConfigError naming the field."""
    if len(rows) > MAX_TENANT_ROWS:
        raise ConfigError("tenants", f"at most {MAX_TENANT_ROWS} rows, not {len(rows)}")
    if any(len(name.encode()) > MAX_TENANT_BYTES for name in rows):
        raise ConfigError("tenants", f"a name has more than {MAX_TENANT_BYTES} bytes")
    capacities: dict[QuotaKind, int] = {"dram": dram_bytes, "ssd": ssd_bytes}
    for tier, capacity in capacities.items():
        for name, row in rows.items():
            guarantee, quota = row.guarantee(tier), row.quota(tier)
            field = f"tenants.{name}.{tier}_guarantee_bytes"
            if name == DEFAULT_ROW and guarantee:
                raise ConfigError(field, "nothing can be guaranteed to any number of tenants")
            if quota is not None and guarantee > quota:
                raise ConfigError(field, f"must not exceed the quota ({quota}), is {guarantee}")
        total = sum(row.guarantee(tier) for row in rows.values())
        if total > capacity:
            message = f"together {total}, but {tier}_bytes is only {capacity}"
            raise ConfigError(f"tenants.*.{tier}_guarantee_bytes", message)


def sum_by_tenant(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums up (tenant, bytes)."""
    sums: dict[str, int] = {}
    for tenant, nbytes in counts:
        sums[tenant] = sums.get(tenant, 0) + nbytes
    return sums


class TenantBytes(collections.Counter[str]):
    """Bytes by tenant, without tenants that have none."""

    total_bytes = 0

    def add(self, tenant: str, nbytes: int) -> None:
        """Counts more bytes of a tenant; fewer when `nbytes` is negative."""
        now = self.get(tenant, 0) + nbytes
        assert now >= 0
        self.total_bytes += nbytes
        if now:
            self[tenant] = now
        else:
            self.pop(tenant, None)

    def of_row(self, name: str, rows: Container[str]) -> int:
        """Bytes held by the tenant with a row; for "*", by all tenants without one of the `rows`."""
        if name != DEFAULT_ROW:
            return self[name]
        return sum(nbytes for tenant, nbytes in self.items() if tenant not in rows)


@dataclasses.dataclass(slots=True, eq=False)
class TenantAccount:
    """Tenants' grants in one tier or for their pins, and tenants' use, in bytes.

    The tier or the pins keep `used` up to date, block by block.
    """

    guarantees: Mapping[str, int] = dataclasses.field(default_factory=dict)  # for tenants with a guarantee
    quotas: Mapping[str, int | None] = dataclasses.field(default_factory=dict)  # of those with a row; None: no limit
    used: TenantBytes = dataclasses.field(default_factory=TenantBytes, init=False)

    @staticmethod
    def of(rows: Mapping[str, TenantRow], what: QuotaKind) -> "TenantAccount":
        guarantees = {name: row.guarantee(what) for name, row in rows.items() if row.guarantee(what)}
        return TenantAccount(guarantees, {name: row.quota(what) for name, row in rows.items()})

    def quota(self, tenant: str) -> int | None:
        """Most bytes that a tenant may have; None for no limit."""
        return self.quotas.get(tenant, self.quotas.get(DEFAULT_ROW))

    def over_quota(self, tenant: str, incoming: int = 0) -> int:
        """Bytes by which a tenant would exceed the quota with `incoming` bytes more; 0 if within the quota."""
        quota = self.quota(tenant)
        return 0 if quota is None else max(0, self.used[tenant] + incoming - quota)

    def guards(self, tenant: str, nbytes: int) -> bool:
        """Whether evicting `nbytes` would leave the tenant with less than the guarantee."""
        guarantee = self.guarantees.get(tenant)
        return guarantee is not None and self.used[tenant] - nbytes < guarantee

    def guarded_from(self, tenant: str, stays: Mapping[str, int]) -> int:
        """Bytes that guarantees keep from being evicted for `tenant`, beyond those by tenant that stay anyway."""
        return sum(
            max(0, min(self.used[other], guarantee) - stays.get(other, 0))
            for other, guarantee in self.guarantees.items()
            if other != tenant
        )


SizeOf = Callable[[BlockKey], int | None]  # bytes of a block; None if not here


class PinLimit(enum.Enum):
    """Why a pin keeps fewer blocks than were asked for, as in the contract."""

    UNSPECIFIED = enum.auto()
    ABSENT = enum.auto()
    TENANT_BUDGET = enum.auto()
    STORE_BUDGET = enum.auto()


class PinOutcome(NamedTuple):
    """How many leading blocks a pin keeps, their bytes, and why not more."""

    blocks: int
    nbytes: int
    limit: PinLimit


class _Pin(NamedTuple):
    keys: Sequence[BlockKey] = ()
    expires_at: float = 0.0


@dataclasses.dataclass(slots=True)
class _Pinned:
    """A pinned block: bytes, and each tenant's number of pins."""

    nbytes: int
    pins: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Pins:
    """All pins of a store. Times are arguments, in seconds on one clock.

    All together keep at most `budget_bytes`. The account of blocks kept by each tenant's pins is kept up to date here.
    """

    def __init__(
        self,
        budget_bytes: int = 0,
        account: TenantAccount | None = None,
        *,
        max_pins: int = MAX_PINS,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.account = account or TenantAccount()
        self.max_pins = max_pins
        self.max_entries = max_entries
        self.by_name: dict[tuple[str, str], _Pin] = {}
        self.pinned: dict[BlockKey, _Pinned] = {}
        self.nbytes = 0  # of all pinned blocks; one that several tenants pin counts once

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(self, key: object) -> bool:
        return key in self.pinned

    @property
    def keys(self) -> int:
        return len(self.pinned)

    @property
    def next_expiry(self) -> float:
        """When the next pin ends; infinite without pins."""
        return min((pin.expires_at for pin in self.by_name.values()), default=math.inf)

    def pin(
        self, tenant: str, name: str, keys: Sequence[BlockKey], size_of: SizeOf, *, now: float, ttl_s: float
    ) -> tuple[PinOutcome, list[BlockKey]]:
        """Keeps the leading keys that are here and fit the budgets; replaces the tenant's pin of that name.

        Call `expire` first: an expired pin still counts.

        Returns:
            The outcome, and the keys with a possibly changed state.

        Raises:
            Overloaded: there are too many pins, or too many keys in pins.
        """
        _check(tenant, name, keys, ttl_s)
        others = [pin for place, pin in self.by_name.items() if place != (tenant, name)]
        entries = sum(len(pin.keys) for pin in others)
        if len(others) >= self.max_pins or entries + len(keys) > self.max_entries:
            message = f"there are {len(others)} other pins of {entries} blocks, and there may be no more"
            raise Overloaded(message, reason="kvstore_pins", retry_after_s=self.next_expiry - now)
        changed = list(dict.fromkeys((*keys, *self._end([(tenant, name)]))))
        outcome = self._take(tenant, keys, size_of)
        if outcome.blocks:
            self.by_name[tenant, name] = _Pin(keys[: outcome.blocks], now + ttl_s)
        return outcome, changed

    def _take(self, tenant: str, keys: Sequence[BlockKey], size_of: SizeOf) -> PinOutcome:
        nbytes = 0
        for count, key in enumerate(keys):
            pinned, size = self.pinned.get(key), size_of(key)
            if size is None:
                return PinOutcome(count, nbytes, PinLimit.ABSENT)
            size = size if pinned is None else pinned.nbytes
            owed = 0 if pinned is not None and tenant in pinned.pins else size
            if self.account.over_quota(tenant, owed):
                return PinOutcome(count, nbytes, PinLimit.TENANT_BUDGET)
            if pinned is None:
                if self.nbytes + size > self.budget_bytes:
                    return PinOutcome(count, nbytes, PinLimit.STORE_BUDGET)
                pinned = self.pinned[key] = _Pinned(size)
                self.nbytes += size
            self.account.used.add(tenant, owed)
            pinned.pins[tenant] += 1
            nbytes += size
        return PinOutcome(len(keys), nbytes, PinLimit.UNSPECIFIED)

    def unpin(self, tenant: str, name: str) -> list[BlockKey]:
        """Ends a pin, if there is one; this and what ends several returns their keys."""
        return self._end([(tenant, name)])

    def end_all(self, tenants: Container[str]) -> list[BlockKey]:
        return self._end([place for place in self.by_name if place[0] in tenants])

    def expire(self, now: float) -> list[BlockKey]:
        return self._end([place for place, pin in self.by_name.items() if pin.expires_at <= now])

    def _end(self, places: Sequence[tuple[str, str]]) -> list[BlockKey]:
        keys = [(tenant, key) for tenant, name in places for key in self.by_name.pop((tenant, name), _Pin()).keys]
        for tenant, key in keys:
            pinned = self.pinned[key]
            pinned.pins[tenant] -= 1
            if not pinned.pins[tenant]:
                del pinned.pins[tenant]
                self.account.used.add(tenant, -pinned.nbytes)
            if not pinned.pins:
                del self.pinned[key]
                self.nbytes -= pinned.nbytes
        return list(dict.fromkeys(key for _, key in keys))


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
