"""The GPU's benchmark without a GPU: it says so; its rows are right on tensors of the CPU, timed by a fake clock."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.device import On
from benchmarks.frame import Row, run
from benchmarks.kernels_gpu import Shape, copy_row, decode_row, flags, measure, norm_rows, prefill_rows, write_row
from benchmarks.kernels_gpu_steps import WAYS, StepCase, sampling_rows, step_rows
from moonpool.engine.platforms.staged import StagedDevice

SMALL = Shape(heads=4, kv_heads=2, head_dim=16, layers=3, dtype=torch.float32)
COPY, MATRIX = 4096, 16


def quarter(call: Callable[[], object]) -> float:
    """Each call takes so long."""
    call()
    return 0.25


ON = On(torch.device("cpu"), 2, quarter, COPY, MATRIX)


def check(row: Row, value: float, limit_name: str, limit: float) -> None:
    assert row.value == pytest.approx(value)
    assert row.limit_name == limit_name
    assert row.limit_value == pytest.approx(limit)
    assert row.spread == 0
    better = limit / value if row.unit == "ms" else value / limit
    assert row.ratio == pytest.approx(better)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels_gpu", measure, [], flags=flags)
    assert capsys.readouterr().out.strip() == "kernels_gpu: not measured, there is no GPU"
    assert run("kernels_gpu", measure, ["--json"], flags=flags)
    kept = json.loads(capsys.readouterr().out)
    assert (kept["skipped"], kept["rows"]) == ("there is no GPU", [])


def test_kernels_are_told_by_what_they_read_and_write() -> None:
    copied = 2 * COPY / 0.25 / 1e9
    token = 2 * 2 * 16 * 4  # key and value of each head, in bytes
    check(decode_row(ON, SMALL, 3, 32), 3 * 32 * token / 0.25 / 1e9, "copy", copied)
    check(write_row(ON, SMALL, 20), 2 * 20 * token / 0.25 / 1e9, "copy", copied)
    check(copy_row(ON, SMALL, 2), 2 * 2 * 3 * 16 * token / 0.25 / 1e9, "copy", copied)
    added, alone = norm_rows(ON, torch.float32, 5, 64)
    check(added, 4 * 5 * 64 * 4 / 0.25 / 1e9, "copy", copied)
    check(alone, 2 * 5 * 64 * 4 / 0.25 / 1e9, "torch's norm", 2 * 5 * 64 * 4 / 0.25 / 1e9)


def test_prefill_is_told_by_its_products() -> None:
    product = 2 * MATRIX**3 / 0.25 / 1e12
    own = 4 * 16 * 4 * (32 * 33 / 2) / 0.25 / 1e12
    whole, flash = prefill_rows(ON, SMALL, 32, 32)
    check(whole, own, "matrix product", product)
    check(flash, own, "torch's flash attention", own)
    [chunk] = prefill_rows(ON, SMALL, 16, 48)
    check(chunk, 4 * 16 * 4 * (16 * 32 + 16 * 17 / 2) / 0.25 / 1e12, "matrix product", product)


def test_sampling_is_told_by_its_time() -> None:
    rows = sampling_rows(ON, 3, 500)
    assert len(rows) == len(WAYS) + 1
    for row in rows:
        own = row.limit_name == "torch's sort and multinomial"
        check(row, 250, row.limit_name, 250 if own else 1e3 * 3 * 500 * 4 / (2 * COPY / 0.25))


def test_a_decode_step_is_told_eagerly_and_as_a_graph() -> None:
    case = StepCase("tiny-qwen2", {}, (1, 3), 64, "float32", lambda: StagedDevice(1))
    rows = step_rows(ON, case)
    assert [row.name.rpartition(", ")[2] for row in rows] == ["layer by layer", "as a graph"] * 2
    first, graph, several, _ = rows
    assert first.value == graph.value
    token = (several.value - first.value) * 0.25 * 1e9 / (2 * 64)
    assert token == pytest.approx(round(token), abs=1e-3), "the two differ by the KV of two sequences"
    assert token > 0


@pytest.mark.slow  # the kernels' own tests run the interpreter
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_rows_of_the_kernels_of_gpus() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    names = ("test_kernels_are_told_by_what_they_read_and_write", "test_prefill_is_told_by_its_products")
    environment = os.environ | {"MOONPOOL_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"{Path(__file__)}::{it}" for it in names),
    ]
    subprocess.run(command, env=environment, check=True)
