"""Writes docs/screens.md: `python -m tools.screens` runs verbs in tmux, 80 columns wide. A test compares help pages."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "screens.md"
COLUMNS, LINES = 80, 120
STACK = "serve bundled --engine emulated:llama-70b-a800"
WAIT_S = 0.2
LONGEST_WAITS = 900
HELP = ("--help", "serve --help", "keys create --help")
"""Pages that stay the same from run to run."""
BEFORE = (
    "list",
    "list --all",
    "show bundled",
    "rm nobody",
    "ps",
    "health",
    "serve llama9",
    "serve qwen3:0.7b",
    "generate hello",
    "keys list",
    "demo bundled",
    "run bundled 'def main(' --max-tokens 24",
)
"""Without a stack; wrong uses among them."""
WHILE = (
    "ps",
    "state",
    "generate 'The moon is' --max-tokens 8",
    "explain",
    "top --once",
    "health",
    "check",
    "drain nobody",
    "keys create ann --rpm 60",
    "keys list",
    "chat --address nobody",
    "stop",
)
"""With a stack that runs."""
HEAD = """# Screens

`python -m tools.screens` writes this page: verbs as a terminal of 80 columns shows them. Compute is emulated, times are
those of one run, and keys are masked.
"""


@dataclass(frozen=True)
class Terminal:
    """A server of tmux of its own, with one session."""

    folder: Path

    def tmux(self, *arguments: str) -> str:
        """What a command of tmux prints."""
        command = ["tmux", "-S", str(self.folder / "tmux"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def begin(self, name: str, command: str) -> None:
        """Run `moonpool COMMAND` in a session that stays when the command has ended."""
        run = f"exec {shlex.quote(str(self.folder / 'bin' / 'moonpool'))} {command}"
        # The window stays open behind the command, also behind Ctrl-C, so that all of it can be read.
        kept = f"trap : INT; sh -c {shlex.quote(run)}; exec cat"
        self.tmux("new-session", "-d", "-s", name, "-x", str(COLUMNS), "-y", str(LINES), kept)

    def screen(self, name: str) -> str:
        """What the session shows."""
        return self.tmux("capture-pane", "-p", "-t", name).rstrip()

    def run(self, name: str, command: str) -> str:
        """What `moonpool COMMAND` has shown when it has ended."""
        self.begin(name, command)
        self.wait(lambda: self.ended(name))
        return self.screen(name)

    def ended(self, name: str) -> bool:
        """Whether the session's command has ended."""
        return self.tmux("display", "-p", "-t", name, "#{pane_current_command}").strip() == "cat"

    def wait(self, done: object) -> None:
        """Wait until a function returns true."""
        assert callable(done)
        pause = threading.Event()
        for _ in range(LONGEST_WAITS):
            if done():
                return
            pause.wait(WAIT_S)
        raise TimeoutError("a command does not end")


def shim(folder: Path) -> None:
    """Write the command that `Terminal` runs: Moonpool of this checkout, whose own files are in the folder."""
    command = folder / "bin" / "moonpool"
    command.parent.mkdir()
    command.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))} XDG_RUNTIME_DIR={folder} XDG_CONFIG_HOME={folder}\n"
        f"export NO_COLOR=1 HF_HUB_OFFLINE=1\ncd {folder}\n"
        f"exec {sys.executable} -c \"import sys; sys.argv[0] = 'moonpool'; "
        f'from moonpool.cli.main import main; main()" "$@"\n'
    )
    command.chmod(0o755)


def page() -> str:
    """The text of the page, from runs of the verbs."""
    with tempfile.TemporaryDirectory(prefix="screens-") as name:
        folder = Path(name)
        shim(folder)
        terminal = Terminal(folder)
        shown: list[tuple[str, str]] = []
        try:
            shown += [(verb, terminal.run(f"before{at}", verb)) for at, verb in enumerate((*HELP, *BEFORE))]
            terminal.begin("stack", STACK)
            terminal.wait(lambda: "Ctrl-C stops." in terminal.screen("stack"))
            shown.append((STACK, terminal.screen("stack")))
            shown += [(verb, terminal.run(f"while{at}", verb)) for at, verb in enumerate(WHILE)]
        finally:
            terminal.tmux("kill-server")
        parts = [f"\n```\n$ moonpool {verb}\n{text}\n```\n" for verb, text in shown]
        return HEAD + re.sub(r"\bmp-[\w-]{32}\b", f"mp-{'x' * 32}", "".join(parts).replace(name, "/tmp"))


def help_pages(text: str) -> dict[str, str]:
    """The help pages on the page, by verb."""
    found = re.findall(r"```\n\$ moonpool ([^\n]*--help)\n(.*?)\n```", text, re.DOTALL)
    return dict(found)


if __name__ == "__main__":
    os.environ.pop("TMUX", None)
    PAGE.write_text(page(), encoding="utf-8")
