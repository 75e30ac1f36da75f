"""Programs that a fork server starts are as executed ones."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from moonpool.base.fork_server import IN_USE, ChildProcess, ForkServer, Launcher, Program, execute
from tests.unit.base.fork_server.program import children

PROGRAM = "tests.unit.base.fork_server.program"
PRELOADED = ("tabnanny", "a_module_that_is_not_there")
WAIT_S = 60.0
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(PRELOADED)
    yield server
    server.close()


@dataclass
class Ran:
    """A program that was started, and what it said."""

    child: ChildProcess
    told: dict[str, object]
    rest: str
    errors: str

    @property
    def forked(self) -> bool:
        return bool(self.told["forked"])


def run(
    launcher: Launcher, what: str, *, starts_engine: bool = False, environment: Mapping[str, str] = MappingProxyType({})
) -> Ran:
    """Starts the program, reads all it says, and its first line as JSON; it has ended unless it waits."""
    out, err = os.pipe(), os.pipe()
    program = Program(PROGRAM, [what], {**os.environ, **environment}, out[1], err[1], starts_engine=starts_engine)
    child = launcher(program)
    os.close(out[1])
    os.close(err[1])
    with open(out[0]) as said, open(err[0]) as errors:
        line = said.readline()
        if what == "wait":
            return Ran(child, json.loads(line), "", "")
        return Ran(child, json.loads(line), said.read(), errors.read())


def test_a_forked_program_is_as_an_executed_one(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.prepare()
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # also where it is so already
    monkeypatch.setenv("ONE_MORE", "\udc80 with a byte that is no text")
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o27)
    cores = os.sched_getaffinity(0)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    forking = ForkServer(PRELOADED)
    try:
        os.sched_setaffinity(0, {min(cores)})
        executed, forked = run(execute, "tell"), run(forking.start, "tell")
    finally:
        forking.close()
        os.umask(before)
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert (executed.forked, forked.forked) == (False, True)
    assert forked.told["state"] == executed.told["state"]
    assert forked.told["pid"] == forked.child.pid
    assert (forked.child.wait(WAIT_S), executed.child.wait(WAIT_S)) == (0, 0)


@pytest.mark.parametrize(
    ("what", "status", "rest", "error"),
    [
        ("seven", 7, "", ""),
        ("text", 1, "", "what is wrong"),
        ("defect", 1, "", "KeyError: 'a defect'"),
        ("handlers", 0, "a thread's last words\nhandled\n", ""),
    ],
)
@pytest.mark.parametrize("by", ["fork", "exec"])
def test_ends(server: ForkServer, by: str, what: str, status: int, rest: str, error: str) -> None:
    ran = run(server.start if by == "fork" else execute, what)
    assert ran.forked == (by == "fork")
    assert ran.child.wait(WAIT_S) == ran.child.poll() == status
    assert ran.rest == rest
    assert ran.errors.strip().endswith(error)


def test_a_child_is_waited_for_and_killed(server: ForkServer) -> None:
    child = run(server.start, "wait").child
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.wait() == child.wait(0.0) == -signal.SIGKILL
    child.send_signal(signal.SIGTERM)  # another process may have its number by now
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)


def test_files_keep_their_numbers(server: ForkServer) -> None:
    """Also one that the fork server uses."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    numbers = (write, os.dup2(write, 3) if write != 3 and not _is_open(3) else write)
    try:
        out, told = os.pipe()
        program = Program(PROGRAM, ["tell"], os.environ, told, 2, pass_fds=sorted(set(numbers)))
        child = server.start(program)
        os.close(told)
        with open(out) as said:
            files = json.loads(said.readline())["state"]["files"]
        assert child.wait(WAIT_S) == 0
        assert {"0", "1", "2", *map(str, numbers)} < set(files)
        assert len(files) == 4 + len(set(numbers)), "and the folder's own"
    finally:
        for number in {read, *numbers}:
            os.close(number)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_each_child_draws_its_own_numbers(server: ForkServer) -> None:
    first, second = (run(server.start, "tell") for _ in range(2))
    assert first.told["draw"] != second.told["draw"]
    assert first.child.wait(WAIT_S) == second.child.wait(WAIT_S) == 0


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_PROC_BIND", "MOONPOOL_FAULT_SEED"])
def test_what_a_process_reads_once_is_read(server: ForkServer, name: str) -> None:
    """Such a program is executed."""
    ran = run(server.start, "tell", environment={name: "1"})
    assert not ran.forked
    assert ran.child.wait(WAIT_S) == 0
    ran = run(server.start, "tell", environment={"OMP_NUM_THREADS": "7"})
    assert ran.forked
    assert ran.child.wait(WAIT_S) == 0


