"""Help pages of commands and services, in one style: headings, names at the left, texts at the right, 80 columns."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 80
TEXT_COLUMN = 28
"""Column at which texts begin; a longer name has a line of its own."""


@dataclass(frozen=True, slots=True)
class HelpRow:
    """A flag, an argument or a verb, and what it is for."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class HelpSection:
    """Rows under a heading."""

    heading: str
    rows: Sequence[HelpRow]


def help_page(usage: str, summary: str, sections: Iterable[HelpSection], end: str = "") -> str:
    """The text of a page.

    Args:
        usage: the command, and what may follow.
        summary: what the command does; empty lines part paragraphs.
        sections: sections without rows are left out.
        end: a paragraph at the end; "" = none.
    """
    blocks = [_filled(f"Usage: {usage}", " " * 7), *(_filled(each) for each in summary.split("\n\n") if each.strip())]
    for section in sections:
        if section.rows:
            blocks.append("\n".join([f"{section.heading}:", *(line for row in section.rows for line in _row(row))]))
    if end:
        blocks.append(_filled(end))
    return "\n\n".join(blocks) + "\n"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _row(row: HelpRow) -> list[str]:
    lines = textwrap.wrap(row.text, WIDTH - TEXT_COLUMN, break_long_words=False, break_on_hyphens=False) or [""]
    name = f"  {row.name}"
    if len(name) + 2 > TEXT_COLUMN:
        return [name, *(" " * TEXT_COLUMN + line for line in lines)]
    return [f"{name:<{TEXT_COLUMN}}{lines[0]}".rstrip(), *(" " * TEXT_COLUMN + line for line in lines[1:])]
