"""The plan of one batch of writes to one disk: new records, carried records, and the segments that leave."""

import dataclasses
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from enum import Enum

from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.file_io import Buffer
from moonpool.base.kv.keys import BlockKey, bind, slice_hash
from moonpool.kvstore.ssd.catalogue import RecordLocation
from moonpool.kvstore.ssd.encryption import EncryptionKey, RecordCipher
from moonpool.kvstore.ssd.files import ALIGN
from moonpool.kvstore.ssd.index import IndexChange
from moonpool.kvstore.ssd.records import pack_header
from moonpool.kvstore.ssd.segment import ENTRY, IndexEntry, RowId, Segment


@dataclasses.dataclass(slots=True)
class Append:
    """One record to be written into `segment`: a new `block`, or the record at `source`, which is carried over."""

    segment: Segment
    entry: IndexEntry
    block: DramBlock | None = None
    encryption: EncryptionKey | None = None  # of the new block; None: stays in plaintext
    source: tuple[Segment, int] | None = None
    bad: bool = False  # what is at the source is not what was written

    @property
    def key(self) -> BlockKey:
        return self.entry[0]

    @property
    def offset(self) -> int:
        return self.entry[1] * ALIGN

    @property
    def end(self) -> int:
        return self.offset + self.entry[2] * ALIGN

    def parts(self) -> tuple[Buffer, ...]:
        """The record of a new block; an encrypted one is another one each time."""
        assert self.block is not None
        block, number = self.block, self.segment.number
        padding = bytes(-block.info.nbytes % ALIGN)
        if self.encryption is None:
            return pack_header(block.info, block.hashes, number), block.data, padding
        seal, slices = RecordCipher.new(self.encryption, block.info).seal(
            map(block.slice, range(len(block.hashes))), block.hashes
        )
        hashes = [bind(slice_hash(data), block.info.key, layer) for layer, data in enumerate(slices)]
        return pack_header(block.info, hashes, number, seal), *slices, padding


def segment_ends(appends: Iterable[Append]) -> dict[Segment, int]:
    """Where the segments of appends end after them."""
    return {append.segment: append.end for append in appends}


def pack_entries(appends: Iterable[Append]) -> dict[Segment, bytes]:
    """The entries of appends, by segment."""
    entries: dict[Segment, bytearray] = {}
    for append in appends:
        entries.setdefault(append.segment, bytearray()).extend(ENTRY.pack(*append.entry))
    return {segment: bytes(packed) for segment, packed in entries.items()}


@dataclasses.dataclass(slots=True)
class Victim:
    """A segment that is reclaimed."""

    segment: Segment
    carried: list[int] = dataclasses.field(default_factory=list)  # rows of blocks that are written anew, oldest first
    carried_bytes: int = 0  # of their records
    removed: list[int] = dataclasses.field(default_factory=list)  # rows of blocks that are not here any more

    @property
    def freed_bytes(self) -> int:
        return self.segment.size - self.carried_bytes


class PlanState(Enum):
    """How far a plan has come; `TRANSITIONS` has the changes that may happen."""

    PLANNED = "planned"
    """Made by `SsdTier.plan`; a thread may be writing what is carried over."""
    CLEARED = "cleared"
    """The first transaction was committed: victims are forgotten, and carried blocks have new places."""
    COMMITTED = "committed"
    """All blocks are durable."""
    FAILED = "failed"
    """None of the blocks is durable. What was cleared stays cleared."""


TRANSITIONS: Mapping[PlanState, frozenset[PlanState]] = {
    PlanState.PLANNED: frozenset({PlanState.CLEARED, PlanState.FAILED}),
    PlanState.CLEARED: frozenset({PlanState.COMMITTED, PlanState.FAILED}),
    PlanState.COMMITTED: frozenset(),
    PlanState.FAILED: frozenset(),
}
"""For each state the ones that may follow. A plan begins as PLANNED."""


@dataclasses.dataclass(slots=True)
class WritePlan:
    """One batch. Made by `SsdTier.plan`, done by `SsdTier.commit`, ended by `committed` or `failed`.

    `full`: segments without anything to carry are deleted first, since the index may need their room to forget them.
    """

    disk: int
    blocks: list[DramBlock]  # durable once the batch is committed
    rejected: list[DramBlock]  # find no room; not written
    given_up: list[BlockKey]  # over-quota tenants' older blocks, for the new blocks
    victims: list[Victim]
    forgotten: list[Segment]  # to be forgotten by the index; their files may be deleted already
    nameless: list[Segment]  # the index has forgotten them; their files could not be deleted
    dead: list[RowId]  # the index does not know that they are
    full: bool
    carry: list[Append]
    store: list[Append]
    reuse: dict[Segment, Segment]  # new segments that take over reclaimed segments' files
    deleting: dict[Segment, Future[None]]  # files, in another thread: earlier plans', and then this plan's
    erase: list[RecordLocation]  # records to be overwritten
    tails: dict[Segment, int]  # files to be cut off at these ends of the segments
    check_index: bool = False
    cut: list[Segment] = dataclasses.field(default_factory=list)  # of these, what the device took
    unerased: list[RecordLocation] = dataclasses.field(default_factory=list)  # of these, what the device did not take
    erase_error: OSError | None = None  # why the device did not take something of both, the last reason
    state: PlanState = PlanState.PLANNED  # changes by `move` only
    unreadable: Segment | None = None  # the segment that failed the plan
    lost: list[BlockKey] = dataclasses.field(default_factory=list)  # of bad records, once the plan has ended
    written_bytes: int = 0  # of records that count, once the plan has ended
    indexed: list[IndexChange] = dataclasses.field(default_factory=list)  # what the index was told

    def move(self, state: PlanState) -> None:
        """Change the state, along `TRANSITIONS` only."""
        assert state in TRANSITIONS[self.state], f"a plan cannot go from {self.state} to {state}"
        self.state = state

    @property
    def cleared(self) -> bool:
        """Whether the first transaction was committed, of a plan that has not ended."""
        return self.state is PlanState.CLEARED

    @property
    def removed(self) -> list[BlockKey]:
        return self.given_up + [victim.segment.keys[row] for victim in self.victims for row in victim.removed]

    @property
    def removed_segments(self) -> list[Segment]:
        return [*self.forgotten, *(victim.segment for victim in self.victims)]

    @property
    def erases(self) -> bool:
        """Whether deleted blocks must be gone from the device with the plan."""
        return bool(self.erase or self.tails or self.forgotten or self.nameless)

    @property
    def idle(self) -> bool:
        """Whether committing the plan changes nothing."""
        erased = len(self.erase) > len(self.unerased)
        return not (self.carry or self.store or self.dead or erased or self.removed_segments)

    @property
    def carried(self) -> list[Append]:
        return [append for append in self.carry if not append.bad]
