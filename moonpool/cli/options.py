"""What several verbs have in common: headings, options, and what these name: conductors, and files of text."""

from pathlib import Path
from typing import Annotated

import typer

from moonpool.errors import InvalidRequest

Address = Annotated[
    str,
    typer.Option(help="The conductor, HOST:PORT; several with commas between them.", envvar="MOONPOOL_ADDRESS"),
]
Model = Annotated[
    str, typer.Option(help="Hugging Face folder, GGUF file, hub id, or smollm2 (fetched once); empty = the bundled one")
]
UsedContext = Annotated[str, typer.Option("--context", help="Id or tag of a context that goes before the prompt.")]
UsedContextTtl = Annotated[
    float,
    typer.Option(
        "--context-ttl-s", min=0.0, help="Renew the context for this many seconds; 0 = leave its time as it is."
    ),
]
KVDtype = Annotated[str, typer.Option(help="Element type of KV: int8, fp8, or auto, that of the weights.")]
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a verb that reads its flags itself."""
START, LOOK, OPERATE = "Start here", "Look at a stack", "Operate a stack"
PREDICT, SINGLE = "Measure and predict", "Run a single service"
"""Headings of the verbs in `moonpool --help`. They come in the order in which their first verbs are added."""


def addresses(text: str) -> list[str]:
    """The addresses of a list with commas.

    Raises:
        InvalidRequest: it is empty, or has an empty place.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InvalidRequest("address", f"must be HOST:PORT, or several with commas between them, is {text!r}")
    return found


def text_of(path: str, option: str) -> str:
    """What a file says.

    Raises:
        InvalidRequest: it cannot be read; names the option.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(option, f"cannot be read: {error}") from None
