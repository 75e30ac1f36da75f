"""What the comparison asks of a store: to be started in processes of its own, and a client to be measured.

A client holds the memory that blocks are taken from and must end in. Each call does whole operations, one after the
other, each of one batch of blocks, and returns when the last is done: a put when its blocks can be read by others, a
get when they lie in the client's memory. Block number `i` of a batch lies at place `i`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from benchmarks.kvstore_shape import Memory

Batches = Sequence[Sequence[bytes]]
"""Keys of each operation."""


class BlockClient(Protocol):
    """One process' client of one store."""

    def put(self, batches: Batches, block_bytes: int) -> None:
        """Stores blocks that were never stored.

        Raises:
            RuntimeError: They were not stored.
        """
        ...

    def get(self, batches: Batches, block_bytes: int) -> None:
        """Reads blocks that were stored.

        Raises:
            RuntimeError: They were not there.
        """
        ...

    def clear(self) -> None:
        """Has the store forget everything, where it can; where it cannot, old blocks make room by themselves."""
        ...

    def close(self) -> None:
        """Ends the connections."""
        ...


class Store(Protocol):
    """A module of this package.

    Attributes:
        NAME: as it is shown.
    """

    NAME: str

    def running(self, nbytes: int) -> AbstractContextManager[str]:
        """The store's processes with so much memory; gives the address for clients.

        Raises:
            Skipped: it is not installed.
        """
        ...

    def client(self, address: str, memory: Memory) -> BlockClient:
        """A client of it.

        Raises:
            Skipped: it is not installed.
        """
        ...
