"""The record format of segment files: how one block describes itself on disk. All integers are little-endian.

    offset  size          field
    0       8             magic "MPKVREC2"
    8       8             xxh3-64 of the header from offset 16 to `header_bytes`
    16      4             header_bytes: a multiple of 4096; the data begin there
    20      4             layers (also the number of slice hashes)
    24      32 · 3        key, parent key, namespace
    120     4 · 5         layout version, kv_heads, head_dim, block_tokens, scale_bytes
    140     16            dtype, ASCII, zero-padded
    156     4             length of the tenant's name
    160     tenant, then 8 bytes per layer: the hash of that layer's slice (moonpool/kv/hashes.py), then 8 bytes:
            seconds since 1970 at which the store got the block, then 8 bytes: the number of the segment that it is of
            (both 0 = not known, as in older records), then zeros
    header_bytes          the data, [layers, slice_bytes], then zeros to a multiple of 4096

Each layer has its own hash, made where the KV was computed, so that a layer-major reader can use a slice without
reading the block. It is bound to the key and the layer: bytes that are whole but belong elsewhere fail too. Records
begin at multiples of 4096, so that a scan finds the next one behind a broken one (and direct I/O stays possible). A
file that was another segment's may hold records of that one still, behind its own: their number tells.

Records with the magic "MPKVREC1" are read too. Their slice hashes are xxh3-64 seeded with the key's first 8 bytes XOR
the layer, made by the store that wrote them.
"""

import dataclasses
import functools
import re
import struct
from collections.abc import Sequence

import xxhash

from moonpool.errors import ConfigError, MoonpoolError
from moonpool.kv.blocks import MAX_TENANT_BYTES, BlockFormat, BlockInfo
from moonpool.kv.hashes import key_bindings, layer_binding, slice_hash
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout

ALIGN = 4096
MAGIC = b"MPKVREC2"
SEEDED_MAGIC = b"MPKVREC1"
_FIXED = struct.Struct("<8sQII32s32s32sIIIII16sI")
_HASHED_FROM = 16
_MAX_HEADER_BYTES = 1 << 20


