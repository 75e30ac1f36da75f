"""Help of verbs: what a command's parameters say, as a page of `moonpool.base.help_page`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from moonpool.base.help_page import HelpRow, HelpSection, help_page

ARGUMENTS, OPTIONS, VERBS = "Arguments", "Options", "Verbs"
"""Headings of parameters and verbs that name none."""
_KINDS = {int: "N", float: "X", Path: "PATH"}
"""What stands for a value in a page, by the value's type; others are TEXT."""


def with_pages(command: Any) -> Any:
    """Give a command, and the verbs below a group, the pages of this module; return the command."""
    command.format_help = lambda ctx, formatter: formatter.write(page_of(command, ctx))
    if hasattr(command, "get_command"):
        parse = command.parse_args
        command.parse_args = lambda ctx, args: parse(ctx, page_without_verb(command, ctx, args))
        find = command.get_command
        command.get_command = lambda ctx, name: None if (verb := find(ctx, name)) is None else with_pages(verb)
    return command


def page_without_verb(group: Any, ctx: Any, args: list[str]) -> list[str]:
    """The arguments of a group of verbs; without any, print its page and end, as after a wrong use."""
    if not args and group.no_args_is_help and not ctx.resilient_parsing:
        typer.echo(page_of(group, ctx).rstrip("\n"))
        ctx.exit(2)
    return args


def page_of(command: Any, ctx: Any) -> str:
    """The help page of a command."""
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    end = f"`{ctx.command_path} VERB --help` explains a verb." if hasattr(command, "list_commands") else ""
    return help_page(usage, command.help or "", _sections(command, ctx), end)


def _sections(command: Any, ctx: Any) -> Iterator[HelpSection]:
    """Verbs by heading, or arguments, then options by heading; options without one come first."""
    found: dict[str, list[HelpRow]] = {ARGUMENTS: [], OPTIONS: []}
    for name in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        verb = command.get_command(ctx, name)
        text = (verb.help or "").strip().split("\n\n")[0]
        heading = getattr(verb, "rich_help_panel", None)
        found.setdefault(heading if isinstance(heading, str) else VERBS, []).append(HelpRow(name, text))
    for parameter in command.get_params(ctx):
        if parameter.param_type_name == "argument":
            found[ARGUMENTS].append(HelpRow(parameter.metavar or parameter.name.upper(), parameter.help or ""))
        elif not parameter.hidden:
            heading = getattr(parameter, "rich_help_panel", None)
            row = HelpRow(_flags(parameter), " ".join(_texts(parameter)))
            found.setdefault(heading if isinstance(heading, str) else OPTIONS, []).append(row)
    if hasattr(command, "list_commands"):  # verbs are what is looked for
        found[OPTIONS] = found.pop(OPTIONS)
    return (HelpSection(heading, rows) for heading, rows in found.items())


def _flags(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += f"/{option.secondary_opts[0]}"
    if option.is_flag:
        return names
    return f"{names} {option.metavar or _kind(option.type_descriptor.annotation)}"


def _kind(annotation: Any) -> str:
    """What stands for a value of this type: its choices, or a word."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if parts := [part for part in get_args(annotation) if part is not type(None)]:
        return _kind(parts[0])
    return _KINDS.get(annotation, "TEXT")


def _texts(option: Any) -> Iterator[str]:
    yield option.help or ""
    if option.envvar:
        yield f"[{option.envvar}]"
    default = option.default
    if option.show_default and not option.is_flag and default not in (None, "", 0, (), []):
        yield f"[{default}]"
