"""Each stage of the GPU check on `staged` with tiny shapes, and faults that it must notice."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frame import Row
from moonpool.base.scheduling.steps import Step
from moonpool.engine.cuda_graphs import DecodeGraphs
from moonpool.engine.platforms.kv_memory import KVLoads
from tools.gpu_check import runners
from tools.gpu_check.host_time import HostTime
from tools.gpu_check.stages import (
    ORDER,
    copies,
    decode_steps,
    devices,
    families,
    kernel_speed,
    kernels,
    parity,
    profile,
    versions,
)
from tools.gpu_check.test_runs import ROOT, PytestRun, run_tests
from tools.gpu_check.where import CheckError, Figure, Where, run_check

HERE = Path(__file__).parent
CASES = (HERE / "cases_of_faults.py").relative_to(ROOT)
LIGHT = (
    "versions",
    "native_build",
    "kernels",
    "devices",
    "parity",
    "copies",
    "kernel_speed",
    "decode_steps",
    "profile",
)
"""Stages without services."""
OF_TESTS = ("kernels", "devices", "parity")
"""Stages that run tests which `make test` runs too."""
SKIPPED = PytestRun([f"{CASES}::test_that_is_skipped"])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-check")


@pytest.fixture
def staged(out: Path) -> Where:
    return Where("staged", True, out, 100.0)


def figures_of(name: str, where: Where) -> dict[str, Figure]:
    """Runs a stage that must pass."""
    result = run_check(name, import_module(f"tools.gpu_check.stages.{name}").check, where)
    assert result["error"] is None
    assert result["ok"] is True
    return result["figures"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in OF_TESTS else ()) for name in LIGHT]
)
def test_a_stage_passes_on_staged(name: str, staged: Where) -> None:
    assert figures_of(name, staged)


def error_of(check: Callable[..., None], where: Where) -> str:
    """What a stage fails with."""
    result = run_check("faulty", check, where)
    assert result["ok"] is False
    return str(result["error"])


def test_a_missing_import_is_named(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "NEEDED", ("json", "no_such_module", "nor_this"))
    assert error_of(versions.check, staged) == "missing imports: no_such_module, nor_this"


def test_a_compiler_that_fails_is_noticed(staged: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("MOONPOOL_KERNELS_CACHE", str(tmp_path))
    assert "BuildError" in error_of(import_module("tools.gpu_check.stages.native_build").check, staged)


def test_each_run_of_tests_that_fails_is_told() -> None:
    """They run at the same time."""
    figures: dict[str, Figure] = {}
    wanted = {way: PytestRun([f"{CASES}::test_that_{way}"]) for way in ("passes", "fails")}
    wanted["is nowhere"] = PytestRun([f"{CASES}::test_of_another_name"])
    with pytest.raises(CheckError) as caught:
        run_tests(wanted, figures)
    told = "fails: 1 failed: cases_of_faults::test_that_fails; is nowhere: pytest ended with 4, 0 tests passed"
    assert str(caught.value) == told
    assert figures["passes: passed"] == 1


def test_a_wrong_kernel_is_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW", [f"{CASES}::test_that_fails", f"{CASES}::test_that_passes"])
    assert "1 failed: cases_of_faults::test_that_fails" in error_of(kernels.check, staged)


@pytest.mark.slow
def test_tests_of_a_gpu_that_none_has_are_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """None has the mark `gpu`."""
    monkeypatch.setattr(devices, "TESTS", [str(CASES)])
    assert "found no tests" in error_of(devices.check, staged)


@pytest.mark.slow
def test_tests_that_are_all_skipped_prove_nothing(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "run_tests", lambda wanted, figures: run_tests({"none": SKIPPED}, figures))
    assert "0 tests passed" in error_of(parity.check, Where("cuda", True, staged.out, 100.0))


def test_kv_that_never_comes_to_the_device_is_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVLoads, "bring", lambda self: None)
    assert "what came back is not what went there" in error_of(copies.check, staged)


def test_a_kernel_that_misses_half_of_its_target_is_named() -> None:
    figures: dict[str, Figure] = {}
    good = Row("decode", 80.0, "GB/s", None, "copy", 100.0, 0.43, 0.85)
    assert kernel_speed.tell(good, figures) == ""
    assert kernel_speed.tell(Row("decode", 40.0, "GB/s", None, "copy", 100.0, 0.42, 0.85), figures).startswith(
        "decode: 0.42"
    )
    assert figures == {"decode, beside copy": "40 GB/s, 0.42 of it, target 0.85"}


def test_a_kernel_that_cannot_run_is_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Iterator[Row]:
        raise RuntimeError("out of resources")
        yield

    monkeypatch.setattr(kernel_speed, "kernel_rows", broken)
    assert error_of(kernel_speed.check, staged) == "RuntimeError: out of resources"


def test_graphs_that_are_slower_or_fail_are_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_steps.judge({"batch 1": (1.0, 1.0), "batch 8": (2.0, 1.5)})
    with pytest.raises(CheckError, match=r"batch 8: 2\.50 ms, eager 2\.00 ms"):
        decode_steps.judge({"batch 1": (1.0, 1.0), "batch 8": (2.0, 2.5)})

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(DecodeGraphs, "go_on", broken)
    assert "no kernel image" in error_of(decode_steps.check, staged)


def test_graphs_that_no_step_takes_are_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeGraphs, "shape", lambda self, step, batch, later: None)
    assert "graph: 0 of" in error_of(decode_steps.check, staged)


def test_a_run_that_ends_early_is_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runners.Stage.decode_steps

    def cut(stage: runners.Stage, batch: int, context: int, steps: int) -> Step:
        return whole(stage, batch, context, steps - 1)

    monkeypatch.setattr(runners.Stage, "decode_steps", cut)
    assert "steps were made, not" in error_of(decode_steps.check, staged)


def test_a_profiler_that_sees_nothing_is_noticed(staged: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(nullcontext[Any]):
        def __enter__(self) -> "Blind":
            return self

        def key_averages(self) -> Sequence[object]:
            return ()

    monkeypatch.setattr(profile, "profile", lambda activities: Blind())
    assert "the profiler saw no work" in error_of(profile.check, staged)


def test_every_test_of_a_gpu_belongs_to_a_stage() -> None:
    """Stage `kernels` names the cases that the tests of Triton on a GPU start."""
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu,?$|pytest\.mark\.gpu, |pytest\.mark\.gpu\]", path.read_text(), re.M)
    }
    started = "tests/unit/engine/kernels/test_triton/test_gpu.py"
    assert {*devices.TESTS, *families.TESTS, *parity.TESTS, started} == marked
    assert set(re.findall(r"cases_\w+\.py", (ROOT / started).read_text())) == {Path(case).name for case in kernels.ALL}


def test_every_stage_stands_in_the_order() -> None:
    modules = {path.stem for path in (ROOT / "tools/gpu_check/stages").glob("*.py")} - {"__init__"}
    assert modules == set(ORDER)


class Clocked:
    """Watched."""

    def outer(self, clock: list[float]) -> str:
        clock[0] += 1.0
        self.inner(clock)
        return "done"

    def inner(self, clock: list[float]) -> None:
        clock[0] += 4.0


def test_time_inside_counts_for_the_part_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    watch = HostTime(lambda: clock[0])
    watch.watch(Clocked, "outer", "one")
    watch.watch(Clocked, "inner", "other")
    assert Clocked().outer(clock) == "done"
    assert watch.seconds == {"one": 1.0, "other": 4.0}
    assert watch.calls == {"one": 1, "other": 1}
    watch.close()
    Clocked().outer(clock)
    assert watch.seconds == {"one": 1.0, "other": 4.0}
