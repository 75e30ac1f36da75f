"""The segment files' record format.

All integers are little-endian.

    offset  size          field
    0       8             magic "MPKVREC2"; "MPKVREC3" if the data are encrypted
    8       8             xxh3-64 of the header from offset 16 to `header_bytes`
    16      4             header_bytes: a multiple of 4096; the data begin there
    20      4             layers (also the number of slice hashes)
    24      32 · 3        key, parent key, namespace
    120     4 · 5         layout version, kv_heads, head_dim, block_size, scale_bytes; of other versions than 1:
                          version, bytes of the layout's message, zeros
    140     16            dtype, ASCII, zero-padded; of other versions than 1 zeros
    156     4             length of the tenant's name
    160     tenant, then 8 bytes per layer: the hash of that layer's slice (moonpool/base/kv/keys.py), then 8 bytes:
            seconds since 1970 at which the store got the block, then 8 bytes: the number of the segment that it is of
            (both 0 = not known, as in older records), then, of other versions than 1, its message
            (KVLayout in protos/moonpool/v1/kv.proto), then, if encrypted, the seal, then zeros
    header_bytes          the data, one slice per layer, then zeros to a multiple of 4096

The seal (encryption.py): 32 bytes for the key's id, ASCII, zero-padded, 32 bytes of salt, 16 bytes per layer: a tag,
and the encrypted hashes of the slices' plaintext, 8 bytes per layer and a tag of 16. The hashes in the header are those
of the ciphertext then, so that a record is verified, copied and found again without any key. Each header has room for a
seal.

Each layer has a hash, made where the KV was computed, so that a layer-major reader can use a slice without reading the
block. The hash is bound to key and layer: whole bytes in the wrong place fail too. Records begin at multiples of 4096,
so that a scan finds the next record behind a broken record (and direct I/O stays possible). A file taken over from
another segment may still hold that segment's records, behind its own: their number tells.

Records with the magic "MPKVREC1" are read too. Their slice hashes are xxh3-64 seeded with the key's first 8 bytes XOR
the layer, made by the writing store.
"""

import dataclasses
import functools
import re
import struct
from collections.abc import Sequence

import xxhash
from google.protobuf.message import DecodeError

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.kv.blocks import MAX_TENANT_BYTES, BlockFormat, BlockInfo
from moonpool.base.kv.keys import BlockKey, key_bindings, layer_binding, slice_hash
from moonpool.base.kv.layout import UNIFORM_VERSION, KVLayout
from moonpool.kvstore.ssd.encryption import (
    KEY_ID_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    BrokenSealError,
    Keyring,
    RecordCipher,
    Seal,
)
from moonpool.kvstore.ssd.files import ALIGN
from moonpool.kvstore.ssd.segment import RecordKind
from moonpool.v1 import kv_pb2

MAGIC = b"MPKVREC2"
SEEDED_MAGIC = b"MPKVREC1"
SEALED_MAGIC = b"MPKVREC3"
_MAGICS = MAGIC, SEEDED_MAGIC, SEALED_MAGIC
_FIXED = struct.Struct("<8sQII32s32s32sIIIII16sI")
_HASHED_FROM = 16
_MAX_HEADER_BYTES = 1 << 20


class BadRecordError(MoonpoolError):
    """The bytes read are not the expected record or slice: the stored block is bad."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record without data, which begin at `header_bytes`; `seeded`: hashes of the older kind."""

    info: BlockInfo
    header_bytes: int
    hashes: tuple[int, ...]
    seeded: bool = False
    segment: int = 0  # the segment's number, 0 if unknown
    seal: Seal | None = None  # of encrypted data

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + _align(self.info.nbytes)

    @property
    def kind(self) -> RecordKind:
        return RecordKind(self.info.format, self.info.tenant, self.seal.key_id if self.seal else "")

    def check_slices(self, first: int, data: memoryview, hashes: Sequence[int] = ()) -> list[int]:
        """Verify the bytes of consecutive layers, as they are on disk; return their hashes, bound to the block.

        `hashes` are those of the bytes, if they were made already.

        Raises:
            BadRecordError: the bytes are not the bytes that were written.
        """
        layout, (of_key,) = self.info.format.layout, key_bindings([self.info.key])
        layers = layout.layers_in(first, len(data))
        slices = [data[layout.place(layer, first)] for layer in layers] if self.seeded or not hashes else []
        made = hashes or map(slice_hash, slices)
        bound = [value ^ of_key ^ layer_binding(layer) for layer, value in zip(layers, made, strict=True)]
        found = bound
        if self.seeded:
            found = [slice_hash(data, of_key ^ layer) for layer, data in zip(layers, slices, strict=True)]
        for layer, value in zip(layers, found, strict=True):
            if value != self.hashes[layer]:
                raise BadRecordError(f"hash of layer {layer} is wrong")
        return bound


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def header_size(info: BlockInfo) -> int:
    """Bytes of a record's header, padding included."""
    layout = info.format.layout
    behind = len(info.tenant.encode()) + 8 * layout.layers + 16 + len(_layout_message(layout))
    return _align(_FIXED.size + behind + _seal_bytes(layout.layers))


