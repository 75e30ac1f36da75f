"""Text for people at a terminal: lines end between words."""

import shutil
import textwrap
from typing import TextIO


def whole_words(text: str, stream: TextIO) -> str:
    """The text as `stream` shows it: wrapped between words at a terminal, unchanged in a pipe or a file."""
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    lines = (textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join("\n".join(line) for line in lines)
