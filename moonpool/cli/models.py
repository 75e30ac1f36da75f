"""Models for the command line: which model is meant, which are on this machine, and what a model consists of."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer

from moonpool.base.checkpoint.named_models import BUNDLED, MODEL_PACKAGES, cache_folder, cached_model, named_model
from moonpool.base.checkpoint.resolve import resolve
from moonpool.base.checkpoint.tensor_info import Quantization
from moonpool.base.errors import CheckpointError

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
    return str(named_model(model or BUNDLED) or model)


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
    """

    name: str
    path: str
    bytes: int


def local_models() -> list[LocalModel]:
    """The named models and those of the hub's cache that are complete on this machine."""
    from moonpool.base.checkpoint import hub

    named = {name: cached_model(name, cache_folder()) for name in MODEL_PACKAGES}
    found: dict[str, Path | None] = {BUNDLED: named_model(BUNDLED), **named, **hub.complete_models()}
    return [LocalModel(name, str(path), _bytes_of(path)) for name, path in found.items() if path is not None]


def _bytes_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def run_list(*, as_json: bool) -> None:
    """Print the models on this machine, and the names of those that `pull` fetches."""
    found = local_models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(model) for model in found]))
        return
    width = max(len(model.name) for model in found)
    for model in found:
        typer.echo(f"{model.name:<{width}}  {model.bytes / 1e6:>9,.1f} MB  {model.path}")
    for name in sorted(set(MODEL_PACKAGES) - {model.name for model in found}):
        typer.echo(f"{name:<{width}}  not here: `moonpool pull {name}` fetches {MODEL_PACKAGES[name].summary}")


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
    from rich.console import Console
    from rich.table import Table

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
    spec = EngineSpec(str(path), found.dtype, layout, blocks, quantization=quantization, max_tokens=longest)
    engine = estimated_memory(found, spec)
    if memory_bytes is not None:
        room = max(0, memory_bytes - (engine.beside_kv - found.weight_bytes))
        found = inspect_checkpoint(path, dtype, found.block_size, room, **how)
    sizes = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "config"}
    report = {
        "architecture": found.config.architecture,
        "max_tokens": found.config.max_position_embeddings,
        **sizes,
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
    table = Table(show_header=False)
    for name, value in report.items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)
