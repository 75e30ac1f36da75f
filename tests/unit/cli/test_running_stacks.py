"""`moonpool stop` ends the stack that `moonpool serve` recorded, and nothing else."""

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.cli import running_stacks
from moonpool.cli.addresses import addresses
from moonpool.cli.running_stacks import LOCAL_CONDUCTOR, RunningStack, recorded_stack, run_ps, run_stop, state_folder

STACK = """
import sys, signal
from pathlib import Path
from moonpool.cli.interrupts import StopFlag
from moonpool.cli.running_stacks import recorded_stack
stopping = StopFlag()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
with recorded_stack(Path(sys.argv[1]), "/models/m", "m") as record:
    record.write("host:1", "host:2", "one")
    print("ready", flush=True)
    while not stopping.wait(60.0):
        pass
"""


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def start() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a process that records a stack as `moonpool serve` does."""
    started: list[subprocess.Popen[str]] = []

    def spawned(data_dir: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", STACK, str(data_dir)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield spawned
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no stack."""
    with subprocess.Popen(["sleep", "200"]) as process:
        yield process
        assert process.poll() is None, "a process that no stack started was ended"
        process.kill()


def put(name: str, text: str) -> Path:
    path = state_folder() / name
    path.write_text(text)
    return path


def record_of(pid: int, **other: object) -> str:
    """This test's record, of another process."""
    with recorded_stack(Path("d"), "m") as record:
        written = RunningStack(**json.loads(record.path.read_text()))
    return json.dumps(dataclasses.asdict(written) | {"pid": pid, **other})


