"""Building, its cache, and what runs where the kernels cannot be built."""

import functools
import logging
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch

from moonpool.base.native import build
from moonpool.engine.kernels import choice
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.native import library
from tests.unit.engine.kernels.cases import BATCHES, make

CPU = torch.device("cpu")
FAKE = """#!/bin/sh
# A compiler that counts the libraries that it makes, and writes what it is asked for.
case "$*" in *-shared*) echo called >> "$COUNT";; esac
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out="$2"; fi; shift; done
echo library > "$out"
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler of our own, few files, an empty cache; returns the file with a line for each call of the compiler."""
    compiler, count = tmp_path / "compiler", tmp_path / "count"
    compiler.write_text(FAKE)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("COUNT", str(count))
    monkeypatch.setenv("MOONPOOL_KERNELS_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("attention.cpp", "panels.cpp", "panels.h"):
        (sources / name).write_text(f"// {name}\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    return count


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing loaded, no choice made; afterwards none either."""
    monkeypatch.setattr(library, "loader", library.Loader())
    choice.choose_by_wish.cache_clear()
    yield
    choice.choose_by_wish.cache_clear()


def test_compilers_work_in_a_folder_of_their_own(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty part of CPATH is a compiler's working folder, where anybody's headers may lie. Relative paths stay."""
    monkeypatch.chdir(tmp_path)
    Path("compiler").write_text(FAKE.replace("echo called", "pwd"))
    monkeypatch.setenv("CXX", "./compiler")
    monkeypatch.setenv("MOONPOOL_KERNELS_CACHE", "cache")
    assert build.build("sse2").absolute().parent == tmp_path / "cache"
    (where,) = map(Path, fake.read_text().splitlines())
    assert where.parent == tmp_path / "cache"


def test_built_once_per_target_and_sources(fake: Path) -> None:
    first, again = build.build("sse2"), build.build("sse2")
    assert first == again
    assert first.read_text() == "library\n"
    assert first.parent.stat().st_mode & 0o777 == 0o700, "what lies there is run"
    assert build.build("avx2") != first
    assert len(fake.read_text().splitlines()) == 2
    assert not [path for path in first.parent.iterdir() if path.is_dir()]  # nothing temporary is left


@pytest.mark.parametrize("damage", ["cut", "zeroed", "no hash", "hash of another"])
def test_a_damaged_library_is_made_anew_and_named(damage: str, fake: Path) -> None:
    path = build.build("sse2")
    beside = path.with_suffix(".sha256")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:3])
    elif damage == "zeroed":
        path.write_bytes(b"\0" * path.stat().st_size)
    elif damage == "no hash":
        beside.unlink()
    else:
        beside.write_text("0" * 64)
    said: list[str] = []
    assert build.build("sse2", report=said.append) == path
    assert path.read_text() == "library\n"
    assert said[0] == f"{path} is damaged: made anew"
    assert build.build("sse2", report=said.append) == path
    assert len(fake.read_text().splitlines()) == 2


def test_concurrent_builds_make_one_library(fake: Path) -> None:
    program = "from moonpool.base.native.build import build; print(build('sse2'))"
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    paths = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(paths) == 1
    assert fake.read_text() == "called\n"


def test_a_compiler_that_fails_leaves_nothing(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "compiler").write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    with pytest.raises(build.BuildError, match=f"^{tmp_path / 'compiler'}: no such flag"):
        build.build("sse2")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


BUILD = """
import signal
from moonpool.base.native.build import build
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
print(build("sse2", report=lambda text: print(text, flush=True)))
"""


