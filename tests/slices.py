"""Slices as tests send them: with the hashes that an engine would have made."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.kv.frames import Slice
from moonpool.base.kv.keys import bind, slice_hash
from moonpool.base.kv.layout import KVLayout

Bytes = bytes | bytearray | memoryview


def slice_to_send(
    layout: KVLayout,
    layer: int,
    block: int,
    data: Bytes,
    valid_tokens: int | None = None,
    heads: range | None = None,
    key: bytes | None = None,
) -> Slice:
    """A slice or some of its heads; `key` binds the hash, as sessions with a kvstore have it."""
    valid = layout.block_size if valid_tokens is None else valid_tokens
    cleaned = bytearray(data)
    if valid < layout.block_size:
        layout.zero_invalid(layer, memoryview(cleaned), valid)
    value = slice_hash(cleaned)
    return Slice(layer, block, memoryview(data), valid, value if key is None else bind(value, key, layer), heads)


def hashed(read: Callable[[int, int], Bytes]) -> Callable[[int, int], tuple[memoryview, int]]:
    """What `StoreWriter.put` reads with, from what gives bytes alone."""

    def with_hash(layer: int, index: int) -> tuple[memoryview, int]:
        data = read(layer, index)
        return memoryview(data), slice_hash(data)

    return with_hash
