"""The team of threads: from several callers, awake and asleep, and in a forked process, the same bits."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moonpool.base.native import build
from moonpool.engine.kernels.arranged_weights import arrange_weight
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.native import library

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")


@pytest.fixture
def product() -> Iterator[Callable[[], Tensor]]:
    """A product that is work for two threads."""
    weight, x = torch.randn(2048, 64), torch.randn(3, 64)
    panels = arrange_weight(weight, None, gated=False, arena=WeightArena())
    assert panels is not None
    torch.set_num_threads(2)
    yield lambda: panels.product(x)
    torch.set_num_threads(1)


def test_callers_at_the_same_time(product: Callable[[], Tensor]) -> None:
    expected = product()
    wrong: list[int] = []

    def call(caller: int) -> None:
        for _ in range(300):
            if not torch.equal(product(), expected):
                wrong.append(caller)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


def test_threads_that_went_to_sleep_are_woken(product: Callable[[], Tensor]) -> None:
    expected = product()
    for _ in range(100):
        idle = time.perf_counter() + 2e-4  # they look for work for a quarter of it
        while time.perf_counter() < idle:
            pass
        assert torch.equal(product(), expected)


def test_a_forked_process_has_a_team_of_its_own(product: Callable[[], Tensor]) -> None:
    expected = product()
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(product(), expected) for _ in range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def run_under_the_sanitizer(folder: Path, program: str, *parts: Path) -> None:
    """A program of this folder with some sources, which says what is wrong."""
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    binary, sources = folder / "stress", (Path(__file__).with_name(program), *parts)
    options = ("-O1", "-g", "-std=c++17", "-pthread", "-fsanitize=thread", "-I", str(build.SOURCES))
    built = subprocess.run(
        [compiler, *options, *sources, "-o", binary], capture_output=True, text=True, check=False, timeout=120
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("no thread sanitizer here")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([binary], capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_more_threads_than_processors_under_the_sanitizer(tmp_path: Path) -> None:
    limit, team = "    if (threads > team_most()) threads = team_most();\n", tmp_path / "team.cpp"
    text = (build.SOURCES / "team.cpp").read_text()
    assert limit in text
    team.write_text(text.replace(limit, ""))
    run_under_the_sanitizer(tmp_path, "team_stress.cpp", team, build.SOURCES / "cpu_sharing.cpp")


def test_a_thread_that_follows_another_one_under_the_sanitizer(tmp_path: Path) -> None:
    run_under_the_sanitizer(tmp_path, "progress_stress.cpp", build.SOURCES / "progress.cpp")


def test_the_team_leaves_a_core_to_a_thread_that_computes_something_else() -> None:
    kernels, cores = library.get(), len(os.sched_getaffinity(0))
    assert kernels is not None
    with kernels.aside():
        assert kernels.threads_used(cores) == max(1, cores - 1)
        with kernels.aside():
            assert kernels.threads_used(cores) == max(1, cores - 2)
    assert kernels.threads_used(cores) == cores
