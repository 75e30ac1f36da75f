"""Memory for blocks in DRAM: slots in several sizes, carved out of large anonymous mappings.

A slot is handed out as a memoryview and comes back after that view and every derived view are gone, so that bytes still
being read are never overwritten. Memory in free slots counts: such memory goes back to the operating system once all
slots together take more than the budget and a small reserve. Used by one thread; views may end in any thread.
"""

import collections
import contextlib
import ctypes
import dataclasses
import itertools
import mmap
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future

from moonpool.base import world
from moonpool.base.errors import Overloaded

PAGE = mmap.PAGESIZE
SLAB_BYTES = 64 << 20  # address space per slab, about; memory is taken only for slots that were used
SMALL_BYTES = 16 * PAGE  # smaller slots share pages; their memory goes back a whole slab at a time
RESERVE_SHARE = 128  # free slots may take memory beyond the budget: the budget divided by this
AHEAD_BYTES, AHEAD_SLOTS = 32 << 20, 64  # for each size, memory brought in ahead, but at least one slot
RETRY_AFTER_S = 1.0
_HUGE_PAGE = 2 << 20
_CACHE_LINE = 64
_PORTION = 1 << 20  # brought in by one system call, during which the process can map nothing
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; older kernels refuse the call at once
_madvise = ctypes.CDLL(None).madvise  # mmap's own method would keep other threads waiting
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Buffer = ctypes.Array[ctypes.c_char]


def slot_bytes(nbytes: int) -> int:
    """Memory that `nbytes` take: whole pages, so that they can be given back, unless that would waste much."""
    return _rounded(nbytes, PAGE if nbytes >= SMALL_BYTES else _CACHE_LINE)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


@dataclasses.dataclass(eq=False, slots=True)
class _Slab:
    """One mapping, for so many `slots`."""

    memory: mmap.mmap
    slots: int
    free: list[int] = dataclasses.field(default_factory=list)  # they may have memory; the last was used last
    bare: list[int] = dataclasses.field(init=False)  # free slots without memory

    def __post_init__(self) -> None:
        self.bare = list(range(self.slots))[::-1]

    @property
    def resident(self) -> int:  # slots that may have memory
        return self.slots - len(self.bare)

    @property
    def live(self) -> int:  # slots that are handed out
        return self.resident - len(self.free)


