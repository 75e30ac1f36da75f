"""The native kernels beside plain formulas, without torch: on this processor, and for AArch64 under an emulator.

`native_harness.cpp` opens the library that the build's own flags give and says what is wrong. AArch64 needs a cross
compiler and QEMU's user emulation (Debian: g++-aarch64-linux-gnu, qemu-user-static), and runs as the plainest processor
and as one with everything. Run one by hand with the seed that a failure prints.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonpool.base.native import build

HARNESS = Path(__file__).with_name("native_harness.cpp")
SAMPLER = Path(__file__).with_name("sampler_harness.cpp")
PACKED = Path(__file__).with_name("packed_harness.cpp")
CROSS = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
#: What the emulator's processors have: ARMv8.0 and nothing else; everything that the emulator knows.
PROCESSORS = ("cortex-a53", "max")
#: Files that products with packed weights need.
PRODUCTS = ("packed", "packed_floats", "multiply", "panels", "team", "cpu_sharing")
#: AVX-VNNI's product of bytes is also one of AVX-512's, in other instruction codes.
AVX_VNNI = ("-mavx512f", "-mavx512vl", "-mavx512vnni", "-D__AVXVNNI__=1")
TILE_MODEL = ("-DMP_TILE_MODEL=1",)
HERE = [name for name, (needed, _) in build.TARGETS.items() if needed <= build.processor_flags()]

TIMEOUT_S = 600
SLOW = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def compile_(*command: str | Path) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def make(compiler: str, target: str, folder: Path) -> tuple[Path, Path]:
    """The harness and the target's library, both by `compiler`."""
    harness, library = folder / "harness", folder / f"{target}.so"
    sources = sorted(build.SOURCES.glob("*.cpp"))
    compile_(compiler, *build.flags(target), *sources, "-o", library)
    options = ("-O2", "-std=c++17", "-pthread", "-w", "-I", str(build.SOURCES))
    compile_(compiler, *options, HARNESS, "-o", harness, "-ldl")
    return harness, library


def run(*command: str | Path) -> str:
    """What the harness says; it must be content."""
    seed = os.environ.get("SEED") or str(random.SystemRandom().randrange(10**9))
    done = subprocess.run([*command, seed], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"{command[-1]}, seed {seed}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("target", [pytest.param(name, marks=SLOW) for name in HERE])
def test_this_processor(target: str, tmp_path: Path) -> None:
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    assert "bf16 1" in run(*make(compiler, target, tmp_path)) or "bf16" not in target


def cross_root() -> Path:
    """Where the emulated program finds its loader."""
    asked = subprocess.run(
        [CROSS, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    return Path(asked.stdout.strip()).resolve().parents[1]


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The command that runs the harness for AArch64, all but the processor and the seed."""
    return emulated("neon", tmp_path_factory.mktemp("aarch64"))


def emulated(target: str, folder: Path) -> list[str | Path]:
    emulator = next((name for name in EMULATORS if shutil.which(name)), None)
    if shutil.which(CROSS) is None or emulator is None:
        pytest.skip(f"needs {CROSS} and {' or '.join(EMULATORS)}")
    return [emulator, "-L", cross_root(), *make(CROSS, target, folder)]


@pytest.mark.parametrize("processor", [pytest.param(name, marks=SLOW) for name in PROCESSORS])
def test_aarch64(processor: str, aarch64: list[str | Path]) -> None:
    emulator, *rest = aarch64
    assert "width 4, bf16 0" in run(emulator, "-cpu", processor, *rest)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_aarch64_with_matrices_of_bfloat16(tmp_path: Path) -> None:
    """A row alone goes by other instructions than among others."""
    emulator, *rest = emulated("neon-bf16", tmp_path)
    assert "width 4, bf16 1" in run(emulator, "-cpu", "max", *rest)


def sums_of(compiler: str, target: str, folder: Path, *before: str | Path, options: Sequence[str] = ()) -> str:
    """What the harness of packed products prints for a target's library."""
    compiled, linked = folder / f"packed-{target}", folder / f"packed-{target}.so"
    left_out = {"-O3", *(["-mavxvnni"] if options else [])}
    flags = ["-O1", *(flag for flag in build.flags(target) if flag not in left_out)]
    compile_(compiler, *flags, *options, *(build.SOURCES / f"{name}.cpp" for name in PRODUCTS), "-o", linked)
    compile_(compiler, "-O1", "-std=c++17", "-w", "-I", str(build.SOURCES), PACKED, "-o", compiled, "-ldl")
    done = subprocess.run([*before, compiled, linked], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{target}: {done.returncode} {done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_packed_products_have_the_same_bits_on_every_processor(tmp_path: Path) -> None:
    """SSE2 has no fused multiplication."""
    here = [target for target in HERE if target != "sse2"]
    found = {target: sums_of(build.compiler(), target, tmp_path) for target in here}
    if "avx512-vnni" in found and "avx2-vnni" not in found:
        found["avx2-vnni"] = sums_of(build.compiler(), "avx2-vnni", tmp_path, options=AVX_VNNI)
    if "avx2" in here:
        found["tiles"] = sums_of(build.compiler(), "avx2", tmp_path, options=TILE_MODEL)
    emulator = next((name for name in EMULATORS if shutil.which(name)), None)
    if shutil.which(CROSS) and emulator:
        options = (emulator, "-L", cross_root(), "-cpu", "max")
        found |= {
            target: sums_of(CROSS, target, tmp_path, *options)
            for target in ("neon", "neon-dot", "neon-i8mm", "neon-bf16")
        }
    assert len(set(found.values())) == 1, {target: hash(text) for target, text in found.items()}


def tokens_of(compiler: str, target: str, folder: Path, *before: str | Path) -> str:
    """What the sampler's harness prints, compiled for a target."""
    harness = folder / f"sampler-{target}"
    flags = [flag for flag in build.flags(target) if flag != "-shared"]
    compile_(compiler, *flags, "-I", str(build.SOURCES), SAMPLER, "-o", harness)
    done = subprocess.run([*before, harness], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{target}: {done.returncode}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_every_processor_chooses_the_same_tokens(aarch64: list[str | Path], tmp_path: Path) -> None:
    emulator, option, root, *_ = aarch64
    chosen = {tokens_of(build.compiler(), target, tmp_path) for target in HERE}
    chosen |= {tokens_of(CROSS, "neon", tmp_path, emulator, option, root, "-cpu", name) for name in PROCESSORS}
    assert len(chosen) == 1


def test_aarch64_flags_name_the_plainest_processor() -> None:
    """A library for all of them, beside that for processors with dot products."""
    assert [flag for flag in build.flags("neon") if flag.startswith("-m")] == ["-march=armv8-a"]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_fault_does_not_pass(tmp_path: Path) -> None:
    """The harness itself: kernels with one wrong coefficient are found out."""
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    wrong = tmp_path / "native"
    shutil.copytree(build.SOURCES, wrong, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (wrong / "vec.h").read_text()
    assert "5.550329035e-2f" in text
    (wrong / "vec.h").write_text(text.replace("5.550329035e-2f", "5.551329035e-2f"))
    harness, library = make(compiler, HERE[-1], tmp_path)
    compile_(compiler, *build.flags(HERE[-1]), *sorted(wrong.glob("*.cpp")), "-o", library)
    done = subprocess.run([harness, library, "1"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "WRONG exponentials of degree 6" in done.stdout
    assert "WRONG exponentials of degree 4" not in done.stdout
