"""A stage's KV as its steps see it, and the plain one: the pool itself."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels import quantized
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import PoolPart
from moonpool.model.load import torch_dtype
from moonpool.sched.steps import Step, finished_blocks

Then = Callable[[], None]


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

    def leave(self, layer: int, then: Then | None) -> None:
        """The layer was given to the computing lane: when it is computed, and what is finished is in the pool, `then`.

        `then` may be called by another thread.
        """

    def over(self, then: Then, *, aborted: bool) -> None:
        """The step is over, and the computing lane has done it: `then` when nothing uses its blocks any more."""

    def fetch(self, blocks: Sequence[int], then: Then) -> None:
        """`then` when the pool has all that is known of some blocks, part-filled ones too. Between two steps."""


def slices_of(part: PoolPart) -> Tensor:
    """A stage's pool as bytes, uint8 [layers, blocks, slice_bytes], over the same memory."""
    layers = part.layer_end - part.layer_begin
    flat = torch.frombuffer(part.map, dtype=torch.uint8, count=part.nbytes)
    return flat.view(layers, part.blocks, part.slice_bytes)


def kv_of(slices: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor | None]:
    """(`KVMemory.kv`, `KVMemory.scales`) over the memory of uint8 [layers, blocks, slice_bytes]."""
    shape = (layout.kv_heads, 2, layout.block_tokens, layout.head_dim)
    if layout.dtype not in quantized.DTYPES:
        return slices.view(torch_dtype(layout.dtype)).view(*slices.shape[:2], *shape), None
    sizes = {"kv_heads": layout.kv_heads, "block_tokens": layout.block_tokens, "head_dim": layout.head_dim}
    return quantized.views(slices, quantized.DTYPES[layout.dtype], **sizes)


class OnePool:
    """See `KVMemory`. Steps compute in the pool itself, and everything is done at once."""

    def __init__(self, part: PoolPart) -> None:
        self.kv, self.scales = kv_of(slices_of(part), part.layout)
        self.host_bytes = part.nbytes
        self._part = part
        self._finished: Sequence[tuple[int, int]] = ()

    def begin(self, step: Step) -> None:
        """See `KVMemory.begin`."""
        for source, block in step.copies:
            self._part.copy(source, block)
        self._finished = finished_blocks(step, self._part.layout.block_tokens)

    def go_on(self, written: Sequence[int], full: Sequence[int]) -> None:
        """See `KVMemory.go_on`."""
        self._finished = [(block, self._part.layout.block_tokens) for block in full]

    def need(self, layer: int) -> None:
        """It is there."""

    def leave(self, layer: int, then: Then | None) -> None:
        """See `KVMemory.leave`."""
        for block, valid_tokens in self._finished:
            self._part.seal(layer, block, valid_tokens)
        if then is not None:
            then()

    def over(self, then: Then, *, aborted: bool) -> None:
        """See `KVMemory.over`."""
        then()

    def fetch(self, blocks: Sequence[int], then: Then) -> None:
        """It is there."""
        then()