class _SizeClass:
    """All slots with one size, in slabs that are filled before others are begun."""

    def __init__(self, size: int, budget: int) -> None:
        self.size = size
        self.small = size < SMALL_BYTES
        self.slots = max(1, min(SMALL_BYTES * 4 if self.small else SLAB_BYTES, _rounded(budget, PAGE)) // size)
        self.slab_bytes = _rounded(self.slots * size, PAGE)
        self.view = ctypes.c_char * size
        self.slabs: dict[_Slab, None] = {}  # in the order they were made
        self.warm: dict[_Slab, None] = {}  # with free slots that have memory; the last was used last

    def take(self, *, fresh: bool) -> tuple[_Slab, int]:
        """A slot without memory if `fresh`, else a `warm` slab's slot."""
        slabs = (slab for slab in reversed(self.slabs) if slab.bare) if fresh else reversed(self.warm)
        slab = next(slabs, None) or self._new_slab()
        slot = (slab.bare if fresh else slab.free).pop()
        self.file(slab)
        return slab, slot

    def _new_slab(self) -> _Slab:
        try:
            memory = mmap.mmap(-1, self.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            message = f"no memory for blocks of {self.size} bytes: {error}"
            raise Overloaded(message, reason="kvstore_memory", retry_after_s=RETRY_AFTER_S) from error
        if self.size < _HUGE_PAGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # kernels without huge pages do not know the advice
                memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a slot's first byte could bring its neighbours' memory too
        slab = _Slab(memory, self.slots)
        self.slabs[slab] = None
        return slab

    def file(self, slab: _Slab) -> None:
        self.warm.pop(slab, None)
        if slab.free:
            self.warm[slab] = None


_Place = tuple[_SizeClass, _Slab, int]


class Arena:
    """Memory for blocks of any size, at most `budget_bytes` handed out.

    With `ahead` a thread brings memory to slots before they are needed, so that the first write costs the caller no
    page faults. Such slots count as handed out meanwhile.

    Attributes:
        on_excess: called in any thread, once before each `collect`, when a slot ends while too much memory is taken.
    """

    def __init__(self, budget_bytes: int, *, ahead: bool = False) -> None:
        self._budget = budget_bytes
        self.limit = budget_bytes + budget_bytes // RESERVE_SHARE
        self.classes: dict[int, _SizeClass] = {}
        self.live: dict[int, tuple[object, _Place]] = {}  # by id of the reference that ends the slot
        self._ended: collections.deque[_Place] = collections.deque()
        self._thread = world.thread_pool(1, "kvstore-arena") if ahead and sys.platform == "linux" else None
        self._populating: Future[None] | None = None
        self.on_excess: Callable[[], object] = lambda: None
        self._told = False
        self.live_bytes = 0  # of slots that are handed out
        self.resident_bytes = 0  # most memory that is taken: handed out, and free but kept for reuse
        self.returned_bytes = 0  # to the operating system since the start

    @property
    def free_bytes(self) -> int:
        """Memory that is taken and not handed out."""
        self.collect()
        return self.resident_bytes - self.live_bytes

    @property
    def mapped_bytes(self) -> int:
        return sum(len(size_class.slabs) * size_class.slab_bytes for size_class in self.classes.values())

    def allocate(self, nbytes: int, *, ahead: bool = True) -> memoryview:
        """Writable memory of undefined content.

        Not `ahead`: other threads write to the memory, page by page.

        Raises:
            Overloaded: the operating system gives no memory.
        """
        assert nbytes > 0
        self.collect()
        size = slot_bytes(nbytes)
        size_class = self.classes.get(size)
        if size_class is None:
            size_class = self.classes[size] = _SizeClass(size, self._budget)
        fresh = not size_class.warm
        buffer = self._take(size_class, fresh=fresh)
        if fresh:
            self._trim()
        if ahead and self._thread is not None and not size_class.small and self.resident_bytes + size <= self._budget:
            self._populate(self._thread, size_class, [buffer] if fresh else [])
        return memoryview(buffer).cast("B")[:nbytes]

    def _take(self, size_class: _SizeClass, *, fresh: bool) -> Buffer:
        slab, slot = size_class.take(fresh=fresh)
        self.live_bytes += size_class.size
        self.resident_bytes += size_class.size if fresh else 0
        buffer = size_class.view.from_buffer(slab.memory, slot * size_class.size)
        end = weakref.ref(buffer, self._end)
        self.live[id(end)] = end, (size_class, slab, slot)
        return buffer

    def _end(self, end: object) -> None:
        """The last view of a slot is gone. Called in any thread."""
        self._ended.append(self.live.pop(id(end))[1])
        if self.resident_bytes > self.limit and not self._told:
            self._told = True
            self.on_excess()

    def _populate(self, thread: Executor, size_class: _SizeClass, buffers: list[Buffer]) -> None:
        """Bring memory to `buffers`, which have none yet, and to further slots if few are left that have any."""
        most = max(1, min(AHEAD_BYTES // size_class.size, AHEAD_SLOTS))
        left = sum(len(slab.free) for slab in itertools.islice(size_class.warm, most))
        if left > most // 2 or (self._populating is not None and not self._populating.done()):
            return
        room = (self._budget - self.resident_bytes) // size_class.size
        buffers += [self._take(size_class, fresh=True) for _ in range(min(most - left, room))]
        if buffers:
            self._populating = thread.submit(_populate, buffers)

    def collect(self) -> None:
        """Take back slots whose views are gone. Done by `allocate` too."""
        self._told = False
        while self._ended:
            size_class, slab, slot = self._ended.popleft()
            slab.free.append(slot)
            self.live_bytes -= size_class.size
            size_class.file(slab)
        self._trim()

    def _trim(self) -> None:
        """Give memory in free slots back while all slots together take more than the limit."""
        if self.resident_bytes <= self.limit:
            return
        for size_class in list(self.classes.values()):
            for slab in list(size_class.warm):
                self._give_back(size_class, slab)
                if self.resident_bytes <= self.limit:
                    return
            if not size_class.slabs:
                del self.classes[size_class.size]

    def _give_back(self, size_class: _SizeClass, slab: _Slab) -> None:
        """Take memory from one slab's free slots, the longest free first; remove a slab without live slots."""
        count = 0
        if not slab.live:
            count = slab.resident
            del size_class.slabs[slab], size_class.warm[slab]  # the mapping goes with the last reference
        elif not size_class.small:
            count = min(len(slab.free), -(-(self.resident_bytes - self.limit) // size_class.size))
            for slot in slab.free[:count]:
                slab.memory.madvise(mmap.MADV_DONTNEED, slot * size_class.size, size_class.size)
            slab.bare += slab.free[:count]
            del slab.free[:count]
            size_class.file(slab)
        self.resident_bytes -= count * size_class.size
        self.returned_bytes += count * size_class.size

    def close(self) -> None:
        """Blocking. Ends the thread after the current work; slots can still be used."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _populate(buffers: list[Buffer]) -> None:
    """Take memory for slots, in portions and from their start on; what has been written to them stays."""
    while buffers:
        buffer = buffers.pop(0)  # an unshared slot is free from the next slot on
        for at in range(0, len(buffer), _PORTION):
            _madvise(ctypes.addressof(buffer) + at, min(_PORTION, len(buffer) - at), _POPULATE_WRITE)
