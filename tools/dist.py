"""Builds the wheels into `dist/` with native code inside, and tries them in an empty environment: `make dist`.

Libraries are built for every processor of this architecture, and for AArch64 where Debian's cross compiler is
(`g++-aarch64-linux-gnu`). They need the C library, whose version the wheel's tag names, and GCC's run time.

`--try` then installs the wheels with pip, far from this checkout, without a compiler in reach and in a folder of
hostile files, and says what an answer took, in seconds of processor.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.native.build import ARCHITECTURES, FOLDER, BuildError, build_all, compiler, detect
from packages.contents import KERNELS, PREBUILT, TAG

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
DISTRIBUTIONS = {"moonpool-base": "packages/moonpool-base", "moonpool": ".", "moonpool-kv": "packages/moonpool-kv"}
"""Distribution -> folder of its pyproject.toml."""
CROSS = {"aarch64": "aarch64-linux-gnu-g++"}
"""Architecture -> compiler for it on a machine of another."""
LINK = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-s")
"""Of the C++ library only what is used is linked in: the rest would ask for a later C library."""
NEEDED = frozenset(
    {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libgcc_s.so.1"}
)
"""The C library's parts and GCC's run time, which every machine for wheels has."""
_VERSION = re.compile(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)")
_NAME = re.compile(rb"\0([\w+.-]+\.so\.\d+)(?=\0)")


HOSTILE = ("grpc", "json", "moonpool", "numpy", "re", "sitecustomize", "tokenizers", "torch")
"""Files in the trial's working folder, with names of what Moonpool imports: none may be imported."""


class DistError(Exception):
    """What was built is not right; the message says what."""


def compilers() -> dict[str, str]:
    """Architecture -> compiler that makes its libraries here.

    Raises:
        BuildError: there is none for this machine.
    """
    here = platform.machine()
    others = {machine: path for machine, name in CROSS.items() if machine != here and (path := shutil.which(name))}
    return {here: compiler()} | others


def build_libraries(machine: str, used: str, folder: Path, targets: Sequence[str] = ()) -> list[Path]:
    """Build what the wheels for an architecture hold, into a folder for each folder of sources.

    Args:
        machine: architecture, as `platform.machine()` says.
        used: compiler.
        folder: has then a folder for each of `KERNELS`, with that wheel's libraries and nothing else.
        targets: those of the engine's kernels, keys of `TARGETS`; none = all of the architecture.

    Raises:
        BuildError: one cannot be built.
        DistError: one needs more of a machine than `NEEDED`.
    """
    made: list[Path] = []
    for name in sorted(KERNELS.values()):
        known = ARCHITECTURES[machine].targets
        wanted = targets or known if name == "engine" else known[-1:]  # the KV library is the plainest everywhere
        report = _Lines(f"{machine} {name}")
        libraries = build_all(folder / name, FOLDER / name, targets=wanted, used=used, link=LINK, report=report)
        _leave_only(folder / name, libraries)
        made += libraries
    for library in made:
        if others := needed(library.read_bytes()) - NEEDED:
            raise DistError(f"{library}: needs {', '.join(sorted(others))}")
    return made


def _leave_only(folder: Path, wanted: Iterable[Path]) -> None:
    """Remove libraries of other sources."""
    names = {path.stem for path in wanted}
    for path in folder.iterdir():
        if path.stem not in names:
            path.unlink()


class _Lines:
    """Prints a line when a build does something else."""

    def __init__(self, subject: str) -> None:
        self._subject, self._last = subject, ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            print(f"{self._subject}: {text}", flush=True)
        self._last = text


def needed(library: bytes) -> set[str]:
    """Names of the libraries that a library asks for."""
    return {name.decode() for name in _NAME.findall(library)}


def glibc_minor(libraries: Iterable[bytes]) -> int:
    """Return N of the least version 2.N of the C library that has all that the libraries ask for."""
    return max((int(minor) for library in libraries for minor in _VERSION.findall(library)), default=17)


def tag(machine: str, libraries: Iterable[bytes]) -> str:
    """Return the tag of wheels with these libraries: any Python 3, Linux with that C library or a later one."""
    return f"py3-none-manylinux_2_{max(17, glibc_minor(libraries))}_{machine}"


