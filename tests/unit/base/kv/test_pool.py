"""The shared pool: geometry, sharing through a descriptor, closing, refusing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.memory import available_bytes
from moonpool.base.kv.pool import KVPool, PoolPart, PoolTarget

LAYOUT = KVLayout.uniform(layers=3, kv_heads=2, head_dim=4, block_size=16, dtype="float32")


def test_parts_and_slices() -> None:
    pool = KVPool.create(LAYOUT, 5, [(0, 2), (2, 3)])
    assert [(part.layer_begin, part.layer_end, part.nbytes) for part in pool.parts] == [
        (0, 2, 2 * 5 * LAYOUT.slice_bytes(0)),
        (2, 3, 5 * LAYOUT.slice_bytes(0)),
    ]
    assert pool.nbytes == 5 * LAYOUT.block_bytes
    for layer in range(3):
        for block in range(5):
            view = pool.slice(layer, block)
            assert view.nbytes == LAYOUT.slice_bytes(0)
            assert bytes(view) == bytes(LAYOUT.slice_bytes(0))
            view[:] = bytes([layer * 5 + block + 1]) * LAYOUT.slice_bytes(0)
    raw = bytes(pool.parts[0].view)
    assert [raw[i * LAYOUT.slice_bytes(0)] for i in range(10)] == list(range(1, 11))
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


def test_slices_are_taken_where_they_landed_or_from_other_memory() -> None:
    pool = KVPool.create(LAYOUT, 4, [(0, 3)])
    target = PoolTarget(pool, [3, 1])
    landed = target.into(2, 0)
    assert landed is not None
    landed[:] = b"l" * LAYOUT.slice_bytes(0)
    target.into(0, 1)
    other = memoryview(b"o" * LAYOUT.slice_bytes(0))
    target.take(2, 0, landed, 7)
    target.take(0, 1, other, 8)
    target.take(1, 1, other, 9)
    found = [pool.read(*cell) for cell in ((2, 3), (0, 1), (1, 1))]
    assert [(bytes(data[:1]), value) for data, value in found] == [(b"l", 7), (b"o", 8), (b"o", 9)]
    del found, landed
    pool.close()


def test_a_populated_pool_has_all_its_memory_and_what_was_in_it() -> None:
    layout = KVLayout.uniform(layers=2, kv_heads=4, head_dim=32, block_size=16, dtype="float16")
    with contextlib.closing(KVPool.create(layout, 64, [(0, 2)])) as pool:
        [part] = pool.parts
        pool.slice(1, 5)[:3] = b"abc"
        taken = os.fstat(part.fd).st_blocks
        part.populate()
        assert os.fstat(part.fd).st_blocks * 512 >= part.nbytes > taken * 512
        assert bytes(pool.slice(1, 5)[:4]) == b"abc\0"


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
        KVPool.create(LAYOUT, 0, [(0, 3)])
    assert caught.value.field == "kv_cache_memory_bytes"
    with pytest.raises(ConfigError, match="only"):
        KVPool.create(LAYOUT, 2, [(0, 3)], lambda: LAYOUT.block_bytes)
    KVPool.create(LAYOUT, 1, [(0, 3)], lambda: LAYOUT.block_bytes).close()


@pytest.mark.parametrize("ranges", [[], [(0, 2)], [(0, 2), (1, 3)], [(0, 0), (0, 3)], [(0, 4)]])
def test_refuses_ranges_that_are_not_the_layers(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError) as caught:
        KVPool.create(LAYOUT, 1, ranges)
    assert caught.value.field == "pipeline_parallel_size"


def test_available_memory_is_told_here() -> None:
    available = available_bytes()
    assert available is None or available > 0


def test_pages_of_files_are_free_memory_of_a_control_group(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    files = {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB\n",
        "sys/fs/cgroup/memory.max": f"{500 << 10}\n",
        "sys/fs/cgroup/memory.current": f"{490 << 10}\n",
        "sys/fs/cgroup/memory.stat": f"anon 9\nactive_file {100 << 10}\ninactive_file {200 << 10}\nshmem 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == 310 << 10
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 800 << 10


def test_hashes_lie_beside_the_slices_and_are_shared() -> None:
    layout = KVLayout.uniform(layers=3, kv_heads=1, head_dim=1, block_size=16, dtype="float16")  # 64 bytes a slice
    with contextlib.closing(KVPool.create(layout, 5, [(0, 1), (1, 3)])) as pool:
        data = bytes(range(64))
        pool.write(2, 4, memoryview(data), 77)
        assert (bytes(pool.read(2, 4)[0]), pool.read(2, 4)[1]) == (data, 77)
        pool.seal(2, 4, 16)
        pool.seal(2, 3, 16)
        assert pool.read(2, 4)[1] == slice_hash(data)
        assert pool.read(2, 3)[1] == slice_hash(bytes(64))
        assert pool.read(1, 4)[1] == 0
        part = pool.parts[1]
        other = PoolPart.attach(os.dup(part.fd), layout, 5, 1, 3)
        assert other.hash_of(2, 4) == slice_hash(data)
        other.close()


def test_the_hash_of_a_part_filled_block_is_that_of_its_valid_tokens() -> None:
    layout = KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="float16")
    with contextlib.closing(KVPool.create(layout, 1, [(0, 1)])) as pool:
        pool.slice(0, 0)[:] = bytes(range(64))
        pool.seal(0, 0, 3)
        cleaned = bytearray(range(64))
        layout.zero_invalid(0, memoryview(cleaned), 3)
        assert (bytes(pool.read(0, 0)[0]), pool.read(0, 0)[1]) == (bytes(range(64)), slice_hash(cleaned))
