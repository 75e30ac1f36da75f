"""Shared by several verbs: headings, options, and what options name: conductors and text files."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperGroup

from moonpool.base.config import present_name
from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.cli.help_pages import page_of, page_without_verb, with_pages

Address = Annotated[
    str,
    typer.Option(
        help="A stack's name (`moonpool ps`), or conductors, HOST:PORT,... Default: the one stack that runs.",
        envvar="MOONPOOL_ADDRESS",
        show_default=False,
    ),
]
MODEL_HELP = "A name (`moonpool list --all`), hub id, folder or GGUF file; empty = the bundled one."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
SystemTurn = Annotated[str, typer.Option("--system", help="The system turn: what the model is told first.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 = greedy.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that together have this share.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
UsedContext = Annotated[str, typer.Option("--context", help="Id or tag of a context that goes before the prompt.")]
UsedContextTtl = Annotated[
    float,
    typer.Option("--context-ttl-s", min=0.0, help="Renew the context for this many seconds; 0 = no change."),
]
ENGINES = "Engines and stores"
"""A heading of options."""
Engines = Literal["auto", "one", "split"]
"""One engine for prompts and answers, or prefill and decode instances; auto = `moonpool.cli.engine_plan` decides."""
EngineChoice = Annotated[
    Engines,
    typer.Option(
        help="one = a single engine for prompts and answers; split = prefill and decode instances; auto = what suits.",
        rich_help_panel=ENGINES,
    ),
]
KVDtype = Annotated[str, typer.Option(help="Element type of KV: int8, fp8, or auto, that of the weights.")]
HELP = {"help_option_names": ["-h", "--help"]}
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings for a verb that reads the verb's own flags."""
START, LOOK, OPERATE = "Start here", "Look at a stack", "Operate a stack"
PREDICT, SINGLE = "Measure and predict", "Run a single service"
"""Headings of the verbs in `moonpool --help`. They come in the order in which their first verbs are added."""

FORMER_VERBS = {"up": "serve", "down": "stop", "model fetch": "pull"}
"""Verbs that had another name; an old name is an error that says the new name."""


def verb(run: Callable[[Any], None]) -> Callable[..., None]:
    """Make a verb from a function with one dataclass: each field is an option or an argument, in this order."""
    (parameter,) = inspect.signature(run).parameters.values()
    options = get_type_hints(run)[parameter.name]
    hints = get_type_hints(options, include_extras=True)

    @functools.wraps(run)
    def call(**given: Any) -> None:
        run(options(**given))

    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)
    ]
    call.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    call.__annotations__ = {field.name: field.annotation for field in fields}
    return call


def same_fields(options: Any, target: type[Any]) -> dict[str, Any]:
    """Return the options whose names are fields of the dataclass `target`, which takes them unchanged."""
    wanted = {field.name for field in dataclasses.fields(target)}
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.name in wanted}


class RootGroup(TyperGroup):
    """The verbs of `moonpool`. An error about a verb or a flag that had another name says the new name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, page_without_verb(self, ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (1, 2):
            if now := FORMER_VERBS.get(was := " ".join(args[:words])):
                raise ConfigError(was, f"is now `moonpool {now}`")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = super().get_command(ctx, cmd_name)
        return None if verb is None else with_pages(verb)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(page_of(self, ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            flag, usage = getattr(error, "option_name", ""), getattr(error, "ctx", None)
            if usage is not None and (now := _renamed_flag(flag, usage.command)):
                verb = usage.command_path.removeprefix(ctx.command_path).strip()
                raise ConfigError(verb, f"{flag} is now {now}") from None
            raise


def _renamed_flag(flag: str, command: Any) -> str:
    """Return the new name for a verb's former flag, or the argument that the flag has become; "" for any other flag."""
    options = {name for parameter in command.params for name in parameter.opts}
    if flag in options:
        return ""
    name = flag.lstrip("-").replace("-", "_")
    now = "--" + present_name(name, {option.lstrip("-").replace("-", "_") for option in options}).replace("_", "-")
    argument = name in options  # arguments have their plain name there
    return now if now in options else f"the argument {name.upper()}" if argument else ""


def prompt_text(prompt: str) -> str:
    """Return the prompt; "-" or "" = standard input, without the line's end that `echo` adds.

    Raises:
        InvalidRequest: the prompt cannot be read, or the pipe is empty.
    """
    if prompt not in ("", "-"):
        return prompt
    if sys.stdin.isatty():
        raise InvalidRequest("prompt", "is missing: give it as the argument, or pipe it in")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"standard input is no text: {error}") from None


def text_of(path: str, option: str) -> str:
    """Read a file.

    Raises:
        InvalidRequest: the file cannot be read; names the option.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(option, f"cannot be read: {error}") from None
