"""Builds the native kernels with the system's compiler, once, into a folder of this user's.

Owns the compiler's flags, which instructions are asked for, and where the result is kept. Must not know what is in it.
The result's name is a hash of sources, flags and compiler, so a changed one is built again and several can lie side by
side. `python -m kernels.native.build` builds ahead of first use and prints where the library lies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300.0
"""Of one build; another process waits for it at most so long."""
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-w")
#: Per instruction set: what the processor must have (Linux's names), and the compiler's flags. The first that fits.
TARGETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512-bf16": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_bf16", "avx2", "fma", "f16c"}),
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx2", "fma", "f16c"}),
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    ),
    "avx2": (frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"}), ("-march=x86-64-v3",)),
    "neon": (frozenset({"asimd"}), ("-march=armv8-a",)),
    "sse2": (frozenset({"sse2"}), ()),
}


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


def processor_flags() -> frozenset[str]:
    """Return the processor's features by Linux's names; empty where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset({"sse2"} if platform.machine() in ("x86_64", "AMD64") else ())


def detect() -> str:
    """Return the best target for this machine.

    Raises:
        BuildError: none is.
    """
    flags = processor_flags()
    for name, (needed, _) in TARGETS.items():
        if needed <= flags:
            return name
    raise BuildError(f"no kernels for this processor ({platform.machine()})")


def cache_folder() -> Path:
    """Return where libraries are kept: MOONPOOL_KERNELS_CACHE, else the user's cache folder."""
    given = os.environ.get("MOONPOOL_KERNELS_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moonpool" / "kernels"


def compiler() -> str:
    """Return the path of the C++ compiler: CXX, else the first of COMPILERS that is found.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CXX"), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler found")


def build(target: str | None = None) -> Path:
    """Return the library for `target` (a key of TARGETS; None: this machine's best), building it if it is not there.

    Processes that need it at the same time wait for the one that builds; a library is complete or not there.

    Raises:
        BuildError: it cannot be built; says why.
    """
    target = target or detect()
    command = [compiler(), *_FLAGS, *TARGETS[target][1]]
    try:
        return _build(cache_folder(), target, command)
    except (OSError, RuntimeError) as error:  # the latter: the user has no home
        raise BuildError(f"no folder to build in: {error}") from None


def _build(folder: Path, target: str, command: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise BuildError(f"{folder}: others may write there, and what lies there is run")
    path = folder / f"{target}-{_hash(command)}.so"
    if path.exists():
        return path
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            _compile(command, path)
    return path


def _hash(command: list[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    with contextlib.suppress(OSError):
        stat = Path(command[0]).resolve().stat()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file. The wait is as long as another's compiler runs, which has a deadline; death releases it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as temporary:
        made = Path(temporary) / path.name
        sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
        try:
            done = subprocess.run(  # noqa: S603  # our own sources and flags
                [*command, *sources, "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env={**os.environ, "TMPDIR": temporary},
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]} took more than {TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise BuildError(f"{command[0]}: {done.stderr.strip()[:500] or done.returncode}")
        made.replace(path)


if __name__ == "__main__":
    try:
        print(build())  # noqa: T201
    except BuildError as error:
        sys.exit(f"native kernels are not built, the torch path will run: {error}")
