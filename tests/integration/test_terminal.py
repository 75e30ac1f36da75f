"""What a person at a terminal sees when a stack starts and when Ctrl-C is pressed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_start import cold
from tools.screens import STACK, Terminal, shim

__all__ = ["cold"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux")]


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal of 80 columns."""
    monkeypatch.delenv("TMUX", raising=False)
    terminal = Terminal(tmp_path)
    shim(tmp_path)
    yield terminal
    terminal.tmux("kill-server")


def press(terminal: Terminal, name: str, key: str, until: str) -> str:
    """Press a key; returns the screen when it shows a text."""
    terminal.tmux("send-keys", "-t", name, key)
    terminal.wait(name, lambda session: until in terminal.screen(session))
    return terminal.screen(name)


def test_a_stack_that_is_asked_to_stop_says_so_and_again_stops_at_once(terminal: Terminal) -> None:
    """Behind the start there is the greeting alone; the first Ctrl-C waits for requests, the second does not."""
    terminal.begin("stack", STACK)
    terminal.wait("stack", lambda session: "Ctrl-C stops." in terminal.screen(session))
    greeting = terminal.screen("stack").splitlines()
    assert greeting[0].startswith("ready:    http://127.0.0.1:"), greeting
    assert not any(sign in line for line in greeting for sign in ("━", "starting", "loading", "kernels"))
    terminal.begin("asks", "generate 'The moon is' --max-tokens 100000")
    terminal.wait("asks", lambda session: "\n" in terminal.screen(session))  # the answer has begun
    press(terminal, "stack", "C-c", "stopping: running requests end first")
    assert not terminal.ended("stack"), "a request runs"
    shown = press(terminal, "stack", "C-c", "stopping now")
    terminal.wait("stack", terminal.ended)
    assert shown.count("stopping") == 2
    assert "Traceback" not in terminal.screen("stack")


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("verb", ["serve bundled --port 0", "run bundled hello", "demo bundled"])
def test_a_start_is_broken_off_with_a_word_and_leaves_no_bar(terminal: Terminal, verb: str) -> None:
    terminal.begin("start", verb)
    terminal.wait("start", lambda session: "compiling native code" in terminal.screen(session))
    press(terminal, "start", "C-c", "stopping")
    terminal.wait("start", terminal.ended)
    shown = terminal.screen("start")
    assert shown.count("stopping") == 1
    assert not any(sign in shown for sign in ("compiling native code", "━", "Traceback", "Aborted")), shown
