"""Seeded damages to every kind of file that somebody else may have written, and to messages of stages on other hosts.

A reader of a damaged file gives values, or refuses with an error that is meant for people. It never ends otherwise, and
takes a bounded time and memory. Where a file has checksums, values are those of the whole file.

    python -m tests.unit.damaged_files --count 10000 --seed 1
"""

from __future__ import annotations

import argparse
import base64
import collections
import copy
import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.checkpoint.formats import tensor_index, weight_files, weights_fingerprint
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.checkpoint.mmproj import mmproj_elements, mmproj_of, mmproj_settings, swapped_names
from moonpool.base.checkpoint.weight_file import WeightFile
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc.api_keys import hash_key, parse_keys
from moonpool.base.rpc.roles import parse_revoked
from moonpool.base.rpc.tls import Tls
from moonpool.base.runtime.journal import rerun
from moonpool.cli.running_stacks import running_stacks
from moonpool.cli.settings import stack_settings
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.models.imatrix import read_imatrix
from moonpool.engine.remote.schema import SchemaError
from moonpool.gateway.batches.lines import InputFile
from moonpool.gateway.batches.store import BatchStore
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.responses.store import ResponseStore, StoreLimits
from moonpool.kvstore.ssd.encryption import add_key, read_key_file
from moonpool.simulator.planning.planner import bundled_hardware, load_hardware
from moonpool.simulator.traces.bailian import read_bailian
from moonpool.simulator.traces.mooncake import read_trace
from moonpool.simulator.traces.weka import WekaSessions
from tests.unit.base.checkpoint.folder import LLAMA, write_config, write_weights
from tests.unit.base.checkpoint.test_gguf_tokenizer import write_sentencepiece
from tests.unit.base.checkpoint.test_lora import write as write_adapter
from tests.unit.base.checkpoint.test_mmproj import files as write_mmproj
from tests.unit.base.rpc.certificates import issue
from tests.unit.base.runtime.test_journal import OURS, counted
from tests.unit.engine.models.test_imatrix import newer, older
from tests.unit.engine.remote.test_schema import ALL
from tools.decisions.corpus import compare

