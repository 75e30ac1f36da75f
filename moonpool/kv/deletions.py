"""Deletions of KV by what they name, so that those which concern some blocks are found without a look at each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonpool.kv.selection import Selection

_Name = tuple[str, str | bytes]


class Deletions:
    """Deletions by id, in the order in which they came."""

    def __init__(self) -> None:
        self._selections: dict[str, Selection] = {}
        self._by_name: dict[_Name, dict[str, None]] = {}

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
        for name in _names(selection):
            self._by_name.setdefault(name, {})[deletion] = None

    def remove(self, deletion: str) -> None:
        """Forgets one; unknown ids are fine."""
        selection = self._selections.pop(deletion, None)
        for name in _names(selection) if selection is not None else ():
            named = self._by_name[name]
            del named[deletion]
            if not named:
                del self._by_name[name]

    def concerning(self, keys: Iterable[bytes], tenant: str, namespace: bytes, ending: bytes = b"") -> list[str]:
        """Ids of those that name the tenant, the namespace or one of the keys; sorted.

        If `ending` is given, also of those that name any key which ends so: for that each name is looked at.
        """
        if not self._selections:
            return []
        names: list[_Name] = [("tenant", tenant), ("namespace", namespace), *(("key", key) for key in keys)]
        names += (name for name in self._by_name if _ends(name, ending)) if ending else ()
        found = {deletion for name in names for deletion in self._by_name.get(name, ())}
        return sorted(found)


def _ends(name: _Name, ending: bytes) -> bool:
    kind, value = name
    return kind == "key" and isinstance(value, bytes) and value.endswith(ending)


def _names(selection: Selection) -> Iterator[_Name]:
    yield from (("tenant", tenant) for tenant in selection.tenants)
    yield from (("namespace", namespace) for namespace in selection.namespaces)
    yield from (("key", key) for key in selection.keys)
