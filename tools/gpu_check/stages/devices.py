"""Steps on the device choose the tokens of a plain CPU, with graphs and without; engines start; sampling agrees."""

from pathlib import Path

from tools.gpu_check.test_runs import PytestRun, list_tests, run_tests
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 200
BESIDE_NEXT = True
TESTS = (
    "tests/unit/engine/test_devices.py",
    "tests/unit/engine/test_lora_graphs.py",
    "tests/unit/engine/test_worker.py",
    "tests/unit/engine/sampling/test_torch_sampler.py",
)


def check(where: Where, figures: Figures) -> None:
    """Run the tests of a GPU. On `staged` find them only: `make test` runs the same tests on `staged`."""
    if where.on_gpu:
        run_tests({Path(path).stem: PytestRun([path], "gpu") for path in TESTS}, figures)
    else:
        list_tests("devices", PytestRun(TESTS, "gpu"), figures)
        figures["steps"] = "skipped: make test runs the same tests on staged"


if __name__ == "__main__":
    stage_main("devices", check)