def _seal_bytes(layers: int) -> int:
    return KEY_ID_BYTES + SALT_BYTES + (TAG_BYTES + 8) * layers + TAG_BYTES


@functools.lru_cache(maxsize=64)
def _layout_message(layout: KVLayout) -> bytes:
    """A header's part about a layout beside the fixed fields."""
    return b"" if layout.version == UNIFORM_VERSION else layout.to_proto().SerializeToString(deterministic=True)


def data_size(block_format: BlockFormat) -> int:
    """A record's bytes behind the header, padding included."""
    return _align(block_format.layout.block_bytes)


def record_size(info: BlockInfo) -> int:
    """Bytes of a block's record, padding included; always at least as large as the block."""
    return header_size(info) + data_size(info.format)


def pack_header(info: BlockInfo, hashes: Sequence[int], segment: int = 0, seal: Seal | None = None) -> bytes:
    """Header of a record in a segment; `hashes`: one per layer slice as written, in order, bound to the block."""
    layout = info.format.layout
    assert len(hashes) == layout.layers
    tenant = info.tenant.encode()
    size = header_size(info)
    out = bytearray(size)
    names = info.key, info.parent, info.format.namespace
    message, shape, dtype = _layout_message(layout), (layout.version, 0, 0, 0, 0), b""
    if message:
        shape = (layout.version, len(message), 0, 0, 0)
    else:
        (group,), tokens = layout.groups, layout.block_size
        shape = (layout.version, group.kv_heads, group.head_dim, tokens, 0)
        dtype = group.dtype.encode()
    _FIXED.pack_into(
        out, 0, SEALED_MAGIC if seal else MAGIC, 0, size, layout.layers, *names, *shape, dtype, len(tenant)
    )
    behind = struct.Struct(f"<{len(tenant)}s{len(hashes) + 2}Q{len(message)}s")
    behind.pack_into(out, _FIXED.size, tenant, *hashes, info.written_at, segment, message)
    if seal is not None:
        packed = b"".join((seal.key_id.encode().ljust(KEY_ID_BYTES, b"\0"), seal.salt, seal.tags, seal.hashes))
        at = _FIXED.size + behind.size
        out[at : at + len(packed)] = packed
    struct.pack_into("<Q", out, 8, xxhash.xxh3_64_intdigest(memoryview(out)[_HASHED_FROM:]))
    return bytes(out)


def resembles_records(data: memoryview) -> bool:
    """Whether a page of a block begins like a record. A scan without the block's header would take the page for one."""
    pages = (match.start() * ALIGN for match in re.finditer(MAGIC[:1], bytes(data[::ALIGN])))
    return any(bytes(data[at : at + 8]) in _MAGICS for at in pages)


def rewrite_record(record: bytearray, segment: int) -> None:
    """Turn an intact record into another segment's record; an older one may have no room to say so."""
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
    if magic not in _MAGICS:
        raise BadRecordError("no record begins here")
    if not ALIGN <= size <= _MAX_HEADER_BYTES or size % ALIGN:
        raise BadRecordError(f"header size {size} is impossible")
    return int(size)


