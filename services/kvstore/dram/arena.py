"""Where the bytes of blocks in DRAM lie: slots of one size each, carved out of large anonymous mappings.

A slot is handed out as a memoryview and comes back by itself when that view and every view made of it are gone, so that
bytes that are still read are never overwritten. Memory in free slots counts: it goes back to the operating system once
all slots together take more than the budget and a small reserve. Used by one thread; only the end of a slot's use may
come from any.
"""

import collections
import ctypes
import dataclasses
import mmap
import weakref
from typing import Any

PAGE = mmap.PAGESIZE
SLAB_BYTES = 64 << 20
"""Address space of one slab aimed at; memory is taken only for slots that were used."""

SMALL_BYTES = 16 * PAGE
"""Smaller slots share pages; their memory goes back a whole slab at a time."""

RESERVE_SHARE = 128
"""One part in so many of the budget may lie in free slots beyond the budget."""

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
        live: slots that are handed out.
        resident: slots that may have memory, live or free.
        free: free slots that may have memory; the last was used last.
        bare: free slots without memory.
    """

    memory: mmap.mmap
    slots: int
    unused: int = 0
    live: int = 0
    resident: int = 0
    free: list[int] = dataclasses.field(default_factory=list)
    bare: list[int] = dataclasses.field(default_factory=list)

    @property
    def room(self) -> bool:
        return bool(self.free or self.bare or self.unused < self.slots)


class _SizeClass:
    """All slots of one size, in slabs that are filled before others are begun."""

    def __init__(self, size: int, budget: int) -> None:
        self.size = size
        self.whole = size < SMALL_BYTES  # memory counts, and goes back, by the slab
        self.slots = max(1, min(SLAB_BYTES, -(-budget // PAGE) * PAGE) // size)
        if self.whole:
            self.slots = max(1, min(self.slots, SMALL_BYTES * 4 // size))
        self.view = ctypes.c_char * size
        self.slabs: set[_Slab] = set()
        self.warm: dict[_Slab, None] = {}  # with free slots that have memory; the last was used last
        self.roomy: dict[_Slab, None] = {}  # with other free slots

    @property
    def slab_bytes(self) -> int:
        return -(-self.slots * self.size // PAGE) * PAGE

    def take(self) -> tuple[_Slab, int, bool]:
        """A slot and whether it has had memory already."""
        if self.warm:
            slab = next(reversed(self.warm))
            slot, had_memory = slab.free.pop(), True
        else:
            slab = next(iter(self.roomy), None) or self._new_slab()
            had_memory = self.whole and slab.resident > 0
            if slab.bare:
                slot = slab.bare.pop()
            else:
                slot, slab.unused = slab.unused, slab.unused + 1
            slab.resident += 1
        slab.live += 1
        self.file(slab)
        return slab, slot, had_memory

    def _new_slab(self) -> _Slab:
        memory = mmap.mmap(-1, self.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.size < _HUGE_PAGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a slot's first byte could bring its neighbours' memory too
        slab = _Slab(memory, self.slots)
        self.slabs.add(slab)
        return slab

    def file(self, slab: _Slab) -> None:
        """Puts a slab where it belongs after a change."""
        self.warm.pop(slab, None)
        if slab.free:
            self.warm[slab] = None
        if slab.bare or slab.unused < slab.slots:
            self.roomy[slab] = None
        else:
            self.roomy.pop(slab, None)


class Arena:
    """Memory for blocks of any sizes.

    Args:
        budget_bytes: what the owner keeps within; free memory is kept only as far as all of it stays near this.

    Attributes:
        live_bytes: slots that are handed out.
        resident_bytes: at most so much memory is taken: handed out, and free but kept for reuse.
        returned_bytes: given back to the operating system since the start.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._limit = budget_bytes + budget_bytes // RESERVE_SHARE
        self._classes: dict[int, _SizeClass] = {}
        self._ended: collections.deque[tuple[_SizeClass, _Slab, int]] = collections.deque()
        self._tokens: dict[int, weakref.ref[Any]] = {}
        self._next_token = 0
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
        """Writable memory of `nbytes`; its bytes are undefined.

        Raises:
            OSError: the operating system gives no more address space.
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
        token = self._next_token = self._next_token + 1
        self._tokens[token] = weakref.ref(buffer, _Ended(self._ended, self._tokens, token, (each, slab, slot)))
        return memoryview(buffer).cast("B")[:nbytes]

    def collect(self) -> None:
        """Takes back slots that are not used any more. Done by `allocate` too."""
        while self._ended:
            each, slab, slot = self._ended.popleft()
            slab.live -= 1
            slab.free.append(slot)
            self.live_bytes -= each.size
            each.file(slab)
        self._trim()

    def _trim(self) -> None:
        """Gives memory in free slots back while all together is more than the limit."""
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
        """Takes memory from free slots of one slab, the longest free first, or all of an unused slab."""
        if not slab.live:
            freed = each.slab_bytes if each.whole else slab.resident * each.size
            each.slabs.discard(slab)
            each.warm.pop(slab, None)
            each.roomy.pop(slab, None)
            self._returned(freed)
            return  # the mapping goes with the last reference to it
        if each.whole:
            return
        count = min(len(slab.free), -(-(self.resident_bytes - self._limit) // each.size))
        for slot in slab.free[:count]:
            slab.memory.madvise(mmap.MADV_DONTNEED, slot * each.size, each.size)
        slab.bare += slab.free[:count]
        del slab.free[:count]
        slab.resident -= count
        self._returned(count * each.size)
        each.file(slab)

    def _returned(self, nbytes: int) -> None:
        self.resident_bytes -= nbytes
        self.returned_bytes += nbytes

    def check_invariants(self) -> None:
        """Every slot is in one state, and the bytes add up."""
        self.collect()
        live = resident = 0
        for size, each in self._classes.items():
            assert size == each.size
            for slab in each.slabs:
                assert not set(slab.free) & set(slab.bare)
                assert all(slot < slab.unused for slot in (*slab.free, *slab.bare))
                assert slab.unused == slab.live + len(slab.free) + len(slab.bare) <= slab.slots
                assert slab.resident == slab.live + len(slab.free)
                assert (slab in each.warm) == bool(slab.free)
                assert (slab in each.roomy) == bool(slab.bare or slab.unused < slab.slots)
                live += slab.live * size
                resident += each.slab_bytes if each.whole else slab.resident * size
        assert (self.live_bytes, self.resident_bytes) == (live, resident)
        assert len(self._tokens) == sum(slab.live for each in self._classes.values() for slab in each.slabs)
        free = sum(len(s.free) * c.size for c in self._classes.values() if not c.whole for s in c.slabs)
        assert not free or resident <= self._limit


class _Ended:
    """What happens when a slot's last view is gone, in whichever thread."""

    __slots__ = ("_ended", "_entry", "_token", "_tokens")

    def __init__(self, ended: Any, tokens: dict[int, Any], token: int, entry: Any) -> None:
        self._ended, self._tokens, self._token, self._entry = ended, tokens, token, entry

    def __call__(self, _: object) -> None:
        del self._tokens[self._token]
        self._ended.append(self._entry)
