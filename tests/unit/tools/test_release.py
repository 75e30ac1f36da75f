"""A release is what its tree says, and has notes, a bill of materials and sums beside the wheels."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tools.dist import DISTRIBUTIONS
from tools.release import BILL, NOTES, SUMS, complaints, missing, notes, prepare, versions, write

CHANGELOG = """# Changelog

## [Unreleased]
{}
## [1.2.0] - 2030-01-02

### Added
- A thing.

## [1.1.0] - 2029-01-02
- Old.
"""


def tree(folder: Path, unreleased: str = "") -> tuple[Path, Path]:
    """A repository of version 1.2.0, and its wheels."""
    root, dist = folder / "tree", folder / "tree/dist"
    for name, place in DISTRIBUTIONS.items():
        (root / place).mkdir(parents=True, exist_ok=True)
        asked = [] if name == "moonpool-base" else ["moonpool-base==1.2.0", "other>=3"]
        project = f'[project]\nname = "{name}"\nversion = "1.2.0"\ndependencies = {json.dumps(asked)}\n'
        (root / place / "pyproject.toml").write_text(project)
    (root / "CHANGELOG.md").write_text(CHANGELOG.format(unreleased))
    (root / "requirements.lock").write_text("grpcio==1.0 \\\n    --hash=sha256:00\n")
    (root / ".gitignore").write_text("dist\n")
    dist.mkdir()
    for name in DISTRIBUTIONS:
        (dist / f"{name.replace('-', '_')}-1.2.0-py3-none-any.whl").write_text(name)
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*own, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root, dist


def test_a_release_that_is_ready(tmp_path: Path) -> None:
    root, dist = tree(tmp_path)
    assert set(versions(root).values()) == {"1.2.0"}
    assert complaints("1.2.0", root) + missing("1.2.0", dist) == []
    files = write("1.2.0", root, dist)
    assert (dist / NOTES).read_text() == "### Added\n- A thing.\n"
    lines = (dist / SUMS).read_text().splitlines()
    assert {line.split()[1]: line.split()[0] for line in lines} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name != SUMS
    }
    components = {found["name"] for found in json.loads((dist / BILL).read_text())["components"]}
    assert {"grpcio", "moonpool-base"} <= components
    assert "pytest" not in components, "what only developers need"


def test_what_keeps_a_tree_from_being_a_release(tmp_path: Path) -> None:
    root, dist = tree(tmp_path, "- New.\n")
    (root / "stray").touch()
    (dist / "moonpool-1.2.0-py3-none-any.whl").rename(dist / "moonpool-1.1.0-py3-none-any.whl")
    (root / "packages/moonpool-kv/pyproject.toml").write_text('[project]\nname = "moonpool-kv"\nversion = "1.1.9"\n')
    assert complaints("1.2.0", root) == [
        "moonpool-kv: version is 1.1.9, not 1.2.0",
        "CHANGELOG.md has lines under [Unreleased]: they belong to [1.2.0] or to a later version",
        "not committed: packages/moonpool-kv/pyproject.toml, stray",
    ]
    assert missing("1.2.0", dist) == [
        "dist/ has no wheel of moonpool 1.2.0: make dist",
        "dist/moonpool-1.1.0-py3-none-any.whl is of another version",
    ]
    assert "CHANGELOG.md has nothing under [1.3.0]" in complaints("1.3.0", root)


def test_notes_end_where_the_next_version_begins() -> None:
    assert notes(CHANGELOG.format(""), "1.1.0") == "- Old.\n"
    assert notes(CHANGELOG.format(""), "9.9.9") == ""


def test_a_tree_is_prepared_for_a_version(tmp_path: Path) -> None:
    root, _ = tree(tmp_path, "\n### Fixed\n- A fault.\n\n")
    (root / "docs").mkdir()
    page = root / "docs/kubernetes.md"
    page.write_text('a/moonpool-light:1.2.0, {newTag: "1.2.0"}, docker 1.2.0, moonpool-light:1.2.01')
    written = prepare("1.3.0", "2030-02-03", root)
    assert {path.name for path in written} == {"pyproject.toml", "CHANGELOG.md", "kubernetes.md"}
    assert set(versions(root).values()) == {"1.3.0"}
    assert page.read_text() == 'a/moonpool-light:1.3.0, {newTag: "1.3.0"}, docker 1.2.0, moonpool-light:1.2.01'
    changelog = (root / "CHANGELOG.md").read_text()
    assert notes(changelog, "1.3.0") == "### Fixed\n- A fault.\n"
    assert notes(changelog, "Unreleased").strip() == ""
    assert "## [1.3.0] - 2030-02-03\n" in changelog
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "1.3.0"], cwd=root, check=True
    )
    assert [each for each in complaints("1.3.0", root) if not each.startswith("not committed: docs")] == []


@pytest.mark.parametrize("version", ["1.3", "v1.3.0", "1.3.0rc1"])
def test_what_is_no_version_is_not_prepared(tmp_path: Path, version: str) -> None:
    root, _ = tree(tmp_path, "\n- A fault.\n\n")
    with pytest.raises(ValueError, match="is no version"):
        prepare(version, "2030-02-03", root)
    with pytest.raises(ValueError, match="nothing under"):
        prepare("1.4.0", "2030-02-03", tree(tmp_path / "other")[0])
