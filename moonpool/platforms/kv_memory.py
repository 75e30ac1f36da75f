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

import torch
from torch import Tensor

from kernels import kv_quantization
from kernels.attention import copy_blocks
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import PoolPart
from moonpool.models.loader import torch_dtype
from moonpool.platforms.interface import Device, DeviceEvent
from moonpool.scheduling.steps import SequenceStep, Step, finished_blocks


class BufferRing:
    """Buffers, each used again when what used it last is done. For one thread.

    Args:
        buffers: [count, bytes].
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers = buffers
        self._free = deque(range(len(buffers)))
        self._busy: deque[tuple[int, DeviceEvent]] = deque()

    def take(self) -> tuple[int, Tensor]:
        """A buffer that nothing uses, and its number; waits for the one that was taken first where all are in use."""
        if not self._free:
            number, mark = self._busy.popleft()
            mark.wait()
            self._free.append(number)
        number = self._free.popleft()
        return number, self._buffers[number]

    def until(self, number: int, mark: DeviceEvent) -> None:
        """A buffer is in use until then."""
        self._busy.append((number, mark))


@dataclass(slots=True, eq=False)
class _Callback:
    """Something to do. A `Mark`."""

    courier: "CallbackThread"
    work: Callable[[], None]
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Waits until it is done.

        Raises:
            BaseException: what an errand has raised; those after it are not done.
        """
        self.over.wait()
        if self.courier.failed is not None:
            raise self.courier.failed


