"""A stage's KV as the stage's steps see KV, and KV in two tiers: a device's own pool, and the host's pool.

The I/O process sees the host's pool. Both tiers have the same blocks. The host's pool counts how often each slice
landed. The loading thread brings slices to the device as they land, in batches; a step waits only for batches with its
own blocks. What a step finishes is copied back in batches; the callback thread waits for them, and hashes.

The ranks of a stage have a device each, with their heads of all slices. Each brings and stores these alone; of a head
that several ranks have, the first of them stores. Once all ranks have stored a batch, the first rank hashes the whole
slices.

A slice on the way to the device:

    LANDED      the I/O process counted it in the pool
       | KVLoads.bring
    UNDER WAY   a batch has it; the loading thread gives batches to the device, in order
       | the event behind the batch is reached
    LOADED      steps may read it; if it lands again, it is brought again
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.base.families.ranks import first_with_head, heads_of_rank
from moonpool.base.kv.layout import NO_SLOT, KVGroup, KVLayout
from moonpool.base.kv.pool import NO_DEVICE, TELL_DEVICE, PoolPart
from moonpool.base.scheduling.steps import Step, finished_blocks, written_blocks
from moonpool.engine.kernels import kv_quantization
from moonpool.engine.kernels.attention import copy_blocks
from moonpool.engine.models.batch import LayersKV, LayersScales
from moonpool.engine.models.loader import torch_dtype
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.platforms.base import Device, DeviceEvent
from moonpool.engine.platforms.callback_thread import CallbackThread, _Callback

_BATCH_BYTES = 16 << 20
"""Bytes per batch: copying takes longer than ordering the copy."""
_SEAL_THREADS = min(4, len(os.sched_getaffinity(0)))
"""One thread hashes about 5 GB/s that are not in the processor's cache, less than a GPU's long prompts make."""


OnDone = Callable[[], None]


class KVMemory(Protocol):
    """KV that steps compute in. One thread calls the methods, for one step after the other.

    Exception: if a plain CPU computes layers together, the callback thread calls `finish_layer` meanwhile. A layer's
    prefix is there for work that is given to the compute stream after `prepare_layer`. Blocks that a step finishes get
    into the pool with their hashes.
    """

    kv: LayersKV
    """For each layer in the stage [blocks, kv_heads, planes, block_size, head_dim]; belongs to the compute stream."""
    scales: LayersScales | None
    """For quantised KV, for each layer [blocks, kv_heads, planes, block_size] float32; of the compute stream."""
    slot_of: NDArray[np.int64] | None
    """Each block's window slot, as the pool has it now (`PoolPart.slot_of`); None if layers with a window have all
    blocks."""
    blocks: int
    block_size: int
    host_bytes: int
    """Host memory of KV, with the pool."""

    def begin(self, step: Step) -> None:
        """Begin a step: copy blocks as `step.copies` says."""

    def advance(self, written: Sequence[int], full: Sequence[int]) -> None:
        """Begin the run's next step, which writes one token to each block in `written` and fills those in `full`."""

    def prepare_layer(self, layer: int) -> None:
        """Make this layer of the step's prefixes available to work given to the compute stream from now on."""

    def finish_layer(self, layer: int, then: OnDone | None, behind: DeviceEvent | None = None) -> None:
        """Store the layer's finished blocks in the pool, once the compute stream is done, then call `then`.

        `then` may be called by another thread. `behind`: the event behind the layer; None: all work so far.
        """

    def finish_step(self, then: OnDone, *, aborted: bool, behind: DeviceEvent | None = None) -> None:
        """End the step, which the compute stream has done. Call `then` once the step's blocks are unused.

        `behind`: as for `finish_layer`.
        """

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """Store blocks in the pool, part-filled ones too, then call `then`. Between two steps."""

    def load(self, then: OnDone | None) -> None:
        """Bring all that landed in the pool to where steps compute, then call `then`. Any thread may call this method.

        `then` may be called by another thread.
        """

    def close(self) -> None:
        """End the threads of this memory. No KV is brought any more."""


def pool_bytes(part: PoolPart) -> Tensor:
    """Return a stage's pool as bytes, uint8 [nbytes], over the same memory."""
    return torch.frombuffer(part.map, dtype=torch.uint8, count=part.nbytes)


def slot_table(part: PoolPart) -> NDArray[np.int64] | None:
    """See `KVMemory.slot_of`."""
    return np.frombuffer(part.slot_of, np.int64) if part.slots else None


