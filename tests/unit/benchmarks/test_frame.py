"""The benchmark frame: medians and ratios run by run, targets, and what is kept and skipped."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.frame import Row, Skipped, bounded, optional, paired, report, run


def test_ratios_are_taken_pair_by_pair() -> None:
    row = paired("x", "GB/s", [(1.0, 2.0), (3.0, 4.0), (2.0, 8.0)], "limit", target=0.5)
    assert (row.value, row.limit_value, row.ratio) == (2.0, 4.0, 0.5)
    assert row.spread == 1.0
    assert row.met
    assert paired("x", "GB/s", [(1.0, 2.0)], "limit").spread is None, "one run has no spread"


def test_less_is_better_turns_the_ratio_round() -> None:
    row = paired("x", "ms", [(10.0, 5.0)], "peer", less_is_better=True, target=1.0)
    assert row.ratio == 0.5
    assert row.met is False
    assert paired("x", "ms", [(10.0, 5.0)], "peer").met is None


def test_a_bound_is_met_up_to_the_limit() -> None:
    assert bounded("growth", "MB", [64.0], "allowed", 64.0).met
    assert not bounded("growth", "MB", [65.0, 70.0, 1.0], "allowed", 64.0).met
    assert bounded("growth", "MB", [0.0], "allowed", 64.0).ratio == 1000.0
    assert bounded("growth", "MB", [-5.0], "allowed", 64.0).met


def test_a_report_has_machine_versions_and_rows() -> None:
    data = report("x", [paired("a", "s", [(1.0, 2.0)], "limit", target=1.0)], date="2026-11-20")
    assert json.loads(json.dumps(data))["rows"] == [
        {
            "name": "a",
            "value": 1.0,
            "unit": "s",
            "spread": None,
            "limit_name": "limit",
            "limit_value": 2.0,
            "ratio": 0.5,
            "target": 1.0,
            "met": False,
        }
    ]
    assert {"benchmark", "date", "machine", "versions", "skipped"} <= set(data)
    said = report("x", [], date="2026-11-20")["machine"]
    assert isinstance(said, dict)
    assert set(said) == {"processor", "instructions", "cores", "system", "python"}


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=1)


def test_run_prints_and_keeps_the_same_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(options: argparse.Namespace, progress: object) -> list[Row]:
        return [paired("size", "B", [(float(options.size), 2.0)] * options.runs, "limit", target=1.0)]

    out = tmp_path / "results" / "x.json"
    flags = ["--json", "--runs", "2", "--size", "3", "--date", "2026-11-20", "--out", str(out)]
    assert run("x", measure, flags, flags=_flags)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert (printed["rows"][0]["value"], printed["date"]) == (3.0, "2026-11-20")
    assert not run("x", measure, ["--size", "1"], flags=_flags)
    assert "target 1 missed: 0.5" in " ".join(capsys.readouterr().out.split())


def test_a_missing_peer_is_skipped_visibly(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(options: argparse.Namespace, progress: object) -> list[Row]:
        optional("a_peer_that_is_nowhere")
        return []

    assert run("x", measure, [])
    assert "not measured, a_peer_that_is_nowhere is not installed" in capsys.readouterr().out
    run("x", measure, ["--json"])
    assert json.loads(capsys.readouterr().out)["skipped"] == "a_peer_that_is_nowhere is not installed"
    with pytest.raises(Skipped):
        optional("a_peer_that_is_nowhere")
    assert optional("json") is json
