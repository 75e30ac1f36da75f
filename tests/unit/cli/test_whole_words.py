"""Lines of text for people end between words."""

import io

import pytest

from moonpool.cli.whole_words import whole_words


class Terminal(io.StringIO):
    """A stream to a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    text = "moonpool: a-long-name that wraps\n\nsecond"
    assert whole_words(text, Terminal()) == "moonpool:\na-long-name\nthat wraps\n\nsecond"
    assert whole_words(text, io.StringIO()) == text
    assert whole_words("slo: 30 s, 0.1 s", Terminal(), "     ") == "slo: 30 s,\n     0.1 s"
