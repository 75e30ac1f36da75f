"""`moonpool model`: its verbs and their flags."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Create, fetch and inspect checkpoints.", no_args_is_help=True)


@app.command("create")
def create_(
    shape: Annotated[str, typer.Argument(help="Named shape, for example tiny-llama or qwen2.5-0.5b.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
) -> None:
    """Write a checkpoint with random weights in Hugging Face format."""
    from moonpool.model.create import create

    create(shape, folder, seed=seed, dtype=dtype)
    typer.echo(f"{folder}: {shape}, {dtype}, seed {seed}")


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="A model's name, for example smollm2.")]) -> None:
    """Fetch a model for later, and print where it is."""
    from moonpool.checkpoint import resolve
    from moonpool.cli.named import chosen_model

    typer.echo(resolve(chosen_model(model)))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Hugging Face folder, GGUF file, hub id or a model's name.")],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    block_tokens: Annotated[int, typer.Option(help="Tokens per KV block.")] = 64,
    memory_bytes: Annotated[
        int | None, typer.Option(help="Show how many tokens fit in this memory beside the weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show a checkpoint's parameters, KV bytes per token, and what fits a given memory."""
    from moonpool.cli.inspect import run_inspect
    from moonpool.cli.named import chosen_model

    run_inspect(chosen_model(model), dtype, block_tokens, memory_bytes, as_json=as_json)
