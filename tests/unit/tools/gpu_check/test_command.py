"""`python -m tools.gpu_check` as it is called."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.gpu_check.test_runs import ROOT


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_stage_runs_as_a_process(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path), "--device", "staged", "--tiny", "--only", "copies")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "results.json").read_text())
    assert [(stage["stage"], stage["ok"]) for stage in told["stages"]] == [("copies", True)]
    assert done.stdout.splitlines()[-1].startswith("failed: none; skipped: none")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_failure_is_the_exit_status(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path), "--only", "copies")
    assert done.returncode == 1
    assert "no CUDA device can be used here" in (tmp_path / "results.md").read_text()
    assert done.stdout.splitlines()[-1].startswith("failed: copies; skipped: none")
