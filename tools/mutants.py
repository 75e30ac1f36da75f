"""Mutation runs: `python -m tools.mutants` changes one operator, condition or statement at a time and runs the tests.

The modules are those that verify KV, keep leases, resume streams, keep tenants apart, sync disks, share work by turns
of tenants, bound what a peer may cost, and read what comes from elsewhere. A mutant is noticed if a test fails or
hangs. Each mutant is tried in a copy of the tree, so that child processes run it, too.
Mutants and their order follow from the seed.

Only unit tests that run the changed line are tried. They come from files that import the module, directly or by way of
other modules. Files that import the module itself come first; then, the fewer modules lie between and the more words
the names share, the sooner a file is looked at. Later
files are looked at only if the tests of earlier ones pass, and once all mutants were
tried with the first file. Each file runs once without a mutation; `tools.covered` notes which tests run which lines.
A test that takes too long, or fails without a mutation, is left out. All runs are forks (`tools.preloaded`).

Mutants in `EQUIVALENT` change nothing that a caller can see. They are not tried.

With `--resume FILE` a run notes each verdict in the file. A later run tries none of these again, as long as the module
is the same; but survivors are tried again, as tests may have come. What test files do without a mutation is kept in
the folder `FILE.runs`, as long as the file and the modules are the same.
"""

import argparse
import ast
import hashlib
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tools import covered, preloaded
from tools.covered import TestRun
from tools.house import Source, imports, sources

ROOT = Path(__file__).parents[1]
RULES: Mapping[str, tuple[str, ...]] = {
    "verification": (
        "moonpool.base.kv.blocks",
        "moonpool.base.kv.frames",
        "moonpool.base.kv.native_copy",
        "moonpool.base.kv_transfer.blocking",
        "moonpool.base.kv_transfer.prefix_reader",
        "moonpool.base.kv_transfer.inbound_transfer",
        "moonpool.base.kv_transfer.slice_bitmap",
        "moonpool.kvstore.ssd.reader",
        "moonpool.kvstore.ssd.records",
    ),
    "lease": (
        "moonpool.base.scheduling.block_lending",
        "moonpool.base.scheduling.block_manager",
        "moonpool.kvstore.core.read_leases",
        "moonpool.kvstore.core.store",
        "moonpool.kvstore.core.put_transfer",
        "moonpool.kvstore.core.put_transfers",
    ),
    "resume": (
        "moonpool.client.token_stream",
        "moonpool.engine.decode.core.scheduler",
        "moonpool.engine.decode.live_requests",
    ),
    "tenant": (
        "moonpool.base.rpc.api_keys",
        "moonpool.base.rpc.roles",
        "moonpool.base.scheduling.budgets",
        "moonpool.base.scheduling.fair_share",
        "moonpool.conductor.core.memory_queue",
        "moonpool.conductor.core.slo_queue",
        "moonpool.conductor.core.tenant_counts",
        "moonpool.conductor.core.tenant_ledger",
        "moonpool.gateway.endpoints.cluster",
        "moonpool.gateway.serving.auth",
        "moonpool.gateway.serving.budgets",
        "moonpool.kvstore.eviction.retention",
        "moonpool.kvstore.eviction.tenants",
    ),
    "turns": (
        "moonpool.base.runtime.tenant_turns",
        "moonpool.conductor.picker_body",
        "moonpool.gateway.batches.lines",
        "moonpool.gateway.batches.runner",
        "moonpool.gateway.serving.client_watch",
        "moonpool.gateway.serving.markdown",
        "moonpool.gateway.serving.merged_stream",
        "moonpool.gateway.serving.tokenizer",
    ),
    "bounds": (
        "moonpool.base.checkpoint.token_bytes",
        "moonpool.base.json_parts",
        "moonpool.base.malloc",
        "moonpool.base.rpc.messages",
        "moonpool.base.rpc.peer_calls",
        "moonpool.base.telemetry.metrics_server",
        "moonpool.gateway.batches.store",
        "moonpool.gateway.http_connection",
        "moonpool.gateway.serving.body_limits",
        "moonpool.gateway.serving.body_reader",
        "moonpool.gateway.serving.cluster_state",
        "moonpool.gateway.serving.scrapes",
        "moonpool.interop.adapter.checked_client",
        "moonpool.interop.indexer.slow_clients",
    ),
    "elsewhere": (
        "moonpool.base.checkpoint.template_sandbox",
        "moonpool.base.kv.media",
        "moonpool.base.native.build",
        "moonpool.base.pictures.file_process",
        "moonpool.base.pictures.files",
        "moonpool.base.runtime.core_classes",
        "moonpool.base.runtime.core_codec",
        "moonpool.base.runtime.journal",
        "moonpool.cli.running_stacks",
        "moonpool.gateway.serving.picture_fetch",
    ),
    "sync": (
        "moonpool.kvstore.ssd.files",
        "moonpool.kvstore.ssd.catalogue",
        "moonpool.kvstore.ssd.disk_index",
        "moonpool.kvstore.ssd.index",
        "moonpool.kvstore.ssd.recovery",
        "moonpool.kvstore.ssd.tier",
    ),
}
"""Modules by the kind of rule they keep."""
WANTED = 0.95
"""Share of mutants that tests should notice."""
UNTESTED = ("__repr__", "check_invariants", "describe", "digest", "state")
"""Functions for people and for checks; a mutation there breaks no rule."""
TEST_S = 20.0
"""Most processor seconds of a test; others are left out."""
SOON_WAVES = 1
"""Waves of test files that are run for all mutants before any is tried with later files; most are noticed by then."""
SELECTION_S = 90.0
"""Processor seconds of the test files that are looked at for a mutant; more files are left out."""
TRIED_S = 30.0
"""Usual seconds of the tests that run for a mutant at once; more tests are left out."""
SLOW_S = 600.0
"""Seconds after which tests count as hanging. pytest ends a test that waits before that."""
HANG_S = 10.0
"""Processor seconds beyond three times the usual ones after which tests hang, whatever else the machine does."""
MEMORY_BYTES = 8 << 30
"""Most memory of a process of a test: a mutant may never stop to allocate."""

