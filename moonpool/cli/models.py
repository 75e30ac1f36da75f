"""Models for the command line: which model is meant, which are on this machine, and what a model consists of."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import typer

from moonpool.base.checkpoint.known_models import known_sizes, plain_name
from moonpool.base.checkpoint.named_models import (
    BUNDLED,
    MODEL_PACKAGES,
    cache_folder,
    cached_model,
    named_model,
    remove_model,
)
from moonpool.base.checkpoint.resolve import model_name, resolve
from moonpool.base.errors import CheckpointError, InvalidRequest
from moonpool.base.quantization import Quantization
from moonpool.cli.running_stacks import running_stacks
from moonpool.cli.tables import RecordTable, age_text, size_text, stdout_console
from moonpool.cli.whole_words import say

INSPECTED = {
    "max_tokens": "context",
    "dtype": "numbers",
    "weight_bytes": "weights in memory",
    "file_bytes": "weights on disk",
    "kv_token_bytes": "KV of a token",
    "kv_block_bytes": "KV of a block",
    "state_bytes": "recurrent state",
    "kv_groups": "KV, by layers",
    "context_tokens": "longest sequence",
    "kv_context_bytes": "its KV",
    "computed": "computed by",
    "reading_bytes": "read buffers",
    "picture_bytes": "encoder of pictures",
    "fit_blocks": "blocks that fit",
    "fit_tokens": "tokens that fit",
    "head_bytes": "output head in bytes",
    "work_bytes": "work space",
    "program_bytes": "program",
    "loading_bytes": "engine while loading",
    "idle_bytes": "engine at rest",
    "engine_bytes": "engine at most",
    "weights_in": "weights lie in",
    "tool_call_parser": "tool calls",
    "reasoning_parser": "thinking",
}
"""What a person reads in place of the names of JSON fields."""
MAPPED = "a mapped file: more than the free memory, so steps wait for the disk"
"""Where weights lie that do not fit into memory."""


def chosen_model(model: str) -> str:
    """The `model` setting for services: a name stands for the model's folder or file, fetched if need be; "" = bundled.

    A folder or file of that name comes first.

    Raises:
        CheckpointError: the model cannot be fetched.
    """
    if model and Path(model).expanduser().exists():
        return model
    return str(named_model(plain_name(model) or BUNDLED) or model)


def pulled_model(model: str) -> str:
    """The same, and what has to be fetched of a hub repository is here.

    Raises:
        CheckpointError: the model cannot be fetched.
    """
    chosen = chosen_model(model)
    resolve(chosen)
    return chosen


def best_model() -> tuple[str, str]:
    """SmolLM2 if present or fetchable, else the bundled model; and why not SmolLM2, "" if SmolLM2."""
    try:
        return chosen_model("smollm2"), ""
    except CheckpointError as error:
        return chosen_model(BUNDLED), str(error)


@dataclasses.dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that needs no network.

    Attributes:
        name: what `serve`, `run` and `--model` take.
        path: folder or file.
        bytes: all files together.
        fetched: when the newest file came, seconds since 1970.
    """

    name: str
    path: str
    bytes: int
    fetched: float


def local_models() -> list[LocalModel]:
    """The named models and those of the hub's cache that are complete on this machine."""
    from moonpool.base.checkpoint import hub  # imports for half a second

    named = {name: cached_model(name, cache_folder()) for name in MODEL_PACKAGES}
    found: dict[str, Path | None] = {BUNDLED: named_model(BUNDLED), **named, **hub.complete_models()}
    return [_local_model(name, path) for name, path in found.items() if path is not None]


def _local_model(name: str, path: Path) -> LocalModel:
    files = [file.stat() for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return LocalModel(name, str(path), sum(file.st_size for file in files), max(file.st_ctime for file in files))


def run_list(*, known: bool, as_json: bool) -> None:
    """Print the models on this machine; with `known`, the other names that `serve` and `pull` take, too."""
    found = local_models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in found]))
        return
    table = RecordTable("name", "size", "fetched", right=("size",))
    for model in found:
        age = "comes with Moonpool" if model.name == BUNDLED else f"{age_text(time.time() - model.fetched)} ago"
        table.add_row(model.name, size_text(model.bytes), age)
    stdout_console().print(table)
    if not known:
        say("`moonpool list --all` also lists names of models that can be fetched.", err=True)
        return
    here = {plain_name(model.name) for model in found}
    others = RecordTable("name", "sizes, the first by default", "from", title="\nnot here; `pull NAME:SIZE` fetches")
    for name, package in MODEL_PACKAGES.items():
        if name not in here:
            others.add_row(name, f"{package.bytes / 1e6:.0f} MB", "the Python package index")
    for name, sizes in known_sizes().items():
        absent = {size: hub_id for size, hub_id in sizes.items() if hub_id not in here}
        if absent:
            others.add_row(name, ", ".join(filter(None, absent)), next(iter(absent.values())).partition("/")[0])
    stdout_console().print(others)
    say("Any other model: OWNER/NAME of the hub, a folder, or a GGUF file.", err=True)


