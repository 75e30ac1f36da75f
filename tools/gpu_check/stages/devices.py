"""Steps on the device choose the tokens of a plain CPU, with graphs and without; engines start; sampling agrees."""

from tools.gpu_check.test_runs import TestRun, list_tests, run_tests
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 100
BESIDE_NEXT = True
ON_GPU = (
    "tests/unit/engine/test_devices.py",
    "tests/unit/engine/test_worker.py",
    "tests/unit/sampling/test_torch_sampler.py",
)
STAGED = ("tests/unit/engine/test_devices.py::test_a_hostile_order_changes_nothing",)


def check(where: Where, figures: Figures) -> None:
    """Run the tests of a GPU. On `staged` find them, and run one: `make test` runs the others on `staged`."""
    if where.on_gpu:
        run_tests("devices", TestRun(ON_GPU, "gpu"), figures)
    else:
        list_tests("devices", TestRun(ON_GPU, "gpu"), figures)
        run_tests("hostile order", TestRun(STAGED), figures)


if __name__ == "__main__":
    stage_main("devices", check)
