"""The locks: every package of `make setup`, or of the light image, but torch, as in constraints.txt, with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


LOCKS = "requirements.lock", "requirements-light.lock"


def locked(name: str) -> dict[str, list[str]]:
    """Lines of each package in a lock: its requirement, then its hashes."""
    found: dict[str, list[str]] = {}
    package = ""
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith(" "):
            package = line.rstrip(" \\")
            found[package] = []
        else:
            found[package].append(line.strip(" \\"))
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("lock", LOCKS)
def test_each_package_has_hashes_and_the_version_of_the_constraints(lock: str) -> None:
    versions, unpinned = pins(), set()
    for text, hashes in locked(lock).items():
        requirement = Requirement(text)
        assert hashes, f"{text} has no hash"
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
        name = canonicalize_name(requirement.name)
        if name in versions:
            assert str(requirement.specifier) == f"=={versions[name]}", "run `make lock`"
        else:
            unpinned.add(name)
    assert unpinned <= {"colorama", "httpx2-jsfetch", "numpy"}, "add these to constraints.txt, then run `make lock`"


@pytest.mark.parametrize("group", ["", "engine"])
def test_nothing_that_setup_installs_is_missing(group: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"][group] if group else project["dependencies"]
    there = {canonicalize_name(Requirement(text).name) for text in locked(LOCKS[0])}
    for text in wanted:
        name = canonicalize_name(Requirement(text).name)
        assert name in there or name in ("torch", "moonpool-base"), f"{text}: run `make lock`"


def test_the_light_lock_is_the_part_of_the_other_that_needs_no_engine() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    whole, light = locked(LOCKS[0]), locked(LOCKS[1])
    assert light.items() <= whole.items(), "run `make lock`"
    there = {canonicalize_name(Requirement(text).name) for text in light}
    assert {canonicalize_name(Requirement(text).name) for text in project["dependencies"]} <= there | {"moonpool-base"}
    assert not there & {"numpy", "gguf", "safetensors"}
