"""Each family's tokens are a plain CPU's, by graphs of decode steps and prompts; tells which have none, and why."""

import os

from tools.gpu_check.test_runs import PytestRun, list_tests, run_tests
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 220
BESIDE_NEXT = True
"""Compiling takes most of the time, on the host's cores."""
TESTS = ("tests/unit/engine/models/test_families_on_devices.py",)
MOST_PROCESSES = 8


def check(where: Where, figures: Figures) -> None:
    """Run the tests of a GPU. On `staged` find them only: `make test-all` runs the same tests on `staged`."""
    if where.on_gpu:
        processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
        run_tests({"families": PytestRun(TESTS, "gpu", processes=processes)}, figures)
    else:
        list_tests("families", PytestRun(TESTS, "gpu"), figures)
        figures["tokens"] = "skipped: make test-all runs the same tests on staged"


if __name__ == "__main__":
    stage_main("families", check)
