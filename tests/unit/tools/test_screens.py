"""The page of screens shows the help pages that verbs have."""

import os
import shlex
import subprocess
import sys

import pytest

from tools.screens import COLUMNS, HELP, PAGE, ROOT, help_pages


@pytest.mark.parametrize("verb", HELP)
def test_help_pages_are_current(verb: str) -> None:
    program = "import sys; sys.argv[0] = 'moonpool'; from moonpool.cli.main import main; main()"
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *shlex.split(verb)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    shown = help_pages(PAGE.read_text(encoding="utf-8"))[verb]
    assert [line.rstrip() for line in said.rstrip().split("\n")] == shown.split("\n"), "run python -m tools.screens"
