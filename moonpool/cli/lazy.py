"""Groups of verbs, as `moonpool simulate`: a module is imported when a verb of it is run, explained or completed."""

import functools
import importlib
from typing import Any

import typer
from typer.core import TyperGroup


def group_of(module: str) -> type[TyperGroup]:
    """The class of a group whose verbs are those of `module.app`."""

    class Lazy(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return _loaded(module).list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _loaded(module).get_command(ctx, cmd_name)

    return Lazy


@functools.cache
def _loaded(module: str) -> TyperGroup:
    found = typer.main.get_command(importlib.import_module(module).app)
    assert isinstance(found, TyperGroup)
    return found
