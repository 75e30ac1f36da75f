"""The SSD tier's segments as room: a budget of bytes, where the next record goes, which segment makes room for it.

Owns those decisions, as plans are made. Must not know of the index, of threads, or how plans end.
"""

from pathlib import Path

from services.kvstore.ssd.catalogue import MAX_SEGMENT_BYTES, Catalogue, Segment
from services.kvstore.ssd.reclaim import Keeps, Victim, choose, empty, thin
from services.kvstore.ssd.records import ALIGN
from services.kvstore.ssd.segments import SegmentFile, segment_path

MIN_SEGMENTS = 8
"""From so many segments on, the budget leaves room for what is carried over before its old file goes."""

MAX_VICTIMS = 16
"""Segments reclaimed by one plan: a store full of kept blocks must not be rewritten for one block."""


class Space:
    """Room for records.

    Args:
        books: what is where.
        folder: of the segment files.
        capacity_bytes: budget for all of them.
        segment_bytes: size at which a segment is closed and the next begun; a larger record gets one of its own.
        next_segment: an id that was never used.
        direct: read new segments past the page cache.

    Attributes:
        used_bytes: of all segments, live or dead, as they will be after the plan under way.
        active: the segment that is appended to. A file of an earlier life never is.
        keeps: what must stay; None for nothing.
        next_segment: id of the next one.
    """

    def __init__(
        self,
        books: Catalogue,
        folder: Path,
        capacity_bytes: int,
        segment_bytes: int,
        next_segment: int,
        *,
        direct: bool,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = min(segment_bytes, MAX_SEGMENT_BYTES // 2)
        self.active: Segment | None = None
        self.keeps: Keeps | None = None
        self.next_segment = next_segment
        self._books = books
        self._folder = folder
        self._direct = direct
        self._reserve = segment_bytes // 2 if capacity_bytes >= MIN_SEGMENTS * segment_bytes else 0
        self._thin: list[int] = []
        self._plans = 0
        self.recount()

    def begin(self) -> None:
        """A plan is being made."""
        self._plans += 1

    def recount(self) -> None:
        """Counts what is used; between plans."""
        self.used_bytes = sum(segment.size for segment in self._books.segments.values())

    @property
    def has_work(self) -> bool:
        """Whether segments are to be rewritten or reclaimed."""
        return bool(self._thin) or self.used_bytes > self.capacity_bytes

    def compact(self, min_live_share: float) -> int:
        """Has `compact_one` rewrite all segments of which less than this share of a full one is live; how many."""
        candidates = [segment for segment in self._books.segments.values() if segment is not self.active]
        self._thin = thin(self._books, candidates, min_live_share, self.segment_bytes)
        return len(self._thin)

    def make_room(self, nbytes: int, victims: list[Victim]) -> bool:
        """Reclaims segments until so many bytes fit; False when they cannot. Adds to `victims` what goes."""
        if nbytes > self.capacity_bytes - self._reserve:
            return False
        while self.used_bytes + nbytes > self.capacity_bytes - self._reserve and len(victims) < MAX_VICTIMS:
            spare = self.capacity_bytes - self.used_bytes - sum(victim.segment.size for victim in victims)
            must = self.used_bytes + nbytes > self.capacity_bytes
            if not self.reclaim(victims, max(0, spare), cheaply=not must):
                break
        return self.used_bytes + nbytes <= self.capacity_bytes

    def reclaim(self, victims: list[Victim], spare_bytes: int, *, cheaply: bool = False) -> bool:
        """Takes the next segment that nobody reads out of the books; False if there is none.

        The active one goes only when there is no other.

        Args:
            victims: gets what goes.
            spare_bytes: most bytes to carry over for having been used.
            cheaply: not if most of the segment must be carried over.
        """
        idle = [
            segment
            for segment in self._books.segments.values()
            if not segment.readers and not segment.going and segment.size
        ]
        others = (segment for segment in idle if segment is not self.active)
        chosen = choose(self._books, others, self.keeps, self._plans)
        if chosen is None:
            active = (segment for segment in idle if segment is self.active)
            chosen = choose(self._books, active, self.keeps, self._plans)
        if chosen is None:
            return False
        segment, kept = chosen
        if cheaply and 2 * kept > segment.size:
            return False
        self._take(empty(self._books, segment, self.keeps, kept, spare_bytes), victims)
        return True

    def give_up(self, nbytes: int, victims: list[Victim]) -> None:
        """Reclaims at least one segment, and as many as it takes to free so many bytes, whatever the budget says."""
        freed = 0
        while len(victims) < MAX_VICTIMS and self.reclaim(victims, 0):
            freed += victims[-1].freed_bytes
            if freed >= nbytes:
                break

    def compact_one(self, victims: list[Victim]) -> None:
        """Has the next thin segment rewritten, with all that lives in it."""
        while self._thin and not victims:
            segment = self._books.segments.get(self._thin.pop(0))
            if segment is None or segment is self.active or segment.going or segment.readers:
                continue
            self._take(empty(self._books, segment, lambda *_: True, segment.live_bytes, 0), victims)

    def _take(self, victim: Victim, victims: list[Victim]) -> None:
        victim.segment.going = True
        if victim.segment is self.active:
            self.active = None
        self.used_bytes -= victim.freed_bytes
        victims.append(victim)

    def place(self, length: int, sizes: dict[Segment, int]) -> tuple[Segment, int]:
        """A segment with room for a record, and where in it (in units of `ALIGN`); `sizes` are the ends so far."""
        segment = self.active
        if segment is not None:
            end = sizes.get(segment, segment.size)
            if end and end + length * ALIGN > self.segment_bytes:
                segment = None
        if segment is None:
            number = self.next_segment
            self.next_segment += 1
            file = SegmentFile(segment_path(self._folder, number), direct=self._direct)
            segment = self.active = self._books.segments[number] = Segment(number, file)
        start = sizes.get(segment, segment.size)
        sizes[segment] = start + length * ALIGN
        return segment, start // ALIGN
