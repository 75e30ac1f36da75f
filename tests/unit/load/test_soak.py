"""When an hour of load has failed."""

import random
from pathlib import Path

import pytest

from moonpool.cli.stack import StackPlan
from tests.load.soak import Known, Soak, Watched, bounds, quarters, store_bound, verdict

MIB = 1 << 20


def soaked(wrong: list[str] | None = None, checked: int = 5, refused: int = 0) -> Soak:
    return Soak([Known([1], [2])], 10, 0.0, random.Random(1), checked=checked, refused=refused, wrong=wrong or [])


def process(*sizes: int, bound: int = 0, most: int = 0) -> Watched:
    return Watched("engine", 1, bound * MIB, sizes=[size * MIB for size in sizes], most=most * MIB)


def test_quarters_are_the_second_and_the_last() -> None:
    assert quarters([1, 1, 5, 7, 9, 9, 20, 22]) == (6, 21)
    assert quarters([3]) == (3, 3)


def test_flat_and_bounded_is_right() -> None:
    assert verdict(soaked(), [process(10, 100, 100, 102, bound=500, most=400), process(1, 600, 600, 615)]) == []


@pytest.mark.parametrize(
    ("watched", "says"),
    [
        (process(100, 100, 150, 150, bound=500), "grew from 100 to 150 MiB"),
        (process(100, 100, 100, 100, bound=90, most=101), "had 101 MiB, its bound is 90"),
        (process(100, 100, 0, 0, bound=500), "ended"),
        (process(100, 100, 100, 100), "no engine has told its bound"),
    ],
)
def test_faults_of_processes(watched: Watched, says: str) -> None:
    [fault] = verdict(soaked(), [watched])
    assert says in fault


def test_a_store_goes_up_and_down_within_its_bound() -> None:
    """Of a stack with two writers: 32 MiB and a 128th, twice 32 ahead, 64 read ahead, 64 its own."""
    plan = StackPlan(model="", data_dir=Path(), dram_bytes=32 * MIB)
    bound = store_bound(plan)
    assert bound == (32 + 2 * 32 + 64 + 64) * MIB + MIB // 4
    store = Watched("kvstore-0", 1, bound, level=False, sizes=[size * MIB for size in (60, 90, 150, 210)])
    store.most = bound
    engine = process(100, 100, 100, 100, bound=500)
    assert verdict(soaked(), [store, engine]) == []
    assert verdict(soaked(), [store]) == ["no engine has told its bound"]
    store.most += MIB
    assert verdict(soaked(), [store, engine]) == ["kvstore-0 had 225 MiB, its bound is 224"]


def test_wrong_and_missing_answers_fail() -> None:
    flat = process(1, 1, 1, 1, bound=5)
    assert verdict(soaked(["wrong answer"]), [flat]) == ["wrong answer"]
    assert verdict(soaked(checked=0), [flat]) == ["no answer was checked"]


def test_a_tenth_may_be_refused() -> None:
    flat = process(1, 1, 1, 1, bound=5)
    assert verdict(soaked(checked=9, refused=1), [flat]) == []
    assert verdict(soaked(checked=8, refused=1), [flat]) == ["1 requests were refused for lack of room"]


def test_bounds_are_read_from_the_log() -> None:
    log = (
        "2026 [info     ] memory   [moonpool] bound_mib=369 libraries_mib=239 pid=4711 stage=0\nother pid=3 bound_mib=9"
    )
    assert bounds(log) == {4711: 369 * MIB}
