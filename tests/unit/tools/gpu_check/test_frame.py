"""The frame of the GPU check: whatever a stage does, its line is told and the next stage goes on."""

import json
from pathlib import Path

import pytest

from tools.gpu_check import frame
from tools.gpu_check.frame import Options, Result, Stage, run

PACKAGE = "tests.unit.tools.gpu_check.stages"


def results(out: Path, *names: str, budget_s: float = 600.0) -> dict[str, Result]:
    stages = [Stage.read(PACKAGE, name) for name in names]
    found = run(stages, Options(out, "staged", tiny=True, budget_s=budget_s, package=PACKAGE))
    assert [result.stage for result in found] == list(names)
    return {result.stage: result for result in found}


def test_each_failure_is_told_and_the_next_stage_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = results(tmp_path, "fails", "raises", "dies", "imports_nothing", "passes")
    assert {name: result.ok for name, result in found.items()} == {
        **dict.fromkeys(("fails", "raises", "dies", "imports_nothing"), False),
        "passes": True,
    }
    assert found["fails"].error == "the answer is 4"
    assert found["fails"].figures == {"found": 3}, "what was found before stays"
    assert found["raises"].error == "KeyError: 'missing'"
    assert "raise KeyError" in found["raises"].log
    assert found["dies"].error == "ended with -9 and told nothing"
    assert found["imports_nothing"].error == "ended with 1 and told nothing"
    assert "no_such_package" in found["imports_nothing"].log
    assert found["passes"].figures["device"] == "staged"
    assert found["passes"].figures["tiny"] is True
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["stage"] for line in lines] == list(found), "one line a stage, and nothing else"
    assert {name: line["ok"] for name, line in zip(found, lines, strict=True)} == {
        result.stage: result.ok for result in found.values()
    }


def test_results_are_files_with_figures_and_the_log_of_a_failure(tmp_path: Path) -> None:
    results(tmp_path, "passes", "fails")
    told = json.loads((tmp_path / "results.json").read_text())
    assert [stage["stage"] for stage in told["stages"]] == ["passes", "fails"]
    page = (tmp_path / "results.md").read_text()
    assert "| passes | passed |" in page
    assert "| fails | **failed** |" in page
    assert "the answer is 4" in page
    assert "```\na | b\n1 | 2\n```" in page, "text of several lines is a table"
    assert "Fails after a figure." in page
    assert "===== passes\nprinted by the stage" in (tmp_path / "logs.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs.txt", "results.json", "results.md"]


def test_a_stage_over_its_limit_is_ended_with_its_processes(tmp_path: Path) -> None:
    found = results(tmp_path, "hangs")["hangs"]
    assert found.ok is False
    assert (found.error or "").startswith("over its limit of 3 s")


def test_a_stage_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "ENDING_S", 0.1)
    found = results(tmp_path, "stays", "passes")
    assert (found["stays"].ok, found["passes"].ok) == (False, True)
    assert (found["stays"].error or "").startswith("over its limit of 1 s")


def test_the_budget_cuts_limits_and_skips_visibly(tmp_path: Path) -> None:
    cut = results(tmp_path, "passes", budget_s=50.0)["passes"]
    assert 0 < float(cut.figures["limit"]) <= 50
    skipped = results(tmp_path, "passes", budget_s=2.0)["passes"]
    assert skipped.ok is None
    assert (skipped.error or "").startswith("skipped: 2 s of the budget")
    assert "| passes | skipped |" in (tmp_path / "results.md").read_text()


def test_a_stage_may_run_beside_the_next(tmp_path: Path) -> None:
    found = results(tmp_path, "waits_for_next", "tells_before")
    assert [result.ok for result in found.values()] == [True, True]
    assert found["waits_for_next"].figures == {"told": "begun"}


def test_a_stage_beside_another_has_its_own_limit(tmp_path: Path) -> None:
    found = results(tmp_path, "hangs_beside", "outlives")
    assert (found["hangs_beside"].ok, found["outlives"].ok) == (False, True)