MAX_S = 5.0
"""Seconds of processor that reading may take."""
MAX_MEMORY = 6 << 30
"""Bytes of address space of the process that reads, when started as a command."""
ODD: Sequence[Any] = (
    None, 5, -1, 0, 1.5, True, "", "x", [], {}, [None], {"type": "x"}, 2**70, -(2**40), 1e308, [[1]], "\ud800", "../x",
    {"content": 3}, 10**30, "9" * 5000,
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """How a kind of file is written whole, and read.

    Attributes:
        name: of the kind.
        make: writes whole files into a folder.
        read: reads the folder; what it gives is compared by `==` if the kind has checksums.
        files: patterns of the files that are damaged.
        refusals: errors that are meant for people.
        exact: a damaged file is refused, made anew, or gives the same values.
    """

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: Sequence[str] = ("*",)
    refusals: tuple[type[Exception], ...] = (MoonpoolError,)
    exact: bool = False


# --- damages ----------------------------------------------------------------------------------------------------------


def damage(draws: random.Random, file: Path) -> str:
    """Damage a file; return what was done."""
    data = file.read_bytes()
    if draws.random() < 0.4:
        changed = _change_value(draws, file, data)
        if changed is not None:
            file.write_bytes(changed[1])
            return f"{file.name}: {changed[0]}"
    kinds: list[Callable[[random.Random, bytearray], str]] = [
        _bits,
        _zeros,
        _cut,
        _noise,
        _repeat,
        _swap,
        _digits,
        _deep,
    ]
    damaged = bytearray(data)
    told = draws.choice(kinds)(draws, damaged)
    file.write_bytes(damaged)
    return f"{file.name}: {told}"


def _place(draws: random.Random, data: bytearray) -> int:
    """Somewhere, often near the beginning, where headers are."""
    size = len(data) if draws.random() < 0.5 else min(len(data), 256)
    return draws.randrange(size) if size else 0


def _bits(draws: random.Random, data: bytearray) -> str:
    count = draws.choice([1, 1, 2, 8])
    for _ in range(count if data else 0):
        data[_place(draws, data)] ^= 1 << draws.randrange(8)
    return f"{count} bits"


def _zeros(draws: random.Random, data: bytearray) -> str:
    begin, length = _place(draws, data), draws.choice([1, 4, 100, 4096])
    data[begin : begin + length] = bytes(len(data[begin : begin + length]))
    return f"zeros at {begin}"


def _cut(draws: random.Random, data: bytearray) -> str:
    at = draws.choice([0, _place(draws, data), max(0, len(data) - 1)])
    del data[at:]
    return f"cut at {at}"


def _noise(draws: random.Random, data: bytearray) -> str:
    begin = _place(draws, data)
    data[begin : begin + draws.randrange(20)] = draws.randbytes(draws.randrange(20))
    return f"noise at {begin}"


def _repeat(draws: random.Random, data: bytearray) -> str:
    begin = _place(draws, data)
    data[begin:begin] = bytes(data[begin : begin + draws.randrange(1, 200)]) * draws.choice([1, 3, 500])
    return f"repeated at {begin}"


def _swap(draws: random.Random, data: bytearray) -> str:
    first, second, length = _place(draws, data), _place(draws, data), draws.randrange(1, 64)
    one, other = bytes(data[first : first + length]), bytes(data[second : second + length])
    data[first : first + length] = other
    data[second : second + length] = one
    return f"swapped {first} and {second}"


def _digits(draws: random.Random, data: bytearray) -> str:
    """Eight bytes of a number: sizes and offsets in headers."""
    at = _place(draws, data) & ~7
    value = draws.choice([0, 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1])
    data[at : at + 8] = value.to_bytes(8, "little")[: len(data[at : at + 8])]
    return f"{value} at {at}"


def _deep(draws: random.Random, data: bytearray) -> str:
    """Text that is nested deeper than a parser may follow, in place of the whole or within."""
    unit = draws.choice([b"[", b'{"a":', b"- ", b"{a: "])
    at = draws.choice([0, _place(draws, data)])
    data[at:at] = unit * 20_000
    return f"{unit!r} 20,000 times at {at}"


def _change_value(draws: random.Random, file: Path, data: bytes) -> tuple[str, bytes] | None:
    """One value of JSON, lines of JSON, YAML or a safetensors header replaced by another or left out."""
    try:
        if file.suffix in (".yaml", ".yml"):
            return _replaced(draws, yaml.safe_load(data), lambda value: yaml.safe_dump(value).encode())
        if file.suffix == ".jsonl":
            lines = data.splitlines()
            at = draws.randrange(len(lines))
            found = _replaced(draws, json.loads(lines[at]), lambda value: json.dumps(value).encode())
            return found and (f"line {at}: {found[0]}", b"\n".join([*lines[:at], found[1], *lines[at + 1 :]]))
        if file.suffix == ".safetensors":
            length = int.from_bytes(data[:8], "little")
            found = _replaced(draws, json.loads(data[8 : 8 + length]), lambda value: json.dumps(value).encode())
            return found and (found[0], len(found[1]).to_bytes(8, "little") + found[1] + data[8 + length :])
        return _replaced(draws, json.loads(data), lambda value: json.dumps(value).encode())
    except (ValueError, IndexError, yaml.YAMLError):
        return None


def _replaced(draws: random.Random, content: Any, written: Callable[[Any], bytes]) -> tuple[str, bytes] | None:
    copied = copy.deepcopy(content)
    at, places = copied, list[tuple[Any, Any]]()
    while isinstance(at, dict | list) and at and (not places or draws.random() < 0.8):
        key: Any = draws.choice(list(at)[:40]) if isinstance(at, dict) else draws.randrange(min(len(at), 40))
        places.append((at, key))
        at = at[key]
    if not places:
        return None
    holder, key = places[-1]
    path = ".".join(str(step) for _, step in places)
    if draws.random() < 0.2:
        del holder[key]
        return f"{path} left out", written(copied)
    holder[key] = draws.choice(ODD)
    return f"{path} = {str(holder[key])[:20]!r}", written(copied)


# --- the kinds of files -----------------------------------------------------------------------------------------------


def _tokenizer(folder: Path) -> None:
    """The bundled model's with a small vocabulary."""
    plain = json.loads((model_dir() / "tokenizer.json").read_text())
    plain["model"]["vocab"] = dict(list(plain["model"]["vocab"].items())[:300])
    plain["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    settings = json.loads((model_dir() / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template", None) or (model_dir() / "chat_template.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    write_config(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1], "temperature": 0.5, "suppress_tokens": [3]}')


def _read_tokenizer(folder: Path) -> object:
    tokenizer = Tokenizer.load(folder)
    turns = [{"role": "user", "content": "Hello <|im_end|> you"}]
    tokens = tokenizer.encode_chat(tokenizer.render_chat(turns)) if tokenizer.chat_template else ()
    return load_config(folder), tokenizer.encode("Hello"), tokens, tokenizer.decode(tokens)


def _weights(folder: Path) -> None:
    write_config(folder)
    for number in range(2):
        tensors = {f"{number}.{name}": ("BF16", [4, 8], bytes(range(64))) for name in "abc"}
        write_weights(folder / f"model-{number}.safetensors", tensors)
    names = {f"{number}.{name}": f"model-{number}.safetensors" for number in range(2) for name in "abc"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _whole_model(folder: Path) -> None:
    """A model with pictures: the decoder's fields in an object of their own, its tensors behind a prefix."""
    text = {**LLAMA, "tie_word_embeddings": True}
    write_config(folder, architectures=["LlavaForConditionalGeneration"], model_type="llava", text_config=text)
    names = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight", "vision_tower.a")
    write_weights(folder / "model.safetensors", {name: ("BF16", [4, 8], bytes(range(64))) for name in names})


def _tiktoken(folder: Path) -> None:
    words = [bytes([byte]) for byte in range(256)] + [b"He", b"Hel", b"lo"]
    lines = [f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]"}')


def _read_weights(folder: Path) -> object:
    return weight_files(folder), tensor_index(folder), weights_fingerprint(folder)


def _read_gguf(folder: Path) -> object:
    file = folder / "model.gguf"
    try:
        found: object = load_config(file), tensor_index(file)
    except MoonpoolError:
        found = None
    return found, Tokenizer.load(file).encode("Hello")


def _read_mmproj(folder: Path) -> object:
    model = folder / "model.gguf"
    return mmproj_settings(model), mmproj_elements(model), swapped_names(mmproj_of(model))


def _stage_messages(folder: Path) -> None:
    for number, (schema, message) in enumerate(ALL):
        (folder / f"{number:02}").write_bytes(schema.encode(message))


def _read_stage_messages(folder: Path) -> object:
    return [schema.decode(file.read_bytes()) for (schema, _), file in zip(ALL, sorted(folder.iterdir()), strict=True)]


def _arranged(folder: Path) -> None:
    made = WeightFile(folder, "a")
    made.allocate(0, 3 * 4096)
    os.pwrite(made.descriptor, random.Random(1).randbytes(3 * 4096), 0)
    made.finish({"shapes": [1, 2, 3]})
    made.close()
    folder.chmod(0o700)


def _read_arranged(folder: Path) -> object:
    """The numbers of a file that is taken as whole; None if it is to be made anew."""
    found = WeightFile(folder, "a")
    try:
        return None if found.notes is None else (found.notes, os.pread(found.descriptor, 3 * 4096, 0))
    finally:
        found.close()


def _lines(*objects: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in objects)


def _mooncake(folder: Path) -> None:
    requests = [
        {
            "timestamp": 100 * at,
            "input_length": 600 + at,
            "output_length": 7,
            "hash_ids": [0, at + 1],
            "session_id": "s",
        }
        for at in range(12)
    ]
    (folder / "t.jsonl").write_text(_lines({"block_size": 512}, *requests))


def _bailian(folder: Path) -> None:
    lines = [
        {"chat_id": at, "parent_chat_id": at - 1, "timestamp": at * 0.5, "input_length": 40, "output_length": 9,
         "hash_ids": [1, 2, at + 3]}
        for at in range(10)
    ]  # fmt: skip
    (folder / "t.jsonl").write_text(_lines(*lines))


def _weka(folder: Path) -> None:
    requests = [
        {"t": at * 1.0, "type": "n", "in": 100, "out": 10, "hash_ids": [1, 2], "model": "m", "api_time": 1.0}
        for at in range(6)
    ]
    (folder / "s.json").write_text(json.dumps({"id": "s", "block_size": 64, "requests": requests}))


def _config_files(folder: Path) -> None:
    (folder / "c.yaml").write_text(
        yaml.safe_dump(
            {"conductor": {"max_queue": 7}, "decode": {"max_num_seqs": 4}, "gateway": {"served_model_name": "x"}}
        )
    )


def _profile(folder: Path) -> None:
    shutil.copy(str(resources.files("moonpool.engine.emulated") / "profiles/llama-8b-h100.yaml"), folder / "p.yaml")


def _hardware(folder: Path) -> None:
    shipped = resources.files("moonpool.simulator.planning") / "hardware"
    shutil.copy(str(shipped / f"{bundled_hardware()[0]}.yaml"), folder / "h.yaml")


def _service(folder: Path) -> None:
    settings = {"conductor": "localhost:1", "model": "tiny", "max_body_bytes": 1 << 20, "allowed_hosts": ["a", "b"]}
    (folder / "s.yaml").write_text(yaml.safe_dump(settings))


def _certificates(folder: Path) -> None:
    issue(folder, "prefill")
    (folder / "ca.key").unlink()


def _read_certificates(folder: Path) -> object:
    tls = Tls(folder / "ca.pem", folder / "prefill.pem", folder / "prefill.key")
    tls.socket_context(server=True)
    tls.channel_credentials()
    tls.server_credentials(client_certificates=True)
    return None


def _keys(folder: Path) -> None:
    lines = [f"sha256:{hash_key(name)} rpm=5 tpm=1000 {name}" for name in ("ann", "bob")]
    (folder / "keys").write_text("\n".join([*lines, "tenant rpm=9 ann", "# who may"]) + "\n")
    (folder / "revoked").write_text(f"sha256:{hash_key('x')}\n# gone\n")


def _read_keys(folder: Path) -> object:
    """As the watchers of these files do, which keep the rows before in case of these errors."""
    return parse_keys((folder / "keys").read_text(encoding="utf-8")), parse_revoked((folder / "revoked").read_text())


def _encryption(folder: Path) -> None:
    add_key(folder / "keys", "ann")
    add_key(folder / "keys", "*")


def _stacks(folder: Path) -> None:
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    records = folder / f"moonpool-stacks-{os.getuid()}"
    records.mkdir(mode=0o700)
    record = {
        "pid": 1,
        "epoch": 3,
        "boot_id": "x",
        "data_dir": "/x",
        "model": "tiny",
        "address": "",
        "http_address": "",
    }
    (records / "a.json").write_text(json.dumps(record))


def _read_stacks(folder: Path) -> object:
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    with redirect_stderr(StringIO()):
        return running_stacks()


def _batch_lines(folder: Path) -> None:
    lines = [
        {"custom_id": f"{at}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x" * at}}
        for at in range(1, 12)
    ]
    (folder / "b.jsonl").write_text(_lines(*lines))


def _read_batch_lines(folder: Path) -> object:
    file = InputFile(folder / "b.jsonl", "/v1/completions", 1 << 20)
    while file.read_on():
        pass
    return file.errors, file.lines()


def _database(opened: Callable[[Path], Any]) -> Callable[[Path], object]:
    def use(folder: Path) -> object:
        opened(folder).close()
        return None

    return use


def _responses(folder: Path) -> ResponseStore:
    return ResponseStore(StoreLimits(1 << 20, 100.0, 1 << 20), folder / "r.sqlite", ThreadPoolExecutor(1), lambda: 1.0)


def _batches(folder: Path) -> BatchStore:
    return BatchStore(folder / "b", 1 << 20, ThreadPoolExecutor(1), lambda: 1.0)


def _importance_entries() -> dict[str, Any]:
    return {f"blk.0.{name}.weight": np.arange(1, 9, dtype=np.float32) for name in ("attn_q", "attn_k", "ffn_down")}


def _importance(folder: Path) -> None:
    newer(folder / "imatrix", _importance_entries())


def _older_importance(folder: Path) -> None:
    older(folder / "imatrix", _importance_entries())


def _read_importance(folder: Path) -> object:
    """By names and sizes: damaged numbers are other numbers."""
    found = read_imatrix(folder / "imatrix", load_config(model_dir()))
    return {name: importance.shape for name, importance in found.items()}


def _decisions(folder: Path) -> None:
    """Two folders of one recording, which differ in its second pair."""
    for name, second in (("a", "x"), ("b", "y")):
        (folder / name).mkdir()
        digest = {"pairs": 2, "sha256": name, "classes": ["One", "Two"], "wrong": list[str]()}
        (folder / name / "digests.json").write_text(json.dumps({"w-1": digest}))
        with gzip.open(folder / name / "w-1.txt.gz", "wt", encoding="utf-8") as lines:
            lines.write(f"core first\n  > #0(1)\n  = []\ncore {second}\n  > #1(2)\n  = []\n")


def _read_decisions(folder: Path) -> object:
    with redirect_stdout(StringIO()):
        return compare(folder / "a", folder / "b", loose=False)


READERS = (
    Reader("journal", counted, lambda folder: rerun(folder / "a.0", modules=OURS).events, ("a.0",)),
    Reader("trace", _mooncake, lambda folder: read_trace(folder / "t.jsonl")),
    Reader("trace of Bailian", _bailian, lambda folder: list(read_bailian(folder / "t.jsonl"))),
    Reader("trace of agents", _weka, lambda folder: WekaSessions().read(folder / "s.json", 0.0)),
    Reader("checkpoint, tokenizer, template", _tokenizer, _read_tokenizer),
    Reader("safetensors", _weights, _read_weights),
    Reader("model with pictures", _whole_model, lambda folder: (load_config(folder), tensor_index(folder))),
    Reader("tiktoken", _tiktoken, lambda folder: Tokenizer.load(folder).encode("Hello")),
    Reader("GGUF", lambda folder: write_sentencepiece(folder / "model.gguf"), _read_gguf),
    Reader("GGUF, part for pictures", write_mmproj, _read_mmproj),
    Reader("importance matrix", _importance, _read_importance),
    Reader("importance matrix, older", _older_importance, _read_importance),
    Reader("recorded decisions", _decisions, _read_decisions, ("*/*",), (Exception,)),
    Reader("messages of stages", _stage_messages, _read_stage_messages, refusals=(SchemaError,)),
    Reader("adapter", write_adapter, read_adapter),
    Reader("arranged weights", _arranged, _read_arranged, exact=True),
    Reader("configuration", _config_files, lambda folder: stack_settings(folder / "c.yaml", ())),
    Reader("profile of an engine", _profile, lambda folder: load_profile(str(folder / "p.yaml"))),
    Reader("hardware of a plan", _hardware, lambda folder: load_hardware(str(folder / "h.yaml"))),
    Reader("settings of a service", _service, lambda folder: GatewayConfig.load(["--config", str(folder / "s.yaml")])),
    Reader("certificates", _certificates, _read_certificates),
    Reader("API keys, revoked certificates", _keys, _read_keys, refusals=(ValueError,)),
    Reader("encryption keys", _encryption, lambda folder: read_key_file(folder / "keys")),
    Reader("records of stacks", _stacks, _read_stacks, ("moonpool-stacks-*/*.json",)),
    Reader("lines of a batch", _batch_lines, _read_batch_lines),
    Reader("database of responses", _database(_responses), _database(_responses), ("r.sqlite",)),
    Reader("database of batches", _database(_batches), _database(_batches), ("b/*",)),
)
"""Data folders of kvstores have `tests.unit.kvstore.damages`, compiled kernels `tests/unit/engine/kernels`."""


class Damages:
    """Damages to one kind of file, each to a fresh copy of the whole files."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        self.whole = folder / "whole"
        self.whole.mkdir()
        reader.make(self.whole)
        self.values = reader.read(self._copy())

    def _copy(self) -> Path:
        copied = self.folder / "damaged"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(self.whole, copied)
        return copied

    def run(self, draws: random.Random) -> tuple[str, str]:
        """Damage and read; return "read" or the error's name, and what is wrong with that, "" = nothing."""
        folder = self._copy()
        files = [file for pattern in self.reader.files for file in sorted(folder.glob(pattern)) if file.is_file()]
        told = damage(draws, draws.choice(files))
        signal.signal(signal.SIGVTALRM, _too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_S)
        try:
            values = self.reader.read(folder)
            happened = "read"
            if self.reader.exact and values is not None and values != self.values:
                return happened, f"{self.reader.name}, {told}: other values"
        except self.reader.refusals as error:
            happened = type(error).__name__
            if not str(error):
                return happened, f"{self.reader.name}, {told}: an error without a message"
        except BaseException:
            return "ended", f"{self.reader.name}, {told}:\n{traceback.format_exc(limit=-6)}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        return happened, ""


class TooLongError(BaseException):
    """Reading has taken too much processor time; no reader takes this for an error of the file."""


def _too_long(number: int, frame: object) -> None:
    raise TooLongError


def run(count: int, seed: int, only: str = "") -> list[str]:
    """So many damages over all kinds; returns what is wrong, and prints a line for each kind."""
    readers = [reader for reader in READERS if only in reader.name]
    wrong = list[str]()
    for place, reader in enumerate(readers):
        share = count // len(readers) + (place < count % len(readers))
        happened = collections.Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            damages = Damages(reader, Path(folder))
            for number in range(share):
                outcome, fault = damages.run(random.Random(f"{reader.name} {seed} {number}"))
                happened[outcome] += 1
                if fault:
                    wrong.append(f"seed {seed}, number {number}: {fault}")
        print(f"{reader.name:32} {share:6}  {dict(happened)}", flush=True)
    return wrong


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="damages over all kinds of files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds with this text in their names")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    wrong = run(options.count, options.seed, options.only)
    print("\n\n".join(wrong[:20]) or "nothing is wrong")
    if len(wrong) > 20:
        print(f"and {len(wrong) - 20} more")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
