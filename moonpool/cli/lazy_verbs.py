"""Groups of verbs whose modules are imported when a verb runs."""

import functools
import importlib
from typing import Any

import typer
from typer.core import TyperGroup


def lazy_group(module: str) -> type[TyperGroup]:
    """Return the class for a group with the verbs in `module.app`."""

    class Lazy(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return _load_group(module).list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _load_group(module).get_command(ctx, cmd_name)

    return Lazy


@functools.cache
def _load_group(module: str) -> TyperGroup:
    found = typer.main.get_command(importlib.import_module(module).app)
    assert isinstance(found, TyperGroup)
    return found


def add_lazy_group(app: typer.Typer, name: str, module: str, panel: str, summary: str) -> None:
    """Add a verb with sub-verbs, in one of the command's modules."""
    verbs = typer.Typer(cls=lazy_group(f"moonpool.cli.{module}"), help=summary, no_args_is_help=True)
    app.add_typer(verbs, name=name, rich_help_panel=panel)
