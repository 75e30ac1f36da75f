"""The KV that the kvstore's benchmarks move: blocks of several sizes, their keys, and the memory they lie in.

A block is made of slices of 64 KiB, one layer's KV of sixteen tokens of a model with eight KV heads of 128, so that
small blocks have few layers and large ones many.
"""

import fcntl
import functools
import mmap
import os
import random
import weakref
from collections.abc import Sequence

from moonpool.base.kv.keys import chain_root, namespace
from moonpool.base.kv.layout import KVLayout
from moonpool.base.transport.regions import SharedRegion
from moonpool.v1 import kv_pb2

SLICE_BYTES = 64 << 10
BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TINY = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="bfloat16")
"""64 bytes: the smallest block there is, for stores of very many."""
_KEY_BYTES = 32


def layout_of(block_bytes: int) -> KVLayout:
    """The layout for blocks with `block_bytes`.

    Raises:
        ValueError: not a multiple of a slice.
    """
    if block_bytes <= 0 or block_bytes % SLICE_BYTES:
        raise ValueError(f"blocks are made of slices of {SLICE_BYTES} bytes, {block_bytes} is not a multiple")
    return KVLayout.uniform(block_bytes // SLICE_BYTES, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


@functools.cache
def namespace_of(layout: KVLayout) -> bytes:
    """Of all benchmarks' KV in this layout."""
    return namespace(bytes(32), layout)


@functools.cache
def root_of(layout: KVLayout) -> bytes:
    """Parent of every chain's first block."""
    return chain_root(namespace_of(layout), "")


def hello(layout: KVLayout) -> kv_pb2.StreamHello:
    """First message on a stream with this KV."""
    instance = kv_pb2.Instance(id="bench", epoch=1, kind=kv_pb2.INSTANCE_KIND_PREFILL)
    return kv_pb2.StreamHello(sender=instance, namespace=namespace_of(layout), layout=layout.to_proto())


def chain(seed: object, blocks: int) -> list[bytes]:
    """Keys that differ from other seeds' keys, made quickly: a store does not check the hashes."""
    data = random.Random(repr(seed)).randbytes(blocks * _KEY_BYTES)
    return [data[at : at + _KEY_BYTES] for at in range(0, len(data), _KEY_BYTES)]


def parents(keys: Sequence[bytes], layout: KVLayout) -> list[bytes]:
    """The key before each of a chain."""
    return [root_of(layout), *keys[:-1]]


def split(total: int, largest: int) -> list[int]:
    """`total` in parts of `largest`; the last part is the rest."""
    return [min(largest, total - at) for at in range(0, total, largest)]


class Memory:
    """Memory that blocks are sent from and read into, like an engine's pool; used in a circle.

    Attributes:
        source: every slice is different.
        target: as large or larger, all touched.
    """

    def __init__(self, source_bytes: int, target_bytes: int = 0) -> None:
        self._fd = os.memfd_create("benchmark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        os.truncate(self._fd, source_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.source = memoryview(mmap.mmap(self._fd, source_bytes))
        self.target = memoryview(bytearray(b"\1") * max(source_bytes, target_bytes))
        for number, at in enumerate(range(0, source_bytes, SLICE_BYTES)):
            size = min(SLICE_BYTES, source_bytes - at)
            self.source[at : at + size] = ((number + 1).to_bytes(4, "little") * (size // 4 + 1))[:size]

    def shared(self) -> list[SharedRegion]:
        """The source, for stores to read on a local transport."""
        return [SharedRegion(self._fd, self.source)]

    def clear_target(self) -> None:
        """Overwrites the target, so that `differs` sees only what is read from now on."""
        self.target[:] = bytes(self.target.nbytes)

    def at(self, place: int, nbytes: int, memory: memoryview) -> int:
        """Offset of piece number `place` with `nbytes` in `memory`."""
        return place % (memory.nbytes // nbytes) * nbytes

    def differs(self, places: int, nbytes: int) -> int:
        """How many of the first `places` pieces with `nbytes` differ between `target` and `source`."""
        wrong = 0
        for place in range(places):
            at = self.at(place, nbytes, self.source)
            into = self.at(place, nbytes, self.target)
            wrong += self.source[at : at + nbytes] != self.target[into : into + nbytes]
        return wrong
