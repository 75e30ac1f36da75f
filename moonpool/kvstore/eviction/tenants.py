"""A store's tenants: guarantees and quotas, per tier and for pins, and what each tenant uses."""

import collections
import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from moonpool.base.errors import ConfigError
from moonpool.base.kv.blocks import MAX_TENANT_BYTES, PICTURES
from moonpool.base.sizes import parse_size

DEFAULT_ROW = "*"  # names the row for tenants without a row of their own; each such tenant gets the row's grants
MAX_TENANT_ROWS = 64  # each is a set of gauges
ByteCount = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
QuotaKind = Literal["dram", "ssd", "pins"]  # in which a tenant has bytes: a tier, or the blocks kept by pins in either


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
        """Bytes held by the tenant with a row; for "*", by all tenants without one of the `rows`, without pictures."""
        if name != DEFAULT_ROW:
            return self[name]
        return sum(nbytes for tenant, nbytes in self.items() if tenant not in rows and tenant != PICTURES)


@dataclasses.dataclass(slots=True, eq=False)
class TenantAccount:
    """Tenants' grants in one tier or for their pins, and tenants' use, in bytes.

    The tier or the pins keep `used` up to date, block by block.
    """

    guarantees: Mapping[str, int] = dataclasses.field(default_factory=dict)  # for tenants with a guarantee
    quotas: Mapping[str, int | None] = dataclasses.field(default_factory=dict)  # of those with a row; None: no limit
    used: TenantBytes = dataclasses.field(default_factory=TenantBytes, init=False)

    @staticmethod
    def of(rows: Mapping[str, TenantRow], what: QuotaKind, pictures: int | None = None) -> "TenantAccount":
        """What the rows grant. `pictures`: bytes granted to the rows of pictures of all tenants; None = no grant."""
        guarantees = {name: row.guarantee(what) for name, row in rows.items() if row.guarantee(what)}
        quotas = {name: row.quota(what) for name, row in rows.items()}
        if pictures is not None:
            quotas[PICTURES] = guarantees[PICTURES] = pictures
        return TenantAccount(guarantees, quotas)

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
