"""A stage's KV as its steps see it, and KV in two tiers: a device's own pool, and the host's pool.

The I/O process sees the host's pool. Both tiers have the same blocks. The host's pool counts how often the I/O
process wrote each slice. What the device has not seen is copied to it before the first layer that needs it; what a
step finishes is copied back, with its hash, by a thread that waits for the device's events.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import kv_quantization
from kernels.attention import copy_blocks
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import PoolPart
from moonpool.models.loader import torch_dtype
from moonpool.platforms.base import Device, DeviceEvent
from moonpool.scheduling.steps import SequenceStep, Step, finished_blocks


class BufferRing:
    """A ring of buffers, each reused after its last use is done. For one thread.

    Args:
        buffers: [count, bytes].
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers, self.arrays = buffers, buffers.numpy()
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
        self._on_failure, self._enter = on_failure, enter
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
            self._on_failure(error)


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


STAGING_BUFFERS = 64
"""Slices under way in each direction."""


def staging_bytes(part: PoolPart, buffers: int = STAGING_BUFFERS) -> int:
    """Memory of the host that the buffers of slices under way take."""
    return 2 * buffers * part.slice_bytes


class TieredKVMemory:
    """See `KVMemory`.

    Args:
        part: the host's pool.
        device: holds the other pool.
        callbacks: stores slices in the host's pool; closed by its owner.
        buffers: slices under way in each direction.
        beside: bytes that stay free on the device, for steps.
    """

    def __init__(
        self,
        part: PoolPart,
        device: Device,
        callbacks: CallbackThread,
        buffers: int = STAGING_BUFFERS,
        beside: int = 0,
    ) -> None:
        # As arrays of numpy, which copies in the calling thread: torch wakes OpenMP's threads for 32 KiB and more.
        self._host_pool = pool_slices(part).numpy()  # [layers, blocks, slice_bytes]
        self._device_pool = device.memory(self._host_pool.shape, beside)
        self.kv, self.scales = typed_kv(self._device_pool, part.layout)
        self._part, self._device, self._size = part, device, part.layout.block_tokens
        self._written = torch.frombuffer(part.written, dtype=torch.int64).view(self._host_pool.shape[:2])
        self._loaded = torch.zeros_like(self._written)
        self._unstored: set[int] = set()
        self._loading = BufferRing(device.buffers(buffers, part.slice_bytes))
        self._storing = BufferRing(device.buffers(buffers, part.slice_bytes))
        own = self._device_pool.nbytes if self._device_pool.device.type == "cpu" else 0
        self.host_bytes = part.nbytes + own + staging_bytes(part, buffers)
        self._callbacks = callbacks
        self._blocks = torch.empty(0, dtype=torch.int64)
        self._finished: list[tuple[int, int]] = []

    def begin(self, step: Step) -> None:
        """See `KVMemory.begin`."""
        self._copy(step.copies)
        spans = [(it, it.start + len(it.token_ids) // 4) for it in step.sequences]
        used = {block for it, end in spans for block in it.block_table[: -(-end // self._size)]}
        self._blocks = torch.tensor(sorted(used))
        self._unstored.update(block for it, end in spans for block in self._written_by(it, end))
        self._finished = finished_blocks(step, self._size)

    def advance(self, written: Sequence[int], full: Sequence[int]) -> None:
        """See `KVMemory.advance`."""
        used = self._blocks.tolist()
        if not set(written).issubset(used):
            self._blocks = torch.tensor(sorted({*used, *written}))
        self._unstored.update(written)
        self._finished = [(block, self._size) for block in full]

    def prepare_layer(self, layer: int) -> None:
        """See `KVMemory.prepare_layer`."""
        self._load(layer - self._part.layer_begin, self._blocks)

    def finish_layer(self, layer: int, then: OnDone | None) -> None:
        """See `KVMemory.finish_layer`."""
        if not self._finished and then is None:
            return
        event = self._store(layer, self._finished)
        if then is not None:
            self._callbacks.send(event.wait)
            self._callbacks.send(then)

    def finish_step(self, then: OnDone, *, aborted: bool) -> None:
        """See `KVMemory.finish_step`."""
        if not aborted:
            self._unstored.difference_update(block for block, _ in self._finished)
        self._callbacks.send(then)

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """See `KVMemory.fetch`. A part-filled block gets no hash: nothing sends it anywhere."""
        wanted = [block for block in dict.fromkeys(blocks) if block in self._unstored]
        for row in range(len(self._device_pool)) if wanted else ():
            # What the device has not seen is newer in the pool: the block is another sequence's by now.
            seen = [(block, 0) for block in wanted if bool(self._written[row, block] == self._loaded[row, block])]
            self._store(self._part.layer_begin + row, seen)
        self._unstored.difference_update(blocks)
        self._callbacks.send(then)

    def _written_by(self, sequence: SequenceStep, end: int) -> Sequence[int]:
        """Blocks that a sequence writes to."""
        if sequence.full_hit:
            return ()
        return sequence.block_table[sequence.start // self._size : -(-end // self._size)]

    # --- copies ----------------------------------------------------------------------------------------------------

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks on the device; the step writes to the copies."""
        if not copies:
            return
        sources, targets = (torch.tensor(blocks) for blocks in zip(*copies, strict=True))
        for row in range(len(self._device_pool)):
            self._load(row, sources)
        self._device.compute.run(partial(_copy_blocks, self._device_pool, sources, targets))
        self._loaded[:, targets] = self._written[:, targets]

    def _load(self, row: int, blocks: Tensor) -> None:
        """Load slices that the I/O process wrote since the device last loaded them."""
        written = self._written[row, blocks]  # read before the bytes are: what is written meanwhile comes once more
        stale = written != self._loaded[row, blocks]
        if not bool(stale.any()):
            return
        for block in blocks[stale].tolist():
            self._load_slice(row, block)
        self._loaded[row, blocks] = written
        self._device.compute.wait_event(self._device.load_stream.record())

    def _load_slice(self, row: int, block: int) -> None:
        number, buffer = self._loading.take()
        np.copyto(self._loading.arrays[number], self._host_pool[row, block])
        self._device.load_stream.run(partial(_copy_bytes, self._device_pool[row, block], buffer))
        self._loading.until(number, self._device.load_stream.record())

    def _store(self, layer: int, blocks: Iterable[tuple[int, int]]) -> DeviceEvent:
        """Store a layer of some blocks, with a hash if they have valid tokens; return the event behind it."""
        self._device.store_stream.wait_event(self._device.compute.record())
        row = layer - self._part.layer_begin
        for block, valid_tokens in blocks:
            number, buffer = self._storing.take()
            self._device.store_stream.run(partial(_copy_bytes, buffer, self._device_pool[row, block]))
            copied, array = self._device.store_stream.record(), self._storing.arrays[number]
            store = partial(self._store_slice, copied, array, layer, block, valid_tokens)
            self._storing.until(number, self._callbacks.send(store))
        return self._device.store_stream.record()

    def _store_slice(
        self, event: DeviceEvent, buffer: NDArray[np.uint8], layer: int, block: int, valid_tokens: int
    ) -> None:
        """Store a slice that has come to its buffer."""
        event.wait()
        np.copyto(self._host_pool[layer - self._part.layer_begin, block], buffer)
        if valid_tokens:
            self._part.seal(layer, block, valid_tokens)


def _copy_bytes(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_blocks(slices: Tensor, sources: Tensor, targets: Tensor) -> None:
    copy_blocks(slices, sources.to(slices.device), targets.to(slices.device))
