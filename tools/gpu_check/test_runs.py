"""Runs tests of this repository as part of a stage, and tells what passed, failed and was skipped."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tools.gpu_check.where import CheckError, Figures

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
ALLOWING_WARNINGS = {"PYTEST_ADDOPTS": "-W default"}
"""Packages of this machine may warn of what those of constraints.txt do not; tests that start pytest take it on."""
_NAMES_TOLD = 8


@dataclass(frozen=True, slots=True)
class PytestRun:
    """Tests to run.

    Attributes:
        tests: files, or node ids of pytest.
        marker: as pytest's `-m`; "": all.
        processes: run at the same time; 0: one after the other in pytest's own process.
        environment: variables beside those of this process.
    """

    tests: Sequence[str]
    marker: str = ""
    processes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def run_tests(name: str, wanted: PytestRun, figures: Figures) -> None:
    """Run tests with the warnings of this machine's packages allowed; `name` begins the figures' names.

    Raises:
        CheckError: a test failed, none passed, or pytest itself failed.
    """
    with tempfile.TemporaryDirectory(prefix="moonpool-tests-") as folder:
        report = Path(folder) / "report.xml"
        command = [*PYTEST, "-v", f"--junitxml={report}", *(["-m", wanted.marker] if wanted.marker else [])]
        command += ["-n", str(wanted.processes)] if wanted.processes else []
        environment = {**os.environ, **ALLOWING_WARNINGS, **wanted.environment}
        done = subprocess.run([*command, *wanted.tests], env=environment, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    failed = [_title(it) for it in cases if it.find("failure") is not None or it.find("error") is not None]
    skipped = [it for it in cases if it.find("skipped") is not None]
    passed = len({_title(it) for it in cases}) - len(set(failed)) - len(skipped)
    figures[f"{name}: passed"] = passed
    if skipped:
        reasons = sorted({it.find("skipped").get("message", "") for it in skipped})  # type: ignore[union-attr]
        figures[f"{name}: {len(skipped)} not run"] = f"skipped: {'; '.join(reasons)}"
    if failed:
        more = f" and {len(failed) - _NAMES_TOLD} more" if len(failed) > _NAMES_TOLD else ""
        raise CheckError(f"{name}: {len(failed)} failed: {', '.join(failed[:_NAMES_TOLD])}{more}")
    if done.returncode or not passed:
        raise CheckError(f"{name}: pytest ended with {done.returncode}, {passed} tests passed")


def list_tests(name: str, wanted: PytestRun, figures: Figures) -> None:
    """Find tests and run none of them, where another run of tests does.

    Raises:
        CheckError: there is none.
    """
    command = [*PYTEST, "-q", "--collect-only", *(["-m", wanted.marker] if wanted.marker else []), *wanted.tests]
    environment = {**os.environ, **ALLOWING_WARNINGS}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode:
        raise CheckError(f"{name}: pytest found no tests, it ended with {done.returncode}")
    figures[f"{name}: found"] = sum("::" in line for line in done.stdout.splitlines())


def _title(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
