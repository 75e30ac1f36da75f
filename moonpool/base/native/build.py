"""Builds the native kernels with the system's compiler, once, into a folder of this user's.

The library's name is a hash over sources, flags and compiler: a change builds another library, and several can lie side
by side. `python -P -m moonpool.base.native.build` builds ahead of first use and prints where the library lies. `--all
FOLDER` builds for every processor with this architecture, for images, which have no compiler and run anywhere: such
libraries are looked for in MOONPOOL_KERNELS_PREBUILT first, which is never written. A platform wheel has them beside
the sources, in a folder `prebuilt`.

A library's hash lies beside the library. A damaged library would end each process that loads the library, so a library
that does not match is made anew, and a prebuilt library that does not match is passed over.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_ABOVE = Path(__file__).parents[2]
FOLDER = _ABOVE / "kernels" if (_ABOVE / "kernels").is_dir() else _ABOVE.parent / "kernels"
"""C++ sources: of a wheel within the package, of a checkout beside the package."""
SOURCES = FOLDER / "engine"
PACKAGED = "prebuilt"
"""Folder beside a platform wheel's sources: libraries for every processor of the wheel's architecture."""
COMPILERS = ("c++", "g++", "clang++")
SILENCE_S = 1800.0
"""Seconds in which a build must compile one more file."""
_REPORT_S = 1.0
_FILE_S = 4.0
"""Processor time for one file, on average: 80 s for the engine's 19 files on an AMD EPYC, 2026-11-29."""
_COMPILING = Path(__file__).with_name("compiling.py")
Report = Callable[[str], None]
"""Called about once a second with what a build does or waits for, and when that changes."""
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-w")
_AVX512_BF16 = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_bf16", "avx512_vnni", "avx2", "fma", "f16c"}
)
_AVX512_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512")
#: Per instruction set: what the processor must have (Linux's names), and the compiler's flags. The first that fits.
TARGETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512-bf16-amx": (
        _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    "avx512-bf16": (_AVX512_BF16, _AVX512_BF16_FLAGS),
    "avx512-vnni": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni", "avx2", "fma", "f16c"}),
        ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx2", "fma", "f16c"}),
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    ),
    "avx2-vnni": (
        frozenset({"avx2", "fma", "f16c", "bmi2", "movbe", "avx_vnni"}),
        ("-march=x86-64-v3", "-mavxvnni"),
    ),
    "avx2": (frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"}), ("-march=x86-64-v3",)),
    # GCC would move loads so far ahead of their use that sums leave their registers.
    "neon-bf16": (
        frozenset({"asimd", "asimddp", "i8mm", "bf16"}),
        ("-march=armv8.2-a+dotprod+i8mm+bf16", "-fno-schedule-insns"),
    ),
    "neon-i8mm": (frozenset({"asimd", "asimddp", "i8mm"}), ("-march=armv8.2-a+dotprod+i8mm",)),
    "neon-dot": (frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
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
    "x86_64": Architecture(
        "flags",
        frozenset({"sse2"}),
        ("avx512-bf16-amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2", "sse2"),
    ),
    "aarch64": Architecture("Features", frozenset({"asimd"}), ("neon-bf16", "neon-i8mm", "neon-dot", "neon")),
}


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


_REQUEST_STATE, _TILE_DATA = 0x1023, 18
"""ARCH_REQ_XCOMP_PERM of arch_prctl, and the number of AMX's tiles there."""


def tiles_permitted() -> bool:
    """Ask Linux for AMX's tiles, and return whether this process may use them: without this, AMX ends a process.

    The permission is for all threads of this process and for processes forked from it. Kernels before 5.16 and some
    sandboxes refuse.
    """
    arch_prctl = ctypes.c_long(158)
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(arch_prctl, ctypes.c_long(_REQUEST_STATE), ctypes.c_long(_TILE_DATA)) == 0)


def processor_flags() -> frozenset[str]:
    """Return the features that this process may use, by Linux's names; empty if the architecture has no kernels."""
    found = listed_flags()
    if "amx_tile" in found and not tiles_permitted():
        return frozenset(name for name in found if not name.startswith("amx_"))
    return found


def listed_flags() -> frozenset[str]:
    """Return the processor's features by Linux's names; empty if the architecture has no kernels."""
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
    """Return the C++ compiler's path: CXX, else the first of COMPILERS found.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CXX"), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return os.path.abspath(found)
    raise BuildError("no C++ compiler found")


def flags(target: str) -> tuple[str, ...]:
    """Return the compiler's flags for `target`, a key of TARGETS."""
    return (*_FLAGS, *TARGETS[target][1])