class BadRecordError(MoonpoolError):
    """Bytes that were read are not the record, or not the slice, that they should be: the stored block is bad."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record without its data, which begin at `header_bytes`; `seeded`: its hashes are of the older kind."""

    info: BlockInfo
    header_bytes: int
    hashes: tuple[int, ...]
    seeded: bool = False
    segment: int = 0  # its number, 0 if not known

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + _align(self.info.nbytes)

    def check_slices(self, first: int, data: memoryview, hashes: Sequence[int] = ()) -> list[int]:
        """Verifies consecutive layers' bytes, whose `hashes` may have been made; these, bound to the block.

        Raises BadRecordError: they are not what was written.
        """
        size, (of_key,) = self.info.format.layout.slice_bytes, key_bindings([self.info.key])
        layers = range(first, first + len(data) // size)
        slices = [data[at : at + size] for at in range(0, len(data), size)] if self.seeded or not hashes else []
        made = hashes or map(slice_hash, slices)
        bound = [value ^ of_key ^ layer_binding(layer) for layer, value in zip(layers, made, strict=True)]
        found = bound
        if self.seeded:
            found = [slice_hash(one, of_key ^ layer) for layer, one in zip(layers, slices, strict=True)]
        for layer, value in zip(layers, found, strict=True):
            if value != self.hashes[layer]:
                raise BadRecordError(f"hash of layer {layer} is wrong")
        return bound


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def header_size(info: BlockInfo) -> int:
    """Bytes of a record's header, padding included."""
    return _align(_FIXED.size + len(info.tenant.encode()) + 8 * info.format.layout.layers + 16)


def data_size(block_format: BlockFormat) -> int:
    """Bytes of a record behind its header, padding included."""
    return _align(block_format.layout.block_bytes)


def record_size(info: BlockInfo) -> int:
    """Bytes of a block's record, padding included; always at least as large as the block."""
    return header_size(info) + data_size(info.format)


def pack_header(info: BlockInfo, hashes: Sequence[int], segment: int = 0) -> bytes:
    """The header of a record in a segment; `hashes` are those of its layer slices in order, bound to the block."""
    layout = info.format.layout
    assert len(hashes) == layout.layers
    tenant = info.tenant.encode()
    size = header_size(info)
    out = bytearray(size)
    names = info.key, info.parent, info.format.namespace
    shape = (layout.version, layout.kv_heads, layout.head_dim, layout.block_tokens, layout.scale_bytes)
    _FIXED.pack_into(out, 0, MAGIC, 0, size, layout.layers, *names, *shape, layout.dtype.encode(), len(tenant))
    struct.pack_into(f"<{len(tenant)}s{len(hashes) + 2}Q", out, _FIXED.size, tenant, *hashes, info.written_at, segment)
    struct.pack_into("<Q", out, 8, xxhash.xxh3_64_intdigest(memoryview(out)[_HASHED_FROM:]))
    return bytes(out)


def resembles_records(data: memoryview) -> bool:
    """Whether a page of a block begins as a record does: a scan that meets it without its header would believe it."""
    pages = (match.start() * ALIGN for match in re.finditer(MAGIC[:1], bytes(data[::ALIGN])))
    return any(bytes(data[at : at + 8]) in (MAGIC, SEEDED_MAGIC) for at in pages)


def move(record: bytearray, segment: int) -> None:
    """Makes an intact record one of another segment; an older one may have no room to say so."""
    size, (layers, *_, tenant_len) = header_bytes_of(record), _FIXED.unpack_from(record)[3:]
    at = _FIXED.size + tenant_len + 8 * layers + 8
    if at + 8 <= size:
        struct.pack_into("<Q", record, at, segment)
        struct.pack_into("<Q", record, 8, xxhash.xxh3_64_intdigest(memoryview(record)[_HASHED_FROM:size]))


def header_bytes_of(data: bytes | bytearray) -> int:
    """Length of the header that `data` begins with. Raises BadRecordError when there is none."""
    if len(data) < _FIXED.size:
        raise BadRecordError("too short for a record")
    magic, _, size, *_ = _FIXED.unpack_from(data)
    if magic not in (MAGIC, SEEDED_MAGIC):
        raise BadRecordError("no record begins here")
    if not ALIGN <= size <= _MAX_HEADER_BYTES or size % ALIGN:
        raise BadRecordError(f"header size {size} is impossible")
    return int(size)


@functools.lru_cache(maxsize=64)
def _format(namespace: bytes, layers: int, shape: tuple[int, ...], dtype: bytes) -> BlockFormat:
    """A format as headers have it, cached: few differ, and a scan reads a million headers."""
    version, kv_heads, head_dim, block_tokens, scale_bytes = shape
    name = dtype.rstrip(b"\0").decode("ascii")
    layout = KVLayout(layers, kv_heads, head_dim, block_tokens, name, version)
    if layout.scale_bytes != scale_bytes:
        raise ConfigError("scale_bytes", f"{name} has {layout.scale_bytes} bytes, not {scale_bytes}")
    return BlockFormat(namespace, layout)


def unpack_header(data: bytes | bytearray) -> RecordHeader:
    """Reads the header that `data` begins with. Raises BadRecordError when it is not intact."""
    size = header_bytes_of(data)
    if len(data) < size:
        raise BadRecordError("the header is cut off")
    fields = _FIXED.unpack_from(data)
    if xxhash.xxh3_64_intdigest(memoryview(data)[_HASHED_FROM:size]) != fields[1]:
        raise BadRecordError("checksum of the header is wrong")
    magic, _, _, layers, key, parent, namespace, *shape, dtype, tenant_len = fields
    sums_at = _FIXED.size + tenant_len
    if tenant_len > MAX_TENANT_BYTES or sums_at + 8 * layers > size:
        raise BadRecordError("the header's parts are larger than it")
    try:
        block_format = _format(namespace, layers, tuple(shape), dtype)
        tenant = data[_FIXED.size : sums_at].decode()
    except (MoonpoolError, ValueError) as error:
        raise BadRecordError(f"the header is intact but impossible: {error}") from error
    hashes = struct.unpack_from(f"<{layers}Q", data, sums_at)
    time_at = sums_at + 8 * layers
    written_at, segment = (int.from_bytes(data[at : min(at + 8, size)], "little") for at in (time_at, time_at + 8))
    info = BlockInfo(BlockKey(key), BlockKey(parent), tenant, block_format, written_at)
    return RecordHeader(info, size, hashes, magic == SEEDED_MAGIC, segment)
