"""Deleting KV: which blocks (by key, tenant, namespace or age), and an index of the deletions that match blocks.

A client deletes at a conductor, which keeps the deletion as a record and sends the deletion to every instance. Each
service deletes matching blocks, and refuses blocks if the sender does not know a matching deletion: such blocks may be
older than the deletion.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import BlockKey, window_key, with_window_keys

EVERY_TENANT = "*"
"""Key in a table of times to live: every tenant without an entry."""
MAX_DELETIONS = 1 << 16
"""Most deletions in a `DeletionLog`. Conductors repeat deletions of the last month only."""
DEMANDED_S = 3600.0
"""Seconds for which KV is taken only from instances that carried out the same deletion.

Older KV is on the way for minutes at most; conductors repeat deletions to joining instances for a month.
"""


@dataclass(frozen=True, slots=True)
class KVSelection:
    """All blocks named by any field. A key names the block's windowed slices, too (`window_key`)."""

    keys: frozenset[BlockKey] = frozenset()
    tenants: frozenset[str] = frozenset()
    namespaces: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        """Number of keys and names; an empty selection names no block."""
        return len(self.keys) + len(self.tenants) + len(self.namespaces)

    @classmethod
    def union(cls, selections: Iterable[KVSelection]) -> KVSelection:
        """The blocks that any of the selections names."""
        every = list(selections)
        return cls(
            frozenset[BlockKey]().union(*(selection.keys for selection in every)),
            frozenset[str]().union(*(selection.tenants for selection in every)),
            frozenset[bytes]().union(*(selection.namespaces for selection in every)),
        )

    def matches(self, key: BlockKey, tenant: str, namespace: bytes) -> bool:
        """Whether the selection names a block."""
        if tenant in self.tenants or namespace in self.namespaces:
            return True
        return bool(self.keys) and (key in self.keys or window_key(key) in self.keys)

    def touches(self, keys: Iterable[BlockKey], tenant: str, namespace: bytes) -> bool:
        """Whether the selection names a tenant's block in a namespace."""
        if tenant in self.tenants or namespace in self.namespaces:
            return True
        return bool(self.keys) and not self.keys.isdisjoint(with_window_keys(keys))


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
    """Seconds that a tenant's KV may stay in one place; infinite if the table has no entry."""
    return ttl_s.get(tenant, ttl_s.get(EVERY_TENANT, math.inf))


_Table = dict[Any, tuple[str, ...]]
"""Deletions that name a key, tenant or namespace. Most keys, maybe millions, are named once and share a tuple."""


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
        """Add a deletion; replace another deletion with the same id."""
        self.remove(deletion)
        self._selections[deletion] = selection
        alone = (deletion,)
        for table, names in self._tables(selection):
            for name in names:
                table[name] = (*table[name], deletion) if name in table else alone

    def remove(self, deletion: str) -> None:
        """Remove a deletion; unknown ids are ignored."""
        selection = self._selections.pop(deletion, None)
        for table, names in self._tables(selection) if selection is not None else ():
            for name in names:
                if left := tuple(other for other in table[name] if other != deletion):
                    table[name] = left
                else:
                    del table[name]

    def matching(self, keys: Iterable[bytes], tenant: str, namespace: bytes) -> list[str]:
        """Sorted ids of deletions that name the tenant, the namespace or one of the keys."""
        if not self._selections:
            return []
        named = [self._by_tenant.get(tenant), self._by_namespace.get(namespace)]
        if self._by_key:
            named += map(self._by_key.get, with_window_keys(keys))
        return sorted({deletion for some in named if some for deletion in some})

    def with_ending(self, ending: bytes, portion: int) -> Generator[None, None, list[str]]:
        """Ids of deletions that name a key with this ending, oldest first.

        Yields after each `portion` keys, so that other work has a turn. Deletions may come and go meanwhile.
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


class DeletionLog:
    """The deletions that an engine instance has carried out; the oldest are dropped at last.

    The log vouches for this instance for good. The log demands a deletion from other instances for `DEMANDED_S` only:
    an instance that joined later may not know an old deletion, and has no older KV.

    Args:
        namespace: the KV's namespace.
        clock: seconds.
    """

    def __init__(self, namespace: bytes, clock: Callable[[], float]) -> None:
        self.namespace = namespace
        self._clock = clock
        self._deletions = DeletionIndex()
        self._demanded = DeletionIndex()
        self._until: deque[tuple[float, str]] = deque()  # those that are demanded, first come first

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._deletions

    def add(self, name: str, selection: KVSelection) -> None:
        """Add a deletion that the pool has carried out."""
        self._deletions.add(name, selection)
        self._drop_old()
        self._demanded.add(name, selection)
        self._until.append((self._clock() + DEMANDED_S, name))
        while len(self._deletions) > MAX_DELETIONS:
            self._deletions.remove(next(iter(self._deletions)))

    def matching(self, keys: Iterable[bytes], tenant: str) -> list[str]:
        """Return the names of deletions that such blocks came after."""
        return self._deletions.matching(keys, tenant, self.namespace)

    def demanded(self, keys: Iterable[bytes], tenant: str) -> list[str]:
        """Return the names of deletions that a source of such blocks must have carried out."""
        self._drop_old()
        return self._demanded.matching(keys, tenant, self.namespace)

    def _drop_old(self) -> None:
        while self._until and self._until[0][0] <= self._clock():
            self._demanded.remove(self._until.popleft()[1])
