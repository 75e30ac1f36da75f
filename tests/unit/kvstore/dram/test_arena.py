"""Memory of blocks: reuse, giving back, and that nobody's bytes change while somebody can see them."""

import os
import platform
import random
import re
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kvstore.dram.arena import AHEAD_BYTES, PAGE, RESERVE_SHARE, SMALL_BYTES, Arena, slot_bytes
from tests.examples import examples
from tests.unit.kvstore.invariants import check

MIB = 1 << 20
KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) if sys.platform == "linux" else (0, 0)


def test_sizes_are_rounded_little() -> None:
    assert slot_bytes(1) == 64
    assert slot_bytes(3072) == 3072
    assert slot_bytes(SMALL_BYTES + 1) == SMALL_BYTES + PAGE
    assert all(slot_bytes(n) <= n * 1.0625 for n in range(SMALL_BYTES, MIB, 1013))


def test_memory_is_used_again_and_what_lies_in_it_stays_until_then() -> None:
    arena = Arena(4 * MIB)
    first = arena.allocate(MIB)
    first[:3] = b"abc"
    del first
    assert (arena.free_bytes, arena.live_bytes, arena.resident_bytes) == (MIB, 0, MIB)
    second = arena.allocate(MIB)
    assert bytes(second[:3]) == b"abc"
    assert arena.resident_bytes == MIB
    check(arena)


def test_a_slot_is_not_used_again_while_a_view_of_a_view_lives() -> None:
    arena = Arena(4 * MIB)
    view = arena.allocate(MIB)
    view[:] = b"x" * MIB
    part = view[100:200].toreadonly()[:10]
    del view
    other = arena.allocate(MIB)
    other[:] = b"y" * MIB
    assert bytes(part) == b"x" * 10
    check(arena)
    del part
    assert arena.free_bytes == MIB
    third = arena.allocate(MIB)
    assert bytes(third[:1]) == b"x"
    assert arena.resident_bytes == 2 * MIB


def test_memory_beyond_the_limit_goes_back_when_its_views_end() -> None:
    arena, told = Arena(4 * MIB), list[int]()

    def give_back() -> None:
        told.append(arena.resident_bytes)
        arena.collect()

    views = [arena.allocate(MIB) for _ in range(6)]
    arena.on_excess = give_back
    assert arena.resident_bytes == 6 * MIB
    views.clear()
    assert told == [6 * MIB, 5 * MIB]
    assert arena.resident_bytes == 4 * MIB
    check(arena)


