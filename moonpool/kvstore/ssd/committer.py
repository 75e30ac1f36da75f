"""Carries out the plans of one disk. Blocking.

A commit writes records, syncs segments, and then names them in an index transaction. A reclaimed segment's file goes
after the transaction that forgets the segment; the file of a new segment is renamed before.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from moonpool.base.telemetry.logs import get_logger
from moonpool.kvstore.ssd.catalogue import RecordLocation
from moonpool.kvstore.ssd.disk_index import DiskIndex
from moonpool.kvstore.ssd.files import ALIGN, FileLayer
from moonpool.kvstore.ssd.index import IndexChange
from moonpool.kvstore.ssd.reader import read_record
from moonpool.kvstore.ssd.records import BadRecordError, rewrite_record
from moonpool.kvstore.ssd.segment import Segment
from moonpool.kvstore.ssd.write_plan import Append, PlanState, WritePlan, pack_entries, segment_ends

log = get_logger(__name__)
_ZEROS = bytes(ALIGN)


@dataclasses.dataclass(frozen=True, slots=True)
class Committer:
    """Does plans, one at a time. On the event loop's side, a committer changes only the plan."""

    files: FileLayer
    index: DiskIndex
    folder: Path
    sync: bool  # a commit survives a loss of power

    def run(self, plan: WritePlan) -> None:
        """Do a plan. On an error `plan.state` tells how far the plan came."""
        try:
            if plan.check_index:
                self.index.check()
            self._erase(plan)
            if plan.erases and not self.sync:  # a lost power would bring back files that older copies were in
                wait(plan.deleting.values())
                self.files.sync_all()
            if plan.full:
                self._free(plan)
            # Carried blocks go first, in a transaction of their own: no crash finds them in neither place (ADR 4).
            for append in plan.carry:
                self._carry(append, plan)
            if plan.carry or not plan.store:
                self._commit(plan, plan.carried)
            self._take_over(plan.reuse)
            self._trim(plan)
            if plan.store:
                self._write(plan.store)
                self._commit(plan, plan.store)
        except BaseException:
            self._cut(plan)
            raise

    def _free(self, plan: WritePlan) -> None:
        """Delete segments that have nothing to carry: a full device may have no room to forget them before."""
        wait(plan.deleting.values())
        for segment in (segment for segment in plan.removed_segments if not segment.live):
            self.files.unlink(segment.path)

    def _erase(self, plan: WritePlan) -> None:
        """Overwrite records with zeros, on the device: no start finds them, with an index or without.

        If the device refuses this for a segment, the segment stays on the list and delays no other work.
        """
        by_segment: dict[Segment, list[RecordLocation]] = {}
        for place in plan.erase:
            by_segment.setdefault(place[0], []).append(place)
        for segment, places in by_segment.items():
            try:
                for _, row in places:
                    self.files.write(segment.path, [_ZEROS] * segment.lengths[row], segment.offset(row))
                self.files.sync(segment.path)
            except OSError as error:
                plan.unerased += places
                plan.erase_error = error

    def _trim(self, plan: WritePlan) -> None:
        for segment, size in plan.tails.items():
            try:
                self.files.truncate(segment.path, size)
                plan.cut.append(segment)
            except OSError as error:  # tried again with the next plan
                plan.erase_error = error

    def _take_over(self, reuse: Mapping[Segment, Segment]) -> None:
        """Give files to new segments before what they hold is overwritten; a start forgets what has no file."""
        for segment, old in reuse.items():
            self.files.rename(old.path, segment.path)
        if reuse and self.sync:
            self.files.sync_folder(self.folder)

    def _carry(self, append: Append, plan: WritePlan) -> None:
        """Copy one verified record, but not a bad record.

        If the record cannot be read, another segment may do: EAGAIN.
        """
        assert append.source is not None
        segment, row = append.source
        try:
            record = read_record(self.files, segment.path, append.key, segment.offset(row), segment.nbytes(row))
        except BadRecordError as error:
            log.warning("a stored block is bad", key=append.key.hex()[:16], error=str(error))
            append.bad = True
            return
        except OSError as error:
            plan.unreadable = segment
            raise OSError(errno.EAGAIN, f"a segment cannot be read: {error}", str(segment.path)) from error
        rewrite_record(record, append.segment.number)
        self.files.write(append.segment.path, [record], append.offset)

    def _write(self, appends: Sequence[Append]) -> None:
        for segment, some in itertools.groupby(appends, lambda append: append.segment):
            written = list(some)
            self.files.write(segment.path, [part for append in written for part in append.parts()], written[0].offset)

    def _commit(self, plan: WritePlan, appends: Sequence[Append]) -> None:
        """Name what was appended; the first transaction carries the removals, then their files go."""
        sizes = segment_ends(appends)
        # Data before names: the index must not name what a power loss takes (ADR 4).
        if self.sync:
            for segment in sizes:
                self.files.sync(segment.path)
            if not all(segment.size or segment in plan.reuse for segment in sizes):
                self.files.sync_folder(self.folder)
        going = set() if plan.cleared else {segment.number for segment in plan.removed_segments}
        dropped = [] if plan.cleared else [row for row in plan.dead if row[0] not in going]
        if appends or going or dropped:
            before = collections.Counter(append.segment for append in (plan.carried if plan.cleared else ()))
            entries = {
                (segment.number, len(segment.keys) + before[segment]): packed
                for segment, packed in pack_entries(appends).items()
            }
            committed = {segment.number: size for segment, size in sizes.items()}
            kinds = {segment.number: segment.named for segment in sizes}
            change = IndexChange(going, dropped, entries, committed, kinds)
            self.index.commit(change, plan.indexed)
            plan.indexed.append(change)
        if not plan.cleared:
            plan.move(PlanState.CLEARED)
            self._delete(plan)

    def _delete(self, plan: WritePlan) -> None:
        """Begin to delete what the index has forgotten; that takes long where a device is told which blocks are free.

        A deleting plan waits for earlier deletions, so that at most one plan's files are beyond the budget; so does a
        plan that stores nothing.
        """
        read = {victim.segment for victim in plan.victims if victim.carried}
        going = [segment for segment in (*plan.nameless, *plan.removed_segments) if segment not in plan.reuse.values()]
        if going or not plan.store:
            wait(plan.deleting.values())
        for segment in going:
            readable, durable = segment in read or segment.readers > 0, self.sync or plan.erases
            unlink = partial(self.files.unlink, readable=readable, durable=durable)
            plan.deleting[segment] = self.files.later(unlink, segment.path)

    def _cut(self, plan: WritePlan) -> None:
        """Take back what was written behind the committed ends, as far as the device lets us."""
        committed = segment_ends(plan.carried) if plan.cleared else {}
        for segment in segment_ends((*plan.carry, *plan.store)):
            with contextlib.suppress(OSError):
                self.files.truncate(segment.path, committed.get(segment, segment.size))
