"""Cores are lent by a page that all engines of a host map."""

import contextlib
import math
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.steps import MAX_WAIT_STEPS, SAVED, SAVED_S, longest_wait_s
from moonpool.engine.cpu_sharing import POLL_S, SLOT, SLOTS, CpuSlot, StepTurns, cpu_set_id, process_epoch
from moonpool.engine.kernels.native import library

MOST = len(os.sched_getaffinity(0))
SAME = cpu_set_id([*os.sched_getaffinity(0)])
PARENT = process_epoch(os.getppid())
OTHERS = cpu_set_id([*os.sched_getaffinity(0), 10_000])
BUSY_NS = 100_000_000
"""So long after its last region began a process counts as computing: what docs/adr/0015-cores.md states."""
COMPUTES = """
import sys
from pathlib import Path
import torch
from moonpool.engine.kernels.native import library
from moonpool.engine.cpu_sharing import SLOTS, CpuSlot
native = library.get()
cores = CpuSlot.claim(Path(sys.argv[1]), 1)
native.lend(cores.address, SLOTS, cores.own)
numbers = -torch.rand(int(sys.argv[2]), 4096)
print(native.threads_used(len(numbers)), flush=True)
while True:
    native.exponentials(numbers, 20_000)
"""
"""Has one region after the other, of some 50 ms, on as many threads as it is told; says how many come to one."""


def put(page: mmap.mmap, slot: int, owner: int, share: int, cores: int, beat_ns: int = 0) -> None:
    SLOT.pack_into(page, slot * SLOT.size, owner, share, cores, beat_ns)


def beat_of(ours: CpuSlot, slot: int) -> int:
    """When a process last began a region."""
    beat_ns: int = SLOT.unpack_from(ours.page, slot * SLOT.size)[3]
    return beat_ns