_ROOT = "<root>"
"""Stands for the copy's folder in what is kept of test files."""
_PREPARES = "`expect` only prepares: without, `_all` finds the same memory"
EQUIVALENT: Mapping[str, str] = {
    "moonpool.base.kv.frames: slices > MAX_FRAME_SLICES -> (slices >= MAX_FRAME_SLICES)": (
        "a frame without a shape is read run by run, to the same memory"
    ),
    "moonpool.base.kv_transfer.prefix_reader: nbytes <= FRAME_BYTES -> (nbytes < FRAME_BYTES)": _PREPARES,
    "moonpool.base.kv_transfer.prefix_reader: slices <= MAX_FRAME_SLICES -> (slices < MAX_FRAME_SLICES)": _PREPARES,
    "moonpool.base.kv_transfer.slice_bitmap: key[1] < blocks -> (key[1] <= blocks)": (
        "no part of a block that is not expected any more is looked at"
    ),
    "moonpool.base.kv_transfer.slice_bitmap: run.head_begin - self._heads.start"
    " -> (run.head_begin + self._heads.start)": ("all bits of a cell move by the same number of places"),
    'moonpool.base.checkpoint.template_sandbox: getattr(_spent, "steps", 0) + 1 -> (getattr(_spent, "steps", 0) - 1)': (
        "steps are counted to look at the clock after each so many, whichever way they are counted"
    ),
    "moonpool.base.checkpoint.template_sandbox: summed.set_environment(node.environment) -> pass": (
        "the compiler computes constants with its own environment"
    ),
    "moonpool.base.json_parts: 0 -> 1": "of a text with too many strings the other parts count no more",
    "moonpool.base.native.build: 24 -> 25": "a folder's name has enough of the hash either way",
    "moonpool.gateway.http_connection: world.monotonic() < until -> (world.monotonic() <= until)": (
        "at the very moment at which a turn ends, one more piece may be parsed"
    ),
    "moonpool.kvstore.core.read_leases: len(held) < len(keys) -> (len(held) <= len(keys))": (
        "if all blocks are in DRAM none comes from SSD, so nothing is evicted whether they are held or not"
    ),
    "moonpool.kvstore.ssd.records: len(data) < _FIXED.size -> (len(data) <= _FIXED.size)": (
        "a header has a page at least, so data that short are a bad record either way"
    ),
    "moonpool.kvstore.ssd.segment_files: found.nbytes <= SMALL_BYTES -> (found.nbytes < SMALL_BYTES)": (
        "how much is read ahead changes no record that is found"
    ),
    "moonpool.kvstore.ssd.recovery: size < image.segments.get(number, 0) -> (size <= image.segments.get(number, 0))": (
        "of a segment as long as was committed, the index calls each record dead that ends beyond, or does not load it"
    ),
}
"""By `Mutant.name`, why no caller can see the change."""

