"""Options of `moonpool serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from moonpool.base.config import ENV_PREFIX, LOOPBACK
from moonpool.base.quantization import Quantization
from moonpool.cli.options import ENGINES, EngineChoice, ModelArgument

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ADDRESSES, MODEL, SETTINGS = "Who may ask, and where", "The model", "Other settings"
"""Headings of the options in `moonpool serve --help`."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `serve`."""

    model: ModelArgument = ""
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port for HTTP; 0 = any free one. Default: 8000, or the next free one.",
            rich_help_panel=ADDRESSES,
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen at for HTTP; 0.0.0.0 = all of this machine's: others may ask.",
            rich_help_panel=ADDRESSES,
        ),
    ] = LOOPBACK
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar=f"{ENV_PREFIX}API_KEY",
            help="Key that clients must send; may be given again.",
            rich_help_panel=ADDRESSES,
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys of several tenants: `moonpool keys` writes the file.",
            rich_help_panel=ADDRESSES,
        ),
    ] = None
    conductor_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the first conductor, others take the next; 0 = any free. Default: 50051, or the next free "
            "one; 0 with --port 0.",
            rich_help_panel=ADDRESSES,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name by which clients know the model; may be given again.", rich_help_panel=MODEL
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Prompt and answer at most. Default: the model's.", rich_help_panel=MODEL
        ),
    ] = None
    dtype: Annotated[
        Dtype, typer.Option(help="Numbers of weights and KV; auto = the model's own.", rich_help_panel=MODEL)
    ] = "auto"
    quantization: Annotated[
        Quantization,
        typer.Option(
            help="Pack the weights at load (int8, int4); auto = keep packed weights packed.", rich_help_panel=MODEL
        ),
    ] = "auto"
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Chat template (Jinja) in place of the model's.", rich_help_panel=MODEL),
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="LoRA adapter that requests may name as model; may be given again.",
            rich_help_panel=MODEL,
        ),
    ] = None
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ... Default: cpu.", rich_help_panel=ENGINES, show_default=False)
    ] = ""
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices that share each layer.", rich_help_panel=ENGINES)
    ] = 1
    engines: EngineChoice = "auto"
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Engines for prompts; splits.", rich_help_panel=ENGINES)
    ] = None
    decode: Annotated[int | None, typer.Option(min=1, help="Engines for answers; splits.", rich_help_panel=ENGINES)] = (
        None
    )
    kvstore: Annotated[int, typer.Option(min=0, help="kvstores.", rich_help_panel=ENGINES)] = 1
    conductors: Annotated[
        int, typer.Option(min=1, max=16, help="Conductors, side by side.", rich_help_panel=ENGINES)
    ] = 1
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="Threads of each engine at most; 0 = all cores, lent to each other.", rich_help_panel=ENGINES
        ),
    ] = 0
    engine: Annotated[
        str, typer.Option(help="real, or emulated:PROFILE to emulate compute.", rich_help_panel=ENGINES)
    ] = "real"
    time_scale: Annotated[
        float,
        typer.Option(min=0, help="Emulated seconds per second; 0 = the profile's own.", rich_help_panel=ENGINES),
    ] = 0.0
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="KV and logs, kept over restarts. Default: a temporary one.",
            rich_help_panel=SETTINGS,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SERVICE.NAME=VALUE",
            help="Any setting (docs/flags.md) of conductor, prefill, decode, kvstore, gateway, engine (prefill and "
            "decode) or all; may be given again.",
            rich_help_panel=SETTINGS,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML of such settings: {SERVICE: {NAME: VALUE}}.", rich_help_panel=SETTINGS),
    ] = None
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=SETTINGS)] = "info"
    restart: Annotated[
        bool,
        typer.Option(help="Restart a service that ends unasked; else the stack stops.", rich_help_panel=SETTINGS),
    ] = True
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.", rich_help_panel=SETTINGS)] = False