@functools.lru_cache(maxsize=64)
def _format(namespace: bytes, layers: int, shape: tuple[int, ...], dtype: bytes, message: bytes) -> BlockFormat:
    """A format in header form, cached: few differ, and a scan reads a million headers."""
    version, kv_heads, head_dim, block_size, scale_bytes = shape
    if version != UNIFORM_VERSION:
        found = kv_pb2.KVLayout.FromString(message)
    else:
        found = kv_pb2.KVLayout(
            version=version,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype.rstrip(b"\0").decode("ascii"),
            scale_bytes=scale_bytes,
        )
    layout = KVLayout.from_proto(found)
    if layout.version != version or layout.layers != layers:
        raise ConfigError("layout", f"has {layout.layers} layers, and the record {layers}")
    return BlockFormat(namespace, layout)


def unpack_header(data: bytes | bytearray) -> RecordHeader:
    """Read the header that `data` begins with. Raises BadRecordError if the header is damaged."""
    size = header_bytes_of(data)
    if len(data) < size:
        raise BadRecordError("the header is cut off")
    fields = _FIXED.unpack_from(data)
    if xxhash.xxh3_64_intdigest(memoryview(data)[_HASHED_FROM:size]) != fields[1]:
        raise BadRecordError("checksum of the header is wrong")
    magic, _, _, layers, key, parent, namespace, *shape, dtype, tenant_len = fields
    sums_at = _FIXED.size + tenant_len
    time_at = sums_at + 8 * layers
    grouped = shape[1] if shape[0] != UNIFORM_VERSION else 0
    seal_at = time_at + 16 + grouped
    sealed = _seal_bytes(layers) if magic == SEALED_MAGIC else 0
    if tenant_len > MAX_TENANT_BYTES or time_at > size or (grouped + sealed and seal_at + sealed > size):
        raise BadRecordError("the header's parts are larger than it")
    try:
        message = bytes(data[time_at + 16 : seal_at])
        seal = _unpack_seal(bytes(data[seal_at : seal_at + sealed]), layers) if sealed else None
        block_format = _format(namespace, layers, tuple(shape), dtype, message)
        tenant = data[_FIXED.size : sums_at].decode()
    except (MoonpoolError, ValueError, DecodeError) as error:
        raise BadRecordError(f"the header is intact but impossible: {error}") from error
    hashes = struct.unpack_from(f"<{layers}Q", data, sums_at)
    written_at, segment = (int.from_bytes(data[at : min(at + 8, size)], "little") for at in (time_at, time_at + 8))
    info = BlockInfo(BlockKey(key), BlockKey(parent), tenant, block_format, written_at)
    return RecordHeader(info, size, hashes, magic == SEEDED_MAGIC, segment, seal)


def _unpack_seal(data: bytes, layers: int) -> Seal:
    tags_at = KEY_ID_BYTES + SALT_BYTES
    hashes_at = tags_at + TAG_BYTES * layers
    key_id = data[:KEY_ID_BYTES].rstrip(b"\0").decode("ascii")
    return Seal(key_id, data[KEY_ID_BYTES:tags_at], data[tags_at:hashes_at], data[hashes_at:])


class OpenedRecord:
    """Decrypts slices of one record.

    Attributes:
        hashes: of the plaintext of all layers, bound to the block.
    """

    def __init__(self, header: RecordHeader, keyring: Keyring | None) -> None:
        """Find the key. Raises BadRecordError if it lacks, or is not the record's."""
        assert header.seal is not None
        self._layout, self._seal = header.info.format.layout, header.seal
        key = None if keyring is None else keyring.find(header.seal.key_id)
        if key is None:
            raise BadRecordError(f"key {header.seal.key_id!r} is not in encryption_keys")
        self._cipher = RecordCipher(key, header.info, header.seal.salt)
        try:
            self.hashes = self._cipher.open_hashes(header.seal)
        except BrokenSealError as error:
            raise BadRecordError(str(error)) from error

    def decrypt(self, first: int, data: memoryview) -> list[int]:
        """Decrypt consecutive layers in place; return their hashes, bound to the block. Raises BadRecordError."""
        layers = self._layout.layers_in(first, len(data))
        try:
            for layer in layers:
                tag = self._seal.tags[TAG_BYTES * layer : TAG_BYTES * (layer + 1)]
                self._cipher.open_slice(layer, data[self._layout.place(layer, first)], tag)
        except BrokenSealError as error:
            raise BadRecordError(str(error)) from error
        return list(self.hashes[layers.start : layers.stop])
