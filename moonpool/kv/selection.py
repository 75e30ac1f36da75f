"""Which KV is to be deleted: by key, by tenant, by namespace, or for its age."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moonpool.errors import InvalidRequest
from moonpool.kv.keys import BlockKey

EVERY_TENANT = "*"
"""In a table of times to live: each tenant that is not named."""


@dataclass(frozen=True, slots=True)
class Selection:
    """All blocks that one of the fields names."""

    keys: frozenset[BlockKey] = frozenset()
    tenants: frozenset[str] = frozenset()
    namespaces: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        """How many keys and names there are; nothing is chosen without one."""
        return len(self.keys) + len(self.tenants) + len(self.namespaces)

    @classmethod
    def union(cls, selections: Iterable[Selection]) -> Selection:
        """All that one of them names."""
        every = list(selections)
        return cls(
            frozenset[BlockKey]().union(*(one.keys for one in every)),
            frozenset[str]().union(*(one.tenants for one in every)),
            frozenset[bytes]().union(*(one.namespaces for one in every)),
        )

    def takes(self, key: BlockKey, tenant: str, namespace: bytes) -> bool:
        """Whether a block is chosen."""
        return tenant in self.tenants or key in self.keys or namespace in self.namespaces


def check_ttls(ttl_s: Mapping[str, float], field: str = "ttl_s") -> dict[str, float]:
    """Times to live by tenant, seconds.

    Raises:
        InvalidRequest: one is not positive and finite; names `field`.
    """
    for tenant, seconds in ttl_s.items():
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidRequest(f"{field}[{tenant}]", f"must be above 0 and finite, is {seconds:g}")
    return dict(ttl_s)


def ttl_of(ttl_s: Mapping[str, float], tenant: str) -> float:
    """How long a tenant's KV may live in one place, seconds; infinite when nothing is said."""
    return ttl_s.get(tenant, ttl_s.get(EVERY_TENANT, math.inf))
