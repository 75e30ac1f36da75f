"""Memory for blocks in DRAM: slots of one size each, carved out of large anonymous mappings.

A slot is handed out as a memoryview and comes back by itself when that view and every view made of it are gone, so that
bytes that are still read are never overwritten. Memory in free slots counts: it goes back to the operating system once
all slots together take more than the budget and a small reserve. Used by one thread; views may end in any thread.
"""

import collections
import ctypes
import dataclasses
import mmap
import weakref

from moonpool.errors import Overloaded

PAGE = mmap.PAGESIZE
SLAB_BYTES = 64 << 20
"""Address space of one slab, about; memory is taken only for slots that were used."""

SMALL_BYTES = 16 * PAGE
"""Smaller slots share pages; their memory goes back a whole slab at a time."""

RESERVE_SHARE = 128
"""Free slots may take memory beyond the budget: the budget divided by this."""

RETRY_AFTER_S = 1.0
_HUGE_PAGE = 2 << 20
_CACHE_LINE = 64


def slot_bytes(nbytes: int) -> int:
    """Memory that `nbytes` take: whole pages, so that they can be given back, unless that would waste much."""
    unit = PAGE if nbytes >= SMALL_BYTES else _CACHE_LINE
    return -(-nbytes // unit) * unit


@dataclasses.dataclass(eq=False, slots=True)
class _Slab:
    """One mapping.

    Attributes:
        slots: how many fit.
        unused: slots `[unused, slots)` were never handed out.
        free: free slots that may have memory; the last was used last.
        bare: free slots without memory.
    """

    memory: mmap.mmap
    slots: int
    unused: int = 0
    free: list[int] = dataclasses.field(default_factory=list)
    bare: list[int] = dataclasses.field(default_factory=list)

    @property
    def resident(self) -> int:
        """Slots that may have memory."""
        return self.unused - len(self.bare)

    @property
    def live(self) -> int:
        """Slots that are handed out."""
        return self.resident - len(self.free)


class _SizeClass:
    """All slots of one size, in slabs that are filled before others are begun."""

    def __init__(self, size: int, budget: int) -> None:
        self.size = size
        self.whole = size < SMALL_BYTES  # memory counts, and goes back, by the slab
        self.slots = max(1, min(SLAB_BYTES, -(-budget // PAGE) * PAGE) // size)
        if self.whole:
            self.slots = max(1, min(self.slots, SMALL_BYTES * 4 // size))
        self.slab_bytes = -(-self.slots * size // PAGE) * PAGE
        self.view = ctypes.c_char * size
        self.slabs: set[_Slab] = set()
        self.warm: dict[_Slab, None] = {}  # with free slots that have memory; the last was used last
        self.roomy: dict[_Slab, None] = {}  # with other free slots

    def take(self) -> tuple[_Slab, int, bool]:
        """A slot, and whether it has memory already."""
        had_memory = bool(self.warm)
        if had_memory:
            slab = next(reversed(self.warm))
            slot = slab.free.pop()
        else:
            slab = next(iter(self.roomy), None) or self._new_slab()
            had_memory = self.whole and slab.resident > 0
            if slab.bare:
                slot = slab.bare.pop()
            else:
                slot, slab.unused = slab.unused, slab.unused + 1
        self.file(slab)
        return slab, slot, had_memory

    def _new_slab(self) -> _Slab:
        try:
            memory = mmap.mmap(-1, self.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            message = f"no memory for blocks of {self.size} bytes: {error}"
            raise Overloaded(message, reason="kvstore_memory", retry_after_s=RETRY_AFTER_S) from error
        if self.size < _HUGE_PAGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a slot's first byte could bring its neighbours' memory too
        slab = _Slab(memory, self.slots)
        self.slabs.add(slab)
        return slab

    def file(self, slab: _Slab) -> None:
        """Brings `warm` and `roomy` up to date after a change of a slab."""
        self.warm.pop(slab, None)
        if slab.free:
            self.warm[slab] = None
        if slab.bare or slab.unused < slab.slots:
            self.roomy[slab] = None
        else:
            self.roomy.pop(slab, None)

    def remove(self, slab: _Slab) -> None:
        """Forgets a slab; its mapping goes with the last reference to it."""
        self.slabs.remove(slab)
        self.warm.pop(slab, None)
        self.roomy.pop(slab, None)

    def resident_bytes(self, slab: _Slab) -> int:
        """Memory that a slab may take."""
        return self.slab_bytes if self.whole else slab.resident * self.size


_Place = tuple[_SizeClass, _Slab, int]


class Arena:
    """Memory for blocks of any size.

    Args:
        budget_bytes: the owner hands out no more than this; free slots keep memory only while all slots together take
            little more.

    Attributes:
        live_bytes: slots that are handed out.
        resident_bytes: most memory that is taken: handed out, and free but kept for reuse.
        returned_bytes: given back to the operating system since the start.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._limit = budget_bytes + budget_bytes // RESERVE_SHARE
        self._classes: dict[int, _SizeClass] = {}
        self._live: dict[int, tuple[object, _Place]] = {}  # by id of the reference that ends it
        self._ended: collections.deque[_Place] = collections.deque()
        self.live_bytes = 0
        self.resident_bytes = 0
        self.returned_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Memory that is taken and not handed out."""
        self.collect()
        return self.resident_bytes - self.live_bytes

    @property
    def mapped_bytes(self) -> int:
        """Address space."""
        return sum(len(each.slabs) * each.slab_bytes for each in self._classes.values())

    def allocate(self, nbytes: int) -> memoryview:
        """Writable memory of `nbytes`, of undefined content.

        Raises:
            Overloaded: the operating system gives no more address space.
        """
        assert nbytes > 0
        self.collect()
        size = slot_bytes(nbytes)
        each = self._classes.get(size)
        if each is None:
            each = self._classes[size] = _SizeClass(size, self._budget)
        slab, slot, had_memory = each.take()
        self.live_bytes += size
        if not had_memory:
            self.resident_bytes += each.slab_bytes if each.whole else size
            self._trim()
        buffer = each.view.from_buffer(slab.memory, slot * size)
        end = weakref.ref(buffer, self._end)
        self._live[id(end)] = end, (each, slab, slot)
        return memoryview(buffer).cast("B")[:nbytes]

    def _end(self, end: object) -> None:
        """The last view of a slot is gone. Called in any thread."""
        self._ended.append(self._live.pop(id(end))[1])

    def collect(self) -> None:
        """Takes back slots whose views are gone. Done by `allocate` too."""
        while self._ended:
            each, slab, slot = self._ended.popleft()
            slab.free.append(slot)
            self.live_bytes -= each.size
            each.file(slab)
        self._trim()

    def _trim(self) -> None:
        """Gives memory in free slots back while all slots together take more than the limit."""
        if self.resident_bytes <= self._limit:
            return
        for each in list(self._classes.values()):
            for slab in list(each.warm):
                self._give_back(each, slab)
                if self.resident_bytes <= self._limit:
                    return
            if not each.slabs:
                del self._classes[each.size]

    def _give_back(self, each: _SizeClass, slab: _Slab) -> None:
        """Takes memory from free slots of one slab, the longest free first; removes a slab without live slots."""
        freed = 0
        if not slab.live:
            freed = each.resident_bytes(slab)
            each.remove(slab)
        elif not each.whole:
            count = min(len(slab.free), -(-(self.resident_bytes - self._limit) // each.size))
            for slot in slab.free[:count]:
                slab.memory.madvise(mmap.MADV_DONTNEED, slot * each.size, each.size)
            slab.bare += slab.free[:count]
            del slab.free[:count]
            each.file(slab)
            freed = count * each.size
        self.resident_bytes -= freed
        self.returned_bytes += freed

    def check_invariants(self) -> None:
        """Checks that every slot is in one state, and that the bytes add up."""
        self.collect()
        live = resident = free = 0
        for size, each in self._classes.items():
            assert size == each.size
            for slab in each.slabs:
                slots = {*slab.free, *slab.bare}
                assert len(slots) == len(slab.free) + len(slab.bare) <= slab.unused <= slab.slots
                assert all(slot < slab.unused for slot in slots)
                assert (slab in each.warm) == bool(slab.free)
                assert (slab in each.roomy) == bool(slab.bare or slab.unused < slab.slots)
                live += slab.live * size
                resident += each.resident_bytes(slab)
                free += 0 if each.whole else len(slab.free)
        assert (self.live_bytes, self.resident_bytes) == (live, resident)
        assert live == sum(place[0].size for _, place in self._live.values())
        assert not free or resident <= self._limit
