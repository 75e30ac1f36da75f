"""Runs the cases of this folder in Triton's interpreter, which has to be chosen before Triton is imported.

Hence a process of their own: no other test meets interpreted kernels. The interpreter accepts code that the compiler
refuses (test_compile.py compiles), and nothing here runs on a GPU (test_gpu.py does, where there is one).
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


INTERPRETER = {
    "TRITON_INTERPRET": "1",
    # The interpreter multiplies tiles with numpy, whose kernels for newer processors round a row by its place in the
    # tile; with these a row's bits are its own. Ignored where there is no OpenBLAS, or another processor.
    "OPENBLAS_CORETYPE": "Nehalem",
}


def run_cases(modules: Sequence[str], marker: str, **environment: str) -> None:
    """Run test modules in a process of their own; its output is shown when it fails."""
    paths = [str(HERE / module) for module in modules]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, *paths]
    finished = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=HERE.parents[4],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    print(finished.stdout[-20000:], finished.stderr[-2000:])
    assert finished.returncode == 0


@pytest.mark.timeout(600)
def test_in_the_interpreter() -> None:
    run_cases(
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
        ],
        "not slow",
        **INTERPRETER,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_in_the_interpreter() -> None:
    run_cases(
        ["cases_attention.py", "cases_products.py", "cases_recurrent.py", "cases_self_check.py", "cases_sparse.py"],
        "slow",
        **INTERPRETER,
    )