class CallbackThread:
    """Does errands.

    Args:
        on_failure: called, once, with what an errand has raised.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._errands: queue.SimpleQueue[_Callback | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[], None]) -> _Callback:
        """Does something after all that was sent before."""
        errand = _Callback(self, work)
        self._errands.put(errand)
        return errand

    def close(self) -> None:
        """Ends the thread when all errands are done."""
        self._errands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            if self.failed is None:
                self._do(errand.work)
            errand.over.set()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failed = error
            self._on_failure(error)


OnDone = Callable[[], None]


class KVMemory(Protocol):
    """KV that is computed with. One thread calls it, for one step after the other.

    Of a plain CPU's layers that are computed together, the place's courier calls `leave` meanwhile. What a step needs
    of the pool is there for its work in the computing lane; what it makes ready to leave gets into the pool, with its
    hash.
    """

    kv: Tensor
    """[layers of the stage, blocks, kv_heads, 2, block_tokens, head_dim]; belongs to the computing lane."""
    scales: Tensor | None
    """Of quantised KV, [layers, blocks, kv_heads, 2, block_tokens] float32; belongs to the computing lane, too."""
    host_bytes: int
    """Memory of the host that KV takes, the pool included."""

    def begin(self, step: Step) -> None:
        """A step begins: its blocks are copied as it says."""

    def go_on(self, written: Sequence[int], full: Sequence[int]) -> None:
        """The next step of the same run begins: it writes a token's KV to each of some blocks; `full` ones then are."""

    def need(self, layer: int) -> None:
        """What is given to the computing lane from now on finds this layer of the step's prefixes."""

    def leave(self, layer: int, then: OnDone | None) -> None:
        """The layer was given to the computing lane: when it is computed, and what is finished is in the pool, `then`.

        `then` may be called by another thread.
        """

    def over(self, then: OnDone, *, aborted: bool) -> None:
        """The step is over, and the computing lane has done it: `then` when nothing uses its blocks any more."""

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """`then` when the pool has all that is known of some blocks, part-filled ones too. Between two steps."""


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
        device: has the other one.
        courier: carries slices that leave; closed by others.
        buffers: slices under way in each direction.
        beside: bytes that are left free on the device, for steps.
    """

    def __init__(
        self,
        part: PoolPart,
        device: Device,
        courier: CallbackThread,
        buffers: int = STAGING_BUFFERS,
        beside: int = 0,
    ) -> None:
        self._there = pool_slices(part)
        self._here = device.memory(tuple(self._there.shape), beside)  # [layers, blocks, slice_bytes]
        self.kv, self.scales = typed_kv(self._here, part.layout)
        self._part, self._device, self._size = part, device, part.layout.block_tokens
        self._written = torch.frombuffer(part.written, dtype=torch.int64).view(self._there.shape[:2])
        self._seen = torch.zeros_like(self._written)
        self._only_here: set[int] = set()
        self._coming = BufferRing(device.buffers(buffers, part.slice_bytes))
        self._leaving = BufferRing(device.buffers(buffers, part.slice_bytes))
        own = self._here.nbytes if self._here.device.type == "cpu" else 0
        self.host_bytes = part.nbytes + own + staging_bytes(part, buffers)
        self._courier = courier
        self._blocks = torch.empty(0, dtype=torch.int64)
        self._finished: list[tuple[int, int]] = []

    def begin(self, step: Step) -> None:
        """See `KVMemory.begin`."""
        self._copy(step.copies)
        spans = [(it, it.start + len(it.token_ids) // 4) for it in step.sequences]
        used = {block for it, end in spans for block in it.block_table[: -(-end // self._size)]}
        self._blocks = torch.tensor(sorted(used))
        self._only_here.update(block for it, end in spans for block in self._written_by(it, end))
        self._finished = finished_blocks(step, self._size)

    def go_on(self, written: Sequence[int], full: Sequence[int]) -> None:
        """See `KVMemory.go_on`."""
        used = self._blocks.tolist()
        if not set(written).issubset(used):
            self._blocks = torch.tensor(sorted({*used, *written}))
        self._only_here.update(written)
        self._finished = [(block, self._size) for block in full]

    def need(self, layer: int) -> None:
        """See `KVMemory.need`."""
        self._bring(layer - self._part.layer_begin, self._blocks)

    def leave(self, layer: int, then: OnDone | None) -> None:
        """See `KVMemory.leave`."""
        if not self._finished and then is None:
            return
        mark = self._carry_out(layer, self._finished)
        if then is not None:
            self._courier.send(mark.wait)
            self._courier.send(then)

    def over(self, then: OnDone, *, aborted: bool) -> None:
        """See `KVMemory.over`."""
        if not aborted:
            self._only_here.difference_update(block for block, _ in self._finished)
        self._courier.send(then)

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """See `KVMemory.fetch`. A part-filled block gets no hash: nothing sends it anywhere."""
        wanted = [block for block in dict.fromkeys(blocks) if block in self._only_here]
        for row in range(len(self._here)) if wanted else ():
            # What the device has not seen is newer in the pool: the block is another sequence's by now.
            seen = [(block, 0) for block in wanted if bool(self._written[row, block] == self._seen[row, block])]
            self._carry_out(self._part.layer_begin + row, seen)
        self._only_here.difference_update(blocks)
        self._courier.send(then)

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
        for row in range(len(self._here)):
            self._bring(row, sources)
        self._device.compute.run(partial(_copy_blocks, self._here, sources, targets))
        self._seen[:, targets] = self._written[:, targets]

    def _bring(self, row: int, blocks: Tensor) -> None:
        """Brings slices that the I/O process has written, since the device saw them last, for the computing lane."""
        written = self._written[row, blocks]  # read before the bytes are: what is written meanwhile comes once more
        stale = written != self._seen[row, blocks]
        if not bool(stale.any()):
            return
        for block in blocks[stale].tolist():
            self._carry_in(row, block)
        self._seen[row, blocks] = written
        self._device.compute.after(self._device.up.mark())

    def _carry_in(self, row: int, block: int) -> None:
        number, buffer = self._coming.take()
        buffer.copy_(self._there[row, block])
        self._device.up.run(partial(_copy_bytes, self._here[row, block], buffer))
        self._coming.until(number, self._device.up.mark())

    def _carry_out(self, layer: int, blocks: Iterable[tuple[int, int]]) -> DeviceEvent:
        """Brings a layer of some blocks to the pool, with a hash where they have valid tokens; the mark is behind."""
        self._device.down.after(self._device.compute.mark())
        row = layer - self._part.layer_begin
        for block, valid_tokens in blocks:
            number, buffer = self._leaving.take()
            self._device.down.run(partial(_copy_bytes, buffer, self._here[row, block]))
            arrived = partial(self._arrived, self._device.down.mark(), buffer, layer, block, valid_tokens)
            self._leaving.until(number, self._courier.send(arrived))
        return self._device.down.mark()

    def _arrived(self, mark: DeviceEvent, buffer: Tensor, layer: int, block: int, valid_tokens: int) -> None:
        """The courier's errand."""
        mark.wait()
        self._there[layer - self._part.layer_begin, block].copy_(buffer)
        if valid_tokens:
            self._part.seal(layer, block, valid_tokens)


def _copy_bytes(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_blocks(slices: Tensor, sources: Tensor, targets: Tensor) -> None:
    copy_blocks(slices, sources.to(slices.device), targets.to(slices.device))
