"""What a calm tenant notices of an attack, as ratios: to the same alone, and to processors that are as busy."""

import os
import subprocess
import sys
import threading

import pytest

from benchmarks.attacks import CalmTimes, Turn, processor_s, rows, shares_of_attack, table

LEAVING = """
import subprocess, sys
load = subprocess.Popen([sys.executable, "-m", "benchmarks.attacks_load", "0.01"], stdout=subprocess.PIPE)
print(load.stdout.readline())
"""


def seen(gap_s: float, first_s: float, number: int = 100) -> CalmTimes:
    return CalmTimes([gap_s] * number, [first_s] * (number // 10))


def test_an_attack_has_what_processes_use_without_the_calm_tenants_part() -> None:
    alone = Turn(seen(0.01, 0.02, 200), {1: 2.0, 2: 1.0}, 4.0)
    attacked = Turn(seen(0.02, 0.04, 100), {1: 3.0, 2: 0.51, 3: 1.0}, 4.0)  # 3 is the hostile client
    assert shares_of_attack(attacked, alone) == pytest.approx([(3.0 - 1.0) / 4, 1.0 / 4]), "2 does no more than before"


def test_ratios_are_to_alone_and_to_processors_that_are_as_busy() -> None:
    turns = [(seen(0.04, 0.06), seen(0.01, 0.02), seen(0.02, 0.05))]
    found = list(rows("tools", turns))
    assert [round(row.value, 3) for row in found] == [4.0, 4.0, 3.0, 2.0, 2.0, 1.2]
    assert list(table(found))[-1] == "| tools | 4.0 | 4.0 | 3.0 | 2.0 | 2.0 | 1.2 |"


def test_a_load_ends_with_the_process_that_began_it() -> None:
    """Which may be killed, and then ends nothing."""
    # The load holds the other end of standard error, which `run` reads to its end.
    left = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, timeout=60, check=True)
    assert b"computing" in left.stdout


def test_threads_may_end_while_processes_are_looked_at() -> None:
    done = threading.Event()

    def start_threads() -> None:
        while not done.is_set():
            short = threading.Thread(target=int)
            short.start()
            short.join()

    starting = threading.Thread(target=start_threads)
    starting.start()
    try:
        for _ in range(1000):
            assert processor_s([os.getpid()])[os.getpid()] > 0
    finally:
        done.set()
        starting.join()
