"""The record format of segment files: how one block describes itself on disk.

Owns the bytes of a record and nothing else; must not know of files, indexes or threads. All integers little-endian.

    offset  size          field
    0       8             magic "MPKVREC2"
    8       8             xxh3-64 of the header from offset 16 to `header_bytes`
    16      4             header_bytes: a multiple of 4096; the data begin there
    20      4             layers (also the number of slice hashes)
    24      32 · 3        key, parent key, namespace
    120     4 · 5         layout version, kv_heads, head_dim, block_tokens, scale_bytes
    140     16            dtype, ASCII, zero-padded
    156     4             length of the tenant's name
    160     tenant, then 8 bytes per layer: the hash of that layer's slice (moonpool/kv/hashes.py), then zeros
    header_bytes          the data, [layers, slice_bytes], then zeros to a multiple of 4096

Each layer has its own hash, made where the KV was computed, so that a layer-major reader can use a slice without
reading the block. It is bound to the key and the layer: bytes that are whole but belong elsewhere fail too. Records
begin at multiples of 4096, so that a scan finds the next one behind a broken one (and direct I/O stays possible).

Records with the magic "MPKVREC1" are read too. Their slice hashes are xxh3-64 seeded with the key's first 8 bytes XOR
the layer, made by the store that wrote them.
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence

import xxhash

from moonpool.errors import MoonpoolError
from moonpool.kv.blocks import MAX_TENANT_BYTES, BlockFormat, BlockInfo
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout

ALIGN = 4096
MAGIC = b"MPKVREC2"
SEEDED_MAGIC = b"MPKVREC1"
_PREFIX = struct.Struct("<8sQII")
_KEY_AT, _PARENT_AT, _NAMESPACE_AT = 24, 56, 88
_TENANT_LENGTH = struct.Struct("<I")
_FIXED = struct.Struct("<8sQII32s32s32sIIIII16sI")
_HASHED_FROM = 16
_MAX_HEADER_BYTES = 1 << 20


class BadRecordError(MoonpoolError):
    """Bytes on disk are not the record, or not the slice, that they should be."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record without its data.

    Attributes:
        info: the block.
        header_bytes: where the data begin, from the record's start.
        hashes: one per layer, as the record has them.
        seeded: whether they are of the older kind.
    """

    info: BlockInfo
    header_bytes: int
    hashes: tuple[int, ...]
    seeded: bool = False

    @property
    def record_bytes(self) -> int:
        """Size of the whole record, padding included."""
        return self.header_bytes + _align(self.info.nbytes)

    def check_slice(self, layer: int, data: memoryview) -> int:
        """Verifies one layer's bytes; returns their hash, bound to the block.

        Raises:
            BadRecordError: they are not what was written.
        """
        key = self.info.key
        value = bind(slice_hash(data), key, layer)
        found = slice_hash(data, seed=int.from_bytes(key[:8], "little") ^ layer) if self.seeded else value
        if found != self.hashes[layer]:
            raise BadRecordError(f"hash of layer {layer} is wrong")
        return value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecordKind:
    """What many records have in common: all that their headers say but keys and checksums.

    Attributes:
        format: of what kind of KV they are.
        tenant: whose they are.
        record_bytes: size of each of them, header and padding included.
    """

    format: BlockFormat
    tenant: str
    record_bytes: int


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def header_size(info: BlockInfo) -> int:
    """Bytes of a block's record header."""
    return _align(_FIXED.size + len(info.tenant.encode()) + 8 * info.format.layout.layers)


def data_size(block_format: BlockFormat) -> int:
    """Bytes of a record behind its header, padding included."""
    return _align(block_format.layout.block_bytes)


def record_size(info: BlockInfo) -> int:
    """Bytes of a block's record, padding included; always at least as large as the block."""
    return header_size(info) + data_size(info.format)


def pack_header(info: BlockInfo, hashes: Sequence[int]) -> bytes:
    """The header of a record.

    Args:
        info: the block.
        hashes: of its layer slices in order, bound to the block.
    """
    layout = info.format.layout
    assert len(hashes) == layout.layers
    tenant = info.tenant.encode()
    size = header_size(info)
    out = bytearray(size)
    _FIXED.pack_into(
        out,
        0,
        MAGIC,
        0,
        size,
        layout.layers,
        info.key,
        info.parent,
        info.format.namespace,
        layout.version,
        layout.kv_heads,
        layout.head_dim,
        layout.block_tokens,
        layout.scale_bytes,
        layout.dtype.encode(),
        len(tenant),
    )
    end = _FIXED.size + len(tenant)
    out[_FIXED.size : end] = tenant
    struct.pack_into(f"<{len(hashes)}Q", out, end, *hashes)
    struct.pack_into("<Q", out, 8, xxhash.xxh3_64_intdigest(memoryview(out)[_HASHED_FROM:]))
    return bytes(out)


