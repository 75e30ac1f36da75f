"""Deletions of KV by what they name, so that those which concern some blocks are found without a look at each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from moonpool.kv.selection import Selection

_Table = dict[Any, "str | dict[str, None]"]
"""The deletion that names something, or all that do. Most keys are named once, and there may be very many."""


class Deletions:
    """Deletions by id, in the order in which they came."""

    def __init__(self) -> None:
        self._selections: dict[str, Selection] = {}
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

    def __getitem__(self, deletion: str) -> Selection:
        return self._selections[deletion]

    def add(self, deletion: str, selection: Selection) -> None:
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

    def concerning(self, keys: Iterable[bytes], tenant: str, namespace: bytes, ending: bytes = b"") -> list[str]:
        """Ids of those that name the tenant, the namespace or one of the keys; sorted.

        If `ending` is given, also of those that name any key which ends so: for that each name is looked at.
        """
        if not self._selections:
            return []
        named = [self._by_tenant.get(tenant), self._by_namespace.get(namespace)]
        if self._by_key:
            named += map(self._by_key.get, keys)
            named += (ids for key, ids in self._by_key.items() if key.endswith(ending)) if ending else ()
        return sorted({id_ for one in named if one for id_ in ((one,) if isinstance(one, str) else one)})

    def _tables(self, selection: Selection) -> Iterator[tuple[_Table, frozenset[Any]]]:
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