class StageSlices:
    """All a stage's slices in one memory, numbered row * blocks + block.

    Attributes:
        flat: the memory, uint8 [nbytes].
        parts: uint8 [rows, blocks, bytes]: consecutive rows with equally large slices, or with a rank's heads of them;
            [rows, slots, bytes] where layers have window slots.

    Args:
        flat: the memory.
        part: the host's pool.
        ranks: of the stage.
        whole: the memory has whole slices, else a rank's heads.
    """

    def __init__(self, flat: Tensor, part: PoolPart, *, ranks: int = 1, whole: bool = True) -> None:
        self.flat, own = flat, part.layout.of_rank(ranks)
        self._layout, self._blocks = part.layout if whole else own, part.blocks
        self._layers = range(part.layer_begin, part.layer_end)
        self._slot_of = torch.frombuffer(part.slot_of, dtype=torch.int64) if part.slots else None
        self.parts: list[Tensor] = []
        self._by_slots: list[bool] = []
        self._shares: list[int] = []
        begin = 0
        for (size, its, by_slots), same in itertools.groupby(self._layers, partial(_shape_of, part, own)):
            rows, count, held = sum(1 for _ in same), part.slots if by_slots else part.blocks, size if whole else its
            end = begin + rows * count * held
            self.parts.append(flat[begin:end].view(rows, count, held))
            self._by_slots.append(by_slots)
            self._shares.append(size // its)
            begin = end
        self._taken = [True] * len(self.parts)

    @classmethod
    def of_pool(cls, part: PoolPart, flat: Tensor) -> "StageSlices":
        """Return the slices in a stage's pool, or in a device's copy of the pool."""
        return cls(flat, part)

    def heads_of(self, rank: int, ranks: int) -> "StageSlices":
        """Return a rank's heads in these whole slices, over the same memory, for copies.

        Copies to heads that an earlier rank has, too, are left out.
        """
        found = copy(self)
        shares = [heads_of_rank(count, rank, ranks).start for count in self._shares]
        sizes = [part.shape[2] // count for part, count in zip(self.parts, self._shares, strict=True)]
        each = zip(self.parts, shares, sizes, strict=True)
        found.parts = [part.narrow(2, share * size, size) for part, share, size in each]
        found._taken = [rank == first_with_head(count, rank, ranks) for count in self._shares]
        return found

    def _places(self, by_slots: bool, blocks: Tensor) -> Tensor:
        """Where blocks lie in a row; `NO_SLOT` if the row lacks a block."""
        if not by_slots:
            return blocks
        assert self._slot_of is not None
        return self._slot_of[blocks]

    def typed(self) -> tuple[LayersKV, LayersScales | None]:
        """(`KVMemory.kv`, `KVMemory.scales`) over the same memory."""
        views = [
            _typed(rows, self._layout.group(layer), self._layout.block_size)
            for layer, rows in zip(self._layers, (row for part in self.parts for row in part), strict=True)
        ]
        kv, scales = [view for view, _ in views], [view for _, view in views]
        if len(self.parts) == 1 and len({(view.shape, view.dtype) for view in kv}) == 1:
            return _typed(self.parts[0], self._layout.group(self._layers.start), self._layout.block_size)
        return kv, None if all(view is None for view in scales) else scales

    def copy(self, device: Device, source: "StageSlices", slices: Tensor) -> None:
        """Copy slices, by rising numbers, from another memory: `Device.copy_slices`."""
        if len(self.parts) == 1 and self._taken[0]:
            device.copy_slices(self.parts[0].flatten(0, 1), source.parts[0].flatten(0, 1), slices)
            return
        first = 0
        for target, origin, by_slots, taken in zip(self.parts, source.parts, self._by_slots, self._taken, strict=True):
            end = first + target.shape[0] * self._blocks
            chosen = slices[(slices >= first) & (slices < end)] - first
            if by_slots:  # a slice that came for a slot that is gone by now is left out
                places = self._places(by_slots, chosen % self._blocks)
                chosen = (chosen // self._blocks * target.shape[1] + places)[places != NO_SLOT].sort().values
            if len(chosen) and taken:
                device.copy_slices(target.flatten(0, 1), origin.flatten(0, 1), chosen)
            first = end

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, where they have the same layers, within this memory."""
        for part, by_slots in zip(self.parts, self._by_slots, strict=True):
            begins, ends = self._places(by_slots, sources), self._places(by_slots, targets)
            both = (begins != NO_SLOT) & (ends != NO_SLOT)
            # Tensors of their own, because a kernel is compiled anew for another alignment.
            copy_blocks(part, begins[both].to(part.device), ends[both].to(part.device))


def rank_bytes(part: PoolPart, ranks: int) -> int:
    """Return the bytes of a rank's heads of all slices in a stage's pool."""
    layers = range(part.layer_begin, part.layer_end)
    return part.layout.of_rank(ranks).pool_bytes(part.blocks, part.slots or part.blocks, layers)


def _shape_of(part: PoolPart, own: KVLayout, layer: int) -> tuple[int, int, bool]:
    """Return the bytes of a layer's slices, those of a rank, and whether slices lie by window slots."""
    by_slots = part.slots > 0 and layer in part.layout.windowed_layers
    return part.layout.slice_bytes(layer), own.slice_bytes(layer), by_slots


def _typed(slices: Tensor, group: KVGroup, block_size: int) -> tuple[Tensor, Tensor | None]:
    """Values, and scales of quantised KV, over uint8 [..., blocks, slice_bytes]."""
    if not group.scaled:
        shape = (group.kv_heads, group.planes, group.slots(block_size), group.head_dim)
        return slices.view(torch_dtype(group.dtype)).view(*slices.shape[:-1], *shape), None
    sizes = {"kv_heads": group.kv_heads, "block_size": block_size, "head_dim": group.head_dim}
    return kv_quantization.views(slices, kv_quantization.DTYPES[group.dtype], planes=group.planes, **sizes)


@dataclass(slots=True, eq=False)
class _Batch:
    """Slices under way to the device: rising numbers, layer by layer.

    Attributes:
        rows: first and last layer in the pool's part.
        given: call that gives the copy to the device.
        event: the slices are on the device. Set by `given`.
    """

    slices: Tensor
    rows: tuple[int, int]
    given: _Callback | None = None
    event: DeviceEvent | None = None


class KVLoads:
    """Brings slices from the host's pool to the device as they land.

    Args:
        part: the host's pool.
        device: copies on the device's `load_stream`.
        source: the host's slices, registered.
        target: the device's.
        batch_slices: most slices of a batch.
        on_landed: is told of blocks that landed before they are brought; called under a lock.
        on_failure: called once, from the loading thread, with an error.
    """

    def __init__(
        self,
        part: PoolPart,
        device: Device,
        source: StageSlices,
        target: StageSlices,
        batch_slices: int,
        on_landed: Callable[[Iterable[int]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        layers = part.layer_end - part.layer_begin
        self._part, self._stream, self._on_landed = part, device.load_stream, on_landed
        self._copy, self._batch_slices = partial(target.copy, device, source), batch_slices
        self._written = torch.frombuffer(part.written, dtype=torch.int64).view(layers, part.blocks)
        self._brought = torch.zeros_like(self._written)
        self._landed, self._by_row = 0, [0] * layers
        self._under_way: deque[_Batch] = deque()
        self._blocks = torch.zeros(part.blocks, dtype=torch.int32)  # slices of each block that are under way
        self._changing = threading.Lock()
        self._thread = CallbackThread(on_failure, device.enter_thread)
        part.landed[-1] = TELL_DEVICE

    @property
    def quiet(self) -> bool:
        """Whether all landed KV is on the device: one word in the pool tells."""
        return self._part.landed[-2] == self._landed and not self._under_way

    def bring(self) -> None:
        """Bring what has landed. Any thread may call this method."""
        if self._part.landed[-2] == self._landed:
            self._part.landed[-1] = TELL_DEVICE
            return
        with self._changing:
            landed = self._part.landed[-2]  # read before the rows' counts, these before the slices' counts and bytes
            rows = [row for row, count in enumerate(self._by_row) if self._part.landed[row] != count]
            for row in rows:
                self._by_row[row] = self._part.landed[row]
            if rows:
                self._take(torch.tensor(rows))
            self._landed = landed  # last: from now on other threads take the batches for all that landed

    def _take(self, rows: Tensor) -> None:
        """Make batches of what has landed in some rows."""
        written, (blocks,) = self._written[rows], self._blocks.shape
        which = (written != self._brought[rows]).nonzero()
        self._brought[rows] = written
        slices = rows[which[:, 0]] * blocks + which[:, 1]
        self._on_landed(set(which[:, 1].tolist()))
        self._blocks.index_add_(0, which[:, 1], torch.ones(len(slices), dtype=torch.int32))
        for begin in range(0, len(slices), self._batch_slices):
            part = slices[begin : begin + self._batch_slices]
            batch = _Batch(part, (int(part[0]) // blocks, int(part[-1]) // blocks))
            self._under_way.append(batch)
            batch.given = self._thread.send(partial(self._give, batch))
        self._thread.send(self._settle)

    def load(self, then: OnDone | None) -> None:
        self.bring()
        if then is not None:
            self._thread.send(then)

    def blocks_of(self, tables: Iterable[Sequence[int]]) -> Tensor | None:
        """Return the blocks of these tables that are under way, bool [blocks]; None if none is."""
        with self._changing:
            blocks = set(self._blocks.nonzero().flatten().tolist())
        found = [block for table in tables if not blocks.isdisjoint(table) for block in blocks.intersection(table)]
        if not found:
            return None
        return torch.zeros(self._part.blocks, dtype=torch.bool).index_fill_(0, torch.tensor(found), True)

    def last_event(self, row: int, blocks: Tensor) -> DeviceEvent | None:
        """Return the event behind which a row of some blocks, bool [blocks], is on the device.

        None: the row is there. Waits until the loading thread has given the row to the device.
        """
        with self._changing:
            found = [copy for copy in self._under_way if copy.rows[0] <= row <= copy.rows[1]]
        last = next((copy for copy in reversed(found) if bool(blocks[copy.slices % len(blocks)].any())), None)
        if last is None:
            return None
        assert last.given is not None
        last.given.wait()
        return last.event

    def close(self) -> None:
        """Stop bringing KV, and end the thread."""
        self._thread.close()
        self._part.landed[-1] = NO_DEVICE

    # --- in the loading thread -------------------------------------------------------------------------------------

    def _give(self, batch: _Batch) -> None:
        self._stream.run(partial(self._copy, batch.slices))
        batch.event = self._stream.record()

    def _settle(self) -> None:
        """Wait until the batches that were given are on the device; then look for more."""
        given = [batch for batch in list(self._under_way) if batch.event is not None]
        if given and given[-1].event is not None:
            given[-1].event.wait()
        with self._changing:
            for batch in given:
                self._under_way.popleft()
                blocks = batch.slices % len(self._blocks)
                self._blocks.index_add_(0, blocks, torch.full((len(blocks),), -1, dtype=torch.int32))
        self._part.landed[-1] = TELL_DEVICE
        self.bring()


class TieredKVMemory:
    """See `KVMemory`.

    Args:
        part: the host's pool.
        device: holds the other pool.
        callbacks: hashes slices that have come to the host's pool; closed by the owner.
        batch_slices: most slices brought as one batch; 16 MiB unless given.
        beside: bytes that stay free on the device, for steps.
        ranks: this process among the stage's ranks; None: there are no others.
    """

    def __init__(
        self,
        part: PoolPart,
        device: Device,
        callbacks: CallbackThread,
        batch_slices: int = 0,
        beside: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        count, self._ranks = 1 if ranks is None else ranks.ranks, ranks
        host = StageSlices(pool_bytes(part), part, ranks=count)
        host = host if ranks is None else host.heads_of(ranks.rank, count)
        self._batch_slices = batch_slices or max(1, _BATCH_BYTES // part.layout.largest_slice_bytes)
        memory = device.memory((rank_bytes(part, count),), beside)
        slices = StageSlices(memory, part, ranks=count, whole=False)
        self.kv, self.scales = slices.typed()
        self.blocks, self.block_size, self.slot_of = part.blocks, part.layout.block_size, slot_table(part)
        part.populate()
        device.register(host.flat)
        self._copy_home = partial(host.copy, device, slices)
        self._device_slices = slices
        self._part, self._device, self._size = part, device, part.layout.block_size
        own = memory.nbytes if memory.device.type == "cpu" else 0
        self.host_bytes = part.nbytes + own
        self._callbacks = callbacks
        self._unstored: set[int] = set()
        self._awaited: Tensor | None = None
        self._gated = False
        self._tables: Sequence[Sequence[int]] = ()
        self._written: Sequence[int] = ()
        self._finished: list[tuple[int, int]] = []
        self._leaving: list[int] = []  # layers with finished blocks not stored yet
        newer, on_failure = self._unstored.difference_update, callbacks.on_failure
        self._loads = KVLoads(part, device, host, slices, self._batch_slices, newer, on_failure)

    def begin(self, step: Step) -> None:
        self._gated, self._awaited = step.gated, None
        self._tables = [sequence.block_table for sequence in step.sequences]
        if step.copies:
            self._tables += zip(*step.copies, strict=True)
        if not self._loads.quiet:
            self._loads.bring()
            self._awaited = self._loads.blocks_of(self._tables)
        self._copy(step.copies)
        self._written = [block for part in step.sequences for block in written_blocks(part, self._size)]
        self._finished = sorted(finished_blocks(step, self._size))

    def advance(self, written: Sequence[int], full: Sequence[int]) -> None:
        self._gated, self._awaited = False, None
        self._written, self._finished = written, [(block, self._size) for block in sorted(full)]

    def prepare_layer(self, layer: int) -> None:
        """See `KVMemory.prepare_layer`. The prefix of a gated step may have landed since the step began."""
        if self._gated and not self._loads.quiet:
            self._loads.bring()
            self._awaited = self._loads.blocks_of(self._tables)
        if self._awaited is not None:
            self._await(layer - self._part.layer_begin)

    def finish_layer(self, layer: int, then: OnDone | None, behind: DeviceEvent | None = None) -> None:
        """See `KVMemory.finish_layer`. Without `then` slices leave when there is a batch, or with the step's end."""
        self._leaving.append(layer)
        if then is None and len(self._leaving) * len(self._finished) < self._batch_slices:
            return
        if not self._store(self._finished, behind, then) and then is not None:
            self._callbacks.send(partial(_call_behind, self._device.compute.record(), then))

    def finish_step(self, then: OnDone, *, aborted: bool, behind: DeviceEvent | None = None) -> None:
        self._unstored.update(self._written)
        if aborted:
            self._leaving.clear()
        else:
            self._store(self._finished, behind)
            self._unstored.difference_update(block for block, _ in self._finished)
        self._callbacks.send(then)

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """See `KVMemory.fetch`. A part-filled block gets no hash: such a block is never sent."""
        self._loads.bring()  # a block in which something landed is another sequence's by now, and newer in the pool
        self._leaving = list(range(self._part.layer_begin, self._part.layer_end))
        self._store([(block, 0) for block in sorted(self._unstored.intersection(blocks))])
        self._unstored.difference_update(blocks)
        self._callbacks.send(then)

    def load(self, then: OnDone | None) -> None:
        self._loads.load(then)

    def close(self) -> None:
        self._loads.close()

    # --- copies ----------------------------------------------------------------------------------------------------

    def _await(self, row: int) -> None:
        """Let the compute stream wait for a row of the step's blocks that are under way."""
        assert self._awaited is not None
        event = self._loads.last_event(row, self._awaited)
        if event is not None:
            self._device.compute.wait_event(event)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks on the device; the step writes to the copies."""
        if not copies:
            return
        if self._awaited is not None:
            for row in range(self._part.layer_end - self._part.layer_begin):
                self._await(row)
        sources, targets = (torch.tensor(blocks) for blocks in zip(*copies, strict=True))
        self._device.compute.run(partial(self._device_slices.copy_blocks, sources, targets))

    def _store(
        self, blocks: Sequence[tuple[int, int]], behind: DeviceEvent | None = None, then: OnDone | None = None
    ) -> bool:
        """Store blocks, rising, for the leaving layers, as one batch, with a hash if they have valid tokens.

        `behind`: the event behind what wrote them; None: all work so far. `then` is called when they have their hashes.

        Returns:
            Whether there was anything to store.
        """
        layers, self._leaving = self._leaving, []
        if not layers or not blocks:
            return False
        stream = self._device.store_stream
        rows = (np.array(layers) - self._part.layer_begin) * self._part.blocks
        slices = torch.from_numpy(np.add.outer(rows, [block for block, _ in blocks]).ravel())
        stream.wait_event(behind or self._device.compute.record())
        stream.run(partial(self._copy_home, slices))
        self._callbacks.send(partial(self._seal, stream.record(), layers, blocks, then))
        return True

    def _seal(
        self, event: DeviceEvent, layers: Sequence[int], blocks: Sequence[tuple[int, int]], then: OnDone | None
    ) -> None:
        """Hash blocks of some layers that are in the host's pool behind an event."""
        event.wait()
        if self._ranks is not None:
            self._ranks.stored()
        if self._ranks is None or self._ranks.first:
            self._part.seal([(layer, *block) for layer in layers for block in blocks if block[1]], _SEAL_THREADS)
        if then is not None:
            then()


def _call_behind(event: DeviceEvent, then: OnDone) -> None:
    event.wait()
    then()
