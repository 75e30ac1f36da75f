"""KV memory: an instance's paged pool, shared between processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from moonpool.base.errors import ConfigError
from moonpool.base.kv import sealing
from moonpool.base.kv.layout import NO_SLOT, KVLayout
from moonpool.base.kv.memory import available_bytes, shared_memory

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python does not name."""
_POPULATING = 4
"""Threads: one takes 0.3 s for 1 GB."""
_NUMBER_BYTES = 8
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python names the flag from 3.13 on


class KVPool:
    """All parts of an instance's pool. Memory is taken from the system when a block is first touched, zero-filled."""

    def __init__(self, layout: KVLayout, blocks: int, parts: Sequence[PoolPart]) -> None:
        self.layout = layout
        self.blocks = blocks
        self.slots = parts[0].slots
        self.parts = list(parts)
        self._by_layer = [part for part in self.parts for _ in range(part.layer_begin, part.layer_end)]

    @classmethod
    def create(
        cls,
        layout: KVLayout,
        blocks: int,
        layer_ranges: Sequence[tuple[int, int]],
        available: Callable[[], int | None] | None = None,
        files: Sequence[int] | None = None,
        *,
        slots: int = 0,
    ) -> KVPool:
        """Make a pool with `blocks` blocks, one part per stage.

        Args:
            layout: A block's arrangement.
            blocks: Number of blocks.
            layer_ranges: Each stage's layers as `(begin, end)`; together all layers, in order.
            available: Bytes that may be taken at most, None for any; `available_bytes` unless given.
            files: Descriptors for empty memory (`shared_memory`), one per part; closed with the pool, or after an
                error.
            slots: Window slots for layers with a window or a recurrent state, which no block has yet; 0 = all blocks
                have the slices of all layers.

        Raises:
            ConfigError: There is no room for a single block, or more is asked for than the machine has.
        """
        fds, parts = list(files or (shared_memory() for _ in layer_ranges)), list[PoolPart]()
        try:
            _check_room(layout, blocks, slots or blocks, available or available_bytes)
            _check_ranges(layout, layer_ranges)
            for fd, (begin, end) in zip(fds, layer_ranges, strict=True):
                parts.append(PoolPart.create(fd, layout, blocks, begin, end, slots))
        except BaseException:
            for part in parts:
                part.close()
            for fd in fds[len(parts) :]:
                os.close(fd)
            raise
        return cls(layout, blocks, parts)

    def move_slots(self, changes: Iterable[tuple[int, int]]) -> None:
        """Give blocks their window slots, or take them: block, and slot or `NO_SLOT`.

        No step and no I/O uses slots that are taken.
        """
        for block, slot in changes:
            for part in self.parts:
                part.slot_of[block] = slot

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def shared(self) -> list[tuple[int, memoryview]]:
        """The parts for other processes to read: descriptors, which stay the pool's, and the bytes as they lie here.

        Call this after all engines have mapped the pool: from then on no process can map the pool for writing or change
        the size. Empty where that cannot be had.
        """
        try:
            for part in self.parts:
                seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
                fcntl.fcntl(part.fd, fcntl.F_ADD_SEALS, seals)
        except (OSError, AttributeError):  # no memfd, or a kernel without such seals
            return []
        return [(part.fd, part.view) for part in self.parts]

    def has(self, layer: int, block: int) -> bool:
        """Whether a block has a layer's slice: blocks without window slot lack slices of layers with a window."""
        return self._by_layer[layer].has(layer, block)

    def slice(self, layer: int, block: int) -> memoryview:
        """One layer's writable bytes in one block."""
        return self._by_layer[layer].slice(layer, block)

    def find(self, layer: int, block: int) -> tuple[memoryview, int] | None:
        """As `read`; None if the block lacks the slice."""
        part = self._by_layer[layer]
        found = part.find(layer, block)
        return None if found is None else (found, part.hash_of(layer, block))

    def read(self, layer: int, block: int) -> tuple[memoryview, int]:
        """One layer in one block, and the slice's hash."""
        part = self._by_layer[layer]
        return part.slice(layer, block), part.hash_of(layer, block)

    def write(self, layer: int, block: int, data: memoryview, value: int) -> None:
        """Take one verified slice from elsewhere, with the received hash."""
        self.slice(layer, block)[:] = data
        self.set_hash(layer, block, value)

    def set_hash(self, layer: int, block: int, value: int) -> None:
        """Keep the received hash for a slice that lies here already, and tell a device that the slice is new."""
        self._by_layer[layer].land(layer, block, value)

    def seal(self, layer: int, block: int, valid_tokens: int) -> None:
        """Hash a slice that was computed in this process."""
        self._by_layer[layer].seal([(layer, block, valid_tokens)])

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for part in self.parts:
            part.close()


