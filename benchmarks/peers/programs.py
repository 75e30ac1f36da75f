"""Runs other projects' programs as child processes: finds, starts and ends them."""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.frame import Skipped

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 10.0
_RETRY_S = 0.05


def program(name: str) -> str:
    """Where a program is: beside our Python, or on the PATH.

    Raises:
        Skipped: it is not installed.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise Skipped(f"{name} is not installed")
    return found


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def listening(
    argv: Sequence[str], port: int, environment: Mapping[str, str], start_s: float = START_S
) -> "Iterator[subprocess.Popen[bytes]]":
    """A program for as long as the body runs, which begins when it listens on `port`, within `start_s` seconds.

    Raises:
        RuntimeError: it ended or did not listen; the message ends with its last output.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment))
        try:
            if not _listens(process, port, start_s):
                log.seek(0)
                tail = log.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"{argv[0]} does not listen on port {port}:\n{tail}")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listens(process: "subprocess.Popen[bytes]", port: int, start_s: float) -> bool:
    until = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
        except OSError:
            time.sleep(_RETRY_S)
        else:
            return True
    return False
