"""Wheels: one import root, no file in two of them and none left out, and nothing of other packages touched."""

import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
DISTRIBUTIONS = {"moonpool": ".", "moonpool-base": "packages/moonpool-base", "moonpool-kv": "packages/moonpool-kv"}
"""Distribution -> folder of its pyproject.toml."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each distribution's wheel, built by the backend itself: no network, no environment of its own."""
    built = {}
    for name, folder in DISTRIBUTIONS.items():
        out = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-P", "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
        subprocess.run(command, cwd=ROOT / folder, check=True, capture_output=True)
        (built[name],) = out.glob("*.whl")
    return built


def files(wheel: Path) -> set[str]:
    """Paths in a wheel, without its metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_every_file_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    held = Counter(name for wheel in wheels.values() for name in files(wheel))
    assert {name for name, count in held.items() if count > 1} == set()
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "moonpool", "kernels"], cwd=ROOT, check=True, capture_output=True, text=True)  # fmt: skip  # noqa: E501
    expected = {
        re.sub("^kernels/", "moonpool/kernels/", path) for path in listed.stdout.split() if (ROOT / path).exists()
    }
    assert set(held) == expected


def test_there_is_one_name_at_the_top(wheels: dict[str, Path]) -> None:
    assert {name.split("/")[0] for wheel in wheels.values() for name in files(wheel)} == {"moonpool"}


@pytest.mark.parametrize("ours_first", [True, False])
def test_other_packages_are_left_alone(wheels: dict[str, Path], ours_first: bool, tmp_path: Path) -> None:
    """`kernels` is a Hugging Face distribution, `services` and `simulator` are names that anybody's project has."""
    others = {
        f"{name}/__init__.py": f"WHOSE = 'of {name}'\n" for name in ("kernels", "services", "simulator", "protos")
    }

    def install_others() -> None:
        for path, text in others.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)

    def install_ours() -> None:
        for wheel in wheels.values():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tmp_path)

    for step in (install_ours, install_others) if ours_first else (install_others, install_ours):
        step()
    assert {path: (tmp_path / path).read_text() for path in others} == others
    for wheel in wheels.values():  # as pip uninstalls: what RECORD names
        for name in files(wheel):
            (tmp_path / name).unlink()
    assert {path: (tmp_path / path).read_text() for path in others} == others
    assert [path for path in (tmp_path / "moonpool").rglob("*") if path.is_file()] == []


def test_the_base_needs_no_other_wheel(wheels: dict[str, Path]) -> None:
    """Neither by an import that always runs, nor in what it asks for."""
    graph = grimp.build_graph("moonpool")
    base = {
        module for module in graph.modules if module.startswith(("moonpool.base", "moonpool.client", "moonpool.v1"))
    }
    leaving = {
        (module, other)
        for module in base
        for other in graph.find_modules_directly_imported_by(module)
        if other not in base
    }
    assert leaving == set()
    connectors = {module for module in graph.modules if module.startswith("moonpool.connectors")}
    used = {other for module in connectors for other in graph.find_modules_directly_imported_by(module)}
    assert used <= base | connectors


def test_a_client_runs_from_the_base_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name in ("moonpool-base", "moonpool-kv"):
        with zipfile.ZipFile(wheels[name]) as archive:
            archive.extractall(tmp_path)
    code = (
        "import sys, moonpool.client, moonpool.client.kv, moonpool.connectors.stores\n"
        "from moonpool.base.kv.native_library import SOURCES\n"
        "assert SOURCES.is_dir(), SOURCES\n"
        "print(moonpool.__file__, [name for name in ('torch', 'lmdb', 'moonpool.conductor') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split(maxsplit=1) == [str(tmp_path / "moonpool" / "__init__.py"), "[]\n"], done.stderr


def test_no_version_that_vllm_pins_is_refused() -> None:
    import tomllib

    text = (ROOT / "tests" / "engines" / "vllm.txt").read_text(encoding="utf-8")
    pairs: list[tuple[str, str]] = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    names = {name.lower().replace("_", "-"): version for name, version in pairs}
    project = tomllib.loads((ROOT / "packages/moonpool-base/pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    assert [str(each) for each in requirements if names[each.name] not in each.specifier] == []
