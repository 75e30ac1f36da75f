"""A plugin of pytest that notes which tests run which lines of some files: `pytest -p tools.covered`.

Tests that fail are left out. What processes do that a test starts is not seen.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from coverage import Coverage

REPORT = "COVERED_REPORT"
"""Environment variable with the path of the report."""
WATCHED = "COVERED_FILES"
"""Environment variable with the files, as PATH lists folders."""


@dataclass(frozen=True)
class TestRun:
    """A test that passes.

    Attributes:
        name: node id.
        seconds: from the start of its setup to the end of its teardown.
        processor_s: the same, in seconds of this process's processors.
        lines: by path, the lines that the test runs.
    """

    __test__ = False

    name: str
    seconds: float
    processor_s: float
    lines: Mapping[str, frozenset[int]]


def read(report: str) -> tuple[TestRun, ...]:
    """The tests of a report's text, in order."""
    found = json.loads(report)
    return tuple(
        TestRun(test["name"], test["seconds"], test["processor_s"], {p: frozenset(n) for p, n in test["lines"].items()})
        for test in found
    )


class Recorder:
    """Records one session of pytest.

    Args:
        report: where the report is written.
        files: paths of the files.
    """

    def __init__(self, report: Path, files: list[str]) -> None:
        self._report = report
        self._coverage = Coverage(data_file=None, config_file=False, include=files, messages=False)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
        self._times: dict[str, tuple[float, float]] = {}
        self._failed = set[str]()

    def pytest_collection_finish(self) -> None:
        """Start to note lines, once the tests are imported."""
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note what one test runs, with its fixtures."""
        self._coverage.switch_context(item.nodeid)
        began = time.monotonic(), time.process_time()
        result = yield
        self._times[item.nodeid] = time.monotonic() - began[0], time.process_time() - began[1]
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note failures."""
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {name: {} for name in self._times}
        for path in sorted(data.measured_files()):
            for line, names in data.contexts_by_lineno(path).items():
                for name in names:
                    if name in lines:
                        lines[name].setdefault(path, []).append(line)
        found = [
            {"name": name, "seconds": seconds, "processor_s": processor_s, "lines": lines[name]}
            for name, (seconds, processor_s) in self._times.items()
            if name not in self._failed
        ]
        self._report.write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(Recorder(Path(os.environ[REPORT]), os.environ[WATCHED].split(os.pathsep)))
