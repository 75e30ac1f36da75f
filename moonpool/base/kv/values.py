"""Values: bytes of any size that other engines keep in kvstores, as blocks (`moonpool.client.kv`).

A store keeps blocks of a layout. A value gets the layout of a *size class*; there are four classes for each doubling.
If a value is as long as the class, the value is the block. Any other value is followed by zeros, and the block's last 8
bytes are the value's length. The layout tells which case holds (`dtype`).

The second half of a value's key is the same for all a tenant's values (`tenant_tag`). So a store sees that a client
keeps to the client's own keys. No client can put a block where engines look for blocks: engines' keys are hashes to the
end.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterable

from blake3 import blake3
from typing_extensions import Buffer

from moonpool.base.errors import InvalidRequest, PermissionDenied
from moonpool.base.kv.iovec import new_bytearray
from moonpool.base.kv.keys import KEY_BYTES, BlockKey
from moonpool.base.kv.layout import MAX_BLOCK_BYTES, KVLayout

MAX_VALUE_BYTES = MAX_BLOCK_BYTES
MAX_KEY_BYTES = 4096

_NAMESPACE_CONTEXT = b"moonpool value namespace v1"
_KEY_CONTEXT = b"moonpool value key v1"
_TAG_CONTEXT = b"moonpool value tenant v1"
_TAG_BYTES = KEY_BYTES // 2
_UNIT = 64  # slice bytes in the smallest layout: K and V for 16 tokens, one head with one element
_PLAIN, _COUNTED = "float16", "bfloat16"  # `dtype`
_LENGTH = struct.Struct("<Q")
_SLICE_BYTES = 128 << 10  # at most, so that frames are full


def value_namespace(name: str) -> bytes:
    """The 32-byte namespace for values that a caller keeps under a name."""
    return _hash(_NAMESPACE_CONTEXT, name.encode())


@functools.lru_cache(1024)
def tenant_tag(tenant: str) -> bytes:
    """The common end of all keys for a tenant's values."""
    return _hash(_TAG_CONTEXT, tenant.encode())[:_TAG_BYTES]


def check_owned(keys: Iterable[bytes], tenant: str | None) -> None:
    """Check keys that a tenant names; None may name any.

    Raises:
        PermissionDenied: a key is not one of the tenant's values.
    """
    if tenant is None:
        return
    tag = tenant_tag(tenant)
    if not all(key.endswith(tag) for key in keys):
        raise PermissionDenied("a client has keys of its own tenant only")


def value_key(namespace: bytes, tenant: str, key: bytes) -> BlockKey:
    """The store's key for a value.

    Args:
        namespace: `value_namespace`.
        tenant: the value's tenant.
        key: the caller's; 1 to `MAX_KEY_BYTES` bytes.

    Raises:
        InvalidRequest: the key is empty or too long.
    """
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidRequest("key", f"must have 1 to {MAX_KEY_BYTES} bytes, has {len(key)}")
    tag = tenant_tag(tenant)
    return BlockKey(_hash(_KEY_CONTEXT, namespace + tag + key)[: KEY_BYTES - _TAG_BYTES] + tag)


def content_key(data: Buffer) -> bytes:
    """Key for content named by the content's bytes: 32 bytes, the blake3 hash."""
    return blake3(data).digest()


@functools.lru_cache(1024)
def layout_of(nbytes: int) -> KVLayout:
    """The layout for the blocks with values of `nbytes`.

    Raises:
        InvalidRequest: a value has at most `MAX_VALUE_BYTES`, or a few less if shorter than the class.
    """
    room = _class_of(nbytes)
    counted = room != nbytes
    if counted:
        room = _class_of(nbytes + _LENGTH.size)
    if room > MAX_BLOCK_BYTES:
        raise InvalidRequest("value", f"has {nbytes} bytes; {MAX_VALUE_BYTES} at most")
    return _layout(room, _COUNTED if counted else _PLAIN)


def _class_of(nbytes: int) -> int:
    """The smallest class with so many bytes: 64 times 1, 2, 3, or 4 to 7 times a power of two."""
    units = max(1, -(-nbytes // _UNIT))
    step = 1 << max(0, units.bit_length() - 3)
    return -(-units // step) * step * _UNIT


@functools.cache
def _layout(room: int, dtype: str) -> KVLayout:
    layers = 1
    while room // layers > _SLICE_BYTES:
        layers *= 2
    return KVLayout.uniform(layers, 1, room // layers // _UNIT, 16, dtype)


def _hash(context: bytes, data: bytes) -> bytes:
    """The context's length comes first, so that no two contexts hash the same bytes."""
    return blake3(bytes([len(context)]) + context + data).digest()


class ValueSource:
    """A value as the block's slices.

    Attributes:
        layout: the block's layout.
    """

    def __init__(self, data: memoryview) -> None:
        """Take bytes that stay as they are until the value was put; raise InvalidRequest when there are too many."""
        self.layout = layout_of(data.nbytes)
        self._data = data

    def slice(self, layer: int) -> memoryview:
        """One layer's bytes; where they are the value's own they are not copied."""
        size = self.layout.slice_bytes(layer)
        own = self._data[self.layout.place(layer)]
        if own.nbytes == size:
            return own
        filled = bytearray(size)
        filled[: own.nbytes] = own
        if layer == self.layout.layers - 1:
            _LENGTH.pack_into(filled, size - _LENGTH.size, self._data.nbytes)
        return memoryview(filled)


class ValueTarget:
    """Memory that takes a value, slice by slice in any order."""

    def __init__(self, layout: KVLayout, memory: memoryview | None = None) -> None:
        """`memory` is writable; None = the value allocates memory when the first slice comes."""
        self._layout = layout
        self._counted = layout.dtype == _COUNTED
        self._own: bytearray | None = None
        self._memory = memory
        self._places: dict[int, memoryview] = {}
        self._length = b""

    def place(self, layer: int) -> memoryview | None:
        """Memory where a slice may land before `take`; None if the slice does not fit."""
        room = self._room(layer)
        if room.nbytes < self._layout.slice_bytes(layer):
            return None
        self._places[layer] = room
        return room

    def take(self, layer: int, data: memoryview) -> None:
        """A slice has come; what has no room is dropped."""
        if data is not self._places.get(layer):
            room = self._room(layer)
            room[:] = data[: room.nbytes]
        if self._counted and layer == self._layout.layers - 1:
            self._length = bytes(data[-_LENGTH.size :])

    def _room(self, layer: int) -> memoryview:
        if self._memory is None:
            self._own = new_bytearray(self._layout.block_bytes)
            self._memory = memoryview(self._own)
        return self._memory[self._layout.place(layer)]

    def length(self) -> int | None:
        """The value's bytes, once all slices have come; None if the block is no value."""
        if not self._counted:
            return self._layout.block_bytes
        (nbytes,) = _LENGTH.unpack(self._length)
        return int(nbytes) if nbytes <= MAX_VALUE_BYTES and layout_of(nbytes) == self._layout else None

    def value(self) -> bytearray | None:
        """The value, where memory was not given; None as `length`."""
        nbytes = self.length()
        if nbytes is None or self._own is None or self._memory is None:
            return None
        for view in (*self._places.values(), self._memory):
            view.release()
        with contextlib.suppress(BufferError):  # what came over a connection that broke may still be referred to
            del self._own[nbytes:]
        return self._own if len(self._own) == nbytes else self._own[:nbytes]
