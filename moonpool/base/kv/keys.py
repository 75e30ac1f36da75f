"""Identity of KV: namespaces, chained block keys, slice hashes, and how keys and tokens are packed into bytes.

The same everywhere and for ever: independent of the process, the machine's byte order and random seeds. Any change here
makes all stored KV unreachable; golden vectors in the tests pin the results.

A layer slice's hash is made once, by the process that computed the KV, and verified by the last receiver. Engines hash
a slice when the block is full or the prompt ends, with invalid token slots as zeros. The hash then lies beside the
slice in the pool, in frames, in the kvstore's DRAM and in the kvstore's records.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

import xxhash
from blake3 import blake3

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.layout import UNIFORM_VERSION, KVLayout
from moonpool.base.kv.media import MediaItem, block_marks

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that identify a block's tokens, all tokens before, the namespace and the tenant."""
KEY_BYTES = 32
MAX_SALT_CHARS = 256
_TOKEN_BYTES = 4
_NAMESPACE_CONTEXT = b"moonpool kv namespace v1"
_ANSWER_CONTEXT = b"moonpool answer tokens"
_ROOT_CONTEXT = b"moonpool kv chain root v1"
_MEDIA_CONTEXT = "moonpool kv block with media v1"


def _field(data: bytes) -> bytes:
    """Length-prefixed, so that no two lists of fields hash the same bytes."""
    return struct.pack("<Q", len(data)) + data


def namespace(weights_fingerprint: bytes, layout: KVLayout) -> bytes:
    """32-byte hash of everything that makes KV differ: the weights and the layout (dtype and block size included)."""
    parts = [_field(_NAMESPACE_CONTEXT), _field(weights_fingerprint)]
    identity: list[object] = [layout.layers]
    for group in layout.groups:
        identity += (group.kv_heads, group.head_dim, layout.block_size)
        identity += (group.dtype, group.scale_bytes(layout.block_size), layout.version)
        if layout.version != UNIFORM_VERSION:
            identity += (group.kind, group.window, *group.layers)
    parts.extend(_field(str(value).encode()) for value in identity)
    return blake3(b"".join(parts)).digest()


def chain_root(namespace: bytes, tenant: str, salt: str = "", lora: bytes = b"") -> bytes:
    """32-byte parent of a chain's first block. Chains for different tenants, salts or LoRA adapters share no key.

    "" = no salt, b"" = no adapter.
    """
    parts = [_ROOT_CONTEXT, namespace, tenant.encode()]
    if salt or lora:
        parts.append(salt.encode())
    if lora:
        parts.append(lora)
    return blake3(b"".join(map(_field, parts))).digest()


def block_keys(
    parent: bytes,
    token_ids: Sequence[int] | array[int],
    block_size: int,
    media: Sequence[MediaItem] = (),
    first: int = 0,
) -> list[BlockKey]:
    """Keys for the full blocks in `token_ids`, each blake3(parent key || the block's tokens as little-endian int32).

    Where pictures begin in a block, their offsets and digests follow, and the hash has a context of its own: no text
    has the key of a picture.

    Args:
        parent: Chain root, or the key of the block before `token_ids`, so that a chain can be continued.
        token_ids: Tokens from a block border on; an incomplete last block has no key.
        block_size: Tokens per block.
        media: The sequence's pictures.
        first: Position of the first of `token_ids` in the sequence.

    Raises:
        InvalidRequest: A token is no int32.
    """
    data = memoryview(tokens_to_bytes(token_ids))
    size = block_size * _TOKEN_BYTES
    marks = block_marks(media, first, len(token_ids), block_size) if media else {}
    keys: list[BlockKey] = []
    for index, start in enumerate(range(0, len(data) - size + 1, size)):
        block, mark = parent + data[start : start + size], marks.get(index)
        parent = (blake3(block) if mark is None else blake3(block + mark, derive_key_context=_MEDIA_CONTEXT)).digest()
        keys.append(BlockKey(parent))
    return keys


def window_key(key: bytes) -> BlockKey:
    """The key for a block's windowed slices, if these are a separate block; given that key, the block's key."""
    return BlockKey(key[:-1] + bytes((key[-1] ^ 0x80,)))


def with_window_keys(keys: Iterable[bytes]) -> list[BlockKey]:
    """Keys for blocks, and for their windowed slices."""
    every = [BlockKey(key) for key in keys]
    return [*every, *map(window_key, every)]


def tokens_digest(root: bytes, token_ids: Sequence[int] | array[int]) -> bytes:
    """32-byte hash over an answer's tokens and chain root: equal if tokens, tenant and model are equal."""
    return blake3(_field(_ANSWER_CONTEXT) + _field(root) + tokens_to_bytes(token_ids)).digest()


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys, concatenated."""
    return b"".join(keys)


def unpack_keys(data: bytes, field: str = "keys", *, max_keys: int | None = None) -> list[BlockKey]:
    """Keys from their concatenation.

    Raises:
        InvalidRequest: The length is no multiple of 32, or there are more than `max_keys`; names `field`.
    """
    if max_keys is not None and len(data) > max_keys * KEY_BYTES:
        raise InvalidRequest(field, f"at most {max_keys} keys, not {len(data) // KEY_BYTES}")
    if len(data) % KEY_BYTES:
        raise InvalidRequest(field, f"length must be a multiple of {KEY_BYTES} bytes, is {len(data)}")
    return [BlockKey(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES)]


def tokens_to_bytes(token_ids: Sequence[int] | array[int]) -> bytes:
    """Tokens as little-endian int32.

    Raises:
        InvalidRequest: A token is no int32.
    """
    try:
        tokens = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("token_ids", f"every token must be an int32: {error}") from error
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def tokens_from_bytes(data: bytes, field: str = "token_ids") -> array[int]:
    """Tokens (array of typecode "i") from little-endian int32.

    Raises:
        InvalidRequest: The length is no multiple of 4; names `field`.
    """
    if len(data) % _TOKEN_BYTES:
        raise InvalidRequest(field, f"length must be a multiple of {_TOKEN_BYTES} bytes, is {len(data)}")
    tokens = array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


_MASK = (1 << 64) - 1
_KEY = struct.Struct(f"<Q{KEY_BYTES - 8}x")
_LAYER = 0x9E3779B97F4A7C15  # odd, so that no two layers of a block are bound alike
slice_hash = xxhash.xxh3_64_intdigest
"""xxh3-64 of a slice's bytes."""


def bind(value: int, key: bytes, layer: int) -> int:
    """Bind a hash to a block and a layer; binding twice gives the hash back."""
    return value ^ int.from_bytes(key[:8], "little") ^ layer_binding(layer)


def key_bindings(keys: Sequence[bytes]) -> list[int]:
    """What `bind` XORs to a hash for each of many keys."""
    return [start for (start,) in _KEY.iter_unpack(b"".join(keys))]


def layer_binding(layer: int) -> int:
    """What `bind` XORs to a hash for a layer."""
    return layer * _LAYER & _MASK
