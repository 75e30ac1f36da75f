"""A plain CPU: work is done at once, and steps compute in the pool itself."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from moonpool.base.families.ranks import heads_of_rank
from moonpool.base.kv.pool import PoolPart
from moonpool.base.scheduling.steps import Step, finished_blocks
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.platforms.base import DeviceEvent
from moonpool.engine.platforms.kv_memory import OnDone, StageSlices, pool_bytes, slot_table


class _CompletedEvent:
    """An event of work that is done already."""

    def wait(self) -> None:
        """Return at once."""


class CpuStream:
    """A plain CPU's stream: work is done at once."""

    _NOW = _CompletedEvent()

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> DeviceEvent:
        return self._NOW

    def wait_event(self, event: DeviceEvent) -> None:
        """All work is done already."""


class CpuKVMemory:
    """See `KVMemory`. Steps compute in the pool itself, and all work is done at once.

    The ranks of a stage compute in one pool of whole slices, each in a view of its heads. A layer ends with a sum,
    behind which all ranks have written the layer's keys and values, so that the first rank stores whole slices.
    """

    def __init__(self, part: PoolPart, ranks: Ranks | None = None) -> None:
        self.kv, self.scales = StageSlices.of_pool(part, pool_bytes(part)).typed()
        self._ranks, self._stores = ranks, ranks is None or ranks.first
        if ranks is not None:
            self.kv = _heads_of(self.kv, ranks)
            self.scales = None if self.scales is None else _heads_of(self.scales, ranks)
        self.blocks, self.block_size, self.slot_of = part.blocks, part.layout.block_size, slot_table(part)
        self.host_bytes = part.nbytes
        self._part = part
        self._finished: Sequence[tuple[int, int]] = ()

    def begin(self, step: Step) -> None:
        for source, block in step.copies if self._stores else ():
            self._part.copy(source, block)
        if step.copies and self._ranks is not None:
            self._ranks.meet()
        self._finished = finished_blocks(step, self._part.layout.block_size)

    def advance(self, written: Sequence[int], full: Sequence[int]) -> None:
        self._finished = [(block, self._part.layout.block_size) for block in full]

    def prepare_layer(self, layer: int) -> None:
        """The pool has the layer already."""

    def finish_layer(self, layer: int, then: OnDone | None, behind: DeviceEvent | None = None) -> None:
        if self._finished and self._stores:
            self._part.seal((layer, block, valid_tokens) for block, valid_tokens in self._finished)
        if then is not None:
            then()

    def finish_step(self, then: OnDone, *, aborted: bool, behind: DeviceEvent | None = None) -> None:
        then()

    def fetch(self, blocks: Sequence[int], then: OnDone) -> None:
        """The pool has the KV already."""
        then()

    def load(self, then: OnDone | None) -> None:
        """The pool has the KV already."""
        if then is not None:
            then()

    def close(self) -> None:
        """There is no thread."""


def _heads_of(stored: Any, ranks: Ranks) -> Any:
    """Return a rank's heads of the layers' KV or scales, [blocks, heads, ...] each, or [layers, blocks, heads, ...]."""

    def cut(tensor: Tensor, at: int) -> Tensor:
        heads = heads_of_rank(tensor.shape[at], ranks.rank, ranks.ranks)
        return tensor.narrow(at, heads.start, len(heads))

    if isinstance(stored, Tensor):
        return cut(stored, 2)
    return [None if layer is None else cut(layer, 1) for layer in stored]
