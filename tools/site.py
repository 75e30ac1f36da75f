"""What `make docs` does to a page before mkdocs makes HTML of it (mkdocs.yml)."""

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
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


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return without_links_outside(markdown, Path(page.file.abs_src_path).parent)
