"""Shared memory: what may be mapped, which bytes are meant, and the account of a mailbox."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import threading
from collections import deque
from pathlib import Path

import pytest

from moonpool.base.errors import FrameError
from moonpool.base.transport.regions import (
    ExportedRegions,
    Mailbox,
    MailboxRing,
    MappedRegion,
    unmap_regions,
)
from moonpool.base.transport.shared_memory import map_regions
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.pairs import LAYOUT, pool_of, shared

SEED = 7


def memory(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_shared_pool_is_written_to_by_those_who_have_it_and_nobody_else() -> None:
    pool = pool_of()
    [(fd, data)] = pool.shared()
    assert pool.shared() == [(fd, data)]
    pool.slice(0, 0)[:4] = b"here"
    own = MappedRegion(fd, os.fstat(fd).st_size)
    assert bytes(own.part(0, 4)) == b"here"
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # as any process of this user can
    for each in (fd, again):
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(each, os.fstat(fd).st_size)
        for size in (16, 1 << 30):
            with pytest.raises(OSError, match="not permitted"):
                os.truncate(each, size)
    os.close(again)
    own.close()
    own.close()
    pool.close()


def test_where_no_thread_begins_a_region_is_unmapped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fd = memory(4096)
    region = MappedRegion(fd, 4096)
    os.close(fd)
    monkeypatch.setattr(threading.Thread, "start", start)
    unmap_regions([region])
    with pytest.raises(ValueError, match="released"):
        region.part(0, 1)


def test_a_pool_without_seals_is_not_shared(tmp_path: Path) -> None:
    pool = pool_of()
    with (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), pool.parts[0].fd)
    assert pool.shared() == []
    pool.close()


@pytest.mark.parametrize(("told", "seals"), [(8192, fcntl.F_SEAL_SHRINK), (0, fcntl.F_SEAL_SHRINK), (4096, 0)])
def test_what_may_become_shorter_or_is_not_what_was_told_is_not_mapped(told: int, seals: int) -> None:
    fd = memory(4096, seals)
    with pytest.raises(FrameError, match="region"):
        MappedRegion(fd, told)
    os.close(fd)


def test_regions_are_mapped_as_they_were_told() -> None:
    fds = [memory(4096), memory(8192)]
    told = [kv_pb2.Region(bytes=4096), kv_pb2.Region(bytes=8192, lent=True)]
    readable, lent = map_regions(fds, told)
    assert ([(number, each.nbytes) for number, each in readable.items()], lent and lent[0]) == ([(1, 4096)], 2)
    assert lent is not None
    lent[1].part(8190, 2)[:] = b"ab"
    with pytest.raises(TypeError, match="read-only"):
        readable[1].part(0, 1)[:] = b"a"
    for some in (told[:1], [told[1], told[1]]):
        with pytest.raises(FrameError, match="descriptors"):
            map_regions(fds, some)
    for fd in fds:
        os.close(fd)


def test_bytes_are_found_in_the_region_in_which_they_lie() -> None:
    first, second = pool_of(), pool_of()
    own = ExportedRegions([*shared(first)(), *shared(second)()])
    size = LAYOUT.slice_bytes(0)
    assert own.find(first.slice(0, 0)) == (1, 0)
    assert own.find(second.slice(1, 2)) == (2, (4 + 2) * size)
    assert own.find(second.slice(1, 3)[4:8]) == (2, (4 + 3) * size + 4)
    for other in (memoryview(bytearray(4)), memoryview(b"bytes"), memoryview(bytearray())):
        assert own.find(other) == (0, 0)
    first.close()
    second.close()


def test_a_mailbox_is_read_here_and_keeps_its_size() -> None:
    box = Mailbox(4096)
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(box.fd, 1)
    there = MappedRegion(box.fd, 4096, writable=True)
    there.part(1, 3)[:] = b"abc"
    assert bytes(box.region.part(0, 5)) == b"\0abc\0"
    with pytest.raises(FrameError, match="of a region"):
        there.part(4095, 2)
    box.close()
    box.region.close()
    there.part(1, 3)[:] = b"xyz"  # a peer that goes on writing when the connection has ended harms nobody
    assert Mailbox(4096).region.part(1, 3) == bytes(3)


def test_pieces_of_a_ring_never_overlap() -> None:
    print("seed", SEED)
    choose, ring, size = random.Random(SEED), MailboxRing(1000), 1000
    taken: deque[tuple[int, int]] = deque()
    refused = 0
    for _ in range(20_000):
        nbytes = choose.randint(1, 400)
        begin = ring.take(nbytes) if choose.random() < 0.6 else None
        if begin is not None:
            assert 0 <= begin <= begin + nbytes <= size
            assert all(begin + nbytes <= at or at + length <= begin for at, length in taken)
            taken.append((begin, nbytes))
        elif taken:
            refused += 1
            ring.free()
            taken.popleft()
    assert refused
    while taken:
        ring.free()
        taken.popleft()
    assert ring.take(size) == 0
    assert ring.take(1) is None
