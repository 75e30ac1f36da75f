"""Room in segments: where the next record goes, and which segment is reclaimed.

Reclaimed oldest first, with a second chance: a block used since written is written anew once, into the newest segment;
at most half a segment is spared so. Blocks that are pinned, or that a guarantee covers, are always carried over. A
segment without live records goes before all others. Rows of pictures have segments of their own: pictures that make
room for pictures leave such a segment, and cost KV nothing.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.ssd.catalogue import Catalogue
from moonpool.kvstore.ssd.files import ALIGN
from moonpool.kvstore.ssd.segment import MAX_SEGMENT_BYTES, Segment
from moonpool.kvstore.ssd.segment_files import segment_path
from moonpool.kvstore.ssd.write_plan import Victim

MIN_SEGMENTS = 8  # from this many on, the budget leaves room for carried records before the old file is deleted
MAX_VICTIMS = 16  # per plan, unless more pay: a store full of kept blocks must not be rewritten for one
SPARED_DIVISOR = 2  # at most this fraction of what could become free is carried over for recent use
LOOK_AT = 8  # segments asked about per choice, once a removable segment was found
MAX_LOOKED_AT = 64  # the same, while there was none
ASK_AGAIN = 64  # plans in which a segment is passed over after too much had to stay: asking walks all its blocks


@dataclasses.dataclass(eq=False)
class SegmentSpace:
    """Room for records on one disk, together at most `capacity_bytes`. Used while a plan is made."""

    catalogue: Catalogue
    disk: int
    folder: Path
    capacity_bytes: int
    segment_bytes: int
    next_segment: int
    pins: Container[BlockKey]
    # Is appended to, by whether its records are rows of pictures; a file of an earlier life never is.
    active: dict[bool, Segment] = dataclasses.field(default_factory=dict)
    used_bytes: int = 0  # of all segments, live or dead, as they will be after the plan under way
    _thin: list[int] = dataclasses.field(default_factory=list)
    _plans: int = 0

    def __post_init__(self) -> None:
        roomy = self.capacity_bytes >= MIN_SEGMENTS * self.segment_bytes
        self._reserve = self.segment_bytes // 2 if roomy else 0
        self.segment_bytes = min(self.segment_bytes, MAX_SEGMENT_BYTES // 2)
        self._full_at = self.capacity_bytes  # the device has no room for more, as far as is known
        self.recount()

    @property
    def segments(self) -> list[Segment]:
        """All of this disk, oldest first."""
        return [segment for segment in self.catalogue.segments.values() if segment.disk == self.disk]

    def recount(self, *, full: bool = False) -> None:
        """A plan has ended; the plan found the device `full`, or not."""
        self._plans += 1
        self.used_bytes = sum(max(segment.size, segment.room) for segment in self.segments)
        if full or self.used_bytes > self._full_at:
            self._full_at = self.used_bytes if full else self.capacity_bytes

    def is_active(self, segment: Segment) -> bool:
        """Whether records are appended to a segment."""
        return segment in self.active.values()

    def seal(self, segment: Segment) -> None:
        """Append no more to a segment."""
        self.active = {kind: other for kind, other in self.active.items() if other is not segment}

    @property
    def has_work(self) -> bool:
        return bool(self._thin) or self.used_bytes > self.capacity_bytes

    @property
    def tails(self) -> list[Segment]:
        """Segments without further appends whose files still hold older segments' bytes."""
        return [segment for segment in self.segments if segment.room > segment.size and not self.is_active(segment)]

    @property
    def turn(self) -> tuple[int, int]:
        """Order disks: the disk with most room, in segments, comes first, else the disk with fewest plans so far."""
        return (self.used_bytes - min(self._full_at, self.capacity_bytes)) // self.segment_bytes, self._plans

    def compact(self, min_live_share: float) -> int:
        """Have the next plans rewrite segments with a live share below this part of a full segment; return how many."""
        self._thin = [
            segment.id
            for segment in self.segments
            if not self.is_active(segment)
            and segment.live.total_bytes < min_live_share * max(segment.size, self.segment_bytes)
        ]
        return len(self._thin)

    def rewrite(self, segments: Iterable[Segment]) -> None:
        """Have the next plans rewrite some segments, which goes with the end of their files."""
        for segment in dict.fromkeys(segments):
            self.seal(segment)
            if segment.id not in self._thin:
                self._thin.append(segment.id)

    def make_room(self, coming: Mapping[bool, int], victims: list[Victim]) -> bool:
        """Reclaim segments until so many bytes fit; False when they cannot. Adds to `victims`.

        `coming`: bytes by whether they are of pictures.
        """
        limit, nbytes = self.capacity_bytes - self._reserve, sum(coming.values())
        if nbytes > limit:
            return False
        while (incoming := self._with(coming)) > limit and _may_take_more(nbytes, victims):
            spare = self.capacity_bytes - incoming + nbytes - sum(victim.segment.size for victim in victims)
            # Still within the budget: to rewrite a segment of kept blocks can wait.
            if not self._reclaim(victims, max(0, spare), cheaply=incoming <= self.capacity_bytes):
                break
        return self._with(coming) <= self.capacity_bytes

    def _with(self, coming: Mapping[bool, int]) -> int:
        """Bytes of all files with so many more in them; the active ones may have room for some."""
        rooms = {kind: max(0, segment.room - segment.size) for kind, segment in self.active.items()}
        return self.used_bytes + sum(max(0, nbytes - rooms.get(kind, 0)) for kind, nbytes in coming.items())

    def give_up(self, nbytes: int, victims: list[Victim]) -> None:
        """Reclaim at least one segment, and enough to free `nbytes`, whatever the budget."""
        while len(victims) < MAX_VICTIMS and self._reclaim(victims, 0):
            if sum(victim.freed_bytes for victim in victims) >= nbytes:
                break

    def compact_one(self, victims: list[Victim]) -> None:
        """Have the next thin segment rewritten, with all live records inside."""
        while self._thin and not victims:
            segment = self.catalogue.segments.get(self._thin.pop(0))
            if segment is not None and not (self.is_active(segment) or segment.going or segment.readers):
                victims.append(self._take(segment, range(len(segment.keys))))

    def pass_over(self, segment: Segment) -> None:
        """A segment cannot be read: others are reclaimed for a while."""
        segment.kept_share, segment.asked_at = 1.0, self._plans

    def _reclaim(self, victims: list[Victim], spare_bytes: int, *, cheaply: bool = False) -> bool:
        """Empty the next segment without readers into `victims`; False if there is none. Active ones come last.

        At most `spare_bytes` are carried over for having been used; `cheaply`: not if most must be carried over.
        """
        idle = [segment for segment in self.segments if not segment.readers and not segment.going and segment.size]
        sealed = [segment for segment in idle if not self.is_active(segment)]
        segment = self._choose(segment for segment in sealed if not segment.live) or self._choose(sealed)
        segment = segment or self._choose(segment for segment in idle if self.is_active(segment))
        if segment is None or (cheaply and segment.kept_share > 0.5):
            return False
        free_bytes = round(segment.size * (1 - segment.kept_share))
        victims.append(self._take(segment, self._spared(segment, min(spare_bytes, free_bytes // SPARED_DIVISOR))))
        return True

    def _choose(self, segments: Iterable[Segment]) -> Segment | None:
        """The first among `segments` (oldest first, none empty) from which at least half would become free.

        Failing that, among the first few the segment that would free most; None if no segment would. A segment is asked
        about once in `ASK_AGAIN` plans, but always before removal: `kept_share` is up to date.
        """
        best: Segment | None = None
        looked = 0
        for segment in segments:
            if self._plans - segment.asked_at >= ASK_AGAIN:
                if looked >= (MAX_LOOKED_AT if best is None else LOOK_AT):
                    break
                looked += 1
                self._ask(segment)
            if segment.asked_at != self._plans and segment.kept_share <= 0.5:
                self._ask(segment)
            if segment.kept_share <= 0.5:
                return segment
            if segment.kept_share < (1 if best is None else best.kept_share):
                best = segment
        if best is not None:
            self._ask(best)
        return best if best is not None and best.kept_share < 1 else None

    def _ask(self, segment: Segment) -> None:
        rows = self.catalogue.live_rows(segment)
        kept_bytes = sum(segment.nbytes(row) for row in rows if self._is_kept(segment, row))
        segment.kept_share = kept_bytes / segment.size
        segment.asked_at = self._plans

    def _is_kept(self, segment: Segment, row: int) -> bool:
        account = segment.kind(row).account
        return segment.keys[row] in self.pins or self.catalogue.account.guards(account, segment.nbytes(row))

    def _take(self, segment: Segment, spared: Container[int]) -> Victim:
        """Carry the blocks that must stay and `spared` rows, which keep their place for now; forget the others.

        One after the other, so that a tenant's guarantee holds for all together.
        """
        victim = Victim(segment)
        for row in self.catalogue.live_rows(segment):
            if row in spared or self._is_kept(segment, row):
                victim.carried.append(row)
                victim.carried_bytes += segment.nbytes(row)
            else:
                self.catalogue.forget(segment.keys[row])
                victim.removed.append(row)
        segment.going = True
        self.seal(segment)
        self.used_bytes -= victim.freed_bytes
        return victim

    def _spared(self, segment: Segment, nbytes: int) -> set[int]:
        """Rows with used blocks, the youngest, together at most `nbytes`."""
        spared: set[int] = set()
        if not nbytes or 1 not in segment.used:
            return spared
        for row in range(len(segment.keys) - 1, -1, -1):
            if segment.used[row] and self.catalogue.is_live(segment, row):
                nbytes -= segment.nbytes(row)
                if nbytes < 0:
                    break
                spared.add(row)
        return spared

    def reusable(self, victims: Iterable[Victim], doomed: Container[Segment]) -> list[Segment]:
        """Segments whose files new segments may take over: without readers, and with distinguishable records.

        Much smaller segments are left out, as each generation would make more of them. Segments with records to be
        overwritten are left out: if the device does not overwrite a record, the file must go.
        """
        most = self.segment_bytes
        found = [victim.segment for victim in victims if not victim.carried and victim.segment not in doomed]
        return [
            segment
            for segment in found
            if segment.overwritable and most <= 2 * segment.size <= 2 * most and segment.room <= segment.size
        ]

    def place(
        self,
        length: int,
        of_pictures: bool,
        sizes: dict[Segment, int],
        free: list[Segment],
        reuse: dict[Segment, Segment],
    ) -> tuple[Segment, int]:
        """A segment with room for a record, and the place inside (in units of `ALIGN`); `sizes` are the ends so far.

        A new segment takes over a `free` segment's file, as `reuse` then says; while free segments are there, no
        segment grows beyond its file.
        """
        segment = self.active.get(of_pictures)
        start = sizes.get(segment, segment.size) if segment is not None else 0
        if segment is None or (start and start + length * ALIGN > (segment.room if free else self.segment_bytes)):
            path, start = segment_path(self.folder, self.next_segment), 0
            segment = self.active[of_pictures] = Segment(self.next_segment, path, disk=self.disk, overwritable=True)
            self.next_segment += 1
            self.catalogue.segments[segment.id] = segment
            if free:
                old = reuse[segment] = free.pop(0)
                segment.room = old.size
        sizes[segment] = start + length * ALIGN
        return segment, start // ALIGN


def _may_take_more(nbytes: int, victims: Sequence[Victim]) -> bool:
    """Whether a plan may reclaim another segment: beyond the first few only for new records, while it pays."""
    freed = sum(victim.freed_bytes for victim in victims)
    carried = sum(victim.carried_bytes for victim in victims)
    return len(victims) < MAX_VICTIMS or carried <= freed < nbytes
