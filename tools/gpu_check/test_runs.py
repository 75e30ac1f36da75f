"""Runs this repository's tests as part of a stage, and reports passed, failed and skipped tests."""

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
_NAMES_TOLD = 8


@dataclass(frozen=True, slots=True)
class PytestRun:
    """Tests to run.

    Attributes:
        tests: files, or node ids of pytest.
        marker: as pytest's `-m`; "": all.
        keyword: as pytest's `-k`; "": all.
        processes: run at the same time; 0: one after the other in pytest's own process.
        environment: variables beside those of this process.
    """

    tests: Sequence[str]
    marker: str = ""
    keyword: str = ""
    processes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, *flags: str) -> list[str]:
        """The call of pytest."""
        chosen = [*(["-m", self.marker] if self.marker else []), *(["-k", self.keyword] if self.keyword else [])]
        chosen += ["-n", str(self.processes)] if self.processes else []
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, *chosen, *self.tests]

    def variables(self) -> dict[str, str]:
        """The environment for pytest, which allows this machine's packages to warn; tests that start pytest do too."""
        return {**os.environ, "PYTEST_ADDOPTS": "-W default", **self.environment}


def run_tests(wanted: Mapping[str, PytestRun], figures: Figures) -> None:
    """Run tests by name, all runs at the same time; the name begins the figures' names.

    Raises:
        CheckError: a test failed, no test passed in a run, or pytest itself failed.
    """
    with tempfile.TemporaryDirectory(prefix="moonpool-tests-") as folder:
        runs = {
            name: _Running(wanted_run, Path(folder) / str(number))
            for number, (name, wanted_run) in enumerate(wanted.items())
        }
        try:
            errors = [running.end(name, figures) for name, running in runs.items()]
        finally:
            for running in runs.values():
                running.close()
    if any(errors):
        raise CheckError("; ".join(filter(None, errors)))


class _Running:
    """A pytest run; the output is printed at the end."""

    def __init__(self, wanted: PytestRun, files: Path) -> None:
        self._report, self._output = files.with_suffix(".xml"), files.with_suffix(".log")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                wanted.command("-v", f"--junitxml={self._report}"),
                env=wanted.variables(),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def end(self, name: str, figures: Figures) -> str | None:
        """Wait for the end, tell what passed, and return what failed."""
        ended = self._process.wait()
        cases = list(ElementTree.parse(self._report).iter("testcase")) if self._report.is_file() else []
        failed = {_title(case) for case in cases if case.find("failure") is not None or case.find("error") is not None}
        skipped = [case for case in cases if case.find("skipped") is not None]
        passed = len({_title(case) for case in cases}) - len(failed) - len(skipped)
        figures[f"{name}: passed"] = passed
        figures.update(
            {told.get("name", ""): told.get("value", "") for case in cases for told in case.iter("property")}
        )
        if skipped:
            reasons = sorted({case.find("skipped").get("message", "") for case in skipped})  # type: ignore[union-attr]
            figures[f"{name}: {len(skipped)} not run"] = f"skipped: {'; '.join(reasons)}"
        if failed:
            more = f" and {len(failed) - _NAMES_TOLD} more" if len(failed) > _NAMES_TOLD else ""
            return f"{name}: {len(failed)} failed: {', '.join(sorted(failed)[:_NAMES_TOLD])}{more}"
        return f"{name}: pytest ended with {ended}, {passed} tests passed" if ended or not passed else None

    def close(self) -> None:
        """End the run if unfinished, and print the output."""
        self._process.kill()
        self._process.wait()
        print(self._output.read_text(errors="replace"), flush=True)


def list_tests(name: str, wanted: PytestRun, figures: Figures) -> None:
    """Find tests without running any, for a run elsewhere.

    Raises:
        CheckError: there is none.
    """
    command = wanted.command("-q", "--collect-only")
    done = subprocess.run(command, env=wanted.variables(), cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode:
        raise CheckError(f"{name}: pytest found no tests, it ended with {done.returncode}")
    figures[f"{name}: found"] = sum("::" in line for line in done.stdout.splitlines())


def _title(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