def unheard(text: str) -> None:
    """A `Report` without a listener."""


def build(target: str | None = None, sources: Path | None = None, report: Report = unheard) -> Path:
    """Return the library for `target` (a key of TARGETS; None: this machine's best), built if missing.

    Processes that need the library at the same time wait for the building process. If the builder ends, its compilers
    end too, and a waiting process builds instead. A library is complete or not there. The library is made from the C++
    files in `sources`, by default the kernels' own.

    Raises:
        BuildError: the library cannot be built; says why.
    """
    target, sources = target or detect(), sources or SOURCES
    try:
        return prebuilt(target, sources) or _build(cache_folder(), target, sources, report)
    except (OSError, RuntimeError) as error:  # the latter: the user has no home
        raise BuildError(f"no folder to build in: {error}") from None


def prebuilt(target: str, sources: Path | None = None) -> Path | None:
    """Return the library for `target` of these very sources that was built ahead, or None.

    MOONPOOL_KERNELS_PREBUILT goes before what the wheel has.

    Raises:
        BuildError: others may write to the folder of MOONPOOL_KERNELS_PREBUILT.
    """
    sources = sources or SOURCES
    name = prebuilt_name(target, sources)
    given = os.environ.get("MOONPOOL_KERNELS_PREBUILT")
    if given and (path := Path(given) / name).is_file():
        _check_folder(path.parent, {0, os.getuid()})
        if _is_whole(path):
            return path
    packaged = sources / PACKAGED / name  # whoever may write there may write all of Moonpool
    return packaged if _is_whole(packaged) else None


def prebuilt_name(target: str, sources: Path | None = None) -> str:
    """Return the library's name for `target` without a compiler in the name."""
    return f"{target}-{_hash(target, sources or SOURCES)}.so"


def build_all(
    folder: Path,
    sources: Path | None = None,
    *,
    targets: Sequence[str] | None = None,
    used: str | None = None,
    link: Sequence[str] = (),
    report: Report = unheard,
) -> list[Path]:
    """Put libraries into `folder`, which all users may read, and return where they lie.

    What was built ahead is copied, and a library that lies in `folder` is left as it is.

    Args:
        folder: for MOONPOOL_KERNELS_PREBUILT, or for a wheel.
        sources: folder of C++ files, as for `build`.
        targets: keys of TARGETS; None = all of this architecture.
        used: compiler, also one for another architecture; None = this machine's.
        link: further flags of the linker.
        report: is told how that goes.

    Raises:
        BuildError: one cannot be built; says why.
    """
    if targets is None:
        architecture = ARCHITECTURES.get(platform.machine())
        if architecture is None:
            raise BuildError(f"no kernels for this processor ({platform.machine()})")
        targets = architecture.targets
    sources = sources or SOURCES
    paths = [folder / prebuilt_name(target, sources) for target in targets]
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        for target, path in zip(targets, paths, strict=True):
            if not _is_whole(path):
                found = prebuilt(target, sources)
                if found is None:
                    _compile(target, used or compiler(), path, sources, report, link)
                else:
                    shutil.copyfile(found, path)
                    shutil.copyfile(_hash_path(found), _hash_path(path))
            path.chmod(0o755)
            _hash_path(path).chmod(0o644)
    except OSError as error:
        raise BuildError(f"no folder to build in: {error}") from None
    return paths


def _check_folder(folder: Path, owners: set[int]) -> None:
    if folder.stat().st_uid not in owners or folder.stat().st_mode & 0o022:
        raise BuildError(f"{folder}: others may write there, and what lies there is run")


def _build(folder: Path, target: str, sources: Path, report: Report) -> Path:
    used = compiler()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_folder(folder, {os.getuid()})
    path = folder / f"{target}-{_hash(target, sources, used)}.so"
    if _is_whole(path):
        return path
    with _locked(path.with_suffix(".lock"), report):
        if not _is_whole(path):
            if path.exists():
                report(f"{path} is damaged: made anew")
            _compile(target, used, path, sources, report)
    return path


