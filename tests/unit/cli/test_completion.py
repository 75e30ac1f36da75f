"""What a shell is told when a word of the command is to be completed."""

import pytest
from typer.testing import CliRunner

from moonpool.cli.main import app


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("moonpool conte", ["context"]),
        ("moonpool context re", ["renew"]),
        ("moonpool context create --ta", ["--tag"]),
        ("moonpool simulate conduc", ["conductors"]),
        ("moonpool bench se", ["serve"]),
        ("moonpool chat --con", ["--context"]),
    ],
)
def test_words(typed: str, completed: list[str]) -> None:
    shell = {"_MOONPOOL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert CliRunner().invoke(app, prog_name="moonpool", env=shell).output.split() == completed
