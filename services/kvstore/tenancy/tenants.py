"""What tenants are granted, and how many bytes of each lie in a tier.

A tier tells its account of every block that comes or goes.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moonpool.errors import ConfigError
from moonpool.kv.blocks import MAX_TENANT_BYTES

DEFAULT_ROW = "*"
"""Name of the row for tenants that have none of their own, each by itself."""

MAX_TENANT_ROWS = 64
"""Rows at most; each is a set of gauges."""

Bytes = Annotated[int, Field(ge=0)]


class TenantRow(BaseModel):
    """What one tenant is granted, in bytes.

    Other tenants cannot evict it below its guarantee. It never has more than its quota; None is no limit.

    Attributes:
        dram_guarantee_bytes, dram_quota_bytes: in the DRAM tier, sizes of blocks.
        ssd_guarantee_bytes, ssd_quota_bytes: in the SSD tier, sizes of records.
        pin_bytes: blocks that its pins keep; None for what all pins together may.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dram_guarantee_bytes: Bytes = 0
    dram_quota_bytes: Bytes | None = None
    ssd_guarantee_bytes: Bytes = 0
    ssd_quota_bytes: Bytes | None = None
    pin_bytes: Bytes | None = None


def read_rows(value: object) -> object:
    """Rows as a flag gives them, YAML or JSON, or as they stand in a file.

    Raises:
        ValueError: it is no mapping of names to rows.
        ConfigError: naming the row and the field that is wrong.
    """
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value) if value.strip() else {}
        except yaml.YAMLError as error:
            raise ValueError(f"is no YAML: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of tenant to row")
    rows: dict[str, TenantRow] = {}
    for name, row in value.items():
        try:
            rows[str(name)] = TenantRow.model_validate(row)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(["tenants", str(name), *map(str, first["loc"])])
            raise ConfigError(field, first["msg"]) from None
    return rows


def check_rows(rows: Mapping[str, TenantRow], dram_bytes: int, ssd_bytes: int) -> None:
    """Whether the rows can be kept.

    Raises:
        ConfigError: naming the field.
    """
    if len(rows) > MAX_TENANT_ROWS:
        raise ConfigError("tenants", f"at most {MAX_TENANT_ROWS} rows, not {len(rows)}")
    for name, row in rows.items():
        if len(name.encode()) > MAX_TENANT_BYTES:
            raise ConfigError("tenants", f"a name has more than {MAX_TENANT_BYTES} bytes")
        for tier in ("dram", "ssd"):
            guarantee, quota = getattr(row, f"{tier}_guarantee_bytes"), getattr(row, f"{tier}_quota_bytes")
            field = f"tenants.{name}.{tier}_guarantee_bytes"
            if name == DEFAULT_ROW and guarantee:
                raise ConfigError(field, "nothing can be guaranteed to any number of tenants")
            if quota is not None and guarantee > quota:
                raise ConfigError(field, f"must not exceed the quota ({quota}), is {guarantee}")
    for tier, capacity in (("dram", dram_bytes), ("ssd", ssd_bytes)):
        total = sum(getattr(row, f"{tier}_guarantee_bytes") for row in rows.values())
        if total > capacity:
            raise ConfigError(
                f"tenants.*.{tier}_guarantee_bytes", f"together {total}, but {tier}_bytes is only {capacity}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Grants:
    """Bytes per tenant in one tier.

    Attributes:
        guarantees: of those who have one.
        quotas: of those who have one.
        default_quota: of tenants without a row; None for none.
    """

    guarantees: Mapping[str, int] = dataclasses.field(default_factory=dict)
    quotas: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    default_quota: int | None = None

    @staticmethod
    def of(rows: Mapping[str, TenantRow], tier: str) -> "Grants":
        """Those of one tier: "dram" or "ssd"."""
        named = {name: row for name, row in rows.items() if name != DEFAULT_ROW}
        return Grants(
            {name: value for name, row in named.items() if (value := getattr(row, f"{tier}_guarantee_bytes"))},
            {name: getattr(row, f"{tier}_quota_bytes") for name, row in named.items()},
            getattr(rows.get(DEFAULT_ROW, TenantRow()), f"{tier}_quota_bytes"),
        )

    @property
    def has_quotas(self) -> bool:
        """Whether any tenant has a quota."""
        return self.default_quota is not None or any(quota is not None for quota in self.quotas.values())

    def quota(self, tenant: str) -> int | None:
        """Most bytes that a tenant may have; None for no limit."""
        return self.quotas.get(tenant, self.default_quota)


class Account:
    """Bytes of one tier by tenant.

    Args:
        grants: what tenants are granted in it.

    Attributes:
        used: bytes of blocks; only tenants that have some.
    """

    def __init__(self, grants: Grants | None = None) -> None:
        self.grants = grants or Grants()
        self.used: collections.Counter[str] = collections.Counter()

    def add(self, tenant: str, nbytes: int) -> None:
        """A block of the tenant came."""
        self.used[tenant] += nbytes

    def remove(self, tenant: str, nbytes: int) -> None:
        """A block of the tenant left."""
        self.used[tenant] -= nbytes
        assert self.used[tenant] >= 0
        if not self.used[tenant]:
            del self.used[tenant]

    def guards(self, tenant: str, nbytes: int) -> bool:
        """Whether the tenant would have less than it is guaranteed if `nbytes` of it left."""
        guarantee = self.grants.guarantees.get(tenant)
        return guarantee is not None and self.used[tenant] - nbytes < guarantee

    def over_quota(self, tenant: str, coming: int = 0) -> int:
        """By how many bytes a tenant would be over its quota with `coming` more; 0 when it would not."""
        quota = self.grants.quota(tenant)
        return 0 if quota is None else max(0, self.used[tenant] + coming - quota)

    def of_row(self, name: str) -> int:
        """Bytes of a tenant that has a row, or of all that have none together under "*"."""
        if name != DEFAULT_ROW:
            return self.used[name]
        return sum(used for tenant, used in self.used.items() if tenant not in self.grants.quotas)

    def check_invariants(self, blocks: Mapping[str, int]) -> None:
        """The account equals `blocks`, the bytes counted anew."""
        assert {name: used for name, used in self.used.items() if used} == {k: v for k, v in blocks.items() if v}
