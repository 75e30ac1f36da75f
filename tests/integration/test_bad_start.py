"""Services that cannot start: one line that names the setting or the file, the right exit code, nothing left behind."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.config import SERVICE_MODULES
from moonpool.base.rpc.process import EXIT_CONFIG
from tests import programs
from tests.integration.conftest import BLOCK
from tests.unit.kvstore.process import running

NOBODY = "127.0.0.1:1"
START_S = 240


def start(module: str, *arguments: str) -> tuple[int, str]:
    """Runs a service, or the command line, that is expected to end by itself; its exit code and what it said."""
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    done = programs.run(module, *arguments, timeout_s=START_S, environment=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def refused(kind: str, *arguments: str) -> str:
    """What a service says that ends because of its settings: its last line."""
    code, said = start(SERVICE_MODULES[kind], *arguments)
    assert code == EXIT_CONFIG, said
    line = said.strip().splitlines()[-1]
    assert line.startswith(f"{kind}: "), said
    return line.removeprefix(f"{kind}: ")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


ENGINE = ("--conductor", NOBODY, "--threads", "1", "--block-size", str(BLOCK))


def test_weights_cut_short(folder: Path) -> None:
    """A download that was broken off. What else can be wrong with weights, `test_loader.py` of models reads."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors: cut short" in refused("prefill", "--model", str(folder), *ENGINE)


def test_an_invalid_tokenizer(folder: Path) -> None:
    """The conductor reads the tokenizer. `tests/unit/base/checkpoint` has further faults of folders."""
    (folder / "tokenizer.json").write_text("{}")
    said = refused("conductor", "--model", str(folder), "--listen", "127.0.0.1:0")
    assert "tokenizer.json: not a tokenizer" in said


def test_a_small_model_that_cannot_guess(checkpoint: Path, folder: Path) -> None:
    """Before an engine starts: another vocabulary, which would make every guess wrong; and nothing to guess with."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 128}))
    model = ("--model", str(checkpoint), *ENGINE)
    said = refused("decode", *model, "--draft-model", str(folder))
    assert said == "draft_model: has 128 tokens, the model 512: not the same vocabulary"
    assert refused("decode", *model, "--speculative", "draft") == "draft_model: speculative=draft needs one"


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["conductor", "decode"])
def test_port_in_use(checkpoint: Path, taken: str, kind: str) -> None:
    """`listen` is named, and the address."""
    flags = {"conductor": ["--model", str(checkpoint)], "decode": ["--model", str(checkpoint), *ENGINE]}
    line = refused(kind, *flags[kind], "--listen", taken)
    assert line.startswith("listen: ")
    assert taken in line


def test_unwritable_folders(tmp_path: Path) -> None:
    """A folder that cannot be made, even by root: below a file."""
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "data")
    assert refused("kvstore", "--data-dir", below).startswith("data_dir: ")
    assert refused("kvstore", "--set", f"spans_dir={below}").startswith("spans_dir: ")
    for name, flags in (("data_dir", ("--data-dir", below)), ("spans_dir", ("--set", f"all.spans_dir={below}"))):
        code, said = start("moonpool.cli.main", "serve", *flags, "--port", "0", "--engine", "emulated:llama-70b-a800")
        assert code == EXIT_CONFIG
        assert name in said


async def test_a_data_folder_in_use(tmp_path: Path) -> None:
    """Two stores never share one."""
    async with running(tmp_path / "log", "--data-dir", str(tmp_path / "data")) as first:
        assert "used by another process" in refused("kvstore", "--data-dir", str(tmp_path / "data"))
        assert await first.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--set", f"blocks={10**12}"), "kv_cache_memory_bytes: 1000000000000 blocks of "),
        (("--model", "no/such-folder/anywhere"), "no/such-folder/anywhere"),
    ],
)
def test_settings(checkpoint: Path, flags: tuple[str, ...], says: str) -> None:
    """More memory than there is, and a model that is nowhere."""
    assert says in refused("prefill", "--model", str(checkpoint), *ENGINE, *flags)
