"""The page of screens shows the help pages that verbs have."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from click import Context

from moonpool.cli import kvstore, main
from tools.screens import COLUMNS, HELP, PAGE, ROOT, help_pages


def leaves(command: Any, name: str = "") -> Iterator[str]:
    """The verbs below a command that run something, with the verbs above them."""
    if not hasattr(command, "list_commands"):
        yield name
        return
    for verb in command.list_commands(Context(command)):
        yield from leaves(command.get_command(Context(command), verb), f"{name} {verb}".strip())


def test_every_verb_is_shown() -> None:
    """A verb's screen, not only its help page."""
    verbs = {*leaves(typer.main.get_command(main.app)), *leaves(typer.main.get_command(kvstore.app), "kvstore")}
    shown = re.findall(r"^\$ moonpool (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    ran = [line for line in shown if not line.endswith("--help")]
    assert len(verbs) > 60
    missing = sorted(verb for verb in verbs if not any(f"{line} ".startswith(f"{verb} ") for line in ran))
    assert not missing, "tools/screens.py runs none of these"


def test_no_line_is_wider_than_the_terminal() -> None:
    """tmux joins what it has wrapped, so a wrapped line is a wide one; commands are typed, not printed."""
    lines = PAGE.read_text(encoding="utf-8").partition("```\n")[2].splitlines()
    wide = [line for line in lines if len(line) > COLUMNS and not line.startswith("$ moonpool ")]
    assert not wide


@pytest.mark.parametrize("verb", HELP)
def test_help_pages_are_current(verb: str) -> None:
    program = "import sys; sys.argv[0] = 'moonpool'; from moonpool.cli.main import main; main()"
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *shlex.split(verb)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    shown = help_pages(PAGE.read_text(encoding="utf-8"))[verb]
    assert [line.rstrip() for line in said.rstrip().split("\n")] == shown.split("\n"), "run python -m tools.screens"
