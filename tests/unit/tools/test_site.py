"""The site of docs/: links that lead out of docs/ become paths, all others stay; mkdocs finds what it is told of."""

import re
from pathlib import Path

from tools.site import DOCS, with_deep_lists, without_links_outside

ROOT = DOCS.parent


def test_links_that_lead_out_of_the_site_become_paths() -> None:
    text = "See [deploy](deploy.md#slurm), [the rules](../CONTRIBUTING.md), [README.md](../README.md), [web](https://a.b/c)."
    assert without_links_outside(text, DOCS) == (
        "See [deploy](deploy.md#slurm), the rules (`CONTRIBUTING.md`), README.md, [web](https://a.b/c)."
    )
    below = "![A curve](../../benchmarks/results/a.svg) and [its ADR](../adr/README.md)"
    assert without_links_outside(below, DOCS / "extend") == (
        "A curve (`benchmarks/results/a.svg`) and [its ADR](../adr/README.md)"
    )


def test_no_page_links_to_what_the_site_lacks() -> None:
    pages = sorted(DOCS.rglob("*.md"))
    assert len(pages) > 50
    for page in pages:
        shown = without_links_outside(page.read_text(encoding="utf-8"), page.parent)
        outside = [
            target for target in re.findall(r"\]\((\.\./[^)\s#]+)", shown) if not (page.parent / target).is_file()
        ]
        assert not outside, page


STEPS = """\
Do this:
1. First:

   ```python
   def f():

       return 1
   ```

   - a point
     that goes on
     - below

2. Second.

A paragraph.
"""


def test_what_belongs_to_an_item_is_indented_as_mkdocs_wants() -> None:
    assert with_deep_lists(STEPS).splitlines() == [
        "Do this:",
        "",
        "1. First:",
        "",
        "    ```python",
        "    def f():",
        "",
        "        return 1",
        "    ```",
        "",
        "    - a point",
        "        that goes on",
        "        - below",
        "",
        "2. Second.",
        "",
        "A paragraph.",
    ]


def test_pages_keep_their_words_and_no_item_of_a_list_loses_its_own() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        shown = with_deep_lists(text)
        assert shown.split() == text.split(), page
        fences = re.findall(r"^( *)```", shown, re.MULTILINE)
        assert all(len(indent) % 4 == 0 for indent in fences), page


def test_what_mkdocs_is_told_of_exists() -> None:
    told = dict(re.findall(r"^(\w+): (.+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert (ROOT / told["docs_dir"]) == DOCS
    assert [Path(name) for name in told["hooks"].strip("[]").split(", ")] == [Path("tools/site.py")]