def build_wheels(out: Path, kernels: Mapping[str, Path], tags: Mapping[str, str]) -> list[Path]:
    """Build each distribution's wheels: for each architecture where it has native code, else for all.

    Args:
        out: folder of wheels; earlier wheels of Moonpool are removed from there.
        kernels: architecture -> folder that `build_libraries` has filled.
        tags: architecture -> the wheels' tag.
    """
    for old in out.glob("moonpool*.whl"):
        old.unlink()
    made: list[Path] = []
    for name, folder in DISTRIBUTIONS.items():
        for machine in kernels if name in KERNELS else (None,):
            variables = {key: value for key, value in os.environ.items() if key not in (PREBUILT, TAG)}
            if machine is not None:
                variables |= {PREBUILT: str(kernels[machine]), TAG: tags[machine]}
            command = [sys.executable, "-P", "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
            subprocess.run(command, cwd=ROOT / folder, env=variables, check=True, stdout=subprocess.DEVNULL)
            (wheel,) = set(out.glob("moonpool*.whl")) - set(made)
            made.append(wheel)
    return made


@dataclass(frozen=True)
class Step:
    """A command of the trial.

    Attributes:
        what: as printed.
        words: the command.
        counts: its processor time is that of Moonpool, not of a download.
        bare: it runs without a compiler, and with an empty home.
    """

    what: str
    words: Sequence[str | Path]
    counts: bool = True
    bare: bool = True


def try_wheels(out: Path, model: str) -> None:
    """Install the wheels for this machine in an empty environment, ask a model, and print what that took.

    Raises:
        DistError: no answer came, or native code was compiled.
    """
    machine = platform.machine()
    (base,), (moonpool,) = (list(out.glob(f"{name}-*{machine}.whl")) for name in ("moonpool_base", "moonpool"))
    with tempfile.TemporaryDirectory(prefix="moonpool-dist-") as name:
        home, environment = Path(name) / "home", Path(name) / "environment"
        home.mkdir()
        for module in HOSTILE:
            (home / f"{module}.py").write_text("raise ImportError('from the working folder')\n")
        subprocess.run([sys.executable, "-P", "-m", "venv", environment], check=True)
        python, command = environment / "bin" / "python", environment / "bin" / "moonpool"
        pip: list[str | Path] = [
            python,
            "-P",
            "-m",
            "pip",
            "install",
            "-q",
            "--no-compile",
            "-c",
            ROOT / "constraints.txt",
        ]
        given = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MOONPOOL_", "XDG_"))}
        bare = given | {"PATH": str(environment / "bin"), "HOME": str(home), "CXX": "/no/compiler"}
        total, said = 0.0, ""
        steps = [
            Step("pip install", [*pip, base, f"{moonpool}[engine]"], bare=False),
            Step(f"moonpool pull {model}", [command, "pull", model], counts=False),
            Step(f"moonpool run {model}", [command, "run", model, "The moon is"]),
        ]
        if (folder := Path(model)).exists():  # without a network
            steps[1:] = [Step(f"moonpool run {model}", [command, "run", folder.absolute(), "The moon is"])]
        for step in steps:
            before = _processor_seconds()
            done = subprocess.run(
                step.words, cwd=home, env=bare if step.bare else given, check=False, capture_output=True, text=True
            )
            used, said = _processor_seconds() - before, done.stdout.strip()
            if done.returncode or (step.bare and not said):
                raise DistError(f"{step.what} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
            total += used if step.counts else 0.0
            print(f"{step.what}: {used:.1f} s of processor" + ("" if step.counts else ", not counted"), flush=True)
        if built := list(home.rglob("moonpool/kernels/*.so")):
            raise DistError(f"native code was compiled, though the wheel has it: {built}")
        print(f"{total:.1f} s of processor from the wheels to an answer, which begins: {said[:60]!r}")


def _processor_seconds() -> float:
    """Of children that have ended and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Build, and try if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description="Builds the wheels.")
    parser.add_argument("--out", type=Path, default=DIST, metavar="FOLDER", help="of the wheels (default: dist)")
    parser.add_argument(
        "--here", action="store_true", help="kernels for this machine's processor alone; not to be given away"
    )
    parser.add_argument("--try", dest="model", metavar="MODEL", help="install the wheels and ask this model")
    given = parser.parse_args()
    kernels: dict[str, Path] = {}
    tags: dict[str, str] = {}
    try:
        here = {platform.machine(): compiler()} if given.here else compilers()
        for machine, used in here.items():
            kernels[machine] = given.out / "kernels" / machine
            libraries = build_libraries(machine, used, kernels[machine], [detect()] if given.here else ())
            tags[machine] = tag(machine, (path.read_bytes() for path in libraries))
        for wheel in build_wheels(given.out, kernels, tags):
            print(f"{wheel} {wheel.stat().st_size / 1e6:.1f} MB")
        if given.model:
            try_wheels(given.out, given.model)
    except (BuildError, DistError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
