"""Runs the cases of this folder on a GPU, and what only a GPU can show: larger shapes, and CUDA graphs."""

import importlib.util

import pytest
import torch

from tests.unit.engine.kernels.test_triton.test_interpreter import run_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not torch.cuda.is_available(), reason="needs triton and a GPU"
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "module",
    [
        "cases_attention.py",
        "cases_experts.py",
        "cases_heads.py",
        "cases_pool.py",
        "cases_pointwise.py",
        "cases_products.py",
        "cases_recurrent.py",
        "cases_sampling.py",
        "cases_sparse.py",
        "cases_self_check.py",
        "cases_gpu.py",
    ],
)
def test_on_the_gpu(module: str) -> None:
    run_cases([module], "not slow", TRITON_INTERPRET="0", MOONPOOL_TRITON_DEVICE="cuda")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_shape_on_the_gpu() -> None:
    run_cases(["cases_attention.py"], "slow", TRITON_INTERPRET="0", MOONPOOL_TRITON_DEVICE="cuda")
