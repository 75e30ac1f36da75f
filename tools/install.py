"""Fills `.venv` with what Moonpool needs, and says in few lines how that goes: `make setup`, `make dev`.

Runs in the new environment, before anything is installed there: Python's own library is all that there is. pip's whole
output is in `.venv/setup.log`.

torch is taken as a build for CPUs unless a driver of an NVIDIA GPU is here. Where pip would take the build with CUDA,
several gigabytes, uv fetches the build for CPUs from PyTorch's own index; uv is then put into a temporary folder.
"""

import argparse
import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""There, if a GPU's driver is: of Linux, or of Linux within Windows."""
CONSTRAINED = ("-c", "constraints.txt")
PIP = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input")
INSTALL = (*PIP, "install", "--no-compile", "--progress-bar", "off", *CONSTRAINED)
"""Modules are compiled by Python when they are first used."""
CPU_BYTES, CUDA_BYTES = 1.0e9, 5.0e9
"""Room that an environment takes, with either build of torch."""
DEV_BYTES = 1.6e9
"""What tests and lint add."""
PLAIN_INTERVAL_S = 15.0
"""Seconds between two lines about the same work, where no terminal reads."""
TAIL_LINES = 15


class InstallError(Exception):
    """The environment cannot be filled; the message says why."""


class Display:
    """One line that is written over on a terminal; elsewhere a line for each part, and one now and then.

    Args:
        stream: gets the text.
        clock: seconds.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._part, self._began, self._told = "", clock(), clock()

    def show(self, part: str, detail: str = "") -> None:
        """Say what is done now."""
        now = self._clock()
        new = part != self._part
        if new:
            self._part, self._began = part, now
        text = f"{part}: {detail}" if detail else part
        if self._terminal:
            text = f"{text}, {now - self._began:.0f} s"
            self._stream.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
        elif new or now - self._told >= PLAIN_INTERVAL_S:
            self._stream.write(text + "\n")
            self._told = now
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._stream.write(("\r\x1b[K" if self._terminal else "") + text + "\n")
        self._stream.flush()


def follow(command: Sequence[str], log: IO[str], heard: Callable[[str], None]) -> None:
    """Run a command; its lines go to `log` and to `heard`, which also gets "" about once a second.

    Raises:
        InstallError: the command failed; the end of its output.
    """
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        rest = b""
        while True:
            if not select.select([process.stdout], [], [], 1.0)[0]:
                heard("")
                continue
            read = os.read(process.stdout.fileno(), 1 << 16)
            *whole, rest = (rest + read).split(b"\n")
            for line in (each.decode(errors="replace").rstrip() for each in whole):
                log.write(line + "\n")
                lines.append(line)
                heard(line)
            if not read:
                break
    log.flush()
    if process.returncode:
        raise InstallError("\n".join(["", *lines[-TAIL_LINES:], f"the whole output: {log.name}"]))


class PipReader:
    """Makes a few words of pip's lines.

    Args:
        show: gets the words.
        of: packages that are expected; 0 = unknown.
    """

    def __init__(self, show: Callable[[str], None], of: int = 0) -> None:
        self._show, self._of = show, of
        self._seen, self._doing = 0, "pip starts"

    def __call__(self, line: str) -> None:
        """Take a line, or "" where time passes."""
        if found := re.match(r"(?:Collecting|Requirement already satisfied:|Obtaining) (?:\S*/)?([\w.-]+)", line):
            self._seen += 1
            name = found[1]
            self._doing = f"{self._seen} of {self._of}, {name}" if self._of else name
        elif line.lstrip().startswith("Downloading ") and ".whl" in line and ".metadata" not in line:
            file, _, size = line.strip().removeprefix("Downloading ").partition(" ")
            self._doing = f"{file.rpartition('/')[2].split('-')[0]} {size}"
        elif line.startswith("Installing collected packages"):
            self._doing = f"unpacking {line.count(',') + 1}"
        self._show(self._doing)


def gpu_driver() -> bool:
    """Return whether the driver of a GPU is here."""
    return any(path.exists() for path in DRIVERS)


def planned(report: dict[str, Any]) -> dict[str, str]:
    """Return what pip would install, by name, with versions."""
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in report["install"]}


def has_cuda(packages: dict[str, str]) -> bool:
    """Return whether packages that pip would install hold CUDA."""
    return any(name.startswith(("nvidia-", "cuda-")) for name in packages)


def install_torch(display: Display, log: IO[str]) -> None:
    """Install torch: with CUDA for a GPU, else the build for CPUs wherever that is to be had.

    Raises:
        InstallError: none can be had.
    """
    if importlib.util.find_spec("torch") is not None:
        return
    driver = gpu_driver()
    if not driver:
        display.show("torch", "looking which build pip has")
        if _pip_has_cuda() and _uv_installs_for_cpus(display, log):
            return
    _need(CUDA_BYTES if driver else CPU_BYTES)
    follow([*INSTALL, "torch"], log, PipReader(lambda words: display.show("torch", words)))


def _pip_has_cuda() -> bool:
    asked = [*PIP, "install", "--quiet", "--dry-run", "--report", "-", *CONSTRAINED, "torch"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode == 0 and has_cuda(planned(json.loads(done.stdout)))


def _uv_installs_for_cpus(display: Display, log: IO[str]) -> bool:
    """Let uv install torch: uv knows PyTorch's index for CPUs. Return whether that went well."""

    def heard(line: str) -> None:
        display.show("torch", "the build for CPUs, from PyTorch's index")

    with tempfile.TemporaryDirectory(prefix="moonpool-uv-") as folder:
        uv = [f"{folder}/bin/uv", "pip", "install", "--python", sys.executable, "--torch-backend", "cpu"]
        try:
            follow([*INSTALL, "--no-deps", "--target", folder, "uv"], log, heard)
            follow([*uv, *CONSTRAINED, "torch"], log, heard)
        except InstallError as error:
            log.write(f"{error}\n")
            display.say(
                "torch's build for CPUs cannot be fetched, so pip takes the build with CUDA, 4 GB more.\n"
                "Otherwise press Ctrl-C, and set PIP_EXTRA_INDEX_URL to PyTorch's CPU index."
            )
            return False
    return True


