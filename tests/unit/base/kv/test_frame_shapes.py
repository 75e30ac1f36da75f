"""Frames of a whole transfer: the same as if they were packed slice by slice."""

from __future__ import annotations

import pytest

from moonpool.base.kv.frames import (
    FRAME_BYTES,
    MAX_FRAME_SLICES,
    Slice,
    bind_all,
    checksum,
    frame_shape,
    pack_frames,
    shape_of,
)
from moonpool.base.kv.keys import bind
from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import kv_pb2

LAYOUT = KVLayout.uniform(layers=3, kv_heads=2, head_dim=4, block_size=16, dtype="float32")
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


def packed(layers: range, blocks: int, heads: range) -> tuple[kv_pb2.FrameHeader, list[int]]:
    """Such a frame, and its slices' own hashes."""
    data = memoryview(bytes(len(heads) * LAYOUT.share_bytes(0)))
    cells = [(layer, block) for layer in layers for block in range(blocks)]
    own = [1000 * layer + block for layer, block in cells]
    hashes = [bind(value, KEYS[block], layer) for value, (layer, block) in zip(own, cells, strict=True)]
    part = None if len(heads) == LAYOUT.head_shares else heads
    slices = [Slice(*cell, data, LAYOUT.block_size, value, part) for cell, value in zip(cells, hashes, strict=True)]
    [(header, _)] = pack_frames(7, 2, slices, LAYOUT, FRAME_BYTES)
    return header, own


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize(("layers", "heads"), [(range(3), range(2)), (range(1, 3), range(1, 2)), (range(1), range(2))])
def test_a_header_is_that_of_the_packed_slices(layers: range, heads: range, blocks: int) -> None:
    header, own = packed(layers, blocks, heads)
    shape = frame_shape(layers, blocks, heads, LAYOUT.block_size)
    assert shape.cells == [(layer, block) for layer in layers for block in range(blocks)]
    hashes = bind_all(own, shape.bindings(KEYS[:blocks]))
    assert shape.header(7, 2, hashes) == header
    assert bind_all(hashes, shape.bindings(KEYS[:blocks])) == own
    assert shape_of(header, layers, blocks, heads, LAYOUT.block_size) is shape


def test_a_header_of_anything_else_has_no_shape() -> None:
    layers, heads, tokens = range(3), range(2), LAYOUT.block_size
    header, _ = packed(layers, 2, heads)
    assert shape_of(header, layers, 3, heads, tokens) is None
    assert shape_of(header, range(2), 3, heads, tokens) is None  # as many slices
    assert shape_of(header, layers, 2, range(1), tokens) is None
    for name in ("transfer", "generation", "checksum"):
        changed = kv_pb2.FrameHeader()
        changed.CopyFrom(header)
        setattr(changed, name, getattr(header, name) + 1)
        assert shape_of(changed, layers, 2, heads, tokens) is None
    header.runs[1].layer, header.runs[2].layer = 2, 1  # all of it, in another order
    header.checksum = checksum(header)
    assert shape_of(header, layers, 2, heads, tokens) is None
    many = kv_pb2.FrameHeader(slice_hashes=[0] * (MAX_FRAME_SLICES + 1))
    assert shape_of(many, range(1), MAX_FRAME_SLICES + 1, heads, tokens) is None
