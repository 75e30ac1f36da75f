"""Dashboard, rules and docs/monitoring.md name metrics that exist, and the files are what Prometheus takes."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.gen_dashboard import FILE, queries, text
from tools.gen_metrics import PAGE

FOLDER = FILE.parent
ROOT = FOLDER.parents[1]
GUIDE = ROOT / "docs/monitoring.md"
NAME = re.compile(r"\b(?:(?:moonpool_\w+|http_\w+|process_\w+)|vllm:\w+)\b")
LABELS = re.compile(r"\{[^}]*\}|\bby \([^)]*\)")


def rules() -> list[dict[str, Any]]:
    """All recording and alert rules."""
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported() -> set[str]:
    """Names of series that services export, with the suffixes of histograms."""
    found = set()
    for names, kind in re.findall(r"^\| (`[^|]+`) \| (Histogram: )?", PAGE.read_text(), flags=re.MULTILINE):
        suffixes = ("_bucket", "_count", "_sum") if kind else ("",)
        found |= {name + suffix for name in re.findall(r"`([^`]+)`", names) for suffix in suffixes}
    return found


def asked() -> Iterator[tuple[str, str]]:
    """Each query with the place of the query."""
    yield from (("dashboard", query) for query in queries())
    yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())
    yield from (("the guide", query) for query in re.findall(r"`([^`]*\(moonpool_[^`]*)`", GUIDE.read_text()))


def test_every_query_names_series_that_exist() -> None:
    names = {(where, name) for where, query in asked() for name in NAME.findall(LABELS.sub("", query))}
    assert len(names) > 50
    known = exported()
    assert {pair for pair in names if pair[1] not in known} == set()


def test_the_dashboard_is_that_of_the_tool() -> None:
    assert FILE.read_text() == text(), "python -m tools.gen_dashboard writes the dashboard"


def test_every_alert_has_its_words_in_the_guide() -> None:
    headings = re.findall(r"^### (\w+)$", GUIDE.read_text(), flags=re.MULTILINE)
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules() if "alert" in rule}
    assert set(headings) == set(alerts)
    assert all(url == f"docs/monitoring.md#{name.lower()}" for name, url in alerts.items())


@pytest.mark.parametrize(("what", "file"), [("rules", "rules.yaml"), ("config", "prometheus.yaml")])
def test_prometheus_takes_the_files(what: str, file: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    shutil.copytree(FOLDER, tmp_path / "monitoring")
    found = subprocess.run(
        [promtool, "check", what, str(tmp_path / "monitoring" / file)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