def test_another_size_takes_the_memory_of_free_slots() -> None:
    arena = Arena(8 * MIB)
    blocks = [arena.allocate(MIB) for _ in range(8)]
    del blocks[0:8:2]
    assert (arena.free_bytes, arena.returned_bytes) == (4 * MIB, 0)
    half = [arena.allocate(MIB // 2) for _ in range(8)]
    check(arena)
    assert arena.live_bytes == 8 * MIB
    assert arena.resident_bytes <= 8 * MIB + 8 * MIB // RESERVE_SHARE
    assert arena.returned_bytes == 4 * MIB
    del half
    again = [arena.allocate(MIB) for _ in range(4)]
    check(arena)
    assert all(bytes(block[:1]) == b"\0" for block in again)  # memory that came back anew
    assert arena.resident_bytes <= 8 * MIB + 8 * MIB // RESERVE_SHARE


def test_a_slab_that_nobody_uses_goes_as_a_whole() -> None:
    arena = Arena(4 * MIB)
    blocks = [arena.allocate(MIB) for _ in range(4)]
    mapped = arena.mapped_bytes
    del blocks
    other = [arena.allocate(2 * MIB) for _ in range(2)]
    assert (arena.resident_bytes, arena.mapped_bytes) == (4 * MIB, mapped)
    assert len(other) == 2
    check(arena)


def test_small_slots_share_pages_and_go_together() -> None:
    arena = Arena(MIB)
    small = [arena.allocate(100) for _ in range(5000)]
    for number, view in enumerate(small):
        view[:4] = number.to_bytes(4, "little")
    assert [int.from_bytes(view[:4], "little") for view in small] == list(range(5000))
    check(arena)
    del small, view
    large = [arena.allocate(MIB // 4) for _ in range(4)]
    check(arena)
    assert arena.live_bytes == arena.resident_bytes == MIB
    assert len(large) == 4


def test_a_use_may_end_in_another_thread() -> None:
    arena = Arena(4 * MIB)
    views = [arena.allocate(MIB)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert arena.free_bytes == MIB
    check(arena)


@pytest.mark.skipif(KERNEL < (5, 14), reason="needs MADV_POPULATE_WRITE")
def test_memory_is_there_before_it_is_written() -> None:
    arena, before = Arena(256 * MIB, ahead=True), resident_bytes()
    first = arena.allocate(MIB)
    first[:3] = b"abc"
    arena.close()
    assert bytes(first[:3]) == b"abc"
    assert arena.free_bytes == AHEAD_BYTES, "a bounded part of the budget"
    assert resident_bytes() - before > AHEAD_BYTES
    blocks = [arena.allocate(MIB) for _ in range(AHEAD_BYTES // MIB)]
    assert arena.resident_bytes == MIB * (1 + len(blocks)), "none of them is new"
    check(arena)


def test_no_memory_beyond_the_budget_is_brought_in() -> None:
    arena = Arena(8 * MIB, ahead=True)
    blocks = [arena.allocate(3 * MIB)]
    arena.close()
    assert (arena.free_bytes, arena.resident_bytes) == (3 * MIB, 6 * MIB)
    del blocks
    small = Arena(MIB, ahead=True)
    block = small.allocate(SMALL_BYTES - PAGE)
    small.close()
    assert small.resident_bytes == len(block)


@settings(max_examples=examples(30))
@given(
    st.lists(
        st.tuples(st.sampled_from([64, 3000, 40_000, 65_536, 70_000, 262_144]), st.integers(0, 9)),
        max_size=60,
    ),
    st.booleans(),
)
def test_any_order_of_use(steps: list[tuple[int, int]], ahead: bool) -> None:
    """`size` is allocated, and what lies at `victim` goes; everybody's bytes stay what they were."""
    arena = Arena(MIB, ahead=ahead)
    views: dict[int, tuple[memoryview, int]] = {}
    for number, (size, victim) in enumerate(steps):
        views.pop(victim, None)
        if sum(len(view) for view, _ in views.values()) + size <= MIB:
            view = arena.allocate(size)
            view[:] = bytes([number]) * size
            views[number % 10] = view, number
        if not ahead:  # else slots come back while they are counted
            check(arena)
        assert all(set(bytes(view)) == {mark} for view, mark in views.values())
    arena.close()
    check(arena)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_resident_memory_stays_near_the_budget_through_days_of_churn() -> None:
    """Random sizes whose mix changes, 60 times the budget; every block is written, as blocks are."""
    budget, rng = 192 * MIB, random.Random(7)
    sizes = [64 << 10, 100_000, 256 << 10, 1 << 20, 1_234_567, 4 << 20]
    source = bytes(max(sizes))
    before = resident_bytes()
    arena, used, peak = Arena(budget), 0, 0
    views: list[memoryview] = []
    for phase in range(60):
        mix, written = rng.sample(sizes, rng.randint(1, 3)), 0
        while written < budget:
            size = rng.choice(mix)
            while used + size > budget:
                index = rng.randrange(len(views))
                views[index], views[-1] = views[-1], views[index]
                used -= len(views.pop())
            view = arena.allocate(size)
            view[:] = source[:size]
            views.append(view)
            used, written = used + size, written + size
        del view
        peak = max(peak, resident_bytes() - before)
        check(arena)
        assert peak <= budget * 1.15, (phase, mix)
    print(f"resident at most {peak / budget:.3f} of the budget, {arena.mapped_bytes / budget:.1f} mapped")