def ended() -> int:
    """The life of a process that is no more."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        life = process_epoch(process.pid)
        process.kill()
    assert life > 0
    assert process_epoch(process.pid) == 0
    return life


@contextlib.contextmanager
def lending(folder: Path) -> Iterator[tuple[CpuSlot, library.Library]]:
    """A page, by which the kernels of this process lend cores."""
    native = library.get()
    if native is None:
        pytest.skip(f"native kernels cannot be had: {library.failure()}")
    ours = CpuSlot.claim(folder / "page", 1)
    native.lend(ours.address, SLOTS, ours.own)
    try:
        yield ours, native
    finally:
        native.lend(0, 0, 0)


def test_each_process_takes_the_first_slot_that_is_free(tmp_path: Path) -> None:
    first_slot = CpuSlot.claim(tmp_path / "page", 3)
    assert SLOT.unpack_from(first_slot.page, 0) == (process_epoch(os.getpid()), 3, SAME, 0)
    put(first_slot.page, 1, PARENT, 1, SAME)
    put(first_slot.page, 2, ended(), 1, SAME)
    put(first_slot.page, 3, process_epoch(os.getpid()) + (1 << 30), 1, SAME)  # its number is another process's now
    assert [CpuSlot.claim(tmp_path / "page", 1).own for _ in range(2)] == [2, 3]


def test_a_page_that_cannot_be_had_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page")
    with pytest.raises(ConfigError, match="core_page"):
        CpuSlot.claim(tmp_path / "link", 1)
    with pytest.raises(ConfigError, match="core_page"):
        CpuSlot.claim(tmp_path / "no" / "page", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT.size, before[1]))
    try:  # as on a full /dev/shm: told here, and not by a signal where the page is written to
        with pytest.raises(ConfigError, match=r"core_page: .*File too large"):
            CpuSlot.claim(tmp_path / "page", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    page = CpuSlot.claim(tmp_path / "page", 1).page
    for slot in range(SLOTS):
        put(page, slot, PARENT, 1, SAME)
    with pytest.raises(ConfigError, match="all of its 64 slots are taken"):
        CpuSlot.claim(tmp_path / "page", 1)


def test_others_cannot_write_to_the_page(tmp_path: Path) -> None:
    (tmp_path / "page").touch()
    (tmp_path / "page").chmod(0o666)
    with pytest.raises(ConfigError, match="others cannot write"):
        CpuSlot.claim(tmp_path / "page", 1)


def test_torch_has_its_share_among_all_that_are_alive(tmp_path: Path) -> None:
    cores = CpuSlot.claim(tmp_path / "page", 1)
    assert cores.fixed_split() == MOST
    put(cores.page, 1, PARENT, 1, SAME)
    put(cores.page, 2, ended(), 100, SAME)
    put(cores.page, 3, PARENT, 100, OTHERS)
    assert cores.fixed_split() == max(1, MOST // 2)


@pytest.mark.skipif(MOST < 2, reason="one core cannot be lent")
@pytest.mark.parametrize(
    ("share", "cores", "later_s", "threads"),
    [
        (1, SAME, 3600.0, max(1, MOST // 2)),
        (1000, SAME, 3600.0, 1),
        (1, SAME, -3600.0, MOST),  # it has died, or waits
        (1, OTHERS, 3600.0, MOST),
    ],
)
def test_kernels_have_their_share_among_those_that_compute(
    tmp_path: Path, share: int, cores: int, later_s: float, threads: int
) -> None:
    with lending(tmp_path) as (ours, native):
        assert native.threads_used(MOST) == MOST
        put(ours.page, 1, PARENT, share, cores, time.monotonic_ns() + int(later_s * 1e9))
        native.had()
        with ours.computing():
            assert native.threads_used(MOST) == threads
            assert SLOT.unpack_from(ours.page, 0)[3] > 0
        assert native.had() == threads / MOST
        assert native.had() == 1.0  # nothing was computed since
        assert SLOT.unpack_from(ours.page, 0)[3] == 0


@pytest.mark.parametrize(
    ("slot", "cores", "later_s", "computes"),
    [(1, SAME, 3600.0, True), (0, SAME, 3600.0, False), (1, OTHERS, 3600.0, False), (1, SAME, -3600.0, False)],
)
def test_who_else_computes(tmp_path: Path, slot: int, cores: int, later_s: float, computes: bool) -> None:
    with lending(tmp_path) as (ours, native):
        assert not native.others_compute()
        put(ours.page, slot, PARENT, 1, cores, time.monotonic_ns() + int(later_s * 1e9))
        assert native.others_compute() == computes
    assert not native.others_compute()  # nothing is lent any more


@pytest.mark.skipif(MOST < 2, reason="one core cannot be lent")
def test_who_is_killed_in_a_region_with_all_cores_frees_them_in_time(tmp_path: Path) -> None:
    """Until then its share is kept from others, exactly; afterwards its slot is another's."""
    with lending(tmp_path) as (ours, native):
        command = [sys.executable, "-c", COMPUTES, str(tmp_path / "page"), str(MOST)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == f"{MOST}\n", "all cores are lent to it"
            deadline, first = time.monotonic() + 60, beat_of(ours, 1)
            while beat_of(ours, 1) == first:
                assert time.monotonic() < deadline, "it does not compute"
            other.kill()  # a region has just begun
            free = False
            while not free:
                free_ns, before = beat_of(ours, 1) + BUSY_NS, time.monotonic_ns()
                computes = native.others_compute()
                with ours.computing():
                    threads = native.threads_used(MOST)
                if time.monotonic_ns() < free_ns:
                    assert (computes, threads) == (True, MOST // 2)
                free = before >= free_ns
            assert (computes, threads) == (False, MOST)
        assert CpuSlot.claim(tmp_path / "page", 1).own == 1


def wanted() -> bool:
    """Of a step that was not aborted."""
    return False


def test_patient_steps_give_way_to_others_but_not_for_long() -> None:
    now, busy_until = 100.0, 1000.0

    def nap(seconds: float) -> None:
        nonlocal now
        now += seconds

    def waited() -> float:
        arrived = now
        turns.give_way(wanted)
        return now - arrived

    turns = StepTurns(lambda: now < busy_until, lambda: 0.5, lambda: now, nap)
    assert waited() == 0.0, "it is not known yet how long a step takes"
    now += 0.01
    assert turns.cpu_share() == 0.5
    assert MAX_WAIT_STEPS * 0.01 <= waited() < MAX_WAIT_STEPS * 0.01 + 2 * POLL_S
    now += 0.03
    assert turns.cpu_share(3) == 0.5
    assert MAX_WAIT_STEPS * 0.03 <= waited() < MAX_WAIT_STEPS * 0.03 + 2 * POLL_S, (
        "what it waited before is not what it took"
    )
    now += 0.01
    assert [turns.cpu_share(), turns.cpu_share()] == [0.5, 0.5]  # the second is that of a step that is not patient
    busy_until = now + 2 * POLL_S
    assert waited() == pytest.approx(2 * POLL_S, abs=POLL_S)


def test_what_patient_steps_did_not_wait_the_next_ones_may_but_not_all_of_it() -> None:
    now, busy_until = 100.0, 0.0

    def nap(seconds: float) -> None:
        nonlocal now
        now += seconds

    def waited() -> float:
        nonlocal now
        arrived = now
        turns.give_way(wanted)
        began, now = now, now + 0.01
        turns.cpu_share()
        return began - arrived

    turns = StepTurns(lambda: now < busy_until, lambda: 1.0, lambda: now, nap)
    assert {waited() for _ in range(2 * SAVED)} == {0.0}
    busy_until = now + 100 * POLL_S
    waits = [waited()]
    busy_until = 1000.0
    waits += [waited() for _ in range(3)]
    wanted_s = (
        100 * POLL_S,
        MAX_WAIT_STEPS * 0.01 * (SAVED + 1) - 100 * POLL_S,
        MAX_WAIT_STEPS * 0.01,
        MAX_WAIT_STEPS * 0.01,
    )
    assert waits == pytest.approx(wanted_s, abs=2 * POLL_S)


def test_who_takes_long_waits_no_longer_than_its_own_patience() -> None:
    assert longest_wait_s(0.01) == pytest.approx(MAX_WAIT_STEPS * SAVED * 0.01)
    assert longest_wait_s(0.1) == pytest.approx(SAVED_S)
    assert longest_wait_s(2.0) == pytest.approx(MAX_WAIT_STEPS * 2.0)


def test_a_step_that_is_aborted_waits_no_longer_and_teaches_nothing() -> None:
    now, aborted_at = 100.0, math.inf

    def nap(seconds: float) -> None:
        nonlocal now
        now += seconds

    turns = StepTurns(lambda: True, lambda: 1.0, lambda: now, nap)
    turns.give_way(wanted)
    now += 0.01
    turns.cpu_share()
    aborted_at = now + 2 * POLL_S
    turns.give_way(lambda: now >= aborted_at)
    assert now == pytest.approx(aborted_at, abs=POLL_S)
    turns.cpu_share()
    arrived = now
    turns.give_way(wanted)
    assert now - arrived >= MAX_WAIT_STEPS * 0.01 - 3 * POLL_S, "the aborted one is not taken for a quick one"
