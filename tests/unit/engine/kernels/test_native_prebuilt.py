"""Libraries built ahead for every processor of an architecture, and found where there is no compiler."""

import os
import platform
from pathlib import Path

import pytest

from moonpool.base.native import build
from tests.unit.engine.kernels.test_build import fake

__all__ = ["fake"]  # a compiler of our own, and an empty cache
ALL = ("avx512-bf16-amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2", "sse2")


@pytest.fixture(autouse=True)
def _on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("MOONPOOL_KERNELS_PREBUILT", raising=False)


@pytest.fixture
def without_compiler(fake: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries of all targets, on a machine without a compiler whose user cannot write to it."""
    folder = fake.parent / "images" / "kernels"
    before = os.umask(0o077)
    try:
        build.build_all(folder)
    finally:
        os.umask(before)
    monkeypatch.setenv("PATH", str(fake.parent / "nothing"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("MOONPOOL_KERNELS_PREBUILT", str(folder))
    return folder


@pytest.mark.parametrize("target", ALL)
def test_found_without_a_compiler(target: str, without_compiler: Path) -> None:
    path = build.build(target)
    assert path.parent == without_compiler
    assert path.name.startswith(f"{target}-")
    assert path.read_text() == "library\n"


def test_everyone_may_read_what_is_built_for_images(without_compiler: Path) -> None:
    assert without_compiler.stat().st_mode & 0o777 == 0o755
    modes = {
        suffix: [path.stat().st_mode & 0o777 for path in without_compiler.glob(suffix)]
        for suffix in ("*.so", "*.sha256")
    }
    assert modes == {"*.so": [0o755] * len(ALL), "*.sha256": [0o644] * len(ALL)}


def test_a_damaged_prebuilt_library_is_passed_over(without_compiler: Path) -> None:
    [library] = without_compiler.glob("sse2-*.so")
    library.write_bytes(b"")
    with pytest.raises(build.BuildError, match="no C"):
        build.build("sse2")


def test_root_may_own_it(without_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = without_compiler.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:
        assert build.build("sse2").parent == without_compiler
    else:
        with pytest.raises(build.BuildError, match="others may write"):
            build.build("sse2")


def test_a_folder_that_others_may_write_to_is_refused(without_compiler: Path) -> None:
    without_compiler.chmod(0o775)
    with pytest.raises(build.BuildError, match="others may write"):
        build.build("sse2")


def test_of_other_sources_is_not_used(without_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.cpp").write_text("// something else\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.BuildError, match="no C"):
        build.build("sse2")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_wheel_has_libraries_beside_its_sources(
    damaged: bool, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another compiler, with flags of the linker; without one here, a damaged library is passed over."""
    made = build.build_all(build.SOURCES / "prebuilt", targets=["neon", "sse2"], used=os.environ["CXX"], link=["-s"])
    assert [path.name.split("-")[0] for path in made] == ["neon", "sse2"]
    again = len(fake.read_text().splitlines())
    build.build_all(build.SOURCES / "prebuilt", targets=["neon", "sse2"], used="/no/compiler")
    assert len(fake.read_text().splitlines()) == again, "what is whole is left as it is"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX")
    if damaged:
        made[1].write_bytes(b"")
        with pytest.raises(build.BuildError, match="no C"):
            build.build("sse2")
    else:
        assert build.build("sse2") == made[1]


def test_copied_where_they_fit_and_built_where_not(without_compiler: Path, fake: Path, tmp_path: Path) -> None:
    called = len(fake.read_text().splitlines())
    assert [path.read_text() for path in build.build_all(tmp_path / "again")] == ["library\n"] * len(ALL)
    assert len(fake.read_text().splitlines()) == called == len(ALL)
    next(without_compiler.glob("avx2-*")).unlink()
    with pytest.raises(build.BuildError, match="no C"):
        build.build_all(tmp_path / "third")


def test_the_command(fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.main(["--all", str(tmp_path / "all")])
    assert [Path(line).parent for line in capsys.readouterr().out.split()] == [tmp_path / "all"] * len(ALL)
    build.main([])
    assert Path(capsys.readouterr().out.strip()).parent == tmp_path / "cache"
    (tmp_path / "compiler").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SystemExit, match="native kernels are not built"):
        build.main(["--all", str(tmp_path / "none")])


def test_an_emulated_processor_is_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """AArch64 emulated on x86 may see the x86 machine's /proc/cpuinfo."""
    for machine, target in (("aarch64", "neon"), ("riscv64", None)):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        if target:
            assert build.detect() == target
            assert "sse2" not in build.processor_flags() or platform.processor() == "aarch64"
        else:
            for make in (build.detect, lambda: build.build_all(Path("nowhere"))):
                with pytest.raises(build.BuildError, match=r"no kernels for this processor \(riscv64\)"):
                    make()


def test_every_target_belongs_to_one_architecture() -> None:
    assert sorted(name for built in build.ARCHITECTURES.values() for name in built.targets) == sorted(build.TARGETS)
    for architecture in build.ARCHITECTURES.values():
        assert build.TARGETS[architecture.targets[-1]][0] <= architecture.always  # whatever it is, one fits


def test_a_folder_that_cannot_be_made_is_named(fake: Path) -> None:
    fake.write_text("")
    with pytest.raises(build.BuildError, match=f"no folder to build in: .*{fake.name}"):
        build.build_all(fake / "kernels")
