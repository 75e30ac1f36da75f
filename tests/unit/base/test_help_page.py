"""Help pages: 80 columns, and nothing lost."""

from moonpool.base.help_page import HelpRow, HelpSection, help_page


def test_a_page() -> None:
    rows = [HelpRow("-h", "Help."), HelpRow("--a-flag-with-a-long-name VALUE", "word " * 20), HelpRow("x", "")]
    page = help_page("program [OPTIONS]", "What it does.\n\nMore of that.", [HelpSection("Options", rows)], "The end.")
    lines = page.splitlines()
    assert lines[:6] == ["Usage: program [OPTIONS]", "", "What it does.", "", "More of that.", ""]
    assert lines[6:9] == ["Options:", "  -h                        Help.", "  --a-flag-with-a-long-name VALUE"]
    assert lines[9].startswith(" " * 28 + "word word")
    assert page.count("word") == 20
    assert lines[-3:] == ["  x", "", "The end."]
    assert max(map(len, lines)) <= 80


def test_sections_without_rows_are_left_out() -> None:
    assert help_page("p", "", [HelpSection("Options", [])]) == "Usage: p\n"
