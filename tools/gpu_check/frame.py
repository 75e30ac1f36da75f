"""Runs stages as processes, one after the other, and writes what they told after each."""

import ast
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from tools.gpu_check.where import Figure

LEAST_S = 5.0
"""A stage with less time than this, and less than the stage's limit, is skipped."""
ENDING_S = 5.0
"""Seconds in which a stage cleans up after the limit."""
LOG_LINES = 15
"""Last lines of a failed stage's log that stand in results.md."""
STAGES = "tools.gpu_check.stages"


@dataclass(frozen=True, slots=True)
class Stage:
    """A module of stages, read without an import: a missing package fails the stage alone."""

    name: str
    module: str
    proves: str
    limit_s: float
    beside_next: bool

    @classmethod
    def read(cls, package: str, name: str) -> "Stage":
        """Read the docstring, `LIMIT_S` and `BESIDE_NEXT` of a module."""
        path = Path(*package.split("."), f"{name}.py")
        tree = ast.parse((Path(__file__).parents[2] / path).read_text(encoding="utf-8"))
        constants = {
            target.id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in ("LIMIT_S", "BESIDE_NEXT")
        }
        proves = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
        return cls(name, f"{package}.{name}", proves, constants["LIMIT_S"], constants.get("BESIDE_NEXT", False))


@dataclass(frozen=True, slots=True)
class Result:
    """What a stage reported, or a report for a silent stage."""

    stage: str
    ok: bool | None
    """None: skipped."""
    seconds: float
    figures: dict[str, Figure] = field(default_factory=dict)
    error: str | None = None
    log: str = ""
    """All other output of the stage."""

    def line(self) -> str:
        """One JSON line, without the log."""
        names = ("stage", "ok", "seconds", "figures", "error")
        return json.dumps({name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class Options:
    """How the check runs.

    Attributes:
        out: folder of results.json, results.md and logs.txt.
        device: "cuda" or "staged".
        tiny: shapes that take seconds on a CPU.
        budget_s: seconds of all stages; the last ones are cut short or skipped.
        package: holds the stages.
    """

    out: Path
    device: str = "cuda"
    tiny: bool = False
    budget_s: float = float("inf")
    package: str = STAGES


class _Running:
    """A stage's process, and the printed lines."""

    def __init__(self, stage: Stage, options: Options, scratch: Path, limit_s: float) -> None:
        self._stage, self._limit_s, self._began = stage, limit_s, time.monotonic()
        self._log = scratch / f"{stage.name}.log"
        flags = ["--device", options.device, "--out", str(scratch), "--limit", str(limit_s)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", stage.module, *flags, *(["--tiny"] if options.tiny else [])],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a process group, which is ended as a whole
            )

    def result(self) -> Result:
        """Wait until the stage ends or reaches the limit, and end all the stage's processes."""
        late = False
        try:
            told, _ = self._process.communicate(timeout=max(0.0, self._began + self._limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            told = self._ended_early()
        self._signal(signal.SIGKILL)
        log = self._log.read_text(encoding="utf-8", errors="replace")
        seconds = round(time.monotonic() - self._began, 1)
        return self._read(told, late, seconds, log)

    def _ended_early(self) -> bytes:
        self._process.terminate()
        try:
            return self._process.communicate(timeout=ENDING_S)[0]
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            return self._process.communicate()[0]

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _read(self, told: bytes, late: bool, seconds: float, log: str) -> Result:
        try:
            line = json.loads(told.splitlines()[-1])
            figures, ok, error = line["figures"], line["ok"], line["error"]
        except (IndexError, ValueError, KeyError):
            figures, ok, error = {}, False, f"ended with {self._process.returncode} and told nothing"
        if late:
            ok, error = False, f"over its limit of {self._limit_s:.0f} s" + (f": {error}" if error else "")
        return Result(self._stage.name, ok, seconds, figures, error, log)


def run(stages: Sequence[Stage], options: Options) -> list[Result]:
    """Run stages; print a line of each, and write what is known after each."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "logs.txt").write_text("")
    results: list[Result] = []
    order = {stage.name: number for number, stage in enumerate(stages)}
    with tempfile.TemporaryDirectory(prefix="moonpool-gpu-check-") as scratch:
        for result in _results(stages, options, Path(scratch)):
            results = sorted([*results, result], key=lambda result: order[result.stage])
            print(result.line(), flush=True)
            with (options.out / "logs.txt").open("a", encoding="utf-8") as logs:
                logs.write(f"===== {result.stage}\n{result.log}\n")
            _write(results, stages, options)
    return results


def _results(stages: Sequence[Stage], options: Options, scratch: Path) -> Iterator[Result]:
    end = time.monotonic() + options.budget_s
    beside: list[_Running] = []
    for stage in stages:
        left = end - time.monotonic()
        if left < min(LEAST_S, stage.limit_s):
            yield Result(stage.name, None, 0.0, error=f"skipped: {max(0.0, left):.0f} s of the budget are left")
            continue
        beside.append(_Running(stage, options, scratch, min(stage.limit_s, left)))
        if not stage.beside_next:
            yield from _ended(beside)
            beside = []
    yield from _ended(beside)


def _ended(beside: Sequence[_Running]) -> Iterator[Result]:
    """Results of stages that run at the same time, as they end; each stage has a separate limit."""
    with ThreadPoolExecutor(max(1, len(beside))) as threads:
        for waiting in as_completed([threads.submit(running.result) for running in beside]):
            yield waiting.result()


def _write(results: Sequence[Result], stages: Sequence[Stage], options: Options) -> None:
    told = {"device": options.device, "tiny": options.tiny, "machine": platform.node(), "date": time.strftime("%F %T")}
    lines = [json.loads(result.line()) for result in results]
    (options.out / "results.json").write_text(json.dumps({**told, "stages": lines}, indent=1) + "\n")
    (options.out / "results.md").write_text(page(results, stages, f"{told['date']}, device {options.device}"))


def page(results: Sequence[Result], stages: Sequence[Stage], title: str) -> str:
    """Results as a Markdown page: a table with all stages, then each stage's figures."""
    proves = {stage.name: stage.proves for stage in stages}
    words = {True: "passed", False: "**failed**", None: "skipped"}
    rows = [
        f"| {result.stage} | {words[result.ok]} | {result.seconds} | {result.error or ''} |".replace("\n", " ")
        for result in results
    ]
    parts = [f"# GPU check, {title}", "", "| stage | result | s | error |", "|---|---|--:|---|", *rows]
    for result in results:
        parts += ["", f"## {result.stage}", "", proves[result.stage], *_figures(result)]
    return "\n".join(parts) + "\n"


def _figures(result: Result) -> Iterator[str]:
    short = {name: figure for name, figure in result.figures.items() if "\n" not in str(figure)}
    if short:
        yield from ("", "| figure | |", "|---|--:|", *(f"| {name} | {figure} |" for name, figure in short.items()))
    for name, figure in result.figures.items():
        if name not in short:
            yield from ("", f"{name}:", "", "```", str(figure).rstrip(), "```")
    if result.ok is False:
        last = result.log.rstrip().splitlines()[-LOG_LINES:]
        yield from ("", result.error or "", "", "```", *last, "```")