NO_DEVICE, DEVICE_KNOWS, TELL_DEVICE = range(3)
"""Whether a device has a copy of a pool, and whether the device's process waits for landed slices."""
_madvise = ctypes.CDLL(None).madvise  # mmap's own holds the interpreter meanwhile


@dataclass(slots=True)
class PoolPart:
    """One stage's share, mapped shared from a file descriptor: layer after layer, each with all blocks' slices.

    With `slots`, layers with a window or a recurrent state have so many slices instead, and a block has those of the
    slot that `slot_of` names, if any.

    Behind these `nbytes` lie numbers of 8 bytes: the slices' hashes, `[layer_end - layer_begin, blocks]`, `written`,
    alike, `landed`, and `slot_of`, `[blocks]`. A slice lands when the slice has come from elsewhere. `map` supports the
    buffer protocol. The part owns `fd`: closed with the part.

    Attributes:
        slots: window slots; 0 = all layers have all blocks' slices.
        slot_of: each block's window slot; `NO_SLOT` = the block lacks the slices of layers with a window.
        written: how often each slice landed.
        landed: how many slices landed in each layer, then in all layers, and then `NO_DEVICE`, `DEVICE_KNOWS` or
            `TELL_DEVICE`. Slices are counted if a device has a copy of the pool.
        on_landed: called in the I/O process, by any thread, if a device waits for landed slices.
    """

    layout: KVLayout
    blocks: int
    slots: int
    layer_begin: int
    layer_end: int
    fd: int
    nbytes: int
    map: mmap.mmap
    view: memoryview = field(repr=False)
    hashes: memoryview = field(repr=False)
    written: memoryview = field(repr=False)
    landed: memoryview = field(repr=False)
    slot_of: memoryview = field(repr=False)
    on_landed: Callable[[], None] | None = None
    _landing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _places: list[tuple[int, int, bool]] = field(init=False, repr=False)  # first byte, bytes per slice, by slots

    def __post_init__(self) -> None:
        layout, start = self.layout, 0
        self._places = []
        for layer in range(self.layer_begin, self.layer_end):
            size, by_slots = layout.slice_bytes(layer), self.slots > 0 and layer in layout.windowed_layers
            self._places.append((start, size, by_slots))
            start += size * (self.slots if by_slots else self.blocks)

    @classmethod
    def create(
        cls, fd: int, layout: KVLayout, blocks: int, layer_begin: int, layer_end: int, slots: int = 0
    ) -> PoolPart:
        """Make a part in empty memory, where no block has a window slot, and take ownership of the descriptor."""
        os.truncate(fd, _mapped_bytes(layout, range(layer_begin, layer_end), blocks, slots))
        made = cls.attach(fd, layout, blocks, layer_begin, layer_end, slots)
        for block in range(blocks if slots else 0):
            made.slot_of[block] = NO_SLOT
        return made

    @classmethod
    def attach(
        cls, fd: int, layout: KVLayout, blocks: int, layer_begin: int, layer_end: int, slots: int = 0
    ) -> PoolPart:
        """Map a part from an inherited descriptor, and take ownership of the descriptor.

        Raises:
            ConfigError: The descriptor's memory is not what the arguments say.
        """
        layers = range(layer_begin, layer_end)
        slices = len(layers) * blocks
        needed, size = _mapped_bytes(layout, layers, blocks, slots), os.fstat(fd).st_size
        if size != needed or slices <= 0:
            raise ConfigError("pool", f"layers {layer_begin} to {layer_end} need {needed} bytes, the pool has {size}")
        mapped = mmap.mmap(fd, needed, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view, nbytes = memoryview(mapped), layout.pool_bytes(blocks, slots or blocks, layers)
        numbers = view[-(-nbytes // _NUMBER_BYTES) * _NUMBER_BYTES :]
        written, landed = (slices * _NUMBER_BYTES * times for times in (1, 2))
        slot_of = landed + (len(layers) + 2) * _NUMBER_BYTES
        views = view[:nbytes], numbers[:written].cast("Q"), numbers[written:landed].cast("q")
        counts = numbers[landed:slot_of].cast("q"), numbers[slot_of:].cast("q")
        return cls(layout, blocks, slots, layer_begin, layer_end, fd, nbytes, mapped, *views, *counts)

    def has(self, layer: int, block: int) -> bool:
        """Whether a block has a layer's slice."""
        return not self._places[layer - self.layer_begin][2] or self.slot_of[block] != NO_SLOT

    def slice(self, layer: int, block: int) -> memoryview:
        """One layer's (index in the model) writable bytes in one block, which `has` the slice."""
        assert self.layer_begin <= layer < self.layer_end, "no such layer in this part"
        assert 0 <= block < self.blocks, "no such block"
        start, size, by_slots = self._places[layer - self.layer_begin]
        at = self.slot_of[block] if by_slots else block
        assert at != NO_SLOT, f"block {block} has no slice of layer {layer}"
        start += at * size
        return self.view[start : start + size]

    def find(self, layer: int, block: int) -> memoryview | None:
        """As `slice`; None if the block lacks the slice."""
        start, size, by_slots = self._places[layer - self.layer_begin]
        at = self.slot_of[block] if by_slots else block
        start += at * size
        return None if at == NO_SLOT else self.view[start : start + size]

    def populate(self) -> None:
        """Take all memory now, if the system can (Linux 5.14), so that no page's first use waits.

        In the calling process, each page is then mapped too: both processes of a pool populate the pool.
        """
        size = -(-len(self.map) // (_POPULATING * mmap.PAGESIZE)) * mmap.PAGESIZE
        memory = ctypes.c_char.from_buffer(self.map)  # keeps the mapping meanwhile
        with ThreadPoolExecutor(_POPULATING) as threads:
            for begin in range(0, len(self.map), size):
                place = ctypes.c_void_p(ctypes.addressof(memory) + begin)
                threads.submit(_madvise, place, ctypes.c_size_t(min(size, len(self.map) - begin)), _POPULATE_WRITE)

    def hash_of(self, layer: int, block: int) -> int:
        """The slice's `slice_hash` when computed or received; 0 before."""
        return int(self.hashes[(layer - self.layer_begin) * self.blocks + block])

    def set_hash(self, layer: int, block: int, value: int) -> None:
        """Keep the hash that came with a slice."""
        self.hashes[(layer - self.layer_begin) * self.blocks + block] = value

    def land(self, layer: int, block: int, value: int) -> None:
        """Keep the hash of a slice that has come into the pool; count the slice if a device has a copy."""
        self.set_hash(layer, block, value)
        if self.landed[-1] == NO_DEVICE:
            return
        row = layer - self.layer_begin
        with self._landing:  # for several threads in one process; readers in the other process need no lock
            self.written[row * self.blocks + block] += 1
            self.landed[row] += 1
            self.landed[-2] += 1
        if self.landed[-1] == TELL_DEVICE and self.on_landed is not None:
            self.landed[-1] = DEVICE_KNOWS
            self.on_landed()

    def seal(self, slices: Iterable[tuple[int, int, int]], threads: int = 1) -> None:
        """Hash slices that were computed here, in one call, on so many threads at most.

        Args:
            slices: layer, block, and valid tokens of each slice; invalid token slots count as zeros. A slice for which
                the block has no place was not computed, and gets no hash.
            threads: For large batches.
        """
        seals, total, cleaned = array("Q"), 0, list[ctypes.Array[ctypes.c_char]]()
        memory = ctypes.c_char.from_buffer(self.map)  # keeps the mapping meanwhile
        base = ctypes.addressof(memory)
        hashes = base + -(-self.nbytes // _NUMBER_BYTES) * _NUMBER_BYTES
        for layer, block, valid_tokens in slices:
            row = layer - self.layer_begin
            start, size, by_slots = self._places[row]
            at = self.slot_of[block] if by_slots else block
            if at == NO_SLOT:
                continue
            data = base + start + at * size
            if valid_tokens < self.layout.block_size:
                copy = (ctypes.c_char * size).from_buffer_copy(self.view, start + at * size)
                self.layout.zero_invalid(layer, memoryview(copy).cast("B"), valid_tokens)
                cleaned.append(copy)
                data = ctypes.addressof(copy)
            seals.extend((data, size, hashes + (row * self.blocks + block) * _NUMBER_BYTES))
            total += size
        if seals:
            sealing.prepare()(seals, total, threads)

    def copy(self, source: int, block: int) -> None:
        """Copy a block's slices in all layers, with the hashes. Both blocks have the same layers."""
        for layer in range(self.layer_begin, self.layer_end):
            if not (self.has(layer, source) and self.has(layer, block)):
                continue
            self.slice(layer, block)[:] = self.slice(layer, source)
            self.set_hash(layer, block, self.hash_of(layer, source))

    def close(self) -> None:
        """Unmap and close. Idempotent. Slices that are still referred to keep the memory."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.hashes.release()
        self.landed.release()
        with contextlib.suppress(BufferError):  # steps read it
            self.slot_of.release()
        with contextlib.suppress(BufferError):  # a device may still read the memory
            self.written.release()
        self.view.release()
        with contextlib.suppress(BufferError):
            self.map.close()


class PoolTarget:
    """Pool blocks that take what is read from elsewhere (`BlockReader.read`).

    Slices for which a block has no place are dropped.
    """

    def __init__(self, pool: KVPool, blocks: Sequence[int]) -> None:
        """Take the blocks' numbers in the pool, in the order of the read's keys."""
        self._pool = pool
        self._blocks = blocks
        self._given: dict[tuple[int, int], memoryview] = {}

    def into(self, layer: int, index: int) -> memoryview | None:
        """Where a slice may land; bytes there do not count until `take`. None: in the reader's memory."""
        if not self._pool.has(layer, self._blocks[index]):
            return None
        memory = self._given[layer, index] = self._pool.slice(layer, self._blocks[index])
        return memory

    def take(self, layer: int, index: int, data: memoryview, value: int) -> None:
        """Take a verified slice with hash, from the memory where the slice should land or from other memory."""
        if self._given.pop((layer, index), None) is data:
            self._pool.set_hash(layer, self._blocks[index], value)
        elif self._pool.has(layer, self._blocks[index]):
            self._pool.write(layer, self._blocks[index], data, value)


def _mapped_bytes(layout: KVLayout, layers: range, blocks: int, slots: int) -> int:
    """Memory for a part: slices, and their numbers, which are aligned to their size."""
    slices, values = len(layers) * blocks, layout.pool_bytes(blocks, slots or blocks, layers)
    numbers = 2 * slices + len(layers) + 2 + (blocks if slots else 0)
    return (-(-values // _NUMBER_BYTES) + numbers) * _NUMBER_BYTES


def _check_room(layout: KVLayout, blocks: int, slots: int, available: Callable[[], int | None]) -> None:
    if blocks < 1:
        raise ConfigError("kv_cache_memory_bytes", f"no room for a single block; one takes {layout.block_bytes} bytes")
    needed, free = layout.pool_bytes(blocks, slots), available()
    if free is not None and needed > free:
        raise ConfigError(
            "kv_cache_memory_bytes",
            f"{blocks} blocks of {layout.block_bytes} bytes need {needed} bytes, only {free} are free",
        )


def _check_ranges(layout: KVLayout, layer_ranges: Sequence[tuple[int, int]]) -> None:
    expected = 0
    for begin, end in layer_ranges:
        if begin != expected or end <= begin:
            raise ConfigError(
                "pipeline_parallel_size", f"layers {list(layer_ranges)} are not consecutive and non-empty"
            )
        expected = end
    if expected != layout.layers:
        raise ConfigError("pipeline_parallel_size", f"layers {list(layer_ranges)} are not the model's {layout.layers}")
