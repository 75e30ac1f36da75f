"""Platform wheels: native code inside, a tag that is true, and what a machine must have named in full."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moonpool.base.native import build
from tools import dist

ROOT = Path(__file__).parents[3]
COMPILER = """#!/bin/sh
# Writes what a linker would write of names, for whatever is asked.
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out="$2"; fi; shift; done
printf '\\0libc.so.6\\0%s\\0GLIBC_2.2.5\\0GLIBC_2.34\\0GLIBC_PRIVATE\\0' "$NEEDS" > "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "compiler").write_text(COMPILER)
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("NEEDS", "libm.so.6")
    return str(tmp_path / "compiler")


def test_wheels_of_two_architectures(compiler: str, tmp_path: Path) -> None:
    """Libraries lie where the loader looks, one for each level of a processor; the tag has their C library."""
    kernels = {machine: tmp_path / machine for machine in ("x86_64", "aarch64")}
    tags = {}
    for machine, folder in kernels.items():
        (folder / "engine").mkdir(parents=True)
        (folder / "engine" / "sse2-of-other-sources.so").write_bytes(b"")
        libraries = dist.build_libraries(machine, compiler, folder)
        tags[machine] = dist.tag(machine, (path.read_bytes() for path in libraries))
    wheels = {path.name: path for path in dist.build_wheels(tmp_path / "out", kernels, tags)}
    assert set(wheels) == {
        "moonpool_kv-0.1.0-py3-none-any.whl",
        *(
            f"{name}-0.1.0-py3-none-manylinux_2_34_{machine}.whl"
            for name in ("moonpool", "moonpool_base")
            for machine in kernels
        ),
    }
    for machine in kernels:
        for distribution, sources, targets in (
            ("moonpool", "engine", build.ARCHITECTURES[machine].targets),
            ("moonpool_base", "kv", build.ARCHITECTURES[machine].targets[-1:]),
        ):
            wheel = wheels[f"{distribution}-0.1.0-py3-none-manylinux_2_34_{machine}.whl"]
            held = {name for name in zipfile.ZipFile(wheel).namelist() if "/prebuilt/" in name}
            inside = f"moonpool/kernels/{sources}"
            built = {build.prebuilt_name(target, build.FOLDER / sources) for target in targets}
            assert held == {
                f"{inside}/{build.PACKAGED}/{Path(library).with_suffix(suffix)}"
                for library in built
                for suffix in (".so", ".sha256")
            }


def test_a_library_that_needs_what_a_machine_may_lack_is_refused(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEEDS", "libstdc++.so.6")
    with pytest.raises(dist.DistError, match=r"needs libstdc\+\+\.so\.6"):
        dist.build_libraries("x86_64", compiler, tmp_path / "kernels", ["sse2"])


def test_what_this_interpreter_needs_is_read_from_its_file() -> None:
    """The names are found in a real library."""
    file = Path(zipfile.__file__).parent / "lib-dynload"
    (library,) = file.glob("_struct.*.so")
    text = library.read_bytes()
    assert "libc.so.6" in dist.needed(text)
    assert 2 <= dist.glibc_minor([text]) < 60
    assert dist.tag("x86_64", [b""]) == "py3-none-manylinux_2_17_x86_64"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_empty_environment_answers_without_a_compiler(tmp_path: Path) -> None:
    """Needs the package index. The kernels of this processor alone, and the bundled model."""
    command = [sys.executable, "-m", "tools.dist", "--here", "--out", str(tmp_path), "--try", "bundled"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the wheels to an answer" in done.stdout
