"""Which KV is to be deleted (by key, tenant, namespace or age), and the deletions that concern some blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.errors import InvalidRequest
from moonpool.kv.keys import BlockKey

EVERY_TENANT = "*"
"""In a table of times to live: each tenant that is not named."""


@dataclass(frozen=True, slots=True)
class KVSelection:
    """All blocks that one of the fields names."""

    keys: frozenset[BlockKey] = frozenset()
    tenants: frozenset[str] = frozenset()
    namespaces: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        """How many keys and names there are; nothing is chosen without one."""
        return len(self.keys) + len(self.tenants) + len(self.namespaces)

    @classmethod
    def union(cls, selections: Iterable[KVSelection]) -> KVSelection:
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


_Table = dict[Any, "str | dict[str, None]"]
"""The deletion that names something, or all that do. Most keys are named once, and there may be very many."""


class DeletionIndex:
    """Deletions by id, in the order in which they came."""

    def __init__(self) -> None:
        self._selections: dict[str, KVSelection] = {}
        self._by_tenant: _Table = {}
        self._by_namespace: _Table = {}
        self._by_key: _Table = {}

    def __len__(self) -> int:
        return len(self._selections)

    def __contains__(self, deletion: str) -> bool:
        return deletion in self._selections

    def __iter__(self) -> Iterator[str]:
        """Ids, first come first."""
        return iter(self._selections)

    def __getitem__(self, deletion: str) -> KVSelection:
        return self._selections[deletion]

    def add(self, deletion: str, selection: KVSelection) -> None:
        """Takes one; another one of its id is replaced."""
        self.remove(deletion)
        self._selections[deletion] = selection
        for table, names in self._tables(selection):
            _add(table, names, deletion)

    def remove(self, deletion: str) -> None:
        """Forgets one; unknown ids are fine."""
        selection = self._selections.pop(deletion, None)
        if selection is not None:
            for table, names in self._tables(selection):
                _remove(table, names, deletion)

    def concerning(self, keys: Iterable[bytes], tenant: str, namespace: bytes) -> list[str]:
        """Ids of those that name the tenant, the namespace or one of the keys; sorted."""
        if not self._selections:
            return []
        named = [self._by_tenant.get(tenant), self._by_namespace.get(namespace)]
        if self._by_key:
            named += map(self._by_key.get, keys)
        return sorted({id_ for one in named if one for id_ in ((one,) if isinstance(one, str) else one)})

    def with_ending(self, ending: bytes, portion: int) -> Generator[None, None, list[str]]:
        """Ids of those, of all that are known now, that name a key which ends so; in the order in which they came.

        Each key may be looked at: after `portion` of them others have a turn. Deletions may come and go meanwhile.
        """
        found, looked_at = list[str](), 0
        for deletion, selection in list(self._selections.items()):
            keys = iter(selection.keys)
            while some := list(itertools.islice(keys, portion - looked_at)):
                looked_at += len(some)
                if ends := any(key.endswith(ending) for key in some):
                    found.append(deletion)
                if looked_at == portion:
                    looked_at = 0
                    yield
                if ends:
                    break
        return found

    def _tables(self, selection: KVSelection) -> Iterator[tuple[_Table, frozenset[Any]]]:
        yield self._by_tenant, selection.tenants
        yield self._by_namespace, selection.namespaces
        yield self._by_key, selection.keys


def _add(table: _Table, names: frozenset[Any], deletion: str) -> None:
    if table.keys().isdisjoint(names):
        table.update(dict.fromkeys(names, deletion))
        return
    for name in names:
        there = table.setdefault(name, deletion)
        if isinstance(there, dict):
            there[deletion] = None
        elif there != deletion:
            table[name] = {there: None, deletion: None}


def _remove(table: _Table, names: frozenset[Any], deletion: str) -> None:
    for name in names:
        there = table[name]
        if isinstance(there, dict):
            del there[deletion]
        if not there or there == deletion:
            del table[name]
