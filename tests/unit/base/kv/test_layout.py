"""Sizes, differences and zeroing of the KV layout."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.base.errors import ConfigError, Mismatch
from moonpool.base.kv.layout import QUANTISED, KVLayout
from moonpool.v1 import kv_pb2
from tests.layouts import uniform_like

LAYOUT = KVLayout.uniform(layers=3, kv_heads=2, head_dim=4, block_size=16, dtype="bfloat16")


def test_sizes() -> None:
    assert LAYOUT.groups[0].element_bytes == 2
    assert LAYOUT.share_bytes(0) == 2 * 16 * 4 * 2 == 256
    assert [LAYOUT.slice_bytes(layer) for layer in range(3)] == [512] * 3
    assert LAYOUT.block_bytes == 1536
    assert LAYOUT.token_bytes == 96


@pytest.mark.parametrize("dtype", QUANTISED.values())
def test_quantised_sizes(dtype: str) -> None:
    """A byte per number, and a scale of four for each token of each head's keys and values."""
    layout = uniform_like(LAYOUT, dtype=dtype)
    (group,) = layout.groups
    assert (group.value_bytes(16), group.scale_bytes(16)) == (2 * 2 * 16 * 4, 2 * 2 * 16 * 4)
    assert (layout.slice_bytes(2), layout.block_bytes, layout.token_bytes) == (512, 1536, 96)
    large = KVLayout.uniform(layers=24, kv_heads=2, head_dim=64, block_size=64, dtype=dtype)
    plain = uniform_like(large, dtype="bfloat16")
    assert large.slice_bytes(0) * 128 == plain.slice_bytes(0) * 68


def test_blocks_and_valid_tokens() -> None:
    assert [LAYOUT.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [LAYOUT.valid_tokens(17, block) for block in range(3)] == [16, 1, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("kv_heads", -1),
        ("kv_heads", 1025),
        ("kv_heads", 1 << 20),
        ("layers", 4097),
        ("head_dim", 1 << 13),
        ("block_size", 1 << 13),
        ("head_dim", 0),
        ("block_size", 24),
        ("block_size", 0),
        ("dtype", "int4"),
    ],
)
def test_refuses_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        uniform_like(LAYOUT, **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("head_dim", {"head_dim": 4096, "block_size": 512}),  # a head that does not fit a message
        ("kv_heads", {"kv_heads": 1024, "head_dim": 1024, "block_size": 64}),
        ("layers", {"layers": 4096, "kv_heads": 256, "head_dim": 1024}),
        ("layers", {"layers": 33, "kv_heads": 256, "head_dim": 1024}),  # more than is hashed at once
    ],
)
def test_what_cannot_travel_or_is_larger_than_any_model_is_refused(field: str, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bytes") as caught:
        uniform_like(LAYOUT, **shape)
    assert caught.value.field == field


def test_proto_round_trip_and_refusal() -> None:
    quantised = uniform_like(LAYOUT, dtype="int8")
    for layout in (LAYOUT, quantised):
        assert KVLayout.from_proto(layout.to_proto()) == layout
    with pytest.raises(Mismatch) as caught:
        KVLayout.from_proto(kv_pb2.KVLayout(layers=1, kv_heads=1, head_dim=4, block_size=16, version=1))
    assert caught.value.field == "layout.dtype"
    other = quantised.to_proto()
    other.groups[0].scale_bytes = 16  # one scale per block, say
    with pytest.raises(Mismatch) as caught:
        KVLayout.from_proto(other)
    assert caught.value.field == "layout.groups"


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 4), ("kv_heads", 1), ("head_dim", 8), ("block_size", 32), ("dtype", "float16")],
)
def test_difference_names_every_field(field: str, value: object) -> None:
    other = uniform_like(LAYOUT, **{field: value})
    found = LAYOUT.difference(other)
    assert found is not None
    assert (found.field, found.there) == (field, value)
    assert LAYOUT.difference(LAYOUT) is None


@pytest.mark.parametrize("valid_tokens", [0, 1, 15, 16])
def test_zero_invalid_clears_exactly_the_other_slots(valid_tokens: int) -> None:
    def runs(*slots: int) -> bytes:
        return b"".join(b"\xff" * slot * valid_tokens + b"\0" * slot * (16 - valid_tokens) for slot in slots) * 2 * 2

    for dtype, expected in (("bfloat16", runs(4 * 2)), ("int8", runs(4 * 1, 4))):
        layout = uniform_like(LAYOUT, dtype=dtype)
        data = bytearray(b"\xff" * layout.slice_bytes(0))
        layout.zero_invalid(0, memoryview(data), valid_tokens)
        assert bytes(data) == expected