def header_bytes_of(data: bytes | bytearray, at: int = 0) -> int:
    """How long the header is that begins with the bytes from `at` on (at least 24).

    Raises:
        BadRecordError: no header begins there.
    """
    if len(data) < at + _PREFIX.size:
        raise BadRecordError("too short for a record")
    magic, _, size, _ = _PREFIX.unpack_from(data, at)
    if magic not in (MAGIC, SEEDED_MAGIC):
        raise BadRecordError("no record begins here")
    if not ALIGN <= size <= _MAX_HEADER_BYTES or size % ALIGN:
        raise BadRecordError(f"header size {size} is impossible")
    return int(size)


@functools.lru_cache(maxsize=64)
def _format(
    namespace: bytes,
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: bytes,
    scale_bytes: int,
    version: int,
) -> BlockFormat:
    """A format as headers have it; few differ, and a scan reads a million headers."""
    name = dtype.rstrip(b"\0").decode("ascii")
    return BlockFormat(namespace, KVLayout(layers, kv_heads, head_dim, block_tokens, name, scale_bytes, version))


def unpack_header(data: bytes | bytearray) -> RecordHeader:
    """Reads a whole header.

    Args:
        data: begins with the header; may be longer.

    Raises:
        BadRecordError: it is not intact.
    """
    size = header_bytes_of(data)
    if len(data) < size:
        raise BadRecordError("the header is cut off")
    fields = _FIXED.unpack_from(data)
    if xxhash.xxh3_64_intdigest(memoryview(data)[_HASHED_FROM:size]) != fields[1]:
        raise BadRecordError("checksum of the header is wrong")
    (
        _,
        _,
        _,
        layers,
        key,
        parent,
        namespace,
        version,
        kv_heads,
        head_dim,
        block_tokens,
        scale_bytes,
        dtype,
        tenant_len,
    ) = fields
    sums_at = _FIXED.size + tenant_len
    if tenant_len > MAX_TENANT_BYTES or sums_at + 8 * layers > size:
        raise BadRecordError("the header's parts are larger than it")
    try:
        shape = (layers, kv_heads, head_dim, block_tokens, dtype, scale_bytes, version)
        block_format = _format(namespace, *shape)
        tenant = data[_FIXED.size : sums_at].decode()
    except (MoonpoolError, ValueError) as error:
        raise BadRecordError(f"the header is intact but impossible: {error}") from error
    info = BlockInfo(BlockKey(key), BlockKey(parent), tenant, block_format)
    hashes = struct.unpack_from(f"<{layers}Q", data, sums_at)
    return RecordHeader(info, size, hashes, seeded=fields[0] == SEEDED_MAGIC)


def identify(data: bytes, at: int, kinds: dict[bytes, RecordKind]) -> tuple[BlockKey, RecordKind]:
    """Verifies a header, and says whose it is and of what kind; quick for kinds that were met before.

    Args:
        data: holds the whole header.
        at: where it begins.
        kinds: those that were met, by the bytes that say so; filled here.

    Raises:
        BadRecordError: it is not intact.
    """
    size = header_bytes_of(data, at)
    header = memoryview(data)[at : at + size]
    if len(header) < size or xxhash.xxh3_64_intdigest(header[_HASHED_FROM:]) != _PREFIX.unpack_from(header)[1]:
        raise BadRecordError("the header is cut off or its checksum is wrong")
    (tenant_bytes,) = _TENANT_LENGTH.unpack_from(header, _FIXED.size - _TENANT_LENGTH.size)
    said = b"".join((header[_HASHED_FROM:_KEY_AT], header[_NAMESPACE_AT : _FIXED.size + tenant_bytes]))
    kind = kinds.get(said)
    if kind is None:
        whole = unpack_header(bytes(header))
        kind = kinds[said] = RecordKind(whole.info.format, whole.info.tenant, whole.record_bytes)
    return BlockKey(bytes(header[_KEY_AT:_PARENT_AT])), kind