def _hash_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Return whether a library is there as it was made."""
    try:
        return _hash_path(path).read_text() == _file_hash(path)
    except (OSError, UnicodeDecodeError):
        return False


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(target: str, sources: Path, used: str | None = None) -> str:
    """Return a hash over the sources, the flags and, if given, the compiler's path and file."""
    digest = hashlib.sha256("\0".join(flags(target)).encode())
    if used is not None:
        stat = Path(used).resolve().stat()
        digest.update(f"\0{used} {stat.st_size} {stat.st_mtime_ns}".encode())
    for source in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock file, which names the owner. The owner's end, of whatever kind, releases the lock."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        began = time.monotonic()
        while not _try_lock(file):
            file.seek(0)
            owner = file.read().strip()
            report(f"waiting for process {owner or '?'}, which compiles native code ({time.monotonic() - began:.0f} s)")
            time.sleep(_REPORT_S / 4)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(target: str, used: str, path: Path, folder: Path, report: Report, link: Sequence[str] = ()) -> None:
    path, folder = path.absolute(), folder.absolute()
    prefix = f".build-{path.stem}-"
    for left in path.parent.glob(f"{prefix}*"):  # of a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as temporary:
        options = [option for option in flags(target) if option != "-shared"]
        objects, commands = [], []
        for source in sorted(folder.glob("*.cpp")):
            objects.append(str(Path(temporary) / f"{source.stem}.o"))
            commands.append([used, *options, "-c", str(source), "-o", objects[-1]])
        made = Path(temporary) / path.name
        environment = {**os.environ, "TMPDIR": temporary}
        about = f"of {len(commands)} files (once, about {_expected_s(len(commands)):.0f} s)"
        _run(commands, environment, lambda done: report(f"compiling native code, {done} {about}"))
        report("linking native code")
        _run([[used, *flags(target), *objects, *link, "-o", str(made)]], environment, lambda done: None)
        _put_with_hash(made, path)


def _expected_s(files: int) -> float:
    """Return about how long a machine that is not busy takes for so many files."""
    at_once = min(files, len(os.sched_getaffinity(0)))
    return max(10.0, round(_FILE_S * files / at_once, -1))


def _put_with_hash(made: Path, path: Path) -> None:
    """Move a library to `path` with the hash beside it; both survive a loss of power whole, or are made anew."""
    beside = made.with_suffix(".sha256")
    beside.write_text(_file_hash(made))
    for file, goal in ((made, path), (beside, _hash_path(path))):  # without the hash, the library counts as missing
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        file.replace(goal)


def _run(commands: list[list[str]], environment: dict[str, str], report: Callable[[int], None]) -> None:
    """Run compilers, as many at once as there are processors; `report` is told how many are done.

    They end with this process, and when the call is left. They work in the build's own folder: an empty part of CPATH
    or LIBRARY_PATH is a compiler's working folder, and headers there may be anybody's.

    Raises:
        BuildError: one failed, or none was done for SILENCE_S.
    """
    at_once = min(len(commands), len(os.sched_getaffinity(0)))
    process = subprocess.Popen(  # noqa: S603  # our own sources and flags
        [sys.executable, "-I", "-S", str(_COMPILING), str(at_once), json.dumps(commands)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
        env=environment,
        cwd=environment["TMPDIR"],
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _follow(commands[0][0], process.stdout, len(commands), report)
        finally:
            process.stdin.close()  # ends what still runs


def _follow(used: str, output: IO[bytes], count: int, report: Callable[[int], None]) -> None:
    done, heard, text = 0, time.monotonic(), b""
    while done < count:
        report(done)
        if not select.select([output], [], [], _REPORT_S)[0]:
            if time.monotonic() - heard > SILENCE_S:
                raise BuildError(f"{used} compiled no further file in {SILENCE_S:.0f} s")
            continue
        read = os.read(output.fileno(), 1 << 16)
        if not read:
            raise BuildError(f"{used} was ended")
        *lines, text = (text + read).split(b"\n")
        failed = next(filter(None, lines), b"")
        if failed:
            raise BuildError(f"{used}: {json.loads(failed)[:500]}")
        done, heard = done + len(lines), time.monotonic()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build this machine's library, or those of all processors, and print where they lie."""
    parser = argparse.ArgumentParser(
        prog="python -P -m moonpool.base.native.build", description="Builds the native kernels."
    )
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="for every processor of this architecture, into FOLDER"
    )
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="of other C++ files than the kernels'")
    given = parser.parse_args(arguments)
    try:
        told: list[str] = []

        def report(text: str) -> None:
            if text not in told[-1:]:
                told.append(text)
                print(text, file=sys.stderr, flush=True)  # noqa: T201

        made = (
            [build(sources=given.sources, report=report)] if given.all is None else build_all(given.all, given.sources)
        )
        print(*made, sep="\n")  # noqa: T201
    except BuildError as error:
        sys.exit(f"native kernels are not built, the torch path will run: {error}")


if __name__ == "__main__":
    main()
