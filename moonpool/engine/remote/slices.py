"""KV slices on their way between a part of the leader's pool and the copy on a stage's host."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.pool import TELL_DEVICE, PoolPart
from moonpool.engine.remote.messages import KVSlice


class LandedSlices:
    """What has landed in a part of the pool and is not sent yet, oldest first."""

    def __init__(self, part: PoolPart) -> None:
        self.part = part
        layers = part.layer_end - part.layer_begin
        self._written: NDArray[np.int64] = np.frombuffer(part.written, np.int64).reshape(layers, part.blocks)
        self._seen = self._written.copy()
        self._rows, self._all = [0] * layers, 0
        self._waiting: dict[tuple[int, int], None] = {}  # layer, block
        part.landed[-1] = TELL_DEVICE

    def __len__(self) -> int:
        return len(self._waiting)

    def look(self) -> None:
        """Note what has landed since the last look; from now on the part tells what lands next."""
        part = self.part
        part.landed[-1] = TELL_DEVICE
        landed = part.landed[-2]  # before the rows' counts, these before the slices' counts and bytes
        if landed == self._all:
            return
        for row, count in enumerate(self._rows):
            if part.landed[row] == count:
                continue
            self._rows[row] = part.landed[row]
            written = self._written[row].copy()
            blocks = (written != self._seen[row]).nonzero()[0].tolist()
            self._seen[row] = written
            layer = part.layer_begin + row
            self._waiting.update(((layer, block), None) for block in blocks)
        self._all = landed

    def take(self, most: int, wanted: Callable[[int, int], bool] | None = None) -> list[KVSlice]:
        """Return the next slices, at most so many, of those that are `wanted` by layer and block.

        The hash is that of the bytes: the pool has none of a part-filled block that was swapped in. A slice that is
        gone is left out. One that changes meanwhile is needed by nobody, or lands again.
        """
        keys = self._waiting if wanted is None else filter(lambda key: wanted(*key), self._waiting)
        taken = [key for _, key in zip(range(most), keys, strict=False)]
        found = []
        for layer, block in taken:
            del self._waiting[layer, block]
            if (data := self.part.find(layer, block)) is not None:
                copy = bytes(data)
                found.append(KVSlice(layer, block, slice_hash(copy), True, copy))
        return found


def write_slice(part: PoolPart | None, found: KVSlice, refuse: Callable[[str], object]) -> PoolPart | None:
    """Write a received slice into a part of the pool; return the part if the slice is there.

    Args:
        part: None: the peer sends KV before there is a pool.
        found: the slice; not written if the window has passed its block.
        refuse: told why a slice cannot be of this part, or is damaged.
    """
    if part is None or not (part.layer_begin <= found.layer < part.layer_end and 0 <= found.block < part.blocks):
        refuse(f"sent KV of layer {found.layer} and block {found.block}, which it does not have")
        return None
    target = part.find(found.layer, found.block)
    if target is None:
        return None
    if len(found.data) != target.nbytes or slice_hash(found.data) != found.value:
        refuse(f"sent damaged KV of layer {found.layer}")
        return None
    target[:] = found.data
    return part
