"""The shared pool: geometry, sharing through a descriptor, closing, refusing."""

from __future__ import annotations

import os

import pytest

from moonpool.errors import ConfigError
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import KVPool, PoolPart, available_bytes

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=16, dtype="float32")


def test_parts_and_slices() -> None:
    pool = KVPool.create(LAYOUT, 5, [(0, 2), (2, 3)])
    assert [(part.layer_begin, part.layer_end, part.nbytes) for part in pool.parts] == [
        (0, 2, 2 * 5 * LAYOUT.slice_bytes),
        (2, 3, 5 * LAYOUT.slice_bytes),
    ]
    assert pool.nbytes == 5 * LAYOUT.block_bytes
    for layer in range(3):
        for block in range(5):
            view = pool.slice(layer, block)
            assert view.nbytes == LAYOUT.slice_bytes
            assert bytes(view) == bytes(LAYOUT.slice_bytes)
            view[:] = bytes([layer * 5 + block + 1]) * LAYOUT.slice_bytes
    raw = bytes(pool.parts[0].view)
    assert [raw[i * LAYOUT.slice_bytes] for i in range(10)] == list(range(1, 11))
    assert pool.slice(2, 0)[0] == 11
    del view
    pool.close()
    pool.close()


def test_attached_part_shares_the_memory() -> None:
    pool = KVPool.create(LAYOUT, 2, [(0, 1), (1, 3)])
    part = PoolPart.attach(os.dup(pool.parts[1].fd), LAYOUT, 2, 1, 3)
    pool.slice(2, 1)[:4] = b"abcd"
    assert bytes(part.slice(2, 1)[:4]) == b"abcd"
    part.slice(1, 0)[:2] = b"xy"
    assert bytes(pool.slice(1, 0)[:2]) == b"xy"
    part.close()
    pool.close()


def test_attach_refuses_other_geometry() -> None:
    pool = KVPool.create(LAYOUT, 2, [(0, 3)])
    fd = os.dup(pool.parts[0].fd)
    with pytest.raises(ConfigError, match="need"):
        PoolPart.attach(fd, LAYOUT, 3, 0, 3)
    os.close(fd)
    pool.close()


def test_close_with_a_slice_in_hand_keeps_its_memory() -> None:
    pool = KVPool.create(LAYOUT, 1, [(0, 3)])
    view = pool.slice(0, 0)
    pool.close()
    view[0] = 7
    assert view[0] == 7


def test_without_memfd_a_temporary_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pool = KVPool.create(LAYOUT, 1, [(0, 3)])
    pool.slice(1, 0)[:1] = b"z"
    assert pool.slice(1, 0)[0] == ord("z")
    pool.close()


def test_refuses_too_little_memory() -> None:
    with pytest.raises(ConfigError) as caught:
        KVPool.create(LAYOUT, KVPool.blocks_for_bytes(LAYOUT, LAYOUT.block_bytes - 1), [(0, 3)])
    assert caught.value.field == "kv_bytes"
    with pytest.raises(ConfigError, match="only"):
        KVPool.create(LAYOUT, 2, [(0, 3)], lambda: LAYOUT.block_bytes)
    KVPool.create(LAYOUT, 1, [(0, 3)], lambda: LAYOUT.block_bytes).close()


@pytest.mark.parametrize("ranges", [[], [(0, 2)], [(0, 2), (1, 3)], [(0, 0), (0, 3)], [(0, 4)]])
def test_refuses_ranges_that_are_not_the_layers(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError) as caught:
        KVPool.create(LAYOUT, 1, ranges)
    assert caught.value.field == "stages"


def test_available_memory_is_told_here() -> None:
    available = available_bytes()
    assert available is None or available > 0
