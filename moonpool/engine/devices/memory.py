"""A stage's KV as its steps see it, and the plain one: the pool itself."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moonpool.errors import Unsupported
from moonpool.kv.pool import PoolPart
from moonpool.model.load import torch_dtype
from moonpool.sched.steps import Step, finished_blocks

Then = Callable[[], None]


class KVMemory(Protocol):
    """KV that is computed with. One thread calls it, for one step after the other.

    What a step needs of the pool is there for its work in the computing lane; what it makes ready to leave gets into
    the pool, with its hash.
    """

    kv: Tensor
    """[layers of the stage, blocks, kv_heads, 2, block_tokens, head_dim]; belongs to the computing lane."""

    def begin(self, step: Step) -> None:
        """A step begins: its blocks are copied as it says."""

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

    def close(self) -> None:
        """Waits for what is under way, and ends its threads."""


def kv_shape(part: PoolPart) -> tuple[int, ...]:
    """[layers, blocks, kv_heads, 2, block_tokens, head_dim].

    Raises:
        Unsupported: KV is quantised (`scale_bytes` is not 0).
    """
    layout = part.layout
    if layout.scale_bytes:
        raise Unsupported("quantised KV cannot be computed with yet")
    layers = part.layer_end - part.layer_begin
    return layers, part.blocks, layout.kv_heads, 2, layout.block_tokens, layout.head_dim


def pool_tensor(part: PoolPart) -> Tensor:
    """A stage's pool as a tensor [layers, blocks, kv_heads, 2, block_tokens, head_dim] over the same memory.

    Raises:
        Unsupported: KV is quantised (`scale_bytes` is not 0).
    """
    shape, dtype = kv_shape(part), torch_dtype(part.layout.dtype)
    return torch.frombuffer(part.map, dtype=dtype, count=part.nbytes // dtype.itemsize).view(shape)


class OnePool:
    """See `KVMemory`. Steps compute in the pool itself, and everything is done at once."""

    def __init__(self, part: PoolPart) -> None:
        self.kv = pool_tensor(part)
        self._part = part
        self._finished: Sequence[tuple[int, int]] = ()

    def begin(self, step: Step) -> None:
        """See `KVMemory.begin`."""
        for source, block in step.copies:
            self._part.copy(source, block)
        self._finished = finished_blocks(step, self._part.layout.block_tokens)

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

    def close(self) -> None:
        """Nothing is under way."""
