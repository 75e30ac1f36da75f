"""The hash of a layer slice: made once, by the process that computed the KV, and verified by the last that receives it.

Engines hash a slice when its block is full or its prompt ends, with invalid token slots as zeros. The hash then lies
beside the slice in the pool, in frames, in the kvstore's DRAM and in its records; it is not made again on the way. So a
bit that flips anywhere in between is noticed.

On its way to and from a kvstore, and there, a hash is *bound* to the block's key and the layer: a slice that is whole
but another one's is noticed too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from moonpool.kv.keys import KEY_BYTES

_MASK = (1 << 64) - 1
_KEY = struct.Struct(f"<Q{KEY_BYTES - 8}x")
_LAYER = 0x9E3779B97F4A7C15  # odd, so that no two layers of a block are bound alike

slice_hash = xxhash.xxh3_64_intdigest
"""xxh3-64 of a slice's bytes."""


def bind(value: int, key: bytes, layer: int) -> int:
    """Binds a hash to a block and a layer; binding twice gives the hash back."""
    return value ^ int.from_bytes(key[:8], "little") ^ layer_binding(layer)


def key_bindings(keys: Sequence[bytes]) -> list[int]:
    """What `bind` XORs to a hash for each of many keys."""
    return [start for (start,) in _KEY.iter_unpack(b"".join(keys))]


def layer_binding(layer: int) -> int:
    """What `bind` XORs to a hash for a layer."""
    return layer * _LAYER & _MASK