def test_a_server_has_a_python_and_variables_of_its_own() -> None:
    """A program with other variables of those that are read once is executed, by the same Python."""
    variables = {**os.environ, "OMP_PROC_BIND": "true"}
    server = ForkServer(PRELOADED, python=(sys.executable, "-O"), environment=variables)
    try:
        ran = [run(server.start, "tell", environment={"OMP_PROC_BIND": value}) for value in ("true", "false")]
        assert [each.forked for each in ran] == [True, False]
        assert [each.told["optimised"] for each in ran] == [1, 1]
        assert [each.child.wait(WAIT_S) for each in ran] == [0, 0]
    finally:
        server.close()


def test_a_server_that_was_killed_costs_a_fork() -> None:
    server = ForkServer(PRELOADED)
    before = set(children())
    try:
        ran = [run(server.start, "tell")]
        (pid,) = set(children()) - before - {ran[0].child.pid}
        os.kill(pid, signal.SIGKILL)
        ran += [run(server.start, "tell") for _ in range(2)]
        assert [each.forked for each in ran] == [True, False, True], "executed, then by a new server"
        assert [each.child.wait(WAIT_S) for each in ran] == [0, 0, 0]
    finally:
        server.close()
    assert set(children()) <= before


def test_a_module_that_opens_a_device_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs are executed, the second without another try."""
    (tmp_path / "a_driver.py").write_text("file = open('/dev/zero', 'rb')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    server = ForkServer([*PRELOADED, "a_driver"])
    try:
        before = set(children())
        for what in ("tell", "wait"):
            ran = run(server.start, what)
            assert not ran.forked
            assert set(children()) - before <= {ran.child.pid}
            ran.child.kill()
            ran.child.wait(WAIT_S)
    finally:
        server.close()


def test_threads_ask_at_once(server: ForkServer) -> None:
    with ThreadPoolExecutor(8) as threads:
        ran = list(threads.map(lambda _: run(server.start, "tell"), range(8)))
    assert all(each.forked for each in ran)
    assert [each.told["pid"] for each in ran] == [each.child.pid for each in ran]
    assert {each.child.wait(WAIT_S) for each in ran} == {0}


def test_orphans_of_others_are_not_adopted(server: ForkServer) -> None:
    """Once a program has been started."""
    assert run(server.start, "tell").child.wait(WAIT_S) == 0
    adopts = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
    assert adopts.value == 0


def test_a_server_is_forked_from_another(server: ForkServer) -> None:
    further = ForkServer(("pickletools",), server)
    try:
        ran = run(further.start, "tell")
        assert ran.forked
        assert ran.child.wait(WAIT_S) == 0
    finally:
        further.close()


def test_what_starts_an_engine_has_a_server_for_it(server: ForkServer) -> None:
    """The worker is its own child; the server for it ends with the engine's start."""
    ran = run(server.start, "engine", starts_engine=True)
    assert ran.told["children"] == [ran.told["worker"]]
    assert ran.told["worker's end"] == -signal.SIGKILL
    assert ran.child.wait(WAIT_S) == 0


_OWNER = f"""
import os, signal
from moonpool.base.fork_server import ForkServer, Program
from tests.unit.base.fork_server.program import children
server = ForkServer(())
server.start(Program({PROGRAM!r}, ["tell"], os.environ, 2, 2)).wait()
print(*children(), flush=True)
signal.pause()
"""


def test_a_server_ends_with_its_owner() -> None:
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        (pid,) = map(int, owner.stdout.readline().split())
        server = os.pidfd_open(pid)
        owner.kill()
    ended, _, _ = select.select([server], [], [], WAIT_S)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(server, signal.SIGKILL)
    os.close(server)
    assert ended, "the fork server outlives its owner"


_IN_A_CHECKOUT = f"""
import os
from moonpool.base.fork_server import ForkServer, Program, execute
for start in (execute, ForkServer(()).start):
    assert start(Program({PROGRAM!r}, ["engine"], os.environ, 1, 2, folder="/")).wait() == 0
"""


def test_a_checkout_that_is_not_installed_is_handed_on() -> None:
    """To programs, and to what these start: here a module of the tests, which no installation has."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for folder, finds in ((ROOT, True), (Path("/"), False)):
        code = f"import sys; sys.path += [{str(ROOT)!r}]{_IN_A_CHECKOUT}"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=given, capture_output=True, text=True)
        assert (done.returncode == 0) == finds, done.stderr
        assert finds or "No module named 'tests'" in done.stderr


def test_tests_fork(server: ForkServer) -> None:
    """Or they would take twice as long."""
    assert IN_USE.services is not None
    assert IN_USE.engines is not None