def run_rm(model: str) -> None:
    """Remove a fetched model from this machine.

    Raises:
        InvalidRequest: the model is not fetched, comes with Moonpool, is the user's own, or is being served.
    """
    from moonpool.base.checkpoint import hub

    name = plain_name(model).partition("@")[0]
    if Path(model).expanduser().exists():
        raise InvalidRequest("model", f"{model} is a file or folder of yours: remove it yourself")
    if name == BUNDLED:
        raise InvalidRequest("model", "the bundled model comes with Moonpool, and stays")
    here = {plain_name(each.name): each.path for each in local_models()}
    for stack in running_stacks():
        if name in (plain_name(stack.model), stack.model) or stack.model == here.get(name):
            raise InvalidRequest("model", f"{model} is served: `moonpool stop {stack.name}` comes first")
    freed = remove_model(name, cache_folder()) if name in MODEL_PACKAGES else hub.remove(name)
    if not freed:
        raise InvalidRequest("model", f"{model} is not here; `moonpool list` shows what is")
    say(f"removed {model}: {size_text(freed)} free again")


def _answer_formats(path: Path) -> dict[str, str | None]:
    """How a gateway reads the model's answers, unless its settings say otherwise."""
    from moonpool.base.checkpoint import Tokenizer, architecture_of
    from moonpool.base.errors import CheckpointError
    from moonpool.gateway.serving.tokenizer import ParserNames, chosen_format

    try:
        found = chosen_format(Tokenizer.load(path), ParserNames(), architecture_of(path))
    except CheckpointError as error:
        return {"tool_call_parser": None, "reasoning_parser": None, "answers": str(error)}
    return {
        "tool_call_parser": found.row.name if found.row is not None else "unknown",
        "reasoning_parser": found.reasoning.names[0] if found.reasoning is not None else "none",
        "answers": found.note or None,
    }


def run_inspect(
    model: str,
    dtype: str,
    block_size: int | None,
    memory_bytes: int | None,
    *,
    max_model_len: int | None,
    quantization: Quantization,
    ranks: int = 1,
    as_json: bool,
) -> None:
    """Print the report as a table or as one JSON object.

    Raises:
        UnsupportedModel: so many ranks cannot share the layers.
    """
    from moonpool.base.checkpoint.config import kv_layout
    from moonpool.base.checkpoint.formats import inspect_checkpoint
    from moonpool.base.checkpoint.resolve import resolve
    from moonpool.base.families.ranks import check_ranks, share_of_rank
    from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
    from moonpool.base.kv.memory import available_bytes
    from moonpool.engine.memory_estimate import estimated_memory
    from moonpool.engine.messages import EngineSpec

    path = resolve(model)
    how: Any = {"max_model_len": max_model_len, "quantization": quantization}
    found = inspect_checkpoint(path, dtype, block_size or DEFAULT_BLOCK_SIZE, **how)
    check_ranks(found.config.decoder, ranks, found.config.architecture)
    layout = kv_layout(found.config, found.dtype, found.block_size)
    blocks = layout.blocks_for(found.context_tokens)
    longest = found.config.max_position_embeddings
    spec = EngineSpec(
        str(path), found.dtype, layout, blocks, quantization=quantization, int8_head=True, max_tokens=longest
    )
    engine = estimated_memory(found, spec)
    if memory_bytes is not None:
        room = max(0, memory_bytes - (engine.beside_kv - found.weight_bytes))
        found = inspect_checkpoint(path, dtype, found.block_size, room, **how)
    sizes = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "config"}
    report = {
        "architecture": found.config.architecture,
        "max_tokens": found.config.max_position_embeddings,
        **sizes,
        "head_bytes": engine.head,
        "work_bytes": engine.work,
        "program_bytes": engine.program + engine.tokenizer,
        "loading_bytes": engine.loading,
        "idle_bytes": engine.idle,
        "engine_bytes": engine.all,
        "weights_in": "memory" if engine.fits(available_bytes()) else MAPPED,
        "tensor_parallel": share_of_rank(found.config.decoder, ranks) if ranks > 1 else None,
        **_answer_formats(path),
    }
    if as_json:
        typer.echo(json.dumps(report))
        return
    table = RecordTable("model", model_name(model))
    for name, value in report.items():
        if value not in (None, 0, ""):
            table.add_row(INSPECTED.get(name, name.replace("_", " ")), _inspected_text(name, value))
    stdout_console().print(table)


def _inspected_text(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    if name == "parameters" and isinstance(value, int):
        return size_text(value).partition(" ")[0] + {"kB": " thousand", "MB": " million", "GB": " billion"}.get(
            size_text(value).partition(" ")[2], ""
        )
    unit = " tokens" if name in ("max_tokens", "context_tokens", "fit_tokens", "block_size") else ""
    return f"{value:,}{unit}" if isinstance(value, int) else str(value)
