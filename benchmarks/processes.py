"""Child processes of benchmarks: started, waited for, measured from outside, ended."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """A Python module as a process that prints `ready: HOST:PORT`. Linux: measured through /proc."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"MOONPOOL_DIE_WITH_PARENT": "1"},
            text=True,
        )
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if not line.startswith("starting: ")), "")
        if not line.startswith("ready: "):
            self.stop()
            raise RuntimeError(f"{module} did not start")
        self.address = line.removeprefix("ready: ").strip()

    def cpu_s(self) -> float:
        """Processor seconds used so far, all threads."""
        return cpu_s_of(self._process.pid)

    def resident_bytes(self) -> int:
        """Memory it holds, shared memory excepted."""
        return _resident_bytes(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def child(module: str, *arguments: str) -> Iterator[Child]:
    """A child process for as long as the body runs."""
    process = Child(module, *arguments)
    try:
        yield process
    finally:
        process.stop()


def cpu_s_of(pid: int) -> float:
    """Processor seconds that a process has used so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def own_cpu_s() -> float:
    """Processor seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_resident_bytes() -> int:
    """Memory this process holds, shared memory excepted."""
    return _resident_bytes(os.getpid())


def own_peak_bytes() -> int:
    """The most memory that this process has held; what its parent had before it was started does not count."""
    return _status_bytes(os.getpid(), "VmHWM")


def _resident_bytes(pid: int) -> int:
    return _status_bytes(pid, "RssAnon")


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} in /proc/{pid}/status")