def compile_kernels(display: Display, log: IO[str]) -> None:
    """Compile native code, once; without a compiler, say what that means."""
    part = "native code, compiled once, minutes"
    engine = [sys.executable, "-P", "-m", "moonpool.base.native.build"]
    kv = [sys.executable, "-P", "-c", "from moonpool.base.kv.native_library import library; library()"]
    try:
        for command in (engine, kv):
            follow(command, log, lambda line: display.show(part, line) if line.startswith("comp") else None)
    except InstallError as error:
        reason = str(error).split("\n")[-2]
        display.say(f"native code is not compiled, so Moonpool computes with torch, which is slower: {reason}")


def size_of(folder: Path) -> float:
    """Return the bytes of a folder's files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _need(size: float) -> None:
    free = shutil.disk_usage(sys.prefix).free
    if free < size:
        raise InstallError(f"the disk of {sys.prefix} has {free / 1e9:.1f} GB free, and {size / 1e9:.1f} GB are needed")


def install(extras: str, display: Display, log: IO[str]) -> None:
    """Install everything, in the environment that runs this.

    Raises:
        InstallError: something cannot be had.
    """
    _need(CPU_BYTES if extras == "engine" else DEV_BYTES)
    locked = sum(not line.startswith(" ") for line in (ROOT / "requirements.lock").read_text().splitlines())
    reader = PipReader(lambda words: display.show("packages", words), locked)
    follow([*INSTALL, "--require-hashes", "--no-deps", "-r", "requirements.lock"], log, reader)
    install_torch(display, log)
    reader = PipReader(lambda words: display.show("Moonpool and the rest", words))
    follow([*INSTALL, "-e", "packages/moonpool-base", "-e", f".[{extras}]"], log, reader)
    compile_kernels(display, log)


def main() -> None:
    """Install what serving needs, or also what developers need."""
    parser = argparse.ArgumentParser(prog="tools/install.py", description="Fills this environment.")
    parser.add_argument("what", choices=["serve", "dev"])
    given = parser.parse_args()
    display, began = Display(sys.stderr), time.monotonic()
    try:
        with Path(sys.prefix, "setup.log").open("a", encoding="utf-8") as log:
            install("engine" if given.what == "serve" else "engine,dev", display, log)
    except InstallError as error:
        display.say(f"set-up failed: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        display.say("stopped; the same command goes on from here")
        sys.exit(130)
    size = size_of(Path(sys.prefix)) / 1e9
    display.say(f"{Path(sys.prefix).name} is ready: {size:.1f} GB, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
