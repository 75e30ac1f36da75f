import subprocess
import sys
from array import array
from collections import Counter, deque
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.scheduling.state_machine import (
    IoEnded,
    PendingIo,
    Timers,
    digest_of,
    draw_below,
    draw_bits,
    draw_unit,
)


class Colour(Enum):
    RED = 1


def test_outstanding_holds_until_the_end_and_never_reuses_a_number() -> None:
    outstanding: PendingIo[str] = PendingIo()
    first = outstanding.begin("a")
    assert outstanding.get(first) == "a"
    assert outstanding.end(first) == "a"
    assert first not in outstanding
    assert outstanding.begin("b") != first
    with pytest.raises(KeyError):
        outstanding.end(first)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["set", "clear", "pop"]), st.integers(0, 20))))
def test_timers_are_those_of_a_plain_dictionary(steps: list[tuple[str, str, int]]) -> None:
    timers: Timers[str] = Timers()
    plain: dict[str, tuple[int, int]] = {}
    for count, (key, verb, at) in enumerate(steps):
        if verb == "set":
            timers.set(key, at)
            plain[key] = at, count
        elif verb == "clear":
            timers.clear(key)
            plain.pop(key, None)
        else:
            due = min(((*when, key) for key, when in plain.items() if when[0] <= at), default=None)
            assert timers.pop_due(at) == (due[2] if due else None)
            if due:
                del plain[due[2]]
        assert timers.next() == min((at for at, _ in plain.values()), default=None)
        assert len(timers) == len(plain)


def test_timers_that_are_moved_again_and_again_take_no_memory() -> None:
    timers: Timers[int] = Timers()
    for at in range(10_000):
        timers.set(at % 3, at)
    assert sys.getsizeof(timers.__dict__["_heap"]) < 10_000


def test_draws_depend_on_every_counter_and_on_nothing_else() -> None:
    assert draw_bits(7, 1, 2) == draw_bits(7, 1, 2)
    different = {draw_bits(7, 1, 2), draw_bits(8, 1, 2), draw_bits(7, 2, 1), draw_bits(7, 1), draw_bits(7, 1, 2, 0)}
    assert len(different) == 5


def test_draws_are_uniform() -> None:
    counts = Counter(draw_below(10, 3, n) for n in range(20_000))
    chi_square = sum((counts[digit] - 2000) ** 2 / 2000 for digit in range(10))
    assert chi_square < 33.7, "p < 1e-4 for nine degrees of freedom"
    assert all(0.0 <= draw_unit(3, n) < 1.0 for n in range(1000))


def test_equal_values_have_equal_digests_and_others_have_not() -> None:
    values = [
        None, True, 1, 1.0, "1", b"1", array("i", [1]), (1,), ((1,),), {1: 2}, {2: 1}, frozenset({1}), IoEnded(1, 2),
        IoEnded(2, 1), Colour.RED, ("a", "b"), ("ab",), (b"", b""), (b"",),
    ]  # fmt: skip
    digests = [digest_of(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digest_of([1, deque([2])]) == digest_of((1, [2]))
    with pytest.raises(TypeError, match="object has no digest"):
        digest_of(object())


def test_digests_of_sets_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from moonpool.base.scheduling.state_machine import digest_of; print(digest_of({'a', 'b', 'c', 'd'}).hex())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
