"""How the KV of one block is arranged in bytes, and what two sides must agree on before they exchange any."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from moonpool.errors import ConfigError, InvalidRequest, Mismatch
from moonpool.v1 import kv_pb2

DEFAULT_BLOCK_SIZE = 64
"""Tokens per KV block, unless `--block-size` says another number."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
QUANTISED = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Types whose numbers are stored with a scale, by the names that flags have for them."""
SCALE_BYTES = 4
"""Of one scale, a little-endian float32; each token has one per head and plane (K or V)."""
LAYOUT_VERSION = 1
_BLOCK_TOKENS_MULTIPLE = 16

MAX_OF = {
    "layers": 4096,
    "kv_heads": 1024,
    "head_dim": 4096,
    "block_tokens": 4096,
    "version": 1 << 16,
}
"""Largest value of each field: some ten times what any known model has."""
MAX_PIECE_BYTES = 4 << 20
"""Largest part of a slice that travels undivided, in one message: a head, or a whole slice that has scales."""
MAX_SLICE_BYTES = 16 << 20
MAX_BLOCK_BYTES = 512 << 20
"""A block is hashed whole, on the event loop, when a reader says that it is damaged."""


@dataclass(frozen=True)
class KVLayout:
    """Arrangement of a block: per layer `[kv_heads, 2 (K, V), block_tokens, head_dim]`, then its scales.

    Heads are outermost, so that the share of some heads is one run of bytes. Only quantised KV has scales,
    `[kv_heads, 2, block_tokens]` float32: a number is its stored value times its token's scale. Its slices travel
    whole.

    Raises:
        ConfigError: A field is out of range; names it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    version: int = LAYOUT_VERSION

    def __hash__(self) -> int:
        """Of what differs most: layouts are keys of what is looked up for every message."""
        return hash((self.layers, self.kv_heads, self.head_dim, self.block_tokens))

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "version"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_OF[name]:
                raise ConfigError(name, f"must be in [1, {MAX_OF[name]}], is {value}")
        if self.block_tokens % _BLOCK_TOKENS_MULTIPLE:
            raise ConfigError("block_tokens", f"must be a multiple of {_BLOCK_TOKENS_MULTIPLE}, is {self.block_tokens}")
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError("dtype", f"must be one of {', '.join(ELEMENT_BYTES)}, is {self.dtype!r}")
        if self.version != LAYOUT_VERSION:
            raise ConfigError("version", f"only version {LAYOUT_VERSION} is known, not {self.version}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        pieces = ("kv_heads", self.slice_bytes) if self.scale_bytes else ("head_dim", self.head_bytes)
        sizes = ((*pieces, MAX_PIECE_BYTES, "a message"), ("kv_heads", self.slice_bytes, MAX_SLICE_BYTES, "a slice"))
        for name, size, limit, what in (*sizes, ("layers", self.block_bytes, MAX_BLOCK_BYTES, "a block")):
            if size > limit:
                raise ConfigError(name, f"{what} would have {size} bytes; {limit} at most")

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of the scales behind one layer's values; 0 where KV is not quantised."""
        return self.kv_heads * 2 * self.block_tokens * SCALE_BYTES if self.dtype in QUANTISED.values() else 0

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one head's K and V in one layer of one block, without their scales."""
        return 2 * self.block_tokens * self.head_dim * self.element_bytes

    @cached_property
    def slice_bytes(self) -> int:
        """Bytes of one layer in one block: the unit in which KV lies in the pool, travels and is stored."""
        return self.kv_heads * self.head_bytes + self.scale_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.slice_bytes

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of KV per token over all layers, rounded up."""
        return -(-self.block_bytes // self.block_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def valid_tokens(self, tokens: int, block: int) -> int:
        """Number of valid token slots in block number `block` of a sequence of `tokens` tokens."""
        return max(0, min(self.block_tokens, tokens - block * self.block_tokens))

    def check_part(self, layers: range, heads: range) -> None:
        """Checks which part of each block a request names.

        Raises:
            InvalidRequest: naming `layer_end` or `head_end`: the layout has no such layers or heads, or they cannot be
                had apart, because scales lie behind all heads.
        """
        if not 0 <= layers.start < layers.stop <= self.layers:
            raise InvalidRequest("layer_end", f"no such layers as {layers}; the layout has {self.layers}")
        if not 0 <= heads.start < heads.stop <= self.kv_heads:
            raise InvalidRequest("head_end", f"no such heads as {heads}; the layout has {self.kv_heads}")
        if self.scale_bytes and len(heads) != self.kv_heads:
            raise InvalidRequest("head_end", "slices with scales travel whole")

    def to_proto(self) -> kv_pb2.KVLayout:
        """The layout as it is sent."""
        names = (*(f.name for f in fields(self)), "scale_bytes")
        return kv_pb2.KVLayout(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_proto(cls, message: kv_pb2.KVLayout) -> KVLayout:
        """A layout from the contract.

        Raises:
            Mismatch: this version cannot hold such a layout; names the field.
        """
        try:
            found = cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
        except ConfigError as error:
            raise Mismatch(f"layout.{error.field}", error.message) from error
        if message.scale_bytes != found.scale_bytes:
            raise Mismatch(
                "layout.scale_bytes", f"{found.dtype} has {found.scale_bytes} bytes here, not {message.scale_bytes}"
            )
        return found

    def difference(self, other: KVLayout) -> str | None:
        """Name of the first field in which the two differ, or None when KV may be exchanged."""
        for field in fields(self):
            if getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None

    def zero_invalid(self, slice_: memoryview, valid_tokens: int) -> None:
        """Zeroes the token slots from `valid_tokens` on in one writable layer slice (they may be another request's).

        Args:
            slice_: Exactly `slice_bytes` bytes.
            valid_tokens: In `[0, block_tokens]`.
        """
        assert slice_.nbytes == self.slice_bytes, "not a whole layer slice"
        assert 0 <= valid_tokens <= self.block_tokens, "valid_tokens out of range"
        if valid_tokens == self.block_tokens:
            return
        values = self.kv_heads * self.head_bytes
        self._zero_planes(slice_[:values], self.head_dim * self.element_bytes, valid_tokens)
        self._zero_planes(slice_[values:], SCALE_BYTES, valid_tokens)

    def _zero_planes(self, planes: memoryview, token: int, valid_tokens: int) -> None:
        """Zeroes slots of `token` bytes from `valid_tokens` on in each plane of `block_tokens` slots."""
        plane, begin = self.block_tokens * token, valid_tokens * token
        zeros = bytes(plane - begin)
        for start in range(0, planes.nbytes, plane):
            planes[start + begin : start + plane] = zeros