_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
"""Comparisons, and what replaces each."""
_ARITHMETIC: Mapping[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.FloorDiv: "*", ast.Mult: "//"}


class Verdict(Enum):
    """What the tests make of a mutant."""

    NOTICED = "noticed"
    HANGS = "hangs"
    SURVIVES = "SURVIVES"
    NOT_RUN = "NOT RUN"
    """No test runs the line."""

    @property
    def is_noticed(self) -> bool:
        """Whether a test fails or hangs with the mutation."""
        return self in (Verdict.NOTICED, Verdict.HANGS)


@dataclass(frozen=True)
class Mutant:
    """A module with one place changed.

    Attributes:
        module: dotted name.
        line: of the changed place.
        before: source of the place.
        after: what replaces it.
        start: offset of the place in the source's UTF-8 bytes.
        statement: first line of the statement with the place.
    """

    module: str
    line: int
    before: str
    after: str
    start: int
    statement: int

    @property
    def name(self) -> str:
        """The module and the change, whatever the line."""
        before, after = (" ".join(part.split()) for part in (self.before, self.after))
        return f"{self.module}: {before} -> {after}"

    def applied(self, text: str) -> str:
        """The module's source with the change."""
        data, end = text.encode(), self.start + len(self.before.encode())
        return (data[: self.start] + self.after.encode() + data[end:]).decode()

    def __str__(self) -> str:
        before, after = (" ".join(part.split()) for part in (self.before, self.after))
        return f"{self.module}:{self.line}: {_cut(before)} -> {_cut(after)}"


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass
class _Finder(ast.NodeVisitor):
    """Collects the mutants of one module."""

    module: str
    text: str
    found: list[Mutant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._data = self.text.encode()
        self._statement = 1
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def mutants(self) -> list[Mutant]:
        """All mutants, in the order of the source."""
        for node in ast.parse(self.text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(node)
        return sorted(self.found, key=lambda mutant: (mutant.start, mutant.before, mutant.after))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(child)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name not in UNTESTED:
            for child in node.body:
                self.visit(child)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> None:
        del node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_logging(node.value):
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self._add(node, "pass")

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            self._add(node.value, str(not node.value.value))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._add(node, f"({word.join(f'({self._source(value)})' for value in node.values)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"bool({self._source(node.operand)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        parts = [self._operand(side) for side in (node.left, *node.comparators)]
        for index, op in enumerate(node.ops):
            words = [_COMPARISONS[type(op)][0] for op in node.ops]
            words[index] = _COMPARISONS[type(op)][1]
            pieces = [parts[0], *(f"{word} {part}" for word, part in zip(words, parts[1:], strict=True))]
            self._add(node, f"({' '.join(pieces)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        word = _ARITHMETIC.get(type(node.op))
        if word is not None and not _is_text(node.left) and not _is_text(node.right):
            self._add(node, f"({self._operand(node.left)} {word} {self._operand(node.right)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add(node, str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        del node

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.NamedExpr):
            self._add(test, f"(not ({self._source(test)}))")

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _source(self, node: ast.expr | ast.stmt) -> str:
        end = self._lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return self._data[self._start(node) : end].decode()

    def _operand(self, node: ast.expr) -> str:
        """Source that stays together whatever operator stands beside."""
        whole = ast.Attribute | ast.Call | ast.Constant | ast.Name | ast.Subscript | ast.UnaryOp
        return self._source(node) if isinstance(node, whole) else f"({self._source(node)})"

    def _add(self, node: ast.expr | ast.stmt, after: str) -> None:
        source, start = self._source(node), self._start(node)
        self.found.append(Mutant(self.module, node.lineno, source, after, start, self._statement))


def _is_logging(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "logging.", "warnings."))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutants_of(source: Source) -> list[Mutant]:
    """All mutants of a module, in the order of the source. A few are no valid Python."""
    return _Finder(source.module, source.text).mutants()


def drawn(files: Sequence[Source], modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` valid mutants of the modules, or all if there are fewer: every mutant is as likely."""
    texts = {source.module: source.text for source in files if source.module in modules}
    found = [mutant for source in files if source.module in texts for mutant in mutants_of(source)]
    random.Random(seed).shuffle(found)
    tried = (mutant for mutant in found if mutant.name not in EQUIVALENT)
    valid = (mutant for mutant in tried if _is_valid(mutant.applied(texts[mutant.module])))
    return list(itertools.islice(valid, count))


def _is_valid(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def selections(files: Sequence[Source], modules: Collection[str]) -> dict[str, list[str]]:
    """By module, paths of test files that import it, directly or not; those that speak to it most come first."""
    importers: dict[str, set[str]] = {}
    for name, targets in imports(files).items():
        for target in targets:
            importers.setdefault(target, set()).add(name)
    return {module: _selection(files, importers, module) for module in modules}


def _selection(files: Sequence[Source], importers: Mapping[str, set[str]], module: str) -> list[str]:
    distance, reached = {module: 0}, [module]
    for name in reached:
        for importer in sorted(importers.get(name, set()) - distance.keys()):
            distance[importer] = distance[name] + 1
            reached.append(importer)
    tests = [file for file in files if file.module in distance and _is_seen(file)]
    return [
        test.path
        for test in sorted(
            tests,
            key=lambda test: (
                distance[test.module] > 1,
                distance[test.module] - _common_words(test.module, module),
                test.path,
            ),
        )
    ]


def _is_seen(source: Source) -> bool:
    """Whether the file has unit tests: most others run the code in other processes, whose lines are not seen."""
    return source.module.startswith("tests.unit.") and Path(source.path).name.startswith("test_")


def _common_words(test: str, module: str) -> int:
    """Words that two names share; those of the module's own name count more than those of its packages."""
    words, (packages, _, own) = _words(test), module.rpartition(".")
    return len(words & _words(packages)) + 3 * len(words & _words(own))


def _words(name: str) -> set[str]:
    """Words in the singular."""
    return {word.removesuffix("s") for word in name.replace("_", ".").split(".")}


@dataclass(frozen=True)
class FileRun:
    """What a test file does without a mutation.

    Attributes:
        processor_s: seconds of a processor.
        tests: those that pass, in order.
    """

    processor_s: float
    tests: tuple[TestRun, ...]


class Copy:
    """A copy of the tree, in which mutants are tried."""

    def __init__(self, files: Sequence[Source], runs: Path | None = None) -> None:
        """`runs`: a folder in which is kept what test files do without a mutation."""
        self._writes = 0
        self._kept_runs = runs
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        self._scratch = Path(self._folder.name, "tmp")
        self.root = Path(self._folder.name, "tree")
        self._files = {source.module: source for source in files}
        self._runs: dict[str, FileRun] = {}
        self._watched = [str(self.root / self._files[name].path) for names in RULES.values() for name in names]
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for path in filter(None, listed):
            if (ROOT / path).is_file():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, self.root / path)

    def close(self) -> None:
        """Delete the copy."""
        self._folder.cleanup()

    def file_runs(self, files: Sequence[str]) -> list[FileRun]:
        """What test files do without a mutation; no test of files that take too long."""
        new = [file for file in files if file not in self._runs and not self._read_kept(file)]
        if not self._note_runs(new):
            for file in new:
                if len(new) == 1 or not self._note_runs([file]):
                    self._keep(file, SLOW_S, [])
        return [self._runs[file] for file in files]

    def _note_runs(self, files: Sequence[str]) -> bool:
        """Run files together, and note what they do; False if they do not come to their end."""
        if not files:
            return True
        began, report = _children_s(), self.root / "covered.json"
        report.unlink(missing_ok=True)
        watched = {covered.REPORT: str(report), covered.WATCHED: os.pathsep.join(self._watched)}
        self._run(["-p", "tools.covered", *files], SLOW_S, watched)
        if not report.exists():
            return False
        found = json.loads(report.read_text(encoding="utf-8"))
        took_s, seconds = _children_s() - began, sum(test["seconds"] for test in found)
        for file in files:
            tests = [test for test in found if test["name"].partition("::")[0] == file]
            share = sum(test["seconds"] for test in tests) / seconds if seconds else 1.0
            self._keep(file, took_s * share, tests)
        return True

    def _keep(self, file: str, processor_s: float, tests: list[dict[str, Any]]) -> None:
        text = json.dumps(tests).replace(str(self.root), _ROOT)
        if (kept := self._kept_run(file)) is not None:
            kept.write_text(json.dumps([processor_s, text]), encoding="utf-8")
        self._runs[file] = self._read_run(processor_s, text)

    def _read_kept(self, file: str) -> bool:
        """Take what an earlier run of this program has kept of a file; returns whether there was anything."""
        kept = self._kept_run(file)
        if kept is None or not kept.exists():
            return False
        self._runs[file] = self._read_run(*json.loads(kept.read_text(encoding="utf-8")))
        return True

    def _read_run(self, processor_s: float, text: str) -> FileRun:
        tests = covered.read(text.replace(_ROOT, str(self.root)))
        return FileRun(processor_s, tuple(test for test in tests if test.processor_s <= TEST_S))

    def _kept_run(self, test: str) -> Path | None:
        """Where it is kept what a test file does, with these modules."""
        if self._kept_runs is None:
            return None
        self._kept_runs.mkdir(parents=True, exist_ok=True)
        paths = [self.root / test, *map(Path, self._watched)]
        state = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
        return self._kept_runs / f"{test.replace('/', '.')}-{state}.json"

    def try_out(self, mutant: Mutant, files: Sequence[str], *, soon: bool) -> Verdict:
        """Run the tests that run the mutant's line; those of later files only if those of earlier ones pass.

        `soon`: those of the first files only; else those of the others.
        """
        verdict = Verdict.NOT_RUN
        for runs in itertools.islice(self.waves(files), *((SOON_WAVES,) if soon else (SOON_WAVES, None))):
            tests = covering(runs, str(self.root / self._files[mutant.module].path), mutant)
            if tests:
                verdict = self._try(mutant, tests)
            if verdict.is_noticed:
                break
        return verdict

    def waves(self, files: Sequence[str]) -> Iterator[list[FileRun]]:
        """One file, two, four, and then four at once: until they take `SELECTION_S` together."""
        rest, total = list(files), 0.0
        for size in itertools.chain((1, 2), itertools.repeat(4)):
            if not rest or total >= SELECTION_S:
                return
            runs, rest = self.file_runs(rest[:size]), rest[size:]
            total += sum(run.processor_s for run in runs)
            yield runs

    def _try(self, mutant: Mutant, tests: Sequence[TestRun]) -> Verdict:
        source = self._files[mutant.module]
        path = self.root / source.path
        self._write(path, mutant.applied(source.text))
        try:
            limit_s = 3 * sum(test.processor_s for test in tests) + HANG_S
            return self._run(["-x", *(test.name for test in tests)], limit_s)
        finally:
            self._write(path, source.text)

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own, so that bytecode of another mutant is not taken for its bytecode."""
        self._writes += 1
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self._writes, self._writes))

    def _run(self, arguments: Sequence[str], processor_s: float, more: Mapping[str, str] | None = None) -> Verdict:
        environment = {**os.environ, "PYTHONPATH": str(self.root), "TMPDIR": str(self._scratch), **(more or {})}
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        self._scratch.mkdir()
        limits = {resource.RLIMIT_DATA: MEMORY_BYTES, resource.RLIMIT_CPU: math.ceil(processor_s)}
        status = preloaded.wait(preloaded.start([*options, *arguments], self.root, environment, limits), SLOW_S)
        shutil.rmtree(self._scratch, ignore_errors=True)  # tests that were killed leave files
        if status == 0:
            return Verdict.SURVIVES
        return Verdict.HANGS if status in (None, -signal.SIGXCPU, -signal.SIGKILL) else Verdict.NOTICED


def _children_s() -> float:
    """Processor seconds of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def covering(runs: Sequence[FileRun], path: str, mutant: Mutant) -> list[TestRun]:
    """The fastest tests that run a mutant's line, or else its statement, up to `TRIED_S`; the fastest file's first."""
    for line in dict.fromkeys((mutant.line, mutant.statement)):
        found = [[test for test in run.tests if line in test.lines.get(path, ())] for run in runs]
        fastest = sorted(itertools.chain(*found), key=lambda test: test.seconds)
        total = itertools.accumulate(test.seconds for test in fastest)
        chosen = {test.name for test, until in zip(fastest, total, strict=True) if until - test.seconds < TRIED_S}
        if chosen:
            return [test for tests in sorted(found, key=_seconds) for test in tests if test.name in chosen]
    return []


def _seconds(tests: Sequence[TestRun]) -> float:
    return sum(test.seconds for test in tests)


class Notes:
    """Verdicts of earlier runs, in a file with a JSON list a line: the mutant's key, and the verdict."""

    def __init__(self, path: Path | None, files: Sequence[Source]) -> None:
        """`path`: the file, which may be missing; None = nothing is noted."""
        self._path = path
        self._hashes = {source.module: hashlib.sha256(source.text.encode()).hexdigest()[:16] for source in files}
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._verdicts = {key: Verdict(verdict) for key, verdict in map(json.loads, lines)}

    def noticed(self, mutant: Mutant) -> Verdict | None:
        """The verdict of a mutant that was noticed earlier."""
        verdict = self._verdicts.get(self._key(mutant))
        return verdict if verdict is not None and verdict.is_noticed else None

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        """Note a verdict."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([self._key(mutant), verdict.value]) + "\n")

    def _key(self, mutant: Mutant) -> str:
        return f"{self._hashes[mutant.module]} {mutant.start} {mutant.name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Try mutants; print each survivor and the share noticed. Exit with 1 if the share is below `WANTED`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=200, help="mutants to try")
    parser.add_argument("--rule", choices=sorted(RULES), action="append", help="only modules of these rules")
    parser.add_argument("--module", action="append", help="only these modules, by dotted name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no mutant is begun after so long")
    parser.add_argument("--resume", type=Path, help="file of verdicts: what it says was noticed is not tried again")
    options = parser.parse_args(argv)
    modules = options.module or [name for rule in options.rule or sorted(RULES) for name in RULES[rule]]
    files = sources(ROOT)
    mutants = drawn(files, modules, options.count, options.seed)
    preloaded.prepare()
    print(f"seed {options.seed}: {len(mutants)} mutants of {len(modules)} modules", flush=True)
    ends_at = time.monotonic() + options.seconds
    notes = Notes(options.resume, files)
    verdicts = {mutant: verdict for mutant in mutants if (verdict := notes.noticed(mutant)) is not None}
    copy = Copy(files, Path(f"{options.resume}.runs") if options.resume else None)
    chosen = selections(files, {mutant.module for mutant in mutants})
    left = [mutant for mutant in mutants if mutant not in verdicts]
    first = dict[Mutant, Verdict]()
    try:
        for soon in (True, False):
            for mutant in left:
                if time.monotonic() >= ends_at:
                    break
                verdict = copy.try_out(mutant, chosen[mutant.module], soon=soon)
                if soon and not verdict.is_noticed:
                    first[mutant] = verdict
                    continue
                verdicts[mutant] = first[mutant] if verdict is Verdict.NOT_RUN else verdict
                notes.add(mutant, verdicts[mutant])
                print(f"{verdicts[mutant].value:8} {mutant}", flush=True)
            left = list(first)
    finally:
        copy.close()
    return _report(first | verdicts)  # what there was no time for counts as it is so far


def _report(verdicts: Mapping[Mutant, Verdict]) -> int:
    survivors = [mutant for mutant, verdict in verdicts.items() if not verdict.is_noticed]
    tried, left = Counter(mutant.module for mutant in verdicts), Counter(mutant.module for mutant in survivors)
    width = max(map(len, tried), default=0)
    print(f"\n{'module':{width}}  tried  survive")
    for module in sorted(tried):
        print(f"{module:{width}}  {tried[module]:5}  {left[module]:7}")
    for mutant in survivors:
        print(f"{verdicts[mutant].value}: {mutant}")
    total = len(verdicts)
    share = 1 - len(survivors) / total if total else 0.0
    print(f"{total - len(survivors)} of {total} mutants noticed: {share:.1%} ({WANTED:.0%} wanted)")
    return int(share < WANTED)


if __name__ == "__main__":
    sys.exit(main())
