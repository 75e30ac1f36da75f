"""Attention and pool kernels in Triton give what the reference gives, over shapes and element types.

On `staged` a few cases run in Triton's interpreter.
"""

import importlib.util
import os
import time

from tools.gpu_check.test_runs import PytestRun, run_tests
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 200
BESIDE_NEXT = True
"""Compiling takes most of the time, on the host's cores."""
CASES = "tests/unit/engine/kernels/test_triton/"
NAMES = (
    "attention", "pool", "pointwise", "products", "experts", "recurrent", "sampling", "heads", "sparse", "self_check",
    "gpu",
)  # fmt: skip
ALL = [f"{CASES}cases_{name}.py" for name in NAMES]
FEW = [f"{CASES}cases_pool.py::test_copy_blocks", f"{CASES}cases_attention.py::test_decode"]
MOST_PROCESSES, MORE_SHAPES_S = 8, 60.0
"""Seconds that must be left for shapes beyond those of every run."""


def check(where: Where, figures: Figures) -> None:
    """Run the cases, then more shapes if there is time."""
    if importlib.util.find_spec("triton") is None:
        figures["kernels"] = "skipped: triton is not installed"
        return
    if not where.on_gpu:
        run_tests({"interpreted": PytestRun(FEW, environment={"TRITON_INTERPRET": "1"})}, figures)
        figures["compiled for the GPU"] = "skipped: there is no GPU"
        return
    began = time.monotonic()
    on_gpu = {"TRITON_INTERPRET": "0", "MOONPOOL_TRITON_DEVICE": "cuda"}
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    run_tests({"cases": PytestRun(ALL, "not slow", processes=processes, environment=on_gpu)}, figures)
    left = where.limit_s - (time.monotonic() - began)
    if left < MORE_SHAPES_S:
        figures["more shapes"] = f"skipped: {left:.0f} s of the limit are left"
        return
    run_tests({"more shapes": PytestRun(ALL[:1], "slow", processes=processes, environment=on_gpu)}, figures)


if __name__ == "__main__":
    stage_main("kernels", check)
