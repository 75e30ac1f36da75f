"""KV in two tiers: a device's own pool, in which steps compute, and the host's, which the I/O process sees.

Both have the same blocks. The host's pool counts how often the I/O process wrote each slice. What the device has not
seen is brought to it before the first layer that needs it; what a step finishes is brought back after its layer. Slices
go through bounded rings of buffers. The computing thread fills the buffers of slices that come, a courier empties those
of slices that leave.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention import copy_blocks
from moonpool.engine.devices.courier import Courier
from moonpool.engine.devices.lanes import Device, Mark
from moonpool.engine.devices.memory import Then, kv_of, slices_of
from moonpool.engine.devices.ring import Ring
from moonpool.kv.pool import PoolPart
from moonpool.sched.steps import SequenceStep, Step, finished_blocks

BUFFERS = 64
"""Slices under way in each direction."""


def ring_bytes(part: PoolPart, buffers: int = BUFFERS) -> int:
    """Memory of the host that the buffers of slices under way take."""
    return 2 * buffers * part.slice_bytes


class TwoTiers:
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
        courier: Courier,
        buffers: int = BUFFERS,
        beside: int = 0,
    ) -> None:
        self._there = slices_of(part)
        self._here = device.memory(tuple(self._there.shape), beside)  # [layers, blocks, slice_bytes]
        self.kv, self.scales = kv_of(self._here, part.layout)
        self._part, self._device, self._size = part, device, part.layout.block_tokens
        self._written = torch.frombuffer(part.written, dtype=torch.int64).view(self._there.shape[:2])
        self._seen = torch.zeros_like(self._written)
        self._only_here: set[int] = set()
        self._coming = Ring(device.buffers(buffers, part.slice_bytes))
        self._leaving = Ring(device.buffers(buffers, part.slice_bytes))
        own = self._here.nbytes if self._here.device.type == "cpu" else 0
        self.host_bytes = part.nbytes + own + ring_bytes(part, buffers)
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

    def leave(self, layer: int, then: Then | None) -> None:
        """See `KVMemory.leave`."""
        if not self._finished and then is None:
            return
        mark = self._carry_out(layer, self._finished)
        if then is not None:
            self._courier.send(mark.wait)
            self._courier.send(then)

    def over(self, then: Then, *, aborted: bool) -> None:
        """See `KVMemory.over`."""
        if not aborted:
            self._only_here.difference_update(block for block, _ in self._finished)
        self._courier.send(then)

    def fetch(self, blocks: Sequence[int], then: Then) -> None:
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

    def _carry_out(self, layer: int, blocks: Iterable[tuple[int, int]]) -> Mark:
        """Brings a layer of some blocks to the pool, with a hash where they have valid tokens; the mark is behind."""
        self._device.down.after(self._device.compute.mark())
        row = layer - self._part.layer_begin
        for block, valid_tokens in blocks:
            number, buffer = self._leaving.take()
            self._device.down.run(partial(_copy_bytes, buffer, self._here[row, block]))
            arrived = partial(self._arrived, self._device.down.mark(), buffer, layer, block, valid_tokens)
            self._leaving.until(number, self._courier.send(arrived))
        return self._device.down.mark()

    def _arrived(self, mark: Mark, buffer: Tensor, layer: int, block: int, valid_tokens: int) -> None:
        """The courier's errand."""
        mark.wait()
        self._there[layer - self._part.layer_begin, block].copy_(buffer)
        if valid_tokens:
            self._part.seal(layer, block, valid_tokens)


def _copy_bytes(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_blocks(slices: Tensor, sources: Tensor, targets: Tensor) -> None:
    copy_blocks(slices, sources.to(slices.device), targets.to(slices.device))
