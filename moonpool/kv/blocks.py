"""What a stored block is: its format, its identity, and its bytes while they lie in DRAM."""

import dataclasses
import functools
from collections.abc import Sequence

from moonpool.errors import InvalidRequest
from moonpool.frozen import frozen
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import KEY_BYTES, BlockKey
from moonpool.kv.layout import KVLayout

NO_PARENT = BlockKey(bytes(KEY_BYTES))
"""Parent of a block whose writer did not name one."""

MAX_TENANT_BYTES = 1024
"""Longest tenant name, as UTF-8."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFormat:
    """Of what kind of KV a block is; two sides read each other's blocks only when it is equal.

    Attributes:
        namespace: 32 bytes, hash of everything that makes KV differ.
        layout: how the block's bytes are arranged.
    """

    namespace: bytes
    layout: KVLayout

    def __post_init__(self) -> None:
        if len(self.namespace) != KEY_BYTES:
            raise InvalidRequest("namespace", f"must be {KEY_BYTES} bytes, has {len(self.namespace)}")


@functools.lru_cache(256)
def block_format(namespace: bytes, layout: KVLayout) -> BlockFormat:
    """A format, the same object for the same kind of KV: then comparing two of them takes no time."""
    return BlockFormat(namespace, layout)


@frozen
class BlockInfo:
    """One block without its bytes.

    Attributes:
        key: its identity.
        parent: key of the block before it in its chain; `NO_PARENT` when unknown.
        tenant: whose block it is; "" for none.
        format: of what kind of KV it is.
        written_at: when its store got it, whole seconds since 1970; 0 = not known, long ago.
    """

    key: BlockKey
    parent: BlockKey
    tenant: str
    format: BlockFormat
    written_at: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the block's data."""
        return self.format.layout.block_bytes


class DramBlock:
    """A whole block in DRAM: `data` is `[layers, slice_bytes]`, layer after layer; `hashes` one per layer, bound to it.

    `holds` counts who needs it to stay: readers, and the writer thread until the block is on SSD. `pinned`: some pin
    keeps it. Its memory is free when the block and all views of it are gone.
    """

    __slots__ = ("data", "hashes", "holds", "info", "pinned")

    def __init__(self, info: BlockInfo, data: memoryview | bytearray, hashes: Sequence[int]) -> None:
        assert len(data) == info.nbytes
        assert len(hashes) == info.format.layout.layers
        self.info = info
        self.data = memoryview(data)
        self.hashes = tuple(hashes)
        self.holds = 0
        self.pinned = False

    def is_of(self, block_format: BlockFormat) -> bool:
        """Whether it is of such KV."""
        own = self.info.format
        return own is block_format or own == block_format

    def slice(self, layer: int) -> memoryview:
        """The bytes of one layer, `[kv_heads, 2, block_tokens, head_dim]` and scales; all heads."""
        size = self.info.format.layout.slice_bytes
        return self.data[layer * size : (layer + 1) * size]

    @property
    def is_intact(self) -> bool:
        """Whether all bytes still match their hashes."""
        layers = range(self.info.format.layout.layers)
        return all(bind(slice_hash(self.slice(n)), self.info.key, n) == self.hashes[n] for n in layers)
