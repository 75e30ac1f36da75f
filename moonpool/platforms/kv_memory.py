"""A stage's KV as its steps see it, and KV in two tiers: a device's own pool, and the host's pool.

The I/O process sees the host's pool. Both tiers have the same blocks. The host's pool counts how often each slice
landed. The loading thread brings slices to the device as they land, in batches; a step waits for batches of its own
blocks only. What a step finishes is copied back in batches, and hashed, by the callback thread.

A slice on its way to the device:

    LANDED      the I/O process counted it in the pool
       | KVLoads.bring
    UNDER WAY   a batch has it; the loading thread copies batches in order, to a buffer and on to the device
       | the event behind the batch is reached
    LOADED      steps may read it; if it lands again, it is brought again
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from kernels import kv_quantization
from kernels.attention import copy_blocks
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import NO_DEVICE, TELL_DEVICE, PoolPart
from moonpool.models.loader import torch_dtype
from moonpool.platforms.base import Device, DeviceEvent
from moonpool.scheduling.steps import SequenceStep, Step, finished_blocks


class BufferRing:
    """A ring of buffers, each reused after its last use is done. For one thread.

    Args:
        buffers: [count, slices, words of a slice].
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers = buffers
        self._free = deque(range(len(buffers)))
        self._busy: deque[tuple[int, DeviceEvent]] = deque()

    def take(self) -> tuple[int, Tensor]:
        """Return an unused buffer and its number; if all are in use, wait for the one taken first."""
        if not self._free:
            number, event = self._busy.popleft()
            event.wait()
            self._free.append(number)
        number = self._free.popleft()
        return number, self._buffers[number]

    def until(self, number: int, event: DeviceEvent) -> None:
        """Keep a buffer in use until an event."""
        self._busy.append((number, event))


@dataclass(slots=True, eq=False)
class _Callback:
    """A call that a `CallbackThread` makes. A `DeviceEvent`."""

    thread: "CallbackThread"
    work: Callable[[], None]
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait until the call is made.

        Raises:
            BaseException: the error of an earlier call, or of this one. No further call is made.
        """
        self.over.wait()
        if self.thread.failed is not None:
            raise self.thread.failed


class CallbackThread:
    """A thread that makes calls, one after the other.

    Args:
        on_failure: called once, with the error of a call.
        enter: called first, by the thread itself: `Device.enter_thread` if its calls wait for a device.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], enter: Callable[[], None] = lambda: None) -> None:
        self._calls: queue.SimpleQueue[_Callback | None] = queue.SimpleQueue()
        self.on_failure, self._enter = on_failure, enter
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[], None]) -> _Callback:
        """Call `work` after all that was sent before."""
        call = _Callback(self, work)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """End the thread after all calls."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._do(self._enter)
        while (call := self._calls.get()) is not None:
            if self.failed is None:
                self._do(call.work)
            call.over.set()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failed = error
            self.on_failure(error)


OnDone = Callable[[], None]


class KVMemory(Protocol):
    """KV that steps compute in. One thread calls its methods, for one step after the other.

    Exception: if a plain CPU computes layers together, the callback thread calls `finish_layer` meanwhile. A layer's
    prefix is there for work that is given to the compute stream after `prepare_layer`. Blocks that a step finishes get
    into the pool with their hashes.
    """

    kv: Tensor
    """[layers of the stage, blocks, kv_heads, 2, block_tokens, head_dim]; belongs to the compute stream."""
    scales: Tensor | None
    """Of quantised KV, [layers, blocks, kv_heads, 2, block_tokens] float32; belongs to the compute stream."""
    host_bytes: int
    """Host memory of KV, with the pool."""

    def begin(self, step: Step) -> None:
        """Begin a step: copy blocks as `step.copies` says."""

    def advance(self, written: Sequence[int], full: Sequence[int]) -> None:
        """Begin the run's next step, which writes one token to each block of `written` and fills those of `full`."""

    def prepare_layer(self, layer: int) -> None:
        """Make this layer of the step's prefixes available to work given to the compute stream from now on."""

    def finish_layer(self, layer: int, then: OnDone | None) -> None:
        """Store the layer's finished blocks in the pool, once the compute stream has computed it, then call `then`.

        `then` may be called by another thread.
        """

    def finish_step(self, then: OnDone, *, aborted: bool) -> None:
        """End the step, which the compute stream has done. Call `then` if nothing uses its blocks any more."""

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """Store blocks in the pool, part-filled ones too, then call `then`. Between two steps."""

    def load(self, then: OnDone | None) -> None:
        """Bring all that landed in the pool to where steps compute, then call `then`. Any thread may call it.

        `then` may be called by another thread.
        """

    def close(self) -> None:
        """End the threads of this memory. Nothing is brought any more."""


