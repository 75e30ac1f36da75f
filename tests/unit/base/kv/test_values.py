"""Values of any size as blocks: every byte comes back, whatever the size."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import KEY_BYTES
from moonpool.base.kv.layout import MAX_BLOCK_BYTES
from moonpool.base.kv.values import (
    MAX_KEY_BYTES,
    ValueSource,
    ValueTarget,
    content_key,
    layout_of,
    tenant_tag,
    value_key,
    value_namespace,
)

NAMESPACE = value_namespace("engine/model/v1")
EDGES = [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 121, 128, 200, 256, 320, 1000, 65536, 131072, 131073, 200_000, 1 << 20]


def bytes_of(nbytes: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(min(nbytes, 4096))) * (nbytes // 4096 + 1)


def through(data: bytes, target: ValueTarget, source: ValueSource) -> None:
    for layer in reversed(range(source.layout.layers)):
        piece = source.slice(layer)
        assert piece.nbytes == source.layout.slice_bytes(0)
        target.take(layer, piece)


@pytest.mark.parametrize("nbytes", EDGES)
def test_a_value_comes_back_whole(nbytes: int) -> None:
    data = bytes_of(nbytes)[:nbytes]
    source = ValueSource(memoryview(data))
    target = ValueTarget(source.layout)
    through(data, target, source)
    assert (target.length(), target.value()) == (nbytes, bytearray(data))


def test_memory_is_taken_with_the_first_slice() -> None:
    source = ValueSource(memoryview(bytes(1 << 20)))
    tracemalloc.start()
    try:
        targets = [ValueTarget(source.layout) for _ in range(4)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        targets[0].take(0, source.slice(0))
        assert tracemalloc.get_traced_memory()[0] >= 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nbytes", EDGES)
def test_a_value_comes_into_memory_of_its_size_and_no_further(nbytes: int) -> None:
    data, memory = bytes_of(nbytes)[:nbytes], bytearray(b"\xee" * (nbytes + 3))
    source = ValueSource(memoryview(data))
    target = ValueTarget(source.layout, memoryview(memory)[:nbytes])
    through(data, target, source)
    assert target.length() == nbytes
    assert memory == data + b"\xee" * 3


def test_a_value_is_had_although_something_still_refers_to_its_memory() -> None:
    data = bytes_of(1000)[:1000]
    source = ValueSource(memoryview(data))
    target = ValueTarget(source.layout)
    place = target.place(0)
    assert place is not None
    kept = place[:10]  # as a transport that broke may keep it for a moment
    through(data, target, source)
    assert target.value() == bytearray(data)
    assert kept == data[:10]


@given(st.integers(0, MAX_BLOCK_BYTES - 8))
def test_a_block_is_at_most_a_quarter_larger_than_its_value(nbytes: int) -> None:
    layout = layout_of(nbytes)
    assert nbytes <= layout.block_bytes <= max(128, (nbytes + 8) * 5 // 4 + 64)
    assert layout.slice_bytes(0) <= 128 << 10
    assert layout_of(layout.block_bytes).block_bytes == layout.block_bytes


@pytest.mark.parametrize("nbytes", [64, 4096, 65536, 3 << 20, 7 << 22, MAX_BLOCK_BYTES])
def test_common_sizes_are_their_own_class(nbytes: int) -> None:
    assert layout_of(nbytes).block_bytes == nbytes


@pytest.mark.parametrize("nbytes", [MAX_BLOCK_BYTES - 7, MAX_BLOCK_BYTES + 1])
def test_a_value_that_fits_no_block(nbytes: int) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        layout_of(nbytes)


def test_slices_are_the_values_own_bytes() -> None:
    data = memoryview(bytearray(1 << 20))
    source = ValueSource(data)
    source.slice(3)[:2] = b"ab"
    assert bytes(data[3 * source.layout.slice_bytes(0) :][:2]) == b"ab"


def test_a_block_that_is_no_value() -> None:
    layout = layout_of(100)
    target = ValueTarget(layout)
    target.take(0, memoryview(b"\xff" * layout.slice_bytes(0)))
    assert (target.length(), target.value()) == (None, None)


def test_keys_differ_by_namespace_tenant_and_key_and_end_with_the_tenant() -> None:
    keys = {
        value_key(space, tenant, key)
        for space in (NAMESPACE, value_namespace("other"))
        for tenant in ("", "ann")
        for key in (b"k", b"kk")
    }
    assert len(keys) == 8
    assert all(len(key) == KEY_BYTES for key in keys)
    assert value_key(NAMESPACE, "ann", b"k").endswith(tenant_tag("ann"))
    assert content_key(b"abc") == content_key(bytearray(b"abc")) != content_key(b"abd")


def test_names_never_change() -> None:
    """Else nothing that is stored would be found again."""
    assert NAMESPACE.hex()[:16] == "f9e9135dab4c5c4f"
    assert value_key(NAMESPACE, "ann", b"k").hex()[:16] == "c8c50c235d4ce276"
    assert tenant_tag("").hex() == "54de29095672aeedb7810658a8a33bd2"
    layout = layout_of(1000)
    assert (layout.layers, layout.head_shares, layout.groups[0].head_dim, layout.dtype) == (1, 1, 16, "bfloat16")


@pytest.mark.parametrize("key", [b"", bytes(MAX_KEY_BYTES + 1)])
def test_a_key_has_some_bytes_and_not_too_many(key: bytes) -> None:
    with pytest.raises(InvalidRequest, match="key: must have 1 to 4096 bytes"):
        value_key(NAMESPACE, "", key)
