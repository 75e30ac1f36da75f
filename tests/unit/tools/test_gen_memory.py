"""docs/memory.md is what the arithmetic of `moonpool model inspect` says today."""

from tools.gen_memory import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.gen_memory writes the page"