def said_by(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


HELD = """#!/bin/sh
if [ -e "$COUNT.hold" ]; then sleep 300 & echo $! >> "$COUNT.children"; wait; fi
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_compiler_outlives_its_build_and_another_build_takes_over(
    fake: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The second build says for which process it waits, and builds when that one has ended."""
    (tmp_path / "compiler").write_text(HELD + FAKE)
    hold, children = tmp_path / "count.hold", tmp_path / "count.children"
    hold.touch()
    start = functools.partial(
        subprocess.Popen, [sys.executable, "-c", BUILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with start() as first, start() as second:
        said = said_by(second).readline()
        if said.startswith("compiling"):
            first, second = second, first  # either may have been sooner
            said = next(line for line in said_by(second) if line.startswith("waiting"))
        assert said.startswith(f"waiting for process {first.pid}, which compiles native code (")
        while not children.exists() or not children.read_text().endswith("\n"):
            assert said_by(first).readline()  # a build tells of itself each second
        watched = [os.pidfd_open(int(pid)) for pid in children.read_text().split()]
        hold.unlink()
        first.send_signal(number)
        first.wait(30)
        for child in watched:
            assert select.select([child], [], [], 30)[0], "a compiler outlived its build"
            os.close(child)
        library = said_by(second).read().splitlines()[-1]
    assert Path(library).read_text() == "library\n"
    left = {path.suffix for path in Path(library).parent.iterdir()}
    assert left == {".so", ".sha256", ".lock"}, "nothing of the first is left"


def test_progress_counts_files(fake: Path) -> None:
    said: list[str] = []
    build.build("sse2", report=said.append)
    count = len(list(build.SOURCES.glob("*.cpp")))
    assert said[0] == f"compiling native code, 0 of {count} files (once, about 10 s)"
    assert said[-1] == "linking native code"
    again: list[str] = []
    build.build("sse2", report=again.append)
    assert again == []


def test_a_compiler_that_does_nothing_for_long_is_named(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said of it again and again is printed once."""
    monkeypatch.setattr(build, "SILENCE_S", 0.02)
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    with pytest.raises(SystemExit, match="compiled no further file in 0 s"):
        build.main([])
    assert capsys.readouterr().err.splitlines() == ["compiling native code, 0 of 2 files (once, about 10 s)"]


def test_the_expected_time_is_told_in_tens_of_seconds(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for number in range(28):
        (build.SOURCES / f"more{number}.cpp").write_text("")
    said: list[str] = []
    build.build("sse2", report=said.append)
    assert said[0] == "compiling native code, 0 of 30 files (once, about 60 s)"


def test_a_folder_that_others_may_write_to_is_refused(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(build.BuildError, match="others may write"):
        build.build("sse2")


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_plain_torch_runs_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    case = make(BATCHES["mixed"])
    with caplog.at_level(logging.INFO, "kernels"):
        for _ in range(2):
            case.check(case.run())
    assert sum("no C++ compiler found" in record.getMessage() for record in caplog.records) == 1
    assert choice.prepare(CPU, torch.float32) == "torch"
    assert choice.why_not_native(CPU, torch.float32).startswith("no C++ compiler found")
    monkeypatch.setenv(choice.VARIABLE, "native")
    with pytest.raises(ValueError, match="MOONPOOL_KERNELS: native kernels cannot be had: no C"):
        case.run()


@pytest.mark.usefixtures("fresh")
def test_a_damaged_library_is_not_used(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert choose("attention", CPU, torch.float32) == "torch"
    assert fake.read_text() == "called\n"


@pytest.mark.parametrize(("wish", "dtype", "name"), [
    ("reference", torch.float32, "reference"),
    ("torch", torch.bfloat16, "torch"),
    ("", torch.float64, "reference"),
])  # fmt: skip
def test_the_choice(wish: str, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, wish)
    assert choose("attention", CPU, dtype) == name


@pytest.mark.parametrize(("wish", "device", "dtype", "why"), [
    ("torch", "cpu", torch.bfloat16, "MOONPOOL_KERNELS=torch"),
    ("", "meta", torch.bfloat16, "the device is meta"),
    ("", "cpu", torch.float64, "no native kernels for float64"),
])  # fmt: skip
def test_why_native_kernels_do_not_run(
    wish: str, device: str, dtype: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(choice.VARIABLE, wish)
    assert choice.why_not_native(torch.device(device), dtype) == why


def test_an_unknown_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "fastest")
    with pytest.raises(ValueError, match=r"^MOONPOOL_KERNELS: must be one of"):
        choose("attention", CPU, torch.float32)


def test_every_processor_has_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, target in (
        ({"asimd", "fp"}, "neon"),
        ({"asimd", "fp", "asimddp"}, "neon-dot"),
        ({"asimd", "fp", "asimddp", "i8mm"}, "neon-i8mm"),
        ({"asimd", "fp", "asimddp", "i8mm", "bf16"}, "neon-bf16"),
        ({"sse2"}, "sse2"),
        ({"sse2", "avx2", "fma", "f16c", "bmi2", "movbe"}, "avx2"),
        ({"sse2", "avx2", "fma", "f16c", "bmi2", "movbe", "avx_vnni"}, "avx2-vnni"),
    ):
        monkeypatch.setattr(build, "processor_flags", lambda flags=flags: frozenset(flags))
        assert build.detect() == target
    monkeypatch.setattr(build, "processor_flags", frozenset)
    with pytest.raises(build.BuildError, match="no kernels for this processor"):
        build.detect()


@pytest.mark.parametrize(
    ("missing", "permitted", "target"),
    [("", True, "avx512-bf16-amx"), ("", False, "avx512-bf16"), ("amx_int8", True, "avx512-bf16")],
)
def test_tiles_need_permission(missing: str, permitted: bool, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole library without tiles runs where Linux refuses them, and nothing else of the processor is given up."""
    has = build.TARGETS["avx512-bf16-amx"][0] | {"sse2"}
    monkeypatch.setattr(build, "listed_flags", lambda: has - {missing})
    monkeypatch.setattr(build, "tiles_permitted", lambda: permitted)
    assert build.detect() == target
    assert build.TARGETS["avx512-bf16"][0] <= build.processor_flags()


def test_features_are_those_that_linux_lists() -> None:
    architecture = build.ARCHITECTURES.get(platform.machine())
    if architecture is None:
        pytest.skip("an architecture without kernels")
    listed = {"x86_64": {"fpu", "tsc"}, "aarch64": {"fp"}}[platform.machine()]
    assert listed | architecture.always <= build.listed_flags()


def test_a_kernel_without_tiles_refuses() -> None:
    assert build.tiles_permitted() == ("amx_tile" in build.listed_flags())


@pytest.mark.timeout(600)  # compilers of a busy machine
@pytest.mark.parametrize(
    ("name", "product"), [("multiply", "tdpbf16ps"), ("prefill", "tdpbf16ps"), ("packed", "tdpbsud")]
)
def test_kernels_compile_for_tiles(name: str, product: str, tmp_path: Path) -> None:
    """On every x86-64 machine; they run where the processor has AMX."""
    if platform.machine() != "x86_64":
        pytest.skip("needs a compiler for x86-64")
    made = tmp_path / f"{name}.o"
    options = [*build.flags("avx512-bf16-amx"), "-O1", "-c", str(build.SOURCES / f"{name}.cpp")]
    subprocess.run([build.compiler(), *options, "-o", str(made)], check=True)
    listed = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True, check=True).stdout
    for instruction in ("ldtilecfg", "tileloadd", product, "tilestored", "tilerelease"):
        assert instruction in listed


def test_what_runs_compilers_ends_in_order_while_its_parent_lives() -> None:
    program = Path(build.__file__).with_name("compiling.py")
    command = [sys.executable, "-I", "-S", str(program), "1", '[["true"], ["false"]]']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said, complained = process.stdout.read(), process.stderr.read()  # standard input stays open
    assert (process.returncode, said, complained) == (0, b'\n"exit status 1"\n', b"")
