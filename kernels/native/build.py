"""Builds the native kernels with the system's compiler, once, into a folder of this user's.

The library's name is a hash of sources, flags and compiler: a change builds another one, and several can lie side by
side. `python -m kernels.native.build` builds ahead of first use and prints where the library lies. With `--all FOLDER`
it builds for every processor of this architecture, for images, which have no compiler and run anywhere: such libraries
are looked for in MOONPOOL_KERNELS_PREBUILT first, where nothing is ever written.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300.0
"""Of one build; another process waits for it at most so long."""
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-w")
#: Per instruction set: what the processor must have (Linux's names), and the compiler's flags. The first that fits.
TARGETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512-bf16": (
        frozenset(
            {
                "avx512f",
                "avx512bw",
                "avx512vl",
                "avx512dq",
                "avx512cd",
                "avx512_bf16",
                "avx512_vnni",
                "avx2",
                "fma",
                "f16c",
            }
        ),
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx2", "fma", "f16c"}),
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    ),
    "avx2": (frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"}), ("-march=x86-64-v3",)),
    "neon": (frozenset({"asimd"}), ("-march=armv8-a",)),
    "sse2": (frozenset({"sse2"}), ()),
}


class Architecture(NamedTuple):
    """What `platform.machine()` says about the processor.

    Attributes:
        line: name of /proc/cpuinfo's line that lists the features.
        always: what every such processor has. An emulated one may be listed under another's name, or not at all.
        targets: keys of TARGETS.
    """

    line: str
    always: frozenset[str]
    targets: tuple[str, ...]


ARCHITECTURES = {
    "x86_64": Architecture("flags", frozenset({"sse2"}), ("avx512-bf16", "avx512", "avx2", "sse2")),
    "aarch64": Architecture("Features", frozenset({"asimd"}), ("neon",)),
}


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


def processor_flags() -> frozenset[str]:
    """Return the processor's features by Linux's names; empty where there are no kernels for its architecture."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return frozenset()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == architecture.line:
                return architecture.always | frozenset(value.split())
    return architecture.always


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


def flags(target: str) -> tuple[str, ...]:
    """Return the compiler's flags for `target`, a key of TARGETS."""
    return (*_FLAGS, *TARGETS[target][1])


def build(target: str | None = None, sources: Path | None = None) -> Path:
    """Return the library for `target` (a key of TARGETS; None: this machine's best), building it if it is not there.

    Processes that need it at the same time wait for the one that builds; a library is complete or not there. It is made
    of the C++ files in `sources`, which are the kernels' own unless given.

    Raises:
        BuildError: it cannot be built; says why.
    """
    target, sources = target or detect(), sources or SOURCES
    try:
        return prebuilt(target, sources) or _build(cache_folder(), target, sources)
    except (OSError, RuntimeError) as error:  # the latter: the user has no home
        raise BuildError(f"no folder to build in: {error}") from None


def prebuilt(target: str, sources: Path | None = None) -> Path | None:
    """Return the library for `target` of these very sources in MOONPOOL_KERNELS_PREBUILT, or None.

    Raises:
        BuildError: others may write to that folder.
    """
    given = os.environ.get("MOONPOOL_KERNELS_PREBUILT")
    path = Path(given) / prebuilt_name(target, sources) if given else None
    if path is None or not path.is_file():
        return None
    _check_folder(path.parent, {0, os.getuid()})
    return path


def prebuilt_name(target: str, sources: Path | None = None) -> str:
    """Return the name of the library for `target` where no compiler is at hand to be part of it."""
    return f"{target}-{_hash(target, sources or SOURCES)}.so"


def build_all(folder: Path, sources: Path | None = None) -> list[Path]:
    """Put a library for every target of this architecture into `folder`, and return where they lie.

    The folder is for MOONPOOL_KERNELS_PREBUILT and readable by all users. What lies in that folder now is copied. The
    libraries are made of the C++ files in `sources`, as by `build`.

    Raises:
        BuildError: one cannot be built; says why.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise BuildError(f"no kernels for this processor ({platform.machine()})")
    sources = sources or SOURCES
    paths = [folder / prebuilt_name(target, sources) for target in architecture.targets]
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        for target, path in zip(architecture.targets, paths, strict=True):
            found = prebuilt(target, sources)
            if found is None:
                _compile(target, compiler(), path, sources)
            elif found != path:
                shutil.copyfile(found, path)
            path.chmod(0o755)
    except OSError as error:
        raise BuildError(f"no folder to build in: {error}") from None
    return paths


def _check_folder(folder: Path, owners: set[int]) -> None:
    if folder.stat().st_uid not in owners or folder.stat().st_mode & 0o022:
        raise BuildError(f"{folder}: others may write there, and what lies there is run")


def _build(folder: Path, target: str, sources: Path) -> Path:
    used = compiler()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_folder(folder, {os.getuid()})
    path = folder / f"{target}-{_hash(target, sources, used)}.so"
    if path.exists():
        return path
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            _compile(target, used, path, sources)
    return path


def _hash(target: str, sources: Path, used: str | None = None) -> str:
    """Return a hash of the sources, the flags and, where it is given, the compiler's path and file."""
    digest = hashlib.sha256("\0".join(flags(target)).encode())
    if used is not None:
        stat = Path(used).resolve().stat()
        digest.update(f"\0{used} {stat.st_size} {stat.st_mtime_ns}".encode())
    for source in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file. The wait is as long as another's compiler runs, which has a deadline; death releases it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(target: str, used: str, path: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as temporary:
        made = Path(temporary) / path.name
        sources = [str(source) for source in sorted(folder.glob("*.cpp"))]
        try:
            done = subprocess.run(  # noqa: S603  # our own sources and flags
                [used, *flags(target), *sources, "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env={**os.environ, "TMPDIR": temporary},
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{used} took more than {TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise BuildError(f"{used}: {done.stderr.strip()[:500] or done.returncode}")
        made.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build this machine's library, or those of all processors, and print where they lie."""
    parser = argparse.ArgumentParser(prog="python -m kernels.native.build", description="Builds the native kernels.")
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="for every processor of this architecture, into FOLDER"
    )
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="of other C++ files than the kernels'")
    given = parser.parse_args(arguments)
    try:
        made = [build(sources=given.sources)] if given.all is None else build_all(given.all, given.sources)
        print(*made, sep="\n")  # noqa: T201
    except BuildError as error:
        sys.exit(f"native kernels are not built, the torch path will run: {error}")


if __name__ == "__main__":
    main()
