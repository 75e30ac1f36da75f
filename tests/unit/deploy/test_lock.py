"""requirements.lock: every package of `make setup` but torch, at the version of constraints.txt, with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def locked() -> dict[str, list[str]]:
    """Lines of each package in the lock: its requirement, then its hashes."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith(" "):
            name = line.rstrip(" \\")
            found[name] = []
        else:
            found[name].append(line.strip(" \\"))
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_each_package_has_hashes_and_the_version_of_the_constraints() -> None:
    versions, unpinned = pins(), set()
    for text, hashes in locked().items():
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
    there = {canonicalize_name(Requirement(text).name) for text in locked()}
    for text in wanted:
        name = canonicalize_name(Requirement(text).name)
        assert name in there or name == "torch", f"{text}: run `make lock`"
