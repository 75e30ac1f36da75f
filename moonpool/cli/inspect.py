"""`moonpool model inspect`: what a checkpoint is and what serving it needs."""

import dataclasses
import json

import typer
from rich.console import Console
from rich.table import Table

from moonpool.checkpoint.inspect import inspect_checkpoint
from moonpool.checkpoint.resolve import resolve


def run_inspect(model: str, dtype: str, block_tokens: int, memory_bytes: int | None, *, as_json: bool) -> None:
    """Prints the report as a table or as one JSON object."""
    found = inspect_checkpoint(resolve(model), dtype, block_tokens, memory_bytes)
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
