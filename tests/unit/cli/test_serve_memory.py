"""What `moonpool serve` does where its engines together do not fit into the free memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.cli import serve
from moonpool.cli.progress import PlainProgress
from moonpool.cli.stack import StackPlan

EACH = 540 << 20
"""Bytes of an engine of the bundled model, about: program, and 256 MiB of KV."""


def test_engines_map_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = StackPlan(str(model_dir()), tmp_path, prefill=2, extra={"decode": ["--max-num-seqs", "4"]})
    refused = replace(plan, extra={"prefill": ["--set", "mmap_weights=off"]})
    said: list[str] = []
    progress = PlainProgress(said.append)
    for free in (None, 4 * EACH):
        monkeypatch.setattr(serve, "available_bytes", lambda amount=free: amount)
        assert serve.tell_memory(plan, progress) == plan
    monkeypatch.setattr(serve, "available_bytes", lambda: 2 * EACH)
    assert serve.tell_memory(refused, progress) == refused
    assert not any("mapped" in line for line in said)
    found = serve.tell_memory(plan, progress)
    assert found.extra["prefill"] == ["--set", "mmap_weights=on"]
    assert found.extra["decode"] == ["--max-num-seqs", "4", "--set", "mmap_weights=on"]
    assert "MB are free: weights are mapped from a file" in said[-1]
