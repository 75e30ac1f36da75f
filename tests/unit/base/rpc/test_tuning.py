"""Settings of a process."""

import asyncio
import dataclasses
import gc
import itertools
import resource
import subprocess
import sys
import weakref

import pytest

from moonpool.base import world
from moonpool.base.malloc import KEPT_BYTES, LITTLE_BYTES, REST_S, FreedMemory
from moonpool.base.rpc import tuning
from moonpool.base.rpc.tuning import raise_open_files_limit


def test_the_process_may_have_as_many_open_files_as_the_system_permits() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


LOAD = """
import ctypes
from moonpool.base.malloc import release_memory
from moonpool.base.rpc.tuning import tune_malloc
from moonpool.base.world import MachineUse
print(tune_malloc() and hasattr(ctypes.CDLL(None), "malloc_trim"))
held = [bytes(100_000) for _ in range(2000)]
del held
print(int(MachineUse().resident_bytes()))
release_memory()
print(int(MachineUse().resident_bytes()))
"""


def test_freed_memory_is_kept_until_it_is_handed_back() -> None:
    """What a load of large bodies leaves, in a process of its own."""
    told = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout.split()
    if told[0] == "False":
        pytest.skip("the C library is not glibc")
    kept, after = map(int, told[1:])
    assert kept - after > 100 << 20


COLLECTED = """
import gc
from moonpool.base.rpc.tuning import tune_gc
tune_gc()
looked = []
def look(phase, info):
    if phase == "start" and info["generation"] < 2:
        looked.append(sum(len(gc.get_objects(generation=at)) for at in range(1 + info["generation"])))
gc.callbacks.append(look)
tree = [[number] for number in range(600_000)]
gc.callbacks.clear()
print(len(looked), max(looked))
"""


def test_the_collector_looks_at_few_objects_at_once() -> None:
    """Each look holds the interpreter lock: a large answer's text is made of a million objects."""
    told = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) > 20
    assert int(told[1]) < 20_000


def test_threads_give_way_to_the_loop_soon() -> None:
    before = sys.getswitchinterval()
    try:
        tuning.tune_threads()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)


def test_memory_is_handed_back_at_rest_and_after_a_load_only() -> None:
    rest, load = 100 << 20, (100 << 20) + KEPT_BYTES + 1
    freed = FreedMemory(0.0, rest)
    assert not freed.is_due(0.1, rest + KEPT_BYTES)  # little is kept
    assert not freed.is_due(REST_S, load)  # busy
    assert freed.is_due(REST_S + 0.1, load)
    freed.handed_back(rest)
    assert not freed.is_due(REST_S + 0.2, rest + KEPT_BYTES)
    assert not freed.is_due(REST_S + 0.3, rest - 1)  # a lower rest is remembered
    assert freed.is_due(REST_S + 0.4, load - 1)


def test_memory_in_use_is_handed_back_once_it_is_freed() -> None:
    """A process without processors looks as if at rest: what is handed back then is not all."""
    rest, load = 100 << 20, 500 << 20
    freed = FreedMemory(0.0, rest)
    assert freed.is_due(0.1, load)
    held = load - 2 * LITTLE_BYTES
    freed.handed_back(held)
    assert freed.is_due(0.2, held), "something came back, so more may come"
    freed.handed_back(held - 1)
    assert not freed.is_due(0.3, held), "in vain: all is in use"
    assert not freed.is_due(0.4, held)
    assert not freed.is_due(0.4 + REST_S, held), "busy"
    assert freed.is_due(0.5 + REST_S, held), "the process has worked"
    freed.handed_back(held)
    assert freed.is_due(0.6 + REST_S, load), "more is held"
    freed.handed_back(rest + KEPT_BYTES)
    assert not freed.is_due(0.7 + REST_S, rest + KEPT_BYTES)


def test_little_that_came_back_is_as_good_as_nothing() -> None:
    """Less than `LITTLE_BYTES`, and so long as not that much more is held."""
    load = 500 << 20
    for came_back, more, due in (
        (LITTLE_BYTES - 1, 0, False),
        (LITTLE_BYTES, 0, True),
        (0, LITTLE_BYTES - 1, False),
        (0, LITTLE_BYTES, True),
    ):
        freed = FreedMemory(0.0, 100 << 20)
        assert freed.is_due(0.1, load)
        freed.handed_back(load - came_back)
        assert freed.is_due(0.2, load - came_back + more) is due


class Cycle:
    """Refers to itself, as an error that its own frame holds."""

    def __init__(self) -> None:
        self.own = self


async def test_cycles_are_freed_before_memory_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector looks seldom, and refused requests leave cycles with all their texts."""
    freed, sizes = asyncio.Event(), itertools.chain([0.0], itertools.repeat(2.0 * KEPT_BYTES))
    usage = world.MachineUse(resident_bytes=lambda: next(sizes), processor_s=lambda: 0.0)
    monkeypatch.setattr(tuning, "REST_S", 0.001)
    gc.disable()
    token = world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), usage=usage))
    try:
        kept = weakref.ref(Cycle(), lambda _: freed.set())
        assert kept() is not None
        resting = asyncio.create_task(tuning.hand_freed_memory_back())
        await asyncio.wait_for(freed.wait(), 30.0)
        resting.cancel()
        await asyncio.gather(resting, return_exceptions=True)
    finally:
        world.CURRENT.reset(token)
        gc.enable()
