"""The SSD tier's catalogue in memory: which record in which segment is which block.

A row of a segment is dead if the row's key has another place, or none.
"""

import collections
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TypeVar

from moonpool.base.kv.blocks import PartTable
from moonpool.base.kv.delete_kv import KVSelection, ttl_of
from moonpool.base.kv.keys import BlockKey, with_window_keys
from moonpool.kvstore.eviction.tenants import TenantAccount, TenantBytes
from moonpool.kvstore.ssd.files import ALIGN
from moonpool.kvstore.ssd.segment import NUMBER_BITS, ROW_BITS, ROW_MASK, RecordKind, Segment, unpack_columns

T = TypeVar("T")
RecordLocation = tuple[Segment, int]  # and a row there
RecordFilter = Callable[[Segment, int], bool]


class Catalogue(PartTable[int]):
    """All segments by id, ascending on each disk, and all blocks' places."""

    def __init__(self, account: TenantAccount | None = None) -> None:
        super().__init__()
        self.segments: dict[int, Segment] = {}
        self.account = account or TenantAccount()
        self.live = self.account.used  # bytes in records that are blocks' places
        self.incoming = TenantBytes()  # of new blocks in plans under way
        self.doubles: list[
            RecordLocation
        ] = []  # copies that are dead for another one's sake; no index knows that they are

    def kind_of(self, key: BlockKey) -> RecordKind | None:
        found = self.find(key)
        return None if found is None else found[0].kind(found[1])

    def find(self, key: BlockKey) -> tuple[Segment, int] | None:
        place = self.parts[key[0]].get(key)
        return None if place is None else (self.segments[place >> ROW_BITS], place & ROW_MASK)

    def is_live(self, segment: Segment, row: int) -> bool:
        key = segment.keys[row]
        return self.parts[key[0]].get(key) == segment.id << ROW_BITS | row

    def live_rows(self, segment: Segment) -> Iterator[int]:
        """A segment's rows that are blocks' places, oldest first. Blocks may be forgotten meanwhile."""
        place = segment.id << ROW_BITS
        parts = self.parts
        for row, key in enumerate(segment.keys):
            if parts[key[0]].get(key) == place | row:
                yield row

    def by_age(self) -> list[Segment]:
        """All disks' segments in the order of their last blocks' puts; within one second in arrival order."""
        return sorted(self.segments.values(), key=lambda segment: segment.written[-1] if segment.written else 0)

    def newest_first(self, step: int) -> Iterator[list[BlockKey]]:
        """Blocks, the last written first, of at most `step` rows at a time; none that come meanwhile."""
        for segment in reversed(self.by_age()):
            if self.segments.get(segment.id) is not segment:
                continue
            for end in range(len(segment.keys), 0, -step):
                rows = range(end - 1, max(end - step, 0) - 1, -1)
                yield [segment.keys[row] for row in rows if self.is_live(segment, row)]

    def oldest_of(self, account: str, nbytes: int, stays: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The oldest blocks of one account except those that `stays`: at least `nbytes` of records, or all."""
        found: list[BlockKey] = []
        for segment in self.by_age():
            for row in self.live_rows(segment) if account in segment.live else ():
                if nbytes <= 0:
                    return found
                key = segment.keys[row]
                if segment.kind(row).account == account and not stays(key):
                    found.append(key)
                    nbytes -= segment.nbytes(row)
        return found

    def chosen(self, selection: KVSelection) -> RecordFilter:
        """Tell whether a record is of a chosen block."""
        of_kind = self._by_kind(
            lambda kind: kind.tenant in selection.tenants or kind.format.namespace in selection.namespaces
        )
        keys = frozenset(with_window_keys(selection.keys))
        return lambda segment, row: of_kind(segment, row) or segment.keys[row] in keys

    def encrypted_with(self, key_ids: Container[str]) -> RecordFilter:
        """Tell whether a record is encrypted with one of some keys."""
        return self._by_kind(lambda kind: bool(kind.key_id) and kind.key_id in key_ids)

    def expired(self, ttl_s: Mapping[str, float], now: float) -> RecordFilter:
        """Tell whether a record is here for longer than the tenant's TTL."""
        oldest = self._by_kind(lambda kind: now - ttl_of(ttl_s, kind.tenant))
        return lambda segment, row: segment.written[row] < oldest(segment, row)

    def _by_kind(self, judge: Callable[[RecordKind], T]) -> Callable[[Segment, int], T]:
        """Judge each kind in a segment once, with the kind's first record; segments and kinds may come later."""
        judged: dict[Segment, dict[int, T]] = collections.defaultdict(dict)

        def of_kind(segment: Segment, row: int) -> T:
            known, number = judged[segment], segment.kinds[row]
            if number not in known:
                known[number] = judge(segment.named[number])
            return known[number]

        return of_kind

    def places(self, part: int, wanted: RecordFilter) -> list[RecordLocation]:
        """Places of a part's blocks with wanted records."""
        found = ((self.segments[place >> ROW_BITS], place & ROW_MASK) for place in self.parts[part].values())
        return [(segment, row) for segment, row in found if wanted(segment, row)]

    def dead(self, segment: Segment, rows: range, wanted: RecordFilter) -> list[RecordLocation]:
        """Dead rows with wanted records that are not to be overwritten already."""
        return [
            (segment, row)
            for row in rows
            if wanted(segment, row) and row not in segment.erased and not self.is_live(segment, row)
        ]

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for segment, row in filter(None, map(self.find, keys)):
            segment.used[row] = 1

    def add(self, segment: Segment, packed: bytes, dead: Container[int] = ()) -> None:
        """Entries were appended to a segment; `dead` rows come dead.

        Of a key that is on another disk, that copy stays the block's place; else the later one is. Adds to `doubles`.
        """
        self.segments[segment.id] = segment
        first = len(segment.keys)
        keys, *columns = unpack_columns(packed)
        for column, more in zip(
            (segment.starts, segment.lengths, segment.kinds, segment.written), columns, strict=True
        ):
            column.extend(more)
        segment.keys += keys
        segment.used += bytes(len(keys))
        assert len(segment.keys) <= ROW_MASK
        sums: collections.Counter[int] = collections.Counter()
        for kind, length in zip(segment.kinds[first:], segment.lengths[first:], strict=True):
            sums[kind] += length * ALIGN
        for kind, nbytes in sums.items():
            self._count(segment, segment.named[kind].account, nbytes)
        parts = self.parts
        for place, key in enumerate(keys, segment.id << ROW_BITS | first):
            part, row = parts[key[0]], place & ROW_MASK
            before = part.setdefault(key, place)
            if before == place and row not in dead:
                continue  # nearly always
            if row in dead or before >> ROW_BITS + NUMBER_BITS != segment.disk:
                self._count(segment, segment.kind(row).account, -segment.nbytes(row))
                if row not in dead:
                    self.doubles.append((segment, row))
                elif before == place:
                    del part[key]
            elif (found := self.forget(key)) is not None:
                self.doubles.append(found)
                part[key] = place

    def _count(self, segment: Segment, account: str, nbytes: int) -> None:
        segment.live.add(account, nbytes)
        self.live.add(account, nbytes)

    def forget(self, key: BlockKey) -> RecordLocation | None:
        """A block has no place any more; returns the last place."""
        found = self.find(key)
        if found is None:
            return None
        segment, row = found
        del self[key]
        self._count(segment, segment.kind(row).account, -segment.nbytes(row))
        return found

    def remove(self, segment: Segment) -> None:
        """A segment is removed, with all blocks that still have their place there; once for each."""
        for row in list(self.live_rows(segment)):
            self.forget(segment.keys[row])
        self.segments.pop(segment.id, None)
