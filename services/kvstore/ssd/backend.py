"""What a durable tier must offer, so that the SSD tier can be exchanged for another one.

Owns the contract only. Two kinds of methods: those of the event loop, which are quick and touch no device, and those
that may block and run in a worker thread. `commit` runs in one thread at a time (the writer thread), `BlockReader.read`
in many.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from moonpool.kv.blocks import BlockFormat, BlockInfo, DramBlock
from moonpool.kv.keys import BlockKey


class BlockReader(Protocol):
    """Reads one block, which is not reclaimed until `release`."""

    key: BlockKey
    format: BlockFormat

    @property
    def info(self) -> BlockInfo | None:
        """The whole of what is known of the block, once a slice was read."""
        ...

    def read(self, layer: int, out: memoryview) -> None:
        """Blocking. As `read_layers`, for one layer."""
        ...

    def read_layers(self, first: int, outs: Sequence[memoryview]) -> None:
        """Blocking. Fills `outs` (`slice_bytes` each) with the verified bytes of consecutive layers, from `first` on.

        Raises:
            BadRecordError: what is stored is not what was written.
            OSError: it cannot be read.
        """
        ...

    def hash_of(self, layer: int) -> int:
        """The hash of a layer that was read, bound to the block."""
        ...

    def release(self) -> None:
        """Event loop. Ends the reading; once."""
        ...


@dataclasses.dataclass(slots=True)
class WritePlan:
    """One batch on its way to the device.

    Attributes:
        blocks: what will be durable once the batch is committed.
        rejected: blocks that find no room; they are not written.
        removed: keys that are not stored here any more from now on, to make room.
        work: the backend's own, for `commit`.
        idle: committing it changes nothing.
        lost: keys that are not stored here any more, found out by `commit`; known after `committed` or `failed`.
    """

    blocks: list[DramBlock]
    rejected: list[DramBlock]
    removed: list[BlockKey]
    work: Any
    idle: bool = False
    lost: list[BlockKey] = dataclasses.field(default_factory=list)


class Backend(Protocol):
    """A bounded, durable set of blocks. Event loop, where nothing else is said."""

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        ...

    @property
    def used_bytes(self) -> int:
        """How much of it is used."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is durable here."""
        ...

    def __len__(self) -> int:
        """Number of durable blocks."""
        ...

    def part(self, number: int) -> Iterable[BlockKey]:
        """Keys of the durable blocks in one part (parts.py); all parts together are all of them."""
        ...

    def newest_first(self, step: int) -> Iterator[Sequence[BlockKey]]:
        """Keys of the durable blocks, the last written first, in steps of bounded effort.

        Blocks may come and go between two steps; those that come then need not be among them.

        Args:
            step: the most blocks or remains of blocks that are looked at for one item, which may be empty.
        """
        ...

    def format_of(self, key: BlockKey) -> BlockFormat | None:
        """The block's format; None when it is not here."""
        ...

    def tenant_of(self, key: BlockKey) -> str | None:
        """Whose block it is; None when it is not here."""
        ...

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were used, wherever from; those that are here are worth keeping when room is made."""
        ...

    def forget_oldest(self, tenant: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Gives up the tenant's oldest blocks, together at least `nbytes` as stored, but none that `stays`.

        Returns:
            Their keys; they are not here any more.
        """
        ...

    def reader(self, key: BlockKey) -> BlockReader:
        """Begins reading a block that is here."""
        ...

    def plan(self, blocks: Sequence[DramBlock]) -> WritePlan:
        """Decides where blocks that are not here will lie and what must go for them; it goes at once."""
        ...

    def commit(self, plan: WritePlan) -> None:
        """Blocking. Does the plan; when it returns, the plan's blocks are as durable as the backend promises.

        Raises:
            OSError, lmdb.Error: it could not; the blocks are not durable.
        """
        ...

    def committed(self, plan: WritePlan) -> None:
        """The plan was committed: its blocks are here from now on."""
        ...

    def failed(self, plan: WritePlan, error: BaseException) -> None:
        """The plan was not committed."""
        ...

    def drop(self, reader: BlockReader) -> bool:
        """What `reader` reads is bad; forgets it. False when it was forgotten or replaced already."""
        ...

    @property
    def has_housekeeping(self) -> bool:
        """Whether a plan without blocks would still have something to do."""
        ...

    def close(self) -> None:
        """Blocking. Gives files and locks back."""
        ...

    def check_invariants(self) -> None:
        """Asserts that the backend's books agree with each other."""
        ...
