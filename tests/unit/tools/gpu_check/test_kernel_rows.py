"""Rows of `kernel_speed` on tensors of the CPU, timed by a fake clock."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.ceilings import On
from benchmarks.frame import Row
from tools.gpu_check.kernel_rows import (
    WAYS,
    Shape,
    Sizes,
    choice_rows,
    chosen_rows,
    copy_row,
    decode_row,
    heads_rows,
    latent_rows,
    norm_rows,
    prefill_rows,
    sampling_rows,
    write_row,
)

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


def test_kernels_are_told_by_what_they_read_and_write() -> None:
    copied = 2 * COPY / 0.25 / 1e9
    token = 2 * 2 * 16 * 4  # key and value of each head, in bytes
    check(decode_row(ON, SMALL, 3, 32), 3 * 32 * token / 0.25 / 1e9, "copy", copied)
    check(write_row(ON, SMALL, 20), 2 * 20 * token / 0.25 / 1e9, "copy", copied)
    check(copy_row(ON, SMALL, 2), 2 * 2 * 3 * 16 * token / 0.25 / 1e9, "copy", copied)
    for row in heads_rows(ON, SMALL, 20):
        check(row, 250, "separate launches", 250)
    added, alone, carried = norm_rows(ON, torch.float32, 5, 64)
    check(carried, 4 * 5 * 64 * 4 / 0.25 / 1e9, "two launches", 4 * 5 * 64 * 4 / 0.25 / 1e9)
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


def test_latent_attention_is_told_beside_the_hardware_and_the_reference() -> None:
    shape = Shape(heads=4, kv_heads=1, head_dim=24, dtype=torch.float32, rest=8)
    decode, whole, few, prompt = latent_rows(ON, shape, Sizes(decode=((3, 32),), prefill=((32, 32),)))
    check(decode, 3 * 32 * 24 * 4 / 0.25 / 1e9, "copy", 2 * COPY / 0.25 / 1e9)
    check(whole, 2 * (24 + 16) * 4 * (32 * 33 / 2) / 0.25 / 1e12, "matrix product", 2 * MATRIX**3 / 0.25 / 1e12)
    for row in (few, prompt):
        check(row, 250, "the reference", 250)


def test_chosen_keys_are_told_beside_a_copy_and_the_reference() -> None:
    latent = Shape(heads=4, kv_heads=1, head_dim=24, dtype=torch.float32, rest=8)
    copied = 2 * COPY / 0.25 / 1e9
    choice, beside = choice_rows(ON, torch.float32, 4, 16, 2, 64, 16)
    check(choice, 2 * 64 * 16 * 4 / 0.25 / 1e9, "copy", copied)
    check(beside, 250, "the reference", 250)
    attended, beside = chosen_rows(ON, latent, 2, 64, 16)
    check(attended, 2 * 16 * 24 * 4 / 0.25 / 1e9, "copy", copied)
    check(beside, 250, "the reference", 250)


def test_sampling_is_told_by_its_time() -> None:
    rows = sampling_rows(ON, 3, 500)
    assert len(rows) == len(WAYS) + 1
    for row in rows:
        own = row.limit_name == "torch's sort and multinomial"
        check(row, 250, row.limit_name, 250 if own else 1e3 * 3 * 500 * 4 / (2 * COPY / 0.25))


@pytest.mark.slow  # the kernels' own tests run the interpreter
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_rows_of_the_kernels_of_gpus() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    names = (
        "test_kernels_are_told_by_what_they_read_and_write",
        "test_prefill_is_told_by_its_products",
        "test_latent_attention_is_told_beside_the_hardware_and_the_reference",
        "test_chosen_keys_are_told_beside_a_copy_and_the_reference",
    )
    environment = os.environ | {"MOONPOOL_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"{Path(__file__)}::{name}" for name in names),
    ]
    subprocess.run(command, env=environment, check=True)