def test_a_number_that_was_given_again(stranger: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    stale = put("a.json", record_of(stranger.pid))
    assert run_stop() == 0
    told = capsys.readouterr()
    assert told.out == "no stack is running\n"
    assert told.err.startswith("removed a record of a stack that ended without removing it: ")
    assert not stale.exists()


def test_a_record_from_before_the_machine_started(capsys: pytest.CaptureFixture[str]) -> None:
    put("a.json", record_of(os.getpid(), boot_id="another"))
    assert run_stop() == 0
    assert capsys.readouterr().out == "no stack is running\n"


@pytest.mark.parametrize("text", ["", "[1]", '{"pid": 1}', "\0"])
def test_a_record_that_cannot_be_read(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = put("a.json", text)
    assert run_stop() == 0
    assert capsys.readouterr().err == f"removed a record that cannot be read: {path}\n"
    assert not path.exists()


def test_a_state_file_of_an_older_version(
    runtime_dir: Path, stranger: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"pid": stranger.pid, "address": "127.0.0.1:1", "data_dir": "x"}
    (runtime_dir / f"moonpool-up-{os.getuid()}.json").write_text(json.dumps(old))
    assert run_stop() == 0
    assert capsys.readouterr().out == "no stack is running\n"


def test_a_record_without_a_process_is_of_no_stack() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert not RunningStack(ended.pid, 0, boot, "x", "m").alive


def test_a_stack_is_told_by_its_address_once_there_is_one() -> None:
    stack = RunningStack(1, 1, "boot", "folder", "m")
    assert str(stack) == "folder (starting, m)"
    assert str(dataclasses.replace(stack, address="host:1")) == "folder (host:1, m)"
    assert str(dataclasses.replace(stack, address="host:1", http_address="host:2")) == "folder (http://host:2, m)"


def test_two_stacks(
    start: Callable[[Path], subprocess.Popen[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = start(tmp_path / "a"), start(tmp_path / "b")
    assert run_stop() == 1
    assert capsys.readouterr().err.splitlines() == [
        "several stacks are running; choose one by name:",
        "  m (http://host:2, /models/m)",
        "  m-2 (http://host:2, /models/m)",
    ]
    assert run_stop("m-2") == 0
    assert second.wait(60) == 0
    assert run_stop("m-2") == 1
    assert capsys.readouterr().err.startswith("another stack is running; ")
    assert first.poll() is None
    third = start(tmp_path / "b")
    assert run_stop(data_dir=tmp_path / "a") == 0
    assert first.wait(60) == 0
    assert run_stop(str(third.pid)) == 0
    assert third.wait(60) == 0
    assert capsys.readouterr().out == "stopped m\nstopped m-2\n"
    assert list(state_folder().iterdir()) == []


def test_verbs_find_the_one_stack_that_runs(start: Callable[[Path], subprocess.Popen[str]], tmp_path: Path) -> None:
    assert addresses("") == [LOCAL_CONDUCTOR], "of containers"
    start(tmp_path / "a")
    assert addresses("") == addresses("m") == ["host:1"]
    assert addresses("other:7,other:8") == ["other:7", "other:8"]
    with pytest.raises(InvalidRequest, match=r"name of a stack, is 'n'; the stacks that run are m"):
        addresses("n")
    start(tmp_path / "b")
    with pytest.raises(InvalidRequest, match=r"several stacks run; name one with --address: m, m-2"):
        addresses("")
    assert addresses("m-2") == ["host:1"]


def test_stacks_that_start_keep_to_ports_of_their_own(tmp_path: Path) -> None:
    def choose(taken: Collection[int]) -> tuple[int, ...]:
        return (next(port for port in range(7, 99) if port not in taken),)

    with recorded_stack(tmp_path / "a", "m", choose_ports=choose) as first:
        with recorded_stack(tmp_path / "b", "m", choose_ports=choose) as second:
            assert (first.ports, second.ports) == ((7,), (8,))
            assert (first.name, second.name) == ("m", "m-2")
        with recorded_stack(tmp_path / "c", "m", choose_ports=choose) as third:
            assert (third.name, third.ports) == ("m-2", (8,))


def test_ps(start: Callable[[Path], subprocess.Popen[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ps(as_json=False)
    assert "no stack is running" in capsys.readouterr().err
    process = start(tmp_path / "a")
    run_ps(as_json=False)
    heading, _, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "model", "address", "engines", "up", "process"]
    up = row.split()[6]
    assert row.split() == ["m", "m", "http://host:2", "one,", "both", "roles", up, "s", str(process.pid)]
    assert 0 <= int(up) < 60
    run_ps(as_json=True)
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pid"], found["model"], found["http_address"]) == (process.pid, "/models/m", "host:2")
    assert found["engines"] == "one"


def test_a_data_folder_is_held_against_stacks_whose_records_are_elsewhere(
    start: Callable[[Path], subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user, or in another container: the second stack is refused, and the folder is free after the first."""
    first = start(tmp_path / "data")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(elsewhere))
    monkeypatch.setattr(running_stacks, "ENDING_S", 0.0)
    with (
        pytest.raises(ConfigError, match=r"data_dir: another stack uses .*, of another user or another container"),
        recorded_stack(tmp_path / "data", "m"),
    ):
        pass
    assert not list(state_folder().glob("*.json"))
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    for _ in range(2):
        with recorded_stack(tmp_path / "data", "m"):
            pass


def test_a_data_folder_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems are; the folder of records is this machine's."""
    locked = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise OSError(errno.ENOLCK, "No locks available")
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with recorded_stack(tmp_path / "data", "m") as record:
        assert record.name == "m"


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"data_dir: .* cannot be used"),
        recorded_stack(tmp_path / "file" / "data", "m"),
    ):
        pass


def test_a_killed_stack_leaves_a_record_that_the_next_one_replaces(
    start: Callable[[Path], subprocess.Popen[str]], tmp_path: Path
) -> None:
    first = start(tmp_path)
    with (
        pytest.raises(ConfigError, match="data_dir: another stack uses it: m "),
        recorded_stack(tmp_path, "m"),
    ):
        pass
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(tmp_path)
    assert run_stop(data_dir=tmp_path) == 0
    assert second.wait(60) == 0


def test_the_folder_must_be_this_users_alone(runtime_dir: Path, tmp_path: Path) -> None:
    folder = state_folder()
    assert folder.parent == runtime_dir
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match=r"XDG_RUNTIME_DIR: .* cannot be used: No such file"):
            run_stop()
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="must be a folder of this user with mode 0700"):
        run_stop()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder of this user with mode 0700"):
        run_stop()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(stranger: subprocess.Popen[bytes]) -> None:
    put("a.json", record_of(stranger.pid))
    os.chown(state_folder(), 12345, 12345)
    with pytest.raises(ConfigError, match="must be a folder of this user with mode 0700"):
        run_stop()
