"""The page over kept results."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import ALL, BY_NAME
from benchmarks.page import PAGE, RESULTS, load, machine_class, page, result_path, write


def keep(folder: Path, date: str, ratio: float, *, skipped: str = "") -> None:
    row: dict[str, object] = {
        "name": "a | b",
        "value": ratio * 4,
        "unit": "GB/s",
        "spread": 0.25,
        "limit_name": "raw TCP",
        "limit_value": 4.0,
        "ratio": ratio,
        "target": 0.5,
        "met": ratio >= 0.5,
    }
    result = {
        "benchmark": "kv_stream",
        "date": date,
        "machine": {"processor": "P", "cores": 2},
        "skipped": skipped,
        "rows": [] if skipped else [row],
    }
    (folder / "kv_stream.json").write_text(json.dumps(result))


def test_the_page_shows_each_figure_beside_its_reference(tmp_path: Path) -> None:
    keep(tmp_path, "2026-11-20", 0.6)
    text = write(tmp_path).read_text()
    assert "| a \\| b | 2.4 GB/s | 25 % | raw TCP | 4 | 0.60 | target 0.5 met: 0.6 |" in text
    assert "P, 2 cores; measured 2026-11-20. 0 of 1 targets missed." in text
    assert page(load(tmp_path)) == text
    keep(tmp_path, "2026-11-21", 0.3)
    text = write(tmp_path).read_text()
    assert "| 0.30 | target 0.5 missed: 0.3 |" in text
    assert "measured 2026-11-21. 1 of 1 targets missed." in text


def test_processors_of_one_name_are_apart_by_their_instructions() -> None:
    machines = [
        {"processor": "P", "cores": 2} | more
        for more in ({}, {"instructions": "avx512-bf16"}, {"instructions": "avx2"})
    ]
    named = [machine_class({"machine": machine}) for machine in machines]
    assert named == ["P, 2 cores", "P, 2 cores", "P with avx2, 2 cores"]


def missing(name: str, beside: str, ratio: float, spread: float | None = 0.01) -> dict[str, object]:
    """A row whose target of 0.5 is missed."""
    figures = {"value": 1.0, "unit": "GB/s", "spread": spread, "limit_value": 4.0, "ratio": ratio}
    return {"name": name, "limit_name": beside, "target": 0.5, "met": False} | figures


def results(benchmark: str, date: str, *rows: dict[str, object]) -> list[dict[str, object]]:
    return [{"benchmark": benchmark, "date": date, "skipped": "", "rows": list(rows)}]


def test_every_missed_target_has_a_sentence() -> None:
    rows = [
        missing("DRAM, Put, blocks of 64 KiB", "raw TCP", 0.3),
        missing("DRAM, Get, blocks of 64 KiB", "raw TCP", 0.31),
        missing("something else", "raw TCP", 0.45, spread=0.2),
        missing("something else", "a copy", 0.45, spread=0.01),
        missing("a third", "raw TCP", 0.45, spread=None),
    ]
    text = page(results("kvstore", "2026-11-22", *rows))
    assert "5 of 5 targets missed." in text
    said = text.partition("Missed:\n\n")[2].splitlines()
    assert len(said) == 3
    put, get = (f"*DRAM, {kind}, blocks of 64 KiB* beside raw TCP" for kind in ("Put", "Get"))
    assert said[0].startswith(f"- {put} (0.3 of 0.5), {get} (0.31 of 0.5). gRPC itself")
    within, unknown = "The runs lie farther apart than what is missing.", "The cause is not known."
    assert said[1] == f"- *something else* beside raw TCP (0.45 of 0.5). {within}"
    third = "*a third* beside raw TCP (0.45 of 0.5)"
    assert said[2] == f"- *something else* beside a copy (0.45 of 0.5), {third}. {unknown}"


def test_a_row_says_when_its_spread_is_not_known(tmp_path: Path) -> None:
    keep(tmp_path, "2026-11-20", 0.6)
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    result["rows"][0]["spread"] = None
    assert "| 2.4 GB/s | one run |" in page([result])
    del result["rows"][0]["spread"]
    assert "| 2.4 GB/s | not recorded |" in page([result])


def test_what_was_skipped_is_said(tmp_path: Path) -> None:
    keep(tmp_path, "2026-11-20", 0.6, skipped="torch is not installed")
    assert "Not measured then: torch is not installed." in page(load(tmp_path))


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json"):
        load(tmp_path)


def test_the_kept_page_is_that_of_the_kept_results() -> None:
    assert (RESULTS / PAGE).read_text() == page(load(RESULTS))


def test_the_document_names_every_benchmark_that_can_be_run_and_which_run_by_name_only() -> None:
    text = (RESULTS.parents[1] / "docs" / "measuring.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \|(.*)$", text, re.MULTILINE))
    assert sorted(rows) == sorted([*ALL, *BY_NAME])
    assert [name for name, row in rows.items() if "*by name*" in row] == list(BY_NAME)
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in rows)


def test_results_of_two_processors_are_kept_side_by_side(tmp_path: Path) -> None:
    first = {"processor": "P", "instructions": "avx2", "cores": 2}
    second = first | {"processor": "Q", "instructions": "avx512-bf16-amx"}
    for date, machine in (("2026-11-20", first), ("2026-11-21", second), ("2026-11-22", first)):
        result = {"benchmark": "engine", "date": date, "machine": machine, "rows": []}
        result_path(tmp_path, "engine", machine).write_text(json.dumps(result))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine-avx512-bf16-amx.json", "engine.json"]
    lines = [line for line in page(load(tmp_path)).splitlines() if "measured" in line or line.startswith("## ")]
    assert lines[-3:] == [
        "## engine",
        "P with avx2, 2 cores; measured 2026-11-22.",
        "Q with avx512-bf16-amx, 2 cores; measured 2026-11-21.",
    ]
