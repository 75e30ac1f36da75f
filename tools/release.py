"""Makes a release of what lies in `dist/`: `make release`, which checks the tree first and then builds the wheels.

Checks that the tree is what the release says: every distribution and the changelog have the version, nothing is
uncommitted. Then writes beside the wheels `notes.md` (the version's changelog), `sbom.cdx.json` (the packages of
requirements.lock, as they are installed here), `images.txt` (the images, if a docker engine answers) and `SHA256SUMS`.
A tag is left to people: the last line says the command. `--prepare VERSION` makes the tree a release's: the version
wherever one is written, and a heading with the date over what the changelog has unreleased. To be committed before.
"""

import argparse
import datetime
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tools.dist import DIST, DISTRIBUTIONS, ROOT
from tools.sbom import bill, canonical

SUMS, NOTES, BILL, IMAGES = "SHA256SUMS", "notes.md", "sbom.cdx.json", "images.txt"
TARGETS = ("light", "engine", "engine-cuda")
"""Images of deploy/Containerfile."""
NAMED_IN = ("docs/kubernetes.md",)
"""Pages that name images with the version."""


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version of each distribution, and that of `moonpool-base` which others ask for, by where it is written."""
    found = {}
    for name, folder in DISTRIBUTIONS.items():
        path = root / folder / "pyproject.toml"
        project = tomllib.loads(path.read_text())["project"]
        found[f"{name}: version"] = project["version"]
        for needed in project.get("dependencies", ()):
            if (asked := re.fullmatch(r"(moonpool[\w-]*)==(\S+)", needed)) is not None:
                found[f"{name}: {asked[1]}"] = asked[2]
    return found


def prepare(version: str, today: str, root: Path = ROOT) -> list[Path]:
    """Write a version wherever the tree names its own, and date the unreleased part of the changelog; return the files.

    Args:
        version: MAJOR.MINOR.PATCH.
        today: year, month and day, as the changelog has them.
        root: of the tree.

    Raises:
        ValueError: it is no version, or nothing is unreleased.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"{version} is no version, such as 1.2.0")
    changelog = (root / "CHANGELOG.md").read_text()
    if not notes(changelog, "Unreleased").strip():
        raise ValueError("CHANGELOG.md has nothing under [Unreleased]")
    before = versions(root)["moonpool: version"]
    written = [root / folder / "pyproject.toml" for folder in DISTRIBUTIONS.values()]
    written += [path for name in NAMED_IN if (path := root / name).exists()]
    ours = re.compile(rf'(^version = "|\bmoonpool[\w-]*(?:==|:)|newTag: "){re.escape(before)}(?![\d.])', re.MULTILINE)
    for path in written:
        path.write_text(ours.sub(rf"\g<1>{version}", path.read_text()))
    heading = "## [Unreleased]\n"
    (root / "CHANGELOG.md").write_text(changelog.replace(heading, f"{heading}\n## [{version}] - {today}\n", 1))
    return [*written, root / "CHANGELOG.md"]


def notes(changelog: str, version: str) -> str:
    """A version's part of the changelog, without its heading; "" if there is none."""
    part = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return part[1].strip() + "\n" if part is not None else ""


def complaints(version: str, root: Path = ROOT) -> list[str]:
    """Why this tree is no release of a version."""
    found = [f"{where} is {other}, not {version}" for where, other in versions(root).items() if other != version]
    changelog = (root / "CHANGELOG.md").read_text()
    if not notes(changelog, version).strip():
        found.append(f"CHANGELOG.md has nothing under [{version}]")
    if notes(changelog, "Unreleased").strip():
        found.append(f"CHANGELOG.md has lines under [Unreleased]: they belong to [{version}] or to a later version")
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    if changed.stdout:
        found.append(f"not committed: {', '.join(line[3:] for line in changed.stdout.splitlines()[:5])}")
    return found


def missing(version: str, dist: Path = DIST) -> list[str]:
    """Why these wheels are no release of a version."""
    found = []
    names = [path.name for path in sorted(dist.glob("*.whl"))]
    for name in DISTRIBUTIONS:
        if not any(wheel.startswith(f"{name.replace('-', '_')}-{version}-") for wheel in names):
            found.append(f"{dist.name}/ has no wheel of {name} {version}: make dist")
    found += [f"{dist.name}/{name} is of another version" for name in names if name.split("-")[1] != version]
    return found


def released(root: Path = ROOT) -> list[Distribution]:
    """What an installation with engines has: our distributions, torch, and the packages of the lock."""
    locked = re.findall(r"^([\w.-]+)==", (root / "requirements.lock").read_text(), re.MULTILINE)
    names = {*DISTRIBUTIONS, "torch", *map(canonical, locked)}
    return [found for found in distributions() if canonical(found.name) in names]


def write(version: str, root: Path = ROOT, dist: Path = DIST) -> list[Path]:
    """Write notes, bill of materials and sums beside the wheels; return all files of the release."""
    (dist / NOTES).write_text(notes((root / "CHANGELOG.md").read_text(), version))
    (dist / BILL).write_text(json.dumps(bill(released(root)), indent=1) + "\n")
    files = [*sorted(dist.glob("*.whl")), dist / BILL, dist / NOTES]
    files += [path for path in (dist / IMAGES,) if path.exists()]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (dist / SUMS).write_text("".join(sums))
    return [*files, dist / SUMS]


def build_images(version: str, root: Path = ROOT, dist: Path = DIST) -> str:
    """Build the images, and write the id of each beside the wheels; return what is to be told.

    Raises:
        CalledProcessError: an image cannot be built.
    """
    (dist / IMAGES).unlink(missing_ok=True)
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        return f"not built, as no docker engine answers: images {', '.join(TARGETS)}"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    built = []
    for target in TARGETS:
        name = f"moonpool-{target}:{version}"
        how = ["--file", "deploy/Containerfile", "--target", target, "--build-arg", f"COMMIT={commit.strip()}"]
        subprocess.run([docker, "build", *how, "--tag", name, "."], cwd=root, check=True)
        told = subprocess.run(
            [docker, "image", "inspect", "--format", "{{.Id}}", name], capture_output=True, check=True
        )
        built.append(f"{name} {told.stdout.decode().strip()}\n")
    (dist / IMAGES).write_text("".join(built))
    return f"images: {', '.join(TARGETS)}"


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the release is ready."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=versions()["moonpool: version"], help="default: that of pyproject.toml")
    parser.add_argument("--check", action="store_true", help="check the tree alone, before wheels are built")
    parser.add_argument("--prepare", metavar="VERSION", help="write this version into the tree, and nothing else")
    options = parser.parse_args(argv)
    if options.prepare:
        for path in prepare(options.prepare, datetime.date.today().isoformat()):
            print(path.relative_to(ROOT))
        return 0
    version = options.version
    if found := complaints(version) + ([] if options.check else missing(version)):
        print(*found, sep="\n", file=sys.stderr)
        return 1
    if options.check:
        return 0
    told = build_images(version)
    for path in write(version):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(ROOT)}")
    print(told)
    # Headings of the notes begin with "#", as comments do, which git leaves out of a message otherwise.
    print(f"then: git tag -s v{version} --cleanup=whitespace -F {DIST.name}/{NOTES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
