"""How a block's KV is arranged in bytes, and what two sides must agree on before exchanging KV."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from moonpool.base.errors import ConfigError, InvalidRequest, Mismatch
from moonpool.v1 import kv_pb2

DEFAULT_BLOCK_SIZE = 64
"""Tokens per KV block, unless `--block-size` says another number."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
QUANTISED = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Types with numbers stored with a scale, by the flags' names."""
SCALE_BYTES = 4
"""Bytes per scale, a little-endian float32; each token has a scale per head and plane."""
UNIFORM_VERSION, GROUPED_VERSION, WINDOWED_VERSION, SCALED_VERSION = 1, 2, 3, 4
"""Versions for layouts with one full-attention group (1), with windows or recurrent states (3), with scales (4), and
for all others (2). Earlier versions had scales behind all heads: such layouts are refused by version.
"""
_BLOCK_SIZE_MULTIPLE = 16
NO_SLOT = -1
"""In place of a window slot: the block lacks the slices of layers with a window or a recurrent state."""
TYPICAL_TOKENS = 4096
"""Sequence length, in tokens, for which a pool's bytes are divided between blocks and window slots."""
WINDOW_PART = 8
"""At least 1 / this number of a pool's bytes hold windowed slices, if there are as many blocks."""
STATES_IN_WORK = 3
"""Recurrent states that a step writes for a sequence beyond states held: the last state, and two at chosen borders."""

KVKind = Literal["full", "window", "latent", "recurrent"]
"""What a group's layers attend to: keys and values of all tokens; keys and values of the last tokens; one vector a
token, from which keys and values come (MLA) or which is an indexer's key; a state of fixed size, which stands for all
tokens before."""
_KINDS = get_args(KVKind)

MAX_OF = {
    "layers": 4096,
    "kv_heads": 1024,
    "head_dim": 4096,
    "block_size": 4096,
    "window": 1 << 31,
    "state": 1 << 24,
}
"""Largest value of each field: some ten times what any known model has."""
MAX_PIECE_BYTES = 4 << 20
"""Largest part of a slice that travels undivided, in one message: a head share."""
MAX_SLICE_BYTES = 16 << 20
MAX_BLOCK_BYTES = 512 << 20
"""A block is hashed whole, on the event loop, when a reader reports damage."""


def _check_range(name: str, value: int, limit: str = "") -> None:
    most = MAX_OF[limit or name]
    if not 1 <= value <= most:
        raise ConfigError(name, f"must be in [1, {most}], is {value}")


_PROTO_KINDS: dict[KVKind, kv_pb2.KVKind.ValueType] = {
    "full": kv_pb2.KV_KIND_FULL,
    "window": kv_pb2.KV_KIND_WINDOW,
    "latent": kv_pb2.KV_KIND_LATENT,
    "recurrent": kv_pb2.KV_KIND_RECURRENT,
}
_KINDS_BY_PROTO = {value: name for name, value in _PROTO_KINDS.items()}


@dataclass(frozen=True)
class KVGroup:
    """Layers with equally shaped slices: `[kv_heads, planes]` runs of `[block_size, head_dim]` values, then scales.

    A recurrent group's slice is `[kv_heads, head_dim]`: the state behind the block's last valid token, in shares.

    Attributes:
        layers: indices in the model, rising.
        kv_heads: heads per layer; heads are outermost, so that a head share is one run of bytes.
        head_dim: elements in a head's key, and in the value; in a recurrent group, elements in a share of the state.
        dtype: element type. Quantised KV has scales, `[block_size]` float32 behind the values of each head and plane:
            a number is the stored value times the token's scale.
        kind: what the layers attend to.
        window: tokens that a query sees, the query's own included; 0 unless `kind` is "window".

    Raises:
        ConfigError: A field is out of range; names the field.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    kind: KVKind = "full"
    window: int = 0

    def __post_init__(self) -> None:
        _check_range("layers", len(self.layers))
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError("layers", "must be indices in rising order")
        _check_range("kv_heads", self.kv_heads)
        _check_range("head_dim", self.head_dim, "state" if self.kind == "recurrent" else "head_dim")
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError("dtype", f"must be one of {', '.join(ELEMENT_BYTES)}, is {self.dtype!r}")
        if self.kind not in _KINDS:
            raise ConfigError("kind", f"must be one of {', '.join(_KINDS)}, is {self.kind!r}")
        if self.kind == "recurrent" and self.scaled:
            raise ConfigError("dtype", f"recurrent states have no scales, as {self.dtype!r} needs")
        if self.kind == "window":
            _check_range("window", self.window)
        elif self.window:
            raise ConfigError("window", f"layers of kind {self.kind!r} have none, not {self.window}")

    @property
    def planes(self) -> int:
        """Vectors with `head_dim` elements per token and head: 2 for key and value, or 1."""
        return 1 if self.kind in ("latent", "recurrent") else 2

    def slots(self, block_size: int) -> int:
        """Vectors for each head and plane in a block: one per token; in a recurrent group, one for all tokens."""
        return 1 if self.kind == "recurrent" else block_size

    @cached_property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether numbers have scales."""
        return self.dtype in QUANTISED.values()

    def scale_bytes(self, block_size: int) -> int:
        """Bytes for one layer's scales; 0 where KV is not quantised."""
        return self.kv_heads * self.planes * self.slots(block_size) * SCALE_BYTES if self.scaled else 0

    def value_bytes(self, block_size: int) -> int:
        """Bytes for one layer's values, without scales."""
        return self.kv_heads * self.planes * self.slots(block_size) * self.head_dim * self.element_bytes

    def slice_bytes(self, block_size: int) -> int:
        """Bytes for one layer in one block."""
        return self.value_bytes(block_size) + self.scale_bytes(block_size)


