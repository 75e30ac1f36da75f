"""One batch on its way to the device: what is written, carried over and removed, and how far it came."""

import dataclasses
from collections.abc import Iterable

from moonpool.kv.blocks import BlockFormat, DramBlock
from moonpool.kv.keys import BlockKey
from services.kvstore.ssd.catalogue import Row, Segment, Slot
from services.kvstore.ssd.id_table import IdChange
from services.kvstore.ssd.records import ALIGN


@dataclasses.dataclass(slots=True)
class Append:
    """One record to be written into `segment`: a new `block`, or the record at `source`, which is carried over."""

    segment: Segment
    row: Row
    block: DramBlock | None = None
    source: tuple[Segment, int] | None = None

    @property
    def key(self) -> BlockKey:
        return self.row[0]

    @property
    def offset(self) -> int:
        return self.row[1] * ALIGN

    @property
    def end(self) -> int:
        return self.offset + self.row[2] * ALIGN


def ends(appends: Iterable[Append]) -> dict[Segment, int]:
    """Where the segments of appends end after them."""
    return {append.segment: append.end for append in appends}


@dataclasses.dataclass(slots=True)
class Victim:
    """A segment that is reclaimed.

    Attributes:
        carried: slots of blocks that are written anew, oldest first.
        carried_bytes: of their records.
        removed: slots and keys of blocks that are not here any more.
    """

    segment: Segment
    carried: list[int]
    carried_bytes: int
    removed: list[tuple[int, BlockKey]]

    @property
    def freed_bytes(self) -> int:
        return self.segment.size - self.carried_bytes


@dataclasses.dataclass(slots=True)
class WritePlan:
    """One batch. Made by `SsdTier.plan`, done by `SsdTier.commit`, ended by `committed` or `failed`.

    Attributes:
        blocks: what is durable once the batch is committed.
        rejected: blocks that find no room; they are not written.
        forgotten: segments whose file may be deleted already, to be forgotten by the index.
        nameless: segments that the index has forgotten, and whose file could not be deleted.
        dead: slots that the index does not know to be dead.
        formats, tenants: ids that the index must learn or may forget.
        full: the device is full: segments without anything to carry are deleted first, since the index may need their
            room to forget them.
        cleared: the first transaction was committed: victims are forgotten, what was carried has its new place.
        named: the index has learnt the ids.
        bad: carried records that are not what was written.
        unreadable: a segment that could not be read, for which the plan failed.
        undeleted: segments whose file could not be deleted.
        lost: keys of bad records; known after `committed` or `failed`.
    """

    blocks: list[DramBlock]
    rejected: list[DramBlock]
    victims: list[Victim]
    forgotten: list[Segment]
    nameless: list[Segment]
    dead: list[Slot]
    formats: IdChange[BlockFormat]
    tenants: IdChange[str]
    full: bool = False
    carry: list[Append] = dataclasses.field(default_factory=list)
    store: list[Append] = dataclasses.field(default_factory=list)
    cleared: bool = False
    named: bool = False
    bad: list[Append] = dataclasses.field(default_factory=list)
    unreadable: Segment | None = None
    undeleted: list[Segment] = dataclasses.field(default_factory=list)
    lost: list[BlockKey] = dataclasses.field(default_factory=list)

    @property
    def removed(self) -> list[BlockKey]:
        return [key for victim in self.victims for _, key in victim.removed]

    @property
    def removed_segments(self) -> list[Segment]:
        return [*self.forgotten, *(victim.segment for victim in self.victims)]

    @property
    def idle(self) -> bool:
        """Whether committing it changes nothing in the index."""
        return not (self.carry or self.store or self.dead or self.removed_segments)

    @property
    def carried(self) -> list[Append]:
        """What was carried over, once `cleared`."""
        bad = {id(append) for append in self.bad}
        return [append for append in self.carry if id(append) not in bad]
