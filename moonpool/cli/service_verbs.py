"""The verbs that run a single service: conductor, prefill, decode, stage, gateway, adapter, indexer, kvstore."""

import importlib
import importlib.metadata
from typing import Any

import typer

from moonpool.base.config import EXTRA_ADVICE, SERVICE_MODULES
from moonpool.base.errors import ConfigError
from moonpool.cli.options import (
    PASS_THROUGH,
    SINGLE,
)

app = typer.Typer()

ADAPTER_PACKAGES = ("aiohttp", "msgspec", "zmq")
"""Modules of the extra `adapter`."""


def _add_service_verb(kind: str, summary: str) -> None:
    """Add a verb that runs a service, with the service's own flags."""

    @app.command(kind, help=summary, context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
    def run(context: typer.Context) -> None:
        status: int = importlib.import_module(f"{SERVICE_MODULES[kind]}.__main__").main(context.args)
        raise typer.Exit(status)


_add_service_verb("conductor", "Run one conductor.")
_add_service_verb("prefill", "Run one prefill instance.")
_add_service_verb("decode", "Run one decode instance.")


@app.command("stage", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def stage_(context: typer.Context) -> None:
    """Run one pipeline stage of a prefill instance on another host."""
    raise typer.Exit(importlib.import_module("moonpool.engine.remote.__main__").main(context.args))


_add_service_verb(
    "gateway", "Run one gateway: the HTTP interfaces of OpenAI and Anthropic, Kimi's context caching, a page."
)


@app.command("adapter", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def adapter_(context: typer.Context) -> None:
    """Join a vLLM or SGLang server to the cluster: adapter vllm --engine URL --model MODEL --conductor ADDRESS."""
    args = context.args
    if args and not args[0].startswith("-"):
        args = ["--set", f"kind={args[0]}", *args[1:]]
    raise typer.Exit(_main_with_extra("adapter")(args))


@app.command("indexer", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def indexer_(context: typer.Context) -> None:
    """Tell other routers which engine holds which KV: HTTP as Mooncake's conductor, KV events as vLLM."""
    raise typer.Exit(_main_with_extra("indexer")(context.args))


def _main_with_extra(service: str) -> Any:
    """A service's `main`. Raises ConfigError if the extra `adapter` is not installed."""
    try:
        return importlib.import_module(f"{SERVICE_MODULES[service]}.__main__").main
    except ModuleNotFoundError as error:
        if error.name not in ADAPTER_PACKAGES:
            raise
        raise ConfigError(service, f"needs {error.name}: {EXTRA_ADVICE.format('adapter')}") from error


@app.command("kvstore", context_settings=PASS_THROUGH, rich_help_panel=SINGLE)
def kvstore_(context: typer.Context) -> None:
    """Run a kvstore, or operate on a kvstore: kvstore stat|verify|compact|warm|advise|add-key|drop-keys."""
    from moonpool.cli import kvstore

    if context.args and context.args[0] in kvstore.VERBS:
        kvstore.run_kvstore(context.args)
    else:
        raise typer.Exit(importlib.import_module("moonpool.kvstore.__main__").main(context.args))