class LayerKV(NamedTuple):
    """One layer's KV: the fields of `KVGroup`."""

    kv_heads: int
    head_dim: int
    dtype: str
    kind: KVKind = "full"
    window: int = 0


class LayoutDifference(NamedTuple):
    """The first field in which two layouts differ, and what the two have there."""

    field: str
    here: object
    there: object


class EqualSlices(NamedTuple):
    """Consecutive layers with equally large slices."""

    layers: range
    slice_bytes: int


@dataclass(frozen=True)
class KVLayout:
    """A block's arrangement: one slice per layer, layer after layer, each with the group's shape.

    Attributes:
        block_size: tokens in a block.
        groups: each layer is in one group.

    Raises:
        ConfigError: A field is out of range; names the field.
    """

    block_size: int
    groups: tuple[KVGroup, ...]

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: str) -> KVLayout:
        """A layout with equal layers, all with full attention."""
        _check_range("layers", layers)
        return cls(block_size, (KVGroup(tuple(range(layers)), kv_heads, head_dim, dtype),))

    @classmethod
    def of_layers(cls, block_size: int, layers: Iterable[LayerKV]) -> KVLayout:
        """A layout of layers in their order; equal layers become one group."""
        found: dict[LayerKV, list[int]] = {}
        for index, layer in enumerate(layers):
            found.setdefault(layer, []).append(index)
        return cls(block_size, tuple(KVGroup(tuple(of), *shape) for shape, of in found.items()))

    def __hash__(self) -> int:
        """Hash present numbers only: layouts are keys for a look-up with every message."""
        return hash((self.block_size, self.layers, self.block_bytes))

    def __post_init__(self) -> None:
        _check_range("block_size", self.block_size)
        if self.block_size % _BLOCK_SIZE_MULTIPLE:
            raise ConfigError("block_size", f"must be a multiple of {_BLOCK_SIZE_MULTIPLE}, is {self.block_size}")
        _check_range("layers", self.layers)
        if sorted(itertools.chain.from_iterable(group.layers for group in self.groups)) != list(range(self.layers)):
            raise ConfigError("groups", f"each of {self.layers} layers must be in one group")
        self._check_sizes()

    def _check_sizes(self) -> None:
        for group in self.groups:
            size = group.slice_bytes(self.block_size)
            for name, nbytes, limit, what in (
                ("head_dim", size // self.head_shares, MAX_PIECE_BYTES, "a message"),
                ("kv_heads", size, MAX_SLICE_BYTES, "a slice"),
            ):
                if nbytes > limit:
                    raise ConfigError(name, f"{what} would have {nbytes} bytes; {limit} at most")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise ConfigError("layers", f"a block would have {self.block_bytes} bytes; {MAX_BLOCK_BYTES} at most")

    @cached_property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def recurrent(self) -> bool:
        """Whether some layers have a recurrent state."""
        return any(group.kind == "recurrent" for group in self.groups)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes for all layers' recurrent states in one block."""
        return sum(
            len(group.layers) * group.slice_bytes(self.block_size) for group in self.groups if group.kind == "recurrent"
        )

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike, with full attention."""
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def version(self) -> int:
        """The arrangement's version: older programs know version 1."""
        if self.scaled:
            return SCALED_VERSION
        if self.is_uniform:
            return UNIFORM_VERSION
        return WINDOWED_VERSION if self.windowed_layers else GROUPED_VERSION

    @property
    def dtype(self) -> str:
        """The groups' element types, each named once."""
        return "+".join(dict.fromkeys(group.dtype for group in self.groups))

    @cached_property
    def head_shares(self) -> int:
        """Number of equal shares into which every layer's heads divide: a head each if layers are alike."""
        return math.gcd(*(group.kv_heads for group in self.groups))

    @cached_property
    def scaled(self) -> bool:
        """Whether slices have scales."""
        return any(group.scaled for group in self.groups)

    @cached_property
    def windowed_layers(self) -> frozenset[int]:
        """Layers with a window or a recurrent state, which need the slices of a sequence's last blocks only."""
        return frozenset(
            layer for group in self.groups if group.kind in ("window", "recurrent") for layer in group.layers
        )

    @cached_property
    def window_blocks(self) -> int:
        """Full blocks before the next token that the layer with the largest window may need; 0 without windows.

        A recurrent state stands for all earlier tokens: the last block has the state.
        """
        return max(int(self.recurrent), -(-max(group.window for group in self.groups) // self.block_size))

    @cached_property
    def windowed_bytes(self) -> int:
        """Bytes for all windowed layers in one block: a window slot of a pool."""
        return sum(self._sizes[layer] for layer in self.windowed_layers)

    @cached_property
    def states_alone(self) -> bool:
        """Whether all windowed layers have a recurrent state: then a step need not write a state for each block."""
        return self.recurrent and all(self.group(layer).kind == "recurrent" for layer in self.windowed_layers)

    def window_slots(self, blocks: int, max_num_batched_tokens: int, longest: int) -> int:
        """Window slots in a pool with `blocks` blocks: as many as sequences with `TYPICAL_TOKENS` tokens hold there.

        More if all slots take less than 1 / `WINDOW_PART` of the pool's bytes: small slots cost little, and short
        sequences need more. At least the slots for one sequence that is computed in steps of `max_num_batched_tokens`,
        and at most one slot per block. 0 if no layer has a window.

        Args:
            blocks: blocks in the pool.
            max_num_batched_tokens: tokens in the largest step.
            longest: tokens in the longest sequence, if shorter than `TYPICAL_TOKENS`; else 0.
        """
        if not self.windowed_layers:
            return 0
        held, typical = self.window_blocks + 1, self.blocks_for(min(longest or TYPICAL_TOKENS, TYPICAL_TOKENS))
        in_work = STATES_IN_WORK if self.states_alone else self.blocks_for(max_num_batched_tokens) + 1
        cheap = blocks * (self.block_bytes - self.windowed_bytes) // ((WINDOW_PART - 1) * self.windowed_bytes)
        return min(blocks, max(-(-blocks * held // typical), held + in_work, cheap))

    def pool_bytes(self, blocks: int, slots: int, layers: range | None = None) -> int:
        """Bytes of a pool, or of some consecutive layers in the pool."""
        of = range(self.layers) if layers is None else layers
        return sum(self._sizes[layer] * (slots if layer in self.windowed_layers else blocks) for layer in of)

    def blocks_in(
        self,
        nbytes: int,
        max_num_batched_tokens: int,
        longest: int,
        layers: range | None = None,
        held: KVLayout | None = None,
    ) -> int:
        """Most blocks in a pool of at most `nbytes`, window slots included; or in a pool for some layers only.

        `max_num_batched_tokens`, `longest`: see `window_slots`. `held`: what the pool holds of each block, a rank's
        share; None: all.
        """
        of, held = range(self.layers) if layers is None else layers, held or self
        if not self.windowed_layers:
            return nbytes // held.layers_bytes(of)

        def fits(blocks: int) -> bool:
            return held.pool_bytes(blocks, self.window_slots(blocks, max_num_batched_tokens, longest), of) <= nbytes

        most = 1
        while fits(most):
            most *= 2
        return bisect_left(range(1, most), True, key=lambda blocks: not fits(blocks))

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence with `tokens` tokens holds in a pool; before the window, only full layers."""
        blocks = self.blocks_for(tokens)
        return self.pool_bytes(blocks, min(blocks, self.window_blocks + 1))

    def first_windowed_block(self, tokens: int) -> int:
        """First block with windowed slices that a sequence with `tokens` tokens needs: earlier slices are not sent.

        With these slices, the sequence can be continued behind the last full block.
        """
        return max(0, tokens // self.block_size - self.window_blocks) if self.windowed_layers else 0

    @cached_property
    def stored_parts(self) -> tuple[LayoutPart, ...]:
        """How kvstores hold blocks: whole, or full and windowed layers as two separate blocks (`window_key`).

        A layout with windows in all layers or in none is not divided.
        """
        windowed, every = self.windowed_layers, range(self.layers)
        if len(windowed) in (0, self.layers):
            return (LayoutPart(self, tuple(every)),)
        parts = (tuple(layer for layer in every if (layer in windowed) is windows) for windows in (False, True))
        return tuple(LayoutPart(self._of(layers), layers) for layers in parts)

    def unread_windows(self, blocks: int) -> int:
        """Leading blocks, in a prefix with `blocks` blocks, that are not read with their windowed slices."""
        return max(0, blocks - self.window_blocks) if len(self.stored_parts) > 1 else 0

    def of_rank(self, ranks: int) -> KVLayout:
        """The layout of what one of a stage's ranks has: heads of their own, or a head that several have."""
        groups = (replace(group, kv_heads=max(1, group.kv_heads // ranks)) for group in self.groups)
        return self if ranks == 1 else KVLayout(self.block_size, tuple(groups))

    def _of(self, layers: Iterable[int]) -> KVLayout:
        """The layout for some layers only, numbered from 0."""
        groups = map(self.group, layers)
        layer_kv = (LayerKV(group.kv_heads, group.head_dim, group.dtype, group.kind, group.window) for group in groups)
        return KVLayout.of_layers(self.block_size, layer_kv)

    @cached_property
    def _groups_by_layer(self) -> tuple[KVGroup, ...]:
        by_layer = {layer: group for group in self.groups for layer in group.layers}
        return tuple(by_layer[layer] for layer in range(self.layers))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(group.slice_bytes(self.block_size) for group in self._groups_by_layer)

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self._sizes, initial=0))

    def group(self, layer: int) -> KVGroup:
        return self._groups_by_layer[layer]

    def slice_bytes(self, layer: int) -> int:
        """Bytes for one layer in one block: the unit in which KV lies in the pool, travels and is stored."""
        return self._sizes[layer]

    def share_bytes(self, layer: int) -> int:
        """Bytes for one of `head_shares` in this layer's slice: one run, with the heads' scales."""
        return self._sizes[layer] // self.head_shares

    @cached_property
    def largest_slice_bytes(self) -> int:
        return max(self._sizes)

    def layers_bytes(self, layers: range) -> int:
        """Bytes for consecutive layers in one block."""
        return self._offsets[layers.stop] - self._offsets[layers.start]

    def place(self, layer: int, first: int = 0) -> slice:
        """Where a layer's slice lies in bytes that begin with a block's layer `first`."""
        begin = self._offsets[layer] - self._offsets[first]
        return slice(begin, begin + self._sizes[layer])

    def layers_in(self, first: int, nbytes: int) -> range:
        """The layers from `first` on that take `nbytes` in a block."""
        return range(first, bisect_left(self._offsets, self._offsets[first] + nbytes))

    def equal_slices(self, layers: range) -> Iterator[EqualSlices]:
        """Some consecutive layers, divided where slices begin to have another size."""
        begin = layers.start
        for size, same in itertools.groupby(self._sizes[layers.start : layers.stop]):
            end = begin + sum(1 for _ in same)
            yield EqualSlices(range(begin, end), size)
            begin = end

    @cached_property
    def block_bytes(self) -> int:
        """Bytes for one block over all layers."""
        return self._offsets[-1]

    @cached_property
    def token_bytes(self) -> int:
        """KV bytes per token over all layers, rounded up."""
        return -(-self.block_bytes // self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def valid_tokens(self, tokens: int, block: int) -> int:
        """Number of valid token slots in block number `block`, in a sequence with `tokens` tokens."""
        return max(0, min(self.block_size, tokens - block * self.block_size))

    def check_part(self, layers: range, heads: range) -> None:
        """Check which part of each block a request names; `heads` in shares.

        Raises:
            InvalidRequest: naming `layer_end` or `head_end`: the layout lacks such layers or heads.
        """
        if not 0 <= layers.start < layers.stop <= self.layers:
            raise InvalidRequest("layer_end", f"no such layers as {layers}; the layout has {self.layers}")
        if not 0 <= heads.start < heads.stop <= self.head_shares:
            raise InvalidRequest("head_end", f"no such heads as {heads}; the layout has {self.head_shares}")

    def to_proto(self) -> kv_pb2.KVLayout:
        """The layout's message. A uniform layout has the same bytes as in version 1."""
        first = self.groups[0]
        uniform = self.version == UNIFORM_VERSION
        message = kv_pb2.KVLayout(
            version=self.version,
            layers=self.layers,
            kv_heads=self.head_shares,
            head_dim=first.head_dim,
            block_size=self.block_size,
            dtype=first.dtype,
        )
        if not uniform:
            message.groups.extend(_group_to_proto(group, self.block_size) for group in self.groups)
        return message

    @classmethod
    def from_proto(cls, message: kv_pb2.KVLayout) -> KVLayout:
        """A layout from the contract.

        Raises:
            Mismatch: this version cannot hold such a layout; names the field.
        """
        version, size = message.version, message.block_size
        if not UNIFORM_VERSION <= version <= SCALED_VERSION:
            raise Mismatch("layout.version", f"{UNIFORM_VERSION} to {SCALED_VERSION} are known, not {version}")
        try:
            if version == UNIFORM_VERSION:
                found = cls.uniform(message.layers, message.kv_heads, message.head_dim, size, message.dtype)
            else:
                found = cls(size, tuple(map(_group_from_proto, message.groups)))
        except ConfigError as error:
            raise Mismatch(f"layout.{error.field}", error.message) from error
        expected = found.to_proto()
        for field in ("version", "layers", "scale_bytes"):
            here, there = getattr(expected, field), getattr(message, field)
            if here != there:
                raise Mismatch(f"layout.{field}", f"such a layout has {here} here, not {there}")
        if len(expected.groups) != len(message.groups):
            raise Mismatch("layout.groups", f"version {version} has none")
        for here, there in zip(expected.groups, message.groups, strict=True):
            if (here.planes, here.scale_bytes) != (there.planes, there.scale_bytes):
                raise Mismatch(
                    "layout.groups",
                    f"{here.kind} layers in {here.dtype} have {here.planes} planes and {here.scale_bytes} bytes of "
                    f"scales here, not {there.planes} and {there.scale_bytes}",
                )
        return found

    def difference(self, other: KVLayout) -> LayoutDifference | None:
        """The first field in which the two differ, or None when KV may be exchanged."""
        if self == other:
            return None
        if self.scaled != other.scaled:  # the versions differ by this
            return LayoutDifference("dtype", self.dtype, other.dtype)
        for name in ("version", "layers", "block_size"):
            if getattr(self, name) != getattr(other, name):
                return LayoutDifference(name, getattr(self, name), getattr(other, name))
        if len(self.groups) != len(other.groups):
            return LayoutDifference("groups", len(self.groups), len(other.groups))
        for number, (here, there) in enumerate(zip(self.groups, other.groups, strict=True)):
            for field in fields(KVGroup):
                if getattr(here, field.name) != getattr(there, field.name):
                    name = field.name if self.is_uniform else f"groups[{number}].{field.name}"
                    return LayoutDifference(name, getattr(here, field.name), getattr(there, field.name))
        raise AssertionError("unequal layouts differ in a field")

    def zero_invalid(self, layer: int, data: memoryview, valid_tokens: int) -> None:
        """Zero the token slots from `valid_tokens` on in one writable slice (they may be another request's).

        A recurrent state has no such slots and stays.

        Args:
            layer: the slice's layer.
            data: The slice, or some of the slice's head shares.
            valid_tokens: In `[0, block_size]`.
        """
        group = self.group(layer)
        assert not data.nbytes % self.share_bytes(layer), "neither a slice nor some heads"
        assert 0 <= valid_tokens <= self.block_size, "valid_tokens out of range"
        if valid_tokens == self.block_size or group.kind == "recurrent":
            return
        parts, plane = (group.head_dim * group.element_bytes, SCALE_BYTES if group.scaled else 0), 0
        while plane < data.nbytes:
            for token in parts:  # values, then their scales
                end = plane + self.block_size * token
                begin = plane + valid_tokens * token
                data[begin:end] = bytes(end - begin)
                plane = end


class LayoutPart(NamedTuple):
    """Some layers of blocks. `layout`: these layers' layout; `layers`: these layers' indices in the model."""

    layout: KVLayout
    layers: tuple[int, ...]


def _group_to_proto(group: KVGroup, block_size: int) -> kv_pb2.KVGroup:
    return kv_pb2.KVGroup(
        layers=group.layers,
        kv_heads=group.kv_heads,
        planes=group.planes,
        head_dim=group.head_dim,
        dtype=group.dtype,
        scale_bytes=group.scale_bytes(block_size),
        kind=_PROTO_KINDS[group.kind],
        window=group.window,
    )


def _group_from_proto(message: kv_pb2.KVGroup) -> KVGroup:
    kind = _KINDS_BY_PROTO.get(message.kind)
    if kind is None:
        raise ConfigError("groups", f"layers of kind {message.kind} are not known here")
    return KVGroup(tuple(message.layers), message.kv_heads, message.head_dim, message.dtype, kind, message.window)
