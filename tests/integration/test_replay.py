"""`moonpool replay` against a stack with emulated compute: the same report as the simulator's, and near it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.bundled import model_dir
from moonpool.cli.replay import run_replay
from moonpool.cli.stack import StackPlan
from simulator.cluster.config import Slo
from simulator.traces.mooncake import write_trace
from simulator.traces.workload import CHAT, Workload
from tests.integration.stack import CheckedStack

PROFILE = "llama-70b-a800"
TIME_SCALE = 4.0
INSTANCES = (2, 2, 1)


@pytest.mark.timeout(300)
def test_measured_beside_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, Workload(1, dataclasses.replace(CHAT, rate_per_s=1.0)).requests(40))
    prefill, decode, kvstore = INSTANCES
    plan = StackPlan(
        model=str(model_dir()), data_dir=tmp_path / "stack", engine=f"emulated:{PROFILE}", time_scale=TIME_SCALE,
        prefill=prefill, decode=decode, kvstore=kvstore, block_tokens=512, log_level="warning",
        extra={"prefill": ["--step-tokens", "4096"]},
    )  # fmt: skip
    with CheckedStack(plan) as stack:
        status = run_replay(
            trace, stack.address, model=str(model_dir()), requests=0, time_scale=TIME_SCALE, prompt_tokens=0,
            output_tokens=0, slo=Slo(), profile=PROFILE, instances=INSTANCES, as_json=True,
        )  # fmt: skip
    assert status == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        print({name: (column["ttft_s"], column["tpot_s"], column["reused_share"]) for name, column in found.items()})
    measured, simulated = found["measured"], found["simulated"]
    assert measured["outcomes"] == simulated["outcomes"] == {"done": 40}
    assert measured.keys() == simulated.keys()
    assert measured["reused_share"] == pytest.approx(simulated["reused_share"], abs=0.1)
    # A stack on a busy machine adds milliseconds, four times as many of the profile's.
    assert 0.8 * simulated["ttft_s"]["p50"] < measured["ttft_s"]["p50"] < 4 * simulated["ttft_s"]["p50"]
    assert 0.9 * simulated["tpot_s"]["p50"] < measured["tpot_s"]["p50"] < 3 * simulated["tpot_s"]["p50"]
