"""Finding a model: folders, the hub through a local endpoint that imitates it, the cache, and being offline."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest

from moonpool.base import bundled
from moonpool.base.checkpoint import model_name, resolve
from moonpool.base.checkpoint.lora import read_settings
from moonpool.base.errors import CheckpointError
from tests.unit.base.checkpoint.folder import write_config, write_weights

READ_WHOLE = [
    "config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json", "model.safetensors.index.json", "tiktoken.model", "processor_config.json",
]  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = """
import sys
from moonpool.base.checkpoint import resolve
from moonpool.base.errors import CheckpointError
for model in sys.argv[1:]:
    try:
        print(resolve(model))
    except CheckpointError as error:
        print("error:", error)
"""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def with_holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", [pipe, endless, with_holes])
@pytest.mark.parametrize("name", READ_WHOLE)
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: Callable[[Path], None], name: str) -> None:
    """A reader of a pipe would wait for ever, and one of a device would read without end."""
    write_config(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    kind(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: (is a pipe|has 1099511627776 bytes)"):
        resolve(str(tmp_path))


def test_other_things_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    os.mkfifo(write_config(tmp_path) / "notes")
    (tmp_path / "gone.json").symlink_to("nowhere")
    for name in ("model.safetensors", "corpus.json", "merges.txt", "data/config.old.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with_holes(tmp_path / name)
    os.mkfifo(tmp_path / "log.json")
    assert resolve(str(tmp_path)) == tmp_path.resolve()


def test_a_pipe_is_no_model_and_no_adapter(tmp_path: Path) -> None:
    for name in ("model.gguf", "adapter_config.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is a pipe"):
        resolve(str(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").rename(tmp_path / "mmproj-model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"mmproj-model\.gguf: is a pipe"):
        resolve(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: is a pipe"):
        read_settings(tmp_path)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as huggingface_hub asks for."""

    files: dict[str, bytes]
    asked: list[str]
    sizes: ClassVar[dict[str, int]] = {}

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        self.asked.append(path)
        if f"{path}/".startswith("/api/models/owner/model/"):
            if "/tree/" in path:
                entries = [self.entry(name) for name in self.files]
                return self.send(json.dumps(entries).encode(), body)
            siblings = [{"rfilename": name, "size": self.sizes.get(name, 9)} for name in self.files]
            return self.send(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode(), body)
        name = path.removeprefix(f"/owner/model/resolve/{COMMIT}/")
        if name in self.files:
            return self.send(self.files[name], body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    source = tmp_path / "source"
    source.mkdir()
    write_config(source)
    write_weights(source / "model.safetensors", {"a": ("F32", [1], bytes(4))})
    Hub.files = {file.name: file.read_bytes() for file in source.iterdir()} | {
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"x",
        "pytorch_model.bin": b"pickle",
        "modeling_custom.py": b"raise SystemExit",
        "original/consolidated.safetensors": b"x",
        "consolidated.safetensors": b"x",
    }
    Hub.asked = []
    Hub.sizes.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_apart(*models: str, home: Path, **environment: str) -> list[str]:
    """Resolve in a process of its own: huggingface_hub reads its environment once, at import."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, *models],
        env={
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(bundled.__file__).parents[3],
    )
    return run.stdout.splitlines()


def test_a_folder(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("model", ["/no/such/folder", "./no/such/folder", "a/b/c", ""])
def test_no_such_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not model:
        assert resolve(".") == tmp_path.resolve()
        return
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="a model is a folder"):
        resolve(str(file))


def test_hub_then_cache(hub: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    [folder] = map(Path, resolve_apart("owner/model", home=home, HF_ENDPOINT=hub))
    fetched = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    assert fetched == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    # Nothing that is not allowed was asked for, and the second time nothing at all.
    assert not [path for path in Hub.asked if path.endswith((".bin", ".py")) or "consolidated" in path]
    asked = len(Hub.asked)
    assert resolve_apart("owner/model", home=home, HF_ENDPOINT=hub) == [str(folder)]
    assert resolve_apart("owner/model", home=home, HF_HUB_OFFLINE="1") == [str(folder)]
    assert Hub.asked[asked:] == []


def test_unknown_and_offline(hub: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    [unknown] = resolve_apart("owner/other", home=home, HF_ENDPOINT=hub)
    assert f"neither a folder here nor a model on {hub}" in unknown
    offline, misspelt = resolve_apart("owner/model", "smolm2", home=home, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert offline == "error: owner/model: no such folder, not in the local cache, and HF_HUB_OFFLINE is set"
    assert "did you mean smollm2" in misspelt


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        [answer] = resolve_apart("owner/model", home=tmp_path, HF_ENDPOINT=endpoint)
    assert answer.startswith("error: owner/model: no such folder, not in the local cache, and not fetched: ")
    assert f"no network: {endpoint} cannot be reached" in answer


def test_more_than_the_disk_holds(hub: str, tmp_path: Path) -> None:
    Hub.sizes["model.safetensors"] = 10**18
    [answer] = resolve_apart("owner/model", home=tmp_path / "home", HF_ENDPOINT=hub)
    assert answer.startswith("error: owner/model: needs 1,000,000,000,000 MB, and ")
    assert answer.endswith("name another folder by HF_HOME")
    assert not [path for path in Hub.asked if "/resolve/" in path], "nothing was fetched"


def test_a_proxy_that_is_not_there(tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": "http://hub.example", "http_proxy": "http://me:secret@127.0.0.1:1"}
    [answer] = resolve_apart("owner/model", home=tmp_path, **variables)
    assert "no network: " in answer or "the proxy http://127.0.0.1:1 cannot be reached" in answer
    assert "secret" not in answer


def test_ollamas_names() -> None:
    assert model_name("qwen3:0.6b") == "Qwen3-0.6B"
    assert model_name("QWEN3:latest") == "Qwen3-8B"
    assert (model_name("smollm2:135m"), model_name("gemma3:270m")) == (model_name("smollm2"), model_name("gemma3"))
    assert model_name("smollm2:1.7b") == "SmolLM2-1.7B-Instruct"


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen3:0.7b", "qwen3:0.6b"), ("llama-3.2", "llama3.2"), ("smolm2", "smollm2"), ("nothing-like-that", "")],
)
def test_an_unknown_name_says_what_there_is(name: str, near: str, tmp_path: Path) -> None:
    [answer] = resolve_apart(name, home=tmp_path)
    assert answer.startswith(f"error: {name}: no folder or file here, and no model of that name")
    assert near in answer
    assert ("did you mean" in answer) == bool(near)


@pytest.mark.parametrize(
    ("model", "name"),
    [("owner/Some-Model", "Some-Model"), ("owner/Some-Model@main", "Some-Model"), ("gpt", "gpt")],
)
def test_a_hub_id_is_served_under_its_last_part(model: str, name: str) -> None:
    assert model_name(model) == name


def test_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert model_name(f"{tmp_path}/here/") == "here"
    assert model_name(f"{tmp_path}/here/../here") == "here"


def test_a_part_for_pictures_is_no_model(tmp_path: Path) -> None:
    picture = tmp_path / "mmproj-tiny-F16.gguf"
    picture.touch()
    with pytest.raises(CheckpointError, match="part for pictures"):
        resolve(str(tmp_path))
    model = tmp_path / "tiny-Q4_K_M.gguf"
    model.touch()
    assert resolve(str(tmp_path)) == model
