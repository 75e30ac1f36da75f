"""Tables by block key, cut into parts: so many small dicts instead of a large one.

The cut is the same for every table: one part of several tables holds the same keys. No step over a table is long: a
part can be listed whole between two turns of the event loop, and a table grows part by part. Keys are hashes, so that
their first byte spreads them evenly.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from moonpool.kv.keys import BlockKey

Value = TypeVar("Value")

PARTS = 256


class PartTable(Generic[Value]):
    """Values by block key.

    Attributes:
        parts: the dicts, by the key's first byte; who looks up many keys may do so here.
    """

    def __init__(self) -> None:
        self.parts: list[dict[BlockKey, Value]] = [{} for _ in range(PARTS)]

    def __contains__(self, key: bytes) -> bool:
        return key in self.parts[key[0]]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[BlockKey]:
        for part in self.parts:
            yield from part

    def __getitem__(self, key: BlockKey) -> Value:
        return self.parts[key[0]][key]

    def __setitem__(self, key: BlockKey, value: Value) -> None:
        self.parts[key[0]][key] = value

    def __delitem__(self, key: BlockKey) -> None:
        del self.parts[key[0]][key]

    def get(self, key: BlockKey) -> Value | None:
        """The key's value; None when it has none."""
        return self.parts[key[0]].get(key)

    def pop(self, key: BlockKey) -> Value:
        """Takes the key's value out.

        Raises:
            KeyError: it has none.
        """
        return self.parts[key[0]].pop(key)

    def values(self) -> Iterator[Value]:
        """All values."""
        for part in self.parts:
            yield from part.values()

    def items(self) -> Iterator[tuple[BlockKey, Value]]:
        """All keys with their values."""
        for part in self.parts:
            yield from part.items()
