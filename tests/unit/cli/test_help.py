"""What `moonpool --help` shows first, and what is said of files that a flag names and nobody can read."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.cli.main import app
from moonpool.errors import InvalidRequest


def test_what_a_newcomer_needs_comes_first_and_single_services_last() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    verbs = re.findall(r"^│ ([a-z]+) {2,}", shown, re.MULTILINE)
    assert verbs[:7] == ["up", "down", "generate", "chat", "demo", "model", "bench"]
    assert sorted(verbs[-5:]) == ["conductor", "decode", "gateway", "kvstore", "prefill"]
    assert "─ Commands ─" not in shown, "each verb stands under a heading"


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (["context", "create", "FILE"], "file"),
        (["context", "create", "-", "--tools", "FILE"], "tools"),
        (["generate", "--prompt", "a", "--grammar", "@FILE"], "grammar"),
    ],
)
@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, verb: list[str], option: str, content: bytes | None
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    done = CliRunner().invoke(app, [one.replace("FILE", str(file)) for one in verb], input="text")
    assert isinstance(done.exception, InvalidRequest)
    assert done.exception.field == option
