"""Starts that are broken off: by a signal, by a port that is taken."""

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.cli.running_stacks import recorded_stack, running_stacks
from tests.integration.test_cli import CLI, children_of, environment

END_S = 60.0
"""Bounds how long a start may take to end, on a busy machine."""
HELD = """#!/bin/sh
while :; do sleep 1; done
"""


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No native code is compiled yet, and the compiler never ends."""
    compiler = tmp_path / "compiler"
    compiler.write_text(HELD)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MOONPOOL_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOONPOOL_KERNELS_PREBUILT", raising=False)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A `moonpool serve` of the bundled model that has just begun; its standard error is read."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [*CLI, "serve", "bundled", "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        yield process
        process.kill()


def ends_with_its_children(process: subprocess.Popen[str], number: signal.Signals) -> None:
    watched = []
    for pid in children_of(process.pid):
        with contextlib.suppress(ProcessLookupError):  # a fork server's process between ends at once
            watched.append(os.pidfd_open(pid))
    assert watched
    process.send_signal(number)
    assert process.wait(END_S) == 128 + number
    for descriptor in watched:
        assert select.select([descriptor], [], [], END_S)[0], "a child outlived the start"
        os.close(descriptor)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_a_start_that_compiles(request: pytest.FixtureRequest, number: signal.Signals) -> None:
    process = request.getfixturevalue("serve")
    while not (line := process.stdout.readline()).startswith("kernels: compiling native code, 0 of "):
        assert line.startswith("memory: "), line
    ends_with_its_children(process, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_that_loads(serve: subprocess.Popen[str], number: signal.Signals) -> None:
    assert serve.stdout is not None
    while "reading the checkpoint" not in (line := serve.stdout.readline()):
        assert line, "the start has ended"
    ends_with_its_children(serve, number)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("flag", ["port", pytest.param("conductor_port", marks=pytest.mark.slow)])
def test_a_taken_port_is_found_before_anything_is_done(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        flags = ["--port", "0", f"--{flag.replace('_', '-')}", str(port)]
        done = subprocess.run(
            [sys.executable, "-m", "moonpool.cli.main", "serve", "bundled", *flags],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"moonpool: {flag}: another program listens at 127.0.0.1:{port}",
        "docs/errors.md#port-taken tells more.",
    ]


@pytest.mark.parametrize("records", ["same", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_a_second_stack_on_a_data_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: str
) -> None:
    """Neither a log nor a folder: also where the first stack's record cannot be seen."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    data = tmp_path / "data"
    with recorded_stack(data, "m"):
        (data / "logs").mkdir()
        (data / "logs" / "conductor.log").write_text("first\n")

        def seen() -> dict[Path, tuple[int, int]]:
            return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (data, *data.rglob("*"))}

        before = seen()
        if records == "elsewhere":
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "elsewhere"))
        command = [*CLI, "serve", "bundled", "--port", "0", "--data-dir", str(data)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("moonpool: data_dir: another stack uses ")
        assert seen() == before


@pytest.mark.slow
def test_people_are_greeted_and_nobody_need_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a ready stack in 80 columns; a second stack, of closed standard output, takes other ports."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [*CLI, "serve", "bundled", "--engine", "emulated:llama-70b-a800"]
    with contextlib.ExitStack() as ended:
        first = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()))
        ended.callback(first.kill)
        assert first.stdout is not None
        told: list[str] = []
        while (line := first.stdout.readline()) != "Ctrl-C stops.\n":
            assert line, told
            told.append(line)
        assert told[0].startswith("ready:    http://127.0.0.1:")
        assert told[1] == "model:    tiny, 131,072 tokens of prompt and answer\n"
        assert max(map(len, told[:-1])) <= 81
        closed = ["sh", "-c", f"exec {shlex.join(command)} >&-"]
        second = ended.enter_context(subprocess.Popen(closed, env=environment()))
        ended.callback(second.kill)
        while not (ready := [stack for stack in running_stacks() if stack.pid == second.pid and stack.address]):
            assert second.poll() is None
        assert ready[0].name == "bundled-2"
        assert f"http://{ready[0].http_address}/\n" not in told[0]
        for process in (second, first):
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
