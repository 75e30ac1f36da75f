"""`tools.mutants` changes one place at a time, draws by seed, and runs the tests that run the line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import covered
from tools.covered import TestRun
from tools.house import Source
from tools.mutants import EQUIVALENT, ROOT, FileRun, Notes, Verdict, covering, drawn, mutants_of, selections

TEXT = '''"""A module."""
LIMIT = 3


class Lease:
    """Until when."""

    def is_over(self, now: float) -> bool:
        if self.pinned and now < self.until:
            log.info("still on", count=7)
            return False
        if not self.owners:
            raise ValueError("nobody has it, for " + "1")
        self.renewals += 1
        self.close()
        assert now > 0
        return "é" in self.name

    def digest(self) -> bytes:
        return digest_of(1 + 2)
'''


def changes(text: str) -> list[tuple[int, str, str]]:
    """Line, and what becomes of it, of all mutants of a module."""
    found = []
    for mutant in mutants_of(Source("moonpool/lease.py", text)):
        before, after = text.splitlines(), mutant.applied(text).splitlines()
        [line] = [number for number in range(len(before)) if before[number] != after[number]]
        found.append((mutant.line, before[line].strip(), after[line].strip()))
    return found


def test_each_place_is_changed_alone() -> None:
    assert [(line, after) for line, _, after in changes(TEXT)] == [
        (9, "if ((self.pinned) or (now < self.until)):"),
        (9, "if (not (self.pinned and now < self.until)):"),
        (9, "if self.pinned and (now <= self.until):"),
        (11, "return True"),
        (12, "if bool(self.owners):"),
        (13, "pass"),
        (14, "pass"),
        (14, "self.renewals += 2"),
        (15, "pass"),
        (17, 'return ("é" not in self.name)'),
    ]


def test_what_stands_behind_other_than_ascii_is_changed_in_its_place() -> None:
    assert changes('def f(a: str) -> bool:\n    return a == "é" or a == "b"\n')[-1] == (
        2,
        'return a == "é" or a == "b"',
        'return a == "é" or (a != "b")',
    )


def test_a_comparison_of_several_is_changed_at_each_sign() -> None:
    found = [after for _, _, after in changes("def f(a: int) -> bool:\n    return 0 < a <= b\n")]
    assert found == ["return 1 < a <= b", "return (0 < a < b)", "return (0 <= a <= b)"]


def test_operands_stay_together() -> None:
    found = [after for _, _, after in changes("def f(a: int) -> bool:\n    return (a << b) - c > (d := a)\n")]
    assert found == ["return ((a << b) + c) > (d := a)", "return (((a << b) - c) >= (d := a))"]


@pytest.mark.parametrize("name", EQUIVALENT)
def test_mutants_without_an_effect_are_mutants_still(name: str) -> None:
    """An entry for code that is gone would stay unseen."""
    module, _, _ = name.partition(":")
    path = f"{module.replace('.', '/')}.py"
    source = Source(path, (ROOT / path).read_text(encoding="utf-8"))
    assert name in [mutant.name for mutant in mutants_of(source)]


def test_mutants_without_an_effect_are_not_drawn() -> None:
    source = Source("moonpool/base/kv/frames.py", "def f(slices: int) -> bool:\n    return slices > MAX_FRAME_SLICES\n")
    assert mutants_of(source)
    assert not drawn([source], [source.module], 9, seed=1)


def test_one_seed_draws_the_same_mutants() -> None:
    files = [Source("moonpool/lease.py", TEXT), Source("moonpool/other.py", TEXT)]
    modules = ["moonpool.lease", "moonpool.other"]
    first = drawn(files, modules, 8, seed=1)
    assert first == drawn(files, modules, 8, seed=1)
    assert first != drawn(files, modules, 8, seed=2)
    assert len(set(first)) == 8
    assert {mutant.module for mutant in drawn(files, ["moonpool.other"], 99, seed=1)} == {"moonpool.other"}


def test_no_mutant_is_invalid() -> None:
    text = "def f(a: int) -> str:\n    match a:\n        case 1:\n            return f'{a}'\n    return 'x' * 2\n"
    for mutant in drawn([Source("moonpool/lease.py", text)], ["moonpool.lease"], 99, seed=1):
        compile(mutant.applied(text), "lease", "exec")


def test_what_was_noticed_is_not_tried_again_while_the_module_is_the_same(tmp_path: Path) -> None:
    before, path = Source("moonpool/lease.py", TEXT), tmp_path / "verdicts.jsonl"
    first, second, third = mutants_of(before)[:3]
    notes = Notes(path, [before])
    for mutant, verdict in ((first, Verdict.SURVIVES), (second, Verdict.NOTICED), (third, Verdict.HANGS)):
        assert notes.noticed(mutant) is None
        notes.add(mutant, verdict)
    again = Notes(path, [before])
    assert [again.noticed(mutant) for mutant in (first, second, third)] == [None, Verdict.NOTICED, Verdict.HANGS]
    again.add(first, Verdict.NOTICED)
    assert Notes(path, [before]).noticed(first) is Verdict.NOTICED
    changed = Source("moonpool/lease.py", TEXT + "\n")
    assert Notes(path, [changed]).noticed(second) is None
    Notes(None, [before]).add(first, Verdict.NOTICED)


def test_tests_that_speak_to_a_module_come_first() -> None:
    files = [
        Source("moonpool/base/kv/lease.py", ""),
        Source("moonpool/base/kv/store.py", "from moonpool.base.kv.lease import Lease\n"),
        Source("moonpool/base/kv/other.py", ""),
        Source("tests/unit/helpers.py", "from moonpool.base.kv import store\n"),
        Source("tests/unit/base/kv/test_lease.py", "from moonpool.base.kv.lease import Lease\n"),
        Source("tests/unit/base/kv/test_store.py", "from moonpool.base.kv import store\n"),
        Source("tests/unit/test_far.py", "from .helpers import f\n"),
        Source("tests/unit/rpc/test_leases.py", "from moonpool.base.kv.lease import Lease\n"),
        Source("tests/unit/base/kv/test_kept.py", "from moonpool.base.kv.lease import Lease\n"),
        Source("tests/unit/test_other.py", "from moonpool.base.kv import other\n"),
    ]
    assert selections(files, ["moonpool.base.kv.lease"])["moonpool.base.kv.lease"] == [
        "tests/unit/base/kv/test_lease.py",
        "tests/unit/rpc/test_leases.py",
        "tests/unit/base/kv/test_kept.py",
        "tests/unit/base/kv/test_store.py",
        "tests/unit/test_far.py",
    ]


def run_of(name: str, seconds: float, *lines: int) -> TestRun:
    return TestRun(name, seconds, seconds, {"lease.py": frozenset(lines)})


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (3, ["fast", "slow"]),  # the faster file first
        (4, ["fast", "other", "slow", "short"]),  # not more than some seconds of tests: the shortest
        (8, []),
    ],
)
def test_tests_that_run_the_line_are_tried(line: int, wanted: list[str]) -> None:
    text = "def f(a: int) -> bool:\n    g()\n    a += 1\n    return a > 1\n\n\n\n    a = 2\n"
    found = mutants_of(Source("moonpool/lease.py", text))
    mutant = next(mutant for mutant in found if mutant.line == line)
    slow = FileRun(40.0, (run_of("slow", 20.0, 1, 3, 4), run_of("slower", 20.0, 4), run_of("short", 9.0, 4)))
    fast = FileRun(2.0, (run_of("fast", 1.0, 2, 3, 4), run_of("other", 1.0, 4)))
    assert [test.name for test in covering([slow, fast], "lease.py", mutant)] == wanted


def test_a_part_of_a_statement_is_run_with_the_statement() -> None:
    [mutant] = mutants_of(Source("moonpool/lease.py", "def f(a: int) -> int:\n    return g(\n        a - b,\n    )\n"))
    assert [test.name for test in covering([FileRun(1.0, (run_of("one", 1.0, 2),))], "lease.py", mutant)] == ["one"]


def test_lines_are_those_that_each_test_runs(tmp_path: Path) -> None:
    (tmp_path / "lease.py").write_text("def f(a):\n    if a:\n        return 1\n    return 2\n")
    (tmp_path / "test_lease.py").write_text(
        "import lease, pytest\n"
        "@pytest.fixture\ndef two():\n    return lease.f(0)\n"
        "async def test_one():\n    assert lease.f(1) == 1\n"
        "def test_two(two):\n    assert two == 2\n"
        "def test_wrong(two):\n    assert two == 1\n"
    )
    report = tmp_path / "covered.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(covered.__file__).parents[1])]),
        covered.REPORT: str(report),
        covered.WATCHED: str(tmp_path / "lease.py"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.covered"]
    options = ["-o", "asyncio_mode=auto", "test_lease.py"]
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    first, second = covered.read(report.read_text(encoding="utf-8"))
    assert (first.name, second.name) == ("test_lease.py::test_one", "test_lease.py::test_two")
    path = str(tmp_path / "lease.py")
    assert (first.lines[path], second.lines[path]) == (frozenset({2, 3}), frozenset({2, 4}))
    assert first.processor_s >= 0
    assert first.seconds > 0
