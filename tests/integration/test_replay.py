"""`moonpool replay` against a stack with emulated compute: fitted to half of the requests, beside it for the others."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.bundled import model_dir
from moonpool.cli.predict_options import ReplayOptions
from moonpool.cli.replay import run_replay
from moonpool.cli.stack import StackPlan
from moonpool.simulator.traces.mooncake import write_trace
from moonpool.simulator.traces.workload import CHAT, Workload
from tests.integration.stack import CheckedStack

PROFILE = "llama-70b-a800"
TIME_SCALE = 2.0
INSTANCES = (2, 2, 1)
REQUESTS, FITTED = 28, 14
FACTORS = {"TTFT": 3.0, "TPOT": 2.0}
"""Simulated times are at most so many times as long as measured ones, or as short. Of fourteen requests one or two make
a p90; on a busy machine the slice that was fitted may have been slower than the other one by a factor of two."""


@pytest.mark.slow  # the fit is `tests/unit/simulator/experiments/test_calibration.py`'s
def test_measured_beside_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, Workload(1, dataclasses.replace(CHAT, rate_per_s=1.0)).requests(REQUESTS))
    prefill, decode, kvstore = INSTANCES
    plan = StackPlan(
        model=str(model_dir()), data_dir=tmp_path / "stack", engine=f"emulated:{PROFILE}", time_scale=TIME_SCALE,
        prefill=prefill, decode=decode, kvstore=kvstore, block_size=512, log_level="warning",
        extra={"prefill": ["--max-num-batched-tokens", "4096"]},
    )  # fmt: skip
    with CheckedStack(plan) as stack:
        status = run_replay(
            ReplayOptions(
                trace=trace, address=stack.address, model=str(model_dir()), time_scale=TIME_SCALE, simulate=PROFILE,
                max_num_batched_tokens=4096, calibrate_on=FITTED, as_json=True,
            )
        )  # fmt: skip
    assert status == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        print({line["figure"]: round(line["ratio"], 3) for line in found["lines"]}, found["extras"])
    measured, simulated = found["measured"], found["simulated"]
    assert measured["outcomes"] == simulated["outcomes"] == {"done": REQUESTS - FITTED}
    assert measured.keys() == simulated.keys()
    # A slower stack finds more: the last turn's answer is there when the next one comes.
    assert measured["reused_share"] == pytest.approx(simulated["reused_share"], abs=0.2)
    assert [line["figure"] for line in found["lines"]] == ["TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"]
    # How near they are depends on what else the machine does: `python -m benchmarks.simulated` has the figures.
    for line in found["lines"]:
        factor = FACTORS[line["figure"].split()[0]]
        assert 1 / factor < line["ratio"] < factor, line