def pool_slices(part: PoolPart) -> Tensor:
    """A stage's pool as bytes, uint8 [layers, blocks, slice_bytes], over the same memory."""
    layers = part.layer_end - part.layer_begin
    flat = torch.frombuffer(part.map, dtype=torch.uint8, count=part.nbytes)
    return flat.view(layers, part.blocks, part.slice_bytes)


def typed_kv(slices: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor | None]:
    """(`KVMemory.kv`, `KVMemory.scales`) over the memory of uint8 [layers, blocks, slice_bytes]."""
    shape = (layout.kv_heads, 2, layout.block_tokens, layout.head_dim)
    if layout.dtype not in kv_quantization.DTYPES:
        return slices.view(torch_dtype(layout.dtype)).view(*slices.shape[:2], *shape), None
    sizes = {"kv_heads": layout.kv_heads, "block_tokens": layout.block_tokens, "head_dim": layout.head_dim}
    return kv_quantization.views(slices, kv_quantization.DTYPES[layout.dtype], **sizes)


STAGING_BUFFERS = 4
"""Batches of slices under way in each direction."""
_BATCH_BYTES = 8 << 20
"""Of a batch: copying it takes longer than to order the copy."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Buffers of the host for slices under way, in each direction."""

    buffers: int
    slices: int
    """Of a buffer."""

    @classmethod
    def of(cls, part: PoolPart) -> Self:
        """Return the buffers for a part of a pool."""
        slices = part.blocks * (part.layer_end - part.layer_begin)
        return cls(STAGING_BUFFERS, max(1, min(_BATCH_BYTES // part.slice_bytes, slices)))

    def nbytes(self, part: PoolPart) -> int:
        """Memory of both directions."""
        return 2 * self.buffers * self.slices * part.slice_bytes

    def ring(self, device: Device, part: PoolPart) -> BufferRing:
        """Return the buffers of one direction."""
        buffers = device.buffers(self.buffers, self.slices * part.slice_bytes)
        return BufferRing(_words(buffers.view(self.buffers, self.slices, part.slice_bytes)))


def _words(slices: Tensor) -> Tensor:
    """Bytes, uint8 [..., slice_bytes], as words if slices are made of words: kernels copy element by element."""
    return slices if slices.shape[-1] % 8 else slices.view(torch.int64)


def _run_of(slices: Tensor) -> slice | None:
    """Return rising numbers as a slice; None if there are gaps between them."""
    first, last = int(slices[0]), int(slices[-1])
    return slice(first, last + 1) if last - first == len(slices) - 1 else None


def _from_device(buffer: Tensor, pool: Tensor, slices: Tensor) -> None:
    """Copy slices of the device's pool, rising numbers, to a buffer of the host."""
    run = _run_of(slices)
    found = pool.index_select(0, slices.to(pool.device, non_blocking=True)) if run is None else pool[run]
    buffer.copy_(found, non_blocking=True)


def _to_device(pool: Tensor, slices: Tensor, buffer: Tensor) -> None:
    """Copy a buffer of the host to slices of the device's pool, rising numbers."""
    run = _run_of(slices)
    if run is None:
        brought = buffer.to(pool.device, non_blocking=True)
        pool.index_copy_(0, slices.to(pool.device, non_blocking=True), brought)
    else:
        pool[run].copy_(buffer, non_blocking=True)


# On the host numpy copies, in the calling thread: torch wakes OpenMP's threads for 32 KiB and more.


def _from_host(buffer: Tensor, pool: Tensor, slices: Tensor) -> None:
    """Copy slices of the host's pool, rising numbers, to a buffer."""
    run = _run_of(slices)
    if run is None:
        np.take(pool.numpy(), slices.numpy(), axis=0, out=buffer.numpy(), mode="clip")  # others copy twice
    else:
        np.copyto(buffer.numpy(), pool[run].numpy())


def _to_host(pool: Tensor, slices: Tensor, buffer: Tensor) -> None:
    """Copy a buffer to slices of the host's pool, rising numbers."""
    pool.numpy()[_run_of(slices) or slices.numpy()] = buffer.numpy()


@dataclass(slots=True, eq=False)
class _Batch:
    """Slices under way to the device: rising numbers, layer by layer.

    Attributes:
        rows: first and last layer in the pool's part.
        given: call that copies the slices to a buffer and gives the device the rest of the way.
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
        device: copies with its `load_stream`.
        slices: the device's pool, [layers * blocks, words of a slice].
        staging: buffers on the way.
        on_landed: is told of blocks that landed before they are brought; called under a lock.
        on_failure: called once, from the loading thread, with an error.
    """

    def __init__(
        self,
        part: PoolPart,
        device: Device,
        slices: Tensor,
        staging: Staging,
        on_landed: Callable[[Iterable[int]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        layers = part.layer_end - part.layer_begin
        self._part, self._stream, self._on_landed = part, device.load_stream, on_landed
        self._source, self._target = _words(pool_slices(part).flatten(0, 1)), slices
        self._written = torch.frombuffer(part.written, dtype=torch.int64).view(layers, part.blocks)
        self._brought = torch.zeros_like(self._written)
        self._landed, self._by_row = 0, [0] * layers
        self._under_way: deque[_Batch] = deque()
        self._blocks = torch.zeros(part.blocks, dtype=torch.int32)  # slices of each block that are under way
        self._batch_slices, self._ring = staging.slices, staging.ring(device, part)
        self._changing = threading.Lock()
        self._thread = CallbackThread(on_failure, device.enter_thread)
        part.landed[-1] = TELL_DEVICE

    @property
    def quiet(self) -> bool:
        """Whether all that landed is on the device: one word of the pool says so."""
        return self._part.landed[-2] == self._landed and not self._under_way

    def bring(self) -> None:
        """Bring what has landed. Any thread may call it."""
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
        """See `KVMemory.load`."""
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
            found = [it for it in self._under_way if it.rows[0] <= row <= it.rows[1]]
        last = next((it for it in reversed(found) if bool(blocks[it.slices % len(blocks)].any())), None)
        if last is None:
            return None
        assert last.given is not None
        last.given.wait()
        return last.event

    def close(self) -> None:
        """Bring nothing any more, and end the thread."""
        self._thread.close()
        self._part.landed[-1] = NO_DEVICE

    # --- in the loading thread -------------------------------------------------------------------------------------

    def _give(self, batch: _Batch) -> None:
        number, buffer = self._ring.take()
        buffer = buffer[: len(batch.slices)]
        _from_host(buffer, self._source, batch.slices)
        self._stream.run(partial(_to_device, self._target, batch.slices, buffer))
        batch.event = self._stream.record()
        self._ring.until(number, batch.event)

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
        callbacks: stores slices in the host's pool; closed by its owner.
        staging: buffers for slices under way; as `Staging.of` unless given.
        beside: bytes that stay free on the device, for steps.
    """

    def __init__(
        self,
        part: PoolPart,
        device: Device,
        callbacks: CallbackThread,
        staging: Staging | None = None,
        beside: int = 0,
    ) -> None:
        host_pool, staging = pool_slices(part), staging or Staging.of(part)
        device_pool = device.memory(tuple(host_pool.shape), beside)  # [layers, blocks, slice_bytes]
        self.kv, self.scales = typed_kv(device_pool, part.layout)
        self._host_slices, self._device_slices = (_words(it.flatten(0, 1)) for it in (host_pool, device_pool))
        self._device_pool = device_pool
        self._part, self._device, self._size = part, device, part.layout.block_tokens
        self._batch_slices, self._storing = staging.slices, staging.ring(device, part)
        own = device_pool.nbytes if device_pool.device.type == "cpu" else 0
        self.host_bytes = part.nbytes + own + staging.nbytes(part)
        self._callbacks = callbacks
        self._unstored: set[int] = set()
        self._awaited: Tensor | None = None
        self._gated = False
        self._tables: Sequence[Sequence[int]] = ()
        self._written: Sequence[int] = ()
        self._finished: list[tuple[int, int]] = []
        self._leaving: list[int] = []  # layers whose finished blocks are not stored yet
        self._loads = KVLoads(
            part, device, self._device_slices, staging, self._unstored.difference_update, callbacks.on_failure
        )

    def begin(self, step: Step) -> None:
        """See `KVMemory.begin`."""
        self._gated, self._awaited = step.gated, None
        self._tables = [it.block_table for it in step.sequences]
        if step.copies:
            self._tables += zip(*step.copies, strict=True)
        if not self._loads.quiet:
            self._loads.bring()
            self._awaited = self._loads.blocks_of(self._tables)
        self._copy(step.copies)
        self._written = [block for it in step.sequences for block in self._written_by(it)]
        self._finished = sorted(finished_blocks(step, self._size))

    def advance(self, written: Sequence[int], full: Sequence[int]) -> None:
        """See `KVMemory.advance`."""
        self._gated, self._awaited = False, None
        self._written, self._finished = written, [(block, self._size) for block in sorted(full)]

    def prepare_layer(self, layer: int) -> None:
        """See `KVMemory.prepare_layer`. The prefix of a gated step may have landed since the step began."""
        if self._gated and not self._loads.quiet:
            self._loads.bring()
            self._awaited = self._loads.blocks_of(self._tables)
        if self._awaited is not None:
            self._await(layer - self._part.layer_begin)

    def finish_layer(self, layer: int, then: OnDone | None) -> None:
        """See `KVMemory.finish_layer`. Without `then` slices leave when there is a batch, or with the step's end."""
        self._leaving.append(layer)
        if then is None and len(self._leaving) * len(self._finished) < self._batch_slices:
            return
        self._store(self._finished)
        if then is not None:
            self._callbacks.send(self._device.compute.record().wait)  # there may be nothing to store
            self._callbacks.send(then)

    def finish_step(self, then: OnDone, *, aborted: bool) -> None:
        """See `KVMemory.finish_step`."""
        self._unstored.update(self._written)
        if aborted:
            self._leaving.clear()
        else:
            self._store(self._finished)
            self._unstored.difference_update(block for block, _ in self._finished)
        self._callbacks.send(then)

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """See `KVMemory.fetch`. A part-filled block gets no hash: nothing sends it anywhere."""
        self._loads.bring()  # a block in which something landed is another sequence's by now, and newer in the pool
        self._leaving = list(range(self._part.layer_begin, self._part.layer_end))
        self._store([(block, 0) for block in sorted(self._unstored.intersection(blocks))])
        self._unstored.difference_update(blocks)
        self._callbacks.send(then)

    def load(self, then: OnDone | None) -> None:
        """See `KVMemory.load`."""
        self._loads.load(then)

    def close(self) -> None:
        """See `KVMemory.close`."""
        self._loads.close()

    def _written_by(self, sequence: SequenceStep) -> Sequence[int]:
        """Blocks that a sequence writes to."""
        if sequence.full_hit:
            return ()
        end = sequence.start + len(sequence.token_ids) // 4
        return sequence.block_table[sequence.start // self._size : -(-end // self._size)]

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
            for row in range(len(self._device_pool)):
                self._await(row)
        sources, targets = (torch.tensor(blocks) for blocks in zip(*copies, strict=True))
        self._device.compute.run(partial(_copy_blocks, self._device_pool, sources, targets))

    def _store(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Store blocks, rising, of the layers that leave, in batches, with a hash if they have valid tokens."""
        layers, self._leaving = self._leaving, []
        leaving = [(layer, *block) for layer in layers for block in blocks]
        if not leaving:
            return
        stream = self._device.store_stream
        stream.wait_event(self._device.compute.record())
        first, per_layer = self._part.layer_begin, self._part.blocks
        for begin in range(0, len(leaving), self._batch_slices):
            batch = leaving[begin : begin + self._batch_slices]
            slices = torch.tensor([(layer - first) * per_layer + block for layer, block, _ in batch])
            number, buffer = self._storing.take()
            stream.run(partial(_from_device, buffer[: len(batch)], self._device_slices, slices))
            store = partial(self._store_batch, stream.record(), buffer[: len(batch)], slices, batch)
            self._storing.until(number, self._callbacks.send(store))

    def _store_batch(
        self, event: DeviceEvent, buffer: Tensor, slices: Tensor, batch: Sequence[tuple[int, int, int]]
    ) -> None:
        """Store slices that have come to their buffer."""
        event.wait()
        _to_host(self._host_slices, slices, buffer)
        for layer, block, valid_tokens in batch:
            if valid_tokens:
                self._part.seal(layer, block, valid_tokens)


def _copy_blocks(slices: Tensor, sources: Tensor, targets: Tensor) -> None:
    copy_blocks(slices, sources.to(slices.device), targets.to(slices.device))
