"""Text for people at a terminal: lines end between words."""

import shutil
import sys
import textwrap
from typing import TextIO

import typer


def say(text: str, *, err: bool = False, indent: str = "") -> None:
    """Print text for a person to standard output or standard error, as `whole_words` wraps it."""
    typer.echo(whole_words(text, sys.stderr if err else sys.stdout, indent), err=err)


def whole_words(text: str, stream: TextIO, indent: str = "") -> str:
    """The text as `stream` shows it: wrapped between words at a terminal, unchanged in a pipe or a file.

    Args:
        text: lines.
        stream: where the text goes.
        indent: what stands before the second and later parts of a line.
    """
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))
