"""The interface of a store that is compared: its processes, and a client to be measured.

A client sends blocks from its memory and reads them into it. Each call does whole operations one after the other, each
of one batch of blocks, and returns when the last is done: a put when others can read its blocks, a get when the blocks
are in the client's memory. Block number `i` of a batch lies at place `i`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from benchmarks.kvstore_client import Memory

Batches = Sequence[Sequence[bytes]]
"""Keys of each operation."""


class BlockClient(Protocol):
    """One process' client of one store."""

    def put(self, batches: Batches, block_bytes: int) -> None:
        """Store blocks that were never stored.

        Raises:
            RuntimeError: they were not stored.
        """
        ...

    def get(self, batches: Batches, block_bytes: int) -> None:
        """Read blocks that were stored.

        Raises:
            RuntimeError: they were not found.
        """
        ...

    def clear(self) -> None:
        """Delete all blocks where the store can; where it cannot, old blocks are evicted."""
        ...

    def close(self) -> None:
        """End the connections."""
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
