"""The figures of the tutorial come from its commands."""

from tools.tutorial import PAGE, anew, excerpt

SAID = """The last one.
[length] 3228 prompt tokens, 64 cached; 24 generated; TTFT 2.500 s, TPOT 0.0804 s (12.4 tokens/s)
phase   tokens  from s   for s
────────────────────────
place           0.0001  0.0553  █
chunk       25  0.0581  0.6380   ███
place: is tokenised and placed
"""


def test_an_excerpt_has_the_lines_that_were_shown_with_other_figures() -> None:
    shown = "[stop] 1 prompt tokens, 0 cached\nphase   tokens  from s\nplace  9\nload  9\nchunk 1\n"
    lines = SAID.splitlines(keepends=True)
    assert excerpt(shown, SAID) == "".join([lines[1], lines[2], *lines[4:6]])


class Shell:
    """A shell that says the same each time, a token sooner."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, command: str) -> str:
        self.ran.append(command)
        return SAID.replace("TTFT 2.500", f"TTFT {2.5 / len(self.ran):.3f}")


def test_the_page_is_made_anew() -> None:
    page, shell = PAGE.read_text(encoding="utf-8"), Shell()
    made = anew(page, shell, "other")
    assert shell.ran[0] == "moonpool serve other --data-dir ./kv"
    assert shell.ran.count("moonpool stop") == 2
    assert "moonpool serve smollm2 --data-dir ./kv" in made
    assert "3228 prompt tokens, 64 cached; 24 generated; TTFT 1.250 s" in made
    assert len(made.splitlines()) < len(page.splitlines()), "lines that are not there now are left out"
