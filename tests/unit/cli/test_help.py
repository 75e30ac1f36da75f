"""What `moonpool --help` shows first, and what is said of files that a flag names and nobody can read."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.cli import generate
from moonpool.cli.main import app
from moonpool.cli.options import FORMER_VERBS
from moonpool.client import GenerateArguments


def test_what_a_newcomer_needs_comes_first_and_single_services_last() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    verbs = re.findall(r"^  ([a-z]+) {2,}", shown, re.MULTILINE)
    first = ["serve", "run", "chat", "pull", "list", "show", "rm", "ps", "stop", "generate", "demo", "help"]
    assert verbs[: len(first)] == first
    services = ["adapter", "conductor", "decode", "gateway", "indexer", "kvstore", "prefill", "stage"]
    assert sorted(verbs[-len(services) :]) == services
    assert "─ Commands ─" not in shown, "each verb stands under a heading"


@pytest.mark.parametrize("verb", ["", "serve", "bench serve", "delete", "prefill", "kvstore stat"])
def test_h_explains_every_verb(verb: str) -> None:
    short, long = (CliRunner().invoke(app, [*verb.split(), flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "usage" in short.stdout.lower()
    assert CliRunner().invoke(app, ["help", *verb.split()]).stdout == long.stdout


@pytest.mark.parametrize("group", ["", "keys", "certs", "simulate"])
def test_a_group_without_a_verb_shows_its_page(group: str) -> None:
    shown = CliRunner().invoke(app, group.split())
    assert (shown.exit_code, shown.stdout) == (2, CliRunner().invoke(app, [*group.split(), "-h"]).stdout)


@pytest.mark.parametrize("verb", ["", "serve", "run", "keys create", "context", "decode", "kvstore stat", "delete"])
def test_pages_have_one_style_and_80_columns(verb: str) -> None:
    page = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*verb.split(), "-h"]).stdout
    assert page.startswith("Usage: ")
    assert "\nOptions:\n" in page
    assert max(map(len, page.splitlines())) <= 80


def test_a_page_tells_values_defaults_and_variables() -> None:
    page = CliRunner().invoke(app, ["serve", "-h"]).stdout
    for shown in ("--dtype auto|float32|bfloat16|float16", "--port N", "[MOONPOOL_API_KEY]", "[127.0.0.1]"):
        assert shown in page
    assert len(page.splitlines()) < 80


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str) -> None:
    assert CliRunner().invoke(app, [flag]).output == f"moonpool {importlib.metadata.version('moonpool')}\n"


@pytest.mark.parametrize(("was", "now"), FORMER_VERBS.items())
def test_a_former_verb_says_the_new_one(was: str, now: str) -> None:
    done = CliRunner().invoke(app, [*was.split(), "x"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"{was}: is now `moonpool {now}`"


@pytest.mark.parametrize(
    ("arguments", "said", "prompt"),
    [(["one two"], "not read", "one two"), ([], "piped\n", "piped"), (["-"], "two\nlines\n\n", "two\nlines\n")],
)
def test_a_prompt_is_the_argument_or_piped(
    arguments: list[str], said: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerateArguments] = []
    monkeypatch.setattr(generate, "run_generate", lambda conductors, request, as_json: asked.append(request))
    assert CliRunner().invoke(app, ["generate", *arguments], input=said).exit_code == 0
    assert [request.get("prompt") for request in asked] == [prompt]


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (["context", "create", "FILE"], "file"),
        (["context", "create", "-", "--tools", "FILE"], "tools"),
        (["generate", "a", "--grammar", "@FILE"], "grammar"),
    ],
)
@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, verb: list[str], option: str, content: bytes | None
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    done = CliRunner().invoke(app, [word.replace("FILE", str(file)) for word in verb], input="text")
    assert isinstance(done.exception, InvalidRequest)
    assert done.exception.field == option


def test_a_verb_that_reads_no_model_imports_nothing_heavy() -> None:
    """`moonpool health` runs every few seconds in a container."""
    heavy = ["moonpool.base.checkpoint", "numpy", "torch", "structlog", "grpc"]
    code = f"import sys, moonpool.cli.main; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
