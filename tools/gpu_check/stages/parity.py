"""Whole stacks of services answer as `transformers` does, to the token or within the element type's error."""

import importlib.util

from tests.integration.topologies import ON_GPU
from tools.gpu_check.test_runs import PytestRun, list_tests, run_tests
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 200
BESIDE_NEXT = True
"""What is right must be right also while other processes use the GPU."""
TESTS = ("tests/integration/test_parity.py",)


def check(where: Where, figures: Figures) -> None:
    """Run the tests of a GPU. On `staged` find them only: `make test` runs the same tests on `staged`."""
    if importlib.util.find_spec("transformers") is None:
        figures["parity"] = "skipped: transformers is not installed"
        return
    stacks = list(map(str, ON_GPU))
    if where.on_gpu:
        run_tests({stack: PytestRun(TESTS, "gpu", stack) for stack in stacks}, figures)
    else:
        list_tests("parity", PytestRun(TESTS, "gpu", " or ".join(stacks)), figures)
        figures["answers"] = "skipped: make test runs the same tests on staged"


if __name__ == "__main__":
    stage_main("parity", check)
