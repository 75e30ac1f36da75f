"""Changes of the KV keys that an instance holds, as the net effect per key."""

from collections.abc import Iterable
from typing import NamedTuple

STORED, COLD, COOLED, REMOVED = range(4)


class KeyChanges(NamedTuple):
    """Net changes of the set of held keys; no key is both stored and removed.

    Attributes:
        stored: held from now on.
        removed: not held any more.
        cooled: of the stored ones and of those held before: in no memory from now on, only on SSD. Who stores a key
            again has it in memory again.
    """

    stored: Iterable[bytes] = ()
    removed: Iterable[bytes] = ()
    cooled: Iterable[bytes] = ()


class NetChanges:
    """Changes that somebody has not heard of yet: only what became of a key last, in the order of the last changes.

    So memory is bounded by the number of distinct keys, and the order of the lists is of no consequence.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Keys that have changed."""
        return len(self._last)

    def note(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), cooled: Iterable[bytes] = ()) -> None:
        """Takes changes, in this order; a key that is cooled was held before."""
        last = self._last
        for keys, change in ((stored, STORED), (removed, REMOVED)):
            for key in keys:
                last.pop(key, None)  # at the end again
                last[key] = change
        for key in cooled:
            before = last.pop(key, COOLED)
            last[key] = COOLED if before == COOLED else COLD

    def take(self, max_keys: int | None = None) -> KeyChanges:
        """Takes the oldest changes out, of so many keys at most."""
        last = self._last
        if max_keys is None or len(last) <= max_keys:
            taken, self._last = last, {}
        else:
            taken = {key: last.pop(key) for key, _ in zip(list(last), range(max_keys), strict=False)}
        lists: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        stored, removed, cooled = lists
        for key, change in taken.items():
            if change == REMOVED:
                removed.append(key)
                continue
            if change != COOLED:
                stored.append(key)
            if change != STORED:
                cooled.append(key)
        return KeyChanges(*lists)

    def clear(self) -> None:
        """Forgets all changes."""
        self._last.clear()
