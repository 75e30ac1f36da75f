"""What `make docs` does to a page before mkdocs makes HTML of it (mkdocs.yml)."""

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
_ITEM = re.compile(r"(?:[-*+]|\d+\.) +")
_LINK = re.compile(r"!?\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def without_links_outside(text: str, folder: Path) -> str:
    """Show links to files and pictures that the site does not have as the files' paths.

    Args:
        text: a page in Markdown.
        folder: of the page.
    """

    def replaced(found: re.Match[str]) -> str:
        shown, target = found[1], found[2]
        path = Path(os.path.normpath(folder / target))
        if "://" in target or (path.is_relative_to(DOCS) and path.is_file()):
            return found[0]
        place = path.relative_to(DOCS.parent)
        return shown if str(place) in shown else f"{shown} (`{place}`)"

    return _LINK.sub(replaced, text)


def with_deep_lists(text: str) -> str:
    """Indent what belongs to an item of a list by four spaces a level, as Python-Markdown wants and GitHub does not.

    A list that follows a paragraph's line gets an empty line before it.
    """
    columns: list[int] = []  # where the text of each open item begins
    done: list[str] = []
    fence = before = ""
    for line in text.splitlines():
        words = line.strip()
        column = len(line) - len(line.lstrip())
        item = _ITEM.match(words) if not fence else None
        in_list = bool(columns)
        starts_block = item or not before or words.startswith("```")
        while words and not fence and starts_block and columns and column < columns[-1]:
            columns.pop()
        if item and before and not in_list:
            done.append("")
        if fence:
            words = line[min(column, columns[-1] if columns else 0) :].rstrip()
        done.append("    " * len(columns) + words if words else "")
        if words.startswith("```") and (not fence or words == fence):
            fence = "" if fence else "```"
        if item:
            columns.append(column + item.end())
        before = "" if fence else words
    return "\n".join(done) + "\n"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return with_deep_lists(without_links_outside(markdown, Path(page.file.abs_src_path).parent))
