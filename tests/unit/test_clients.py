"""`make clients`: its table and its scripted model. The programs themselves are not installed here."""

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from moonpool.v1 import conductor_pb2 as pb
from tests.clients.__main__ import PAGE, Environment, changed_cells, listed_cells, main, programs, with_cells
from tests.clients.scripted import COMMAND, DONE, FINISH, SEARCH_REPLACE, says


def test_the_table_lists_every_program_at_its_version() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = listed_cells(page)
    assert {name: version for name, (version, _) in listed.items()} == {
        program.name: program.version for program in programs()
    }
    assert all(cells for _, cells in listed.values())
    assert with_cells(page, {}) == page


def test_what_worked_is_written() -> None:
    page = with_cells(PAGE.read_text(encoding="utf-8"), {"openai_sdk": ["chat", "stream"], "codex_agent": []})
    assert listed_cells(page)["openai_sdk"][1] == ["chat", "stream"]
    assert listed_cells(page)["codex_agent"][1] == []


@pytest.mark.parametrize(
    ("found", "changed"),
    [
        ({"chat": "", "stream": "", "new": "fails"}, []),
        ({"chat": "", "stream": "boom"}, ["p.stream: boom"]),
        ({"chat": "", "(end)": "see log"}, ["p.stream: did not run"]),
        ({"chat": "", "stream": "", "new": ""}, ["p.new: works, and is not listed"]),
    ],
)
def test_a_changed_cell_is_told(found: dict[str, str], changed: list[str]) -> None:
    assert changed_cells("p", ["chat", "stream"], found) == changed


def test_a_program_that_cannot_be_installed_is_skipped_visibly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network, and with nothing fetched before."""
    for name, value in (("UV_OFFLINE", "1"), ("UV_CACHE_DIR", str(tmp_path / "cache")), ("PATH", str(tmp_path))):
        monkeypatch.setenv(name, value)
    names = ["llm_program", "openai_node"]
    assert main([*names, "--folder", str(tmp_path / "clients")]) == 0
    told = capsys.readouterr().out
    assert all(f"SKIPPED {name}: cannot be installed: " in told for name in names)
    assert "0 cells work, 0 changed, 2 programs skipped" in told


def test_packages_are_left_out_and_torch_is_that_of_the_running_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, left_out = tmp_path / "e" / "lib" / "python3" / "site-packages", list[str]()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "install" in command:
            site.mkdir(parents=True)
            left_out.append(Path(command[command.index("--override") + 1]).read_text())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert Environment("e", ("vllm==0.32.0",), "2026-11-27", ("torch", "numba")).install(tmp_path) == ""
    assert left_out == ['torch; python_version < "3"\nnumba; python_version < "3"\n']
    assert (site / "torch.pth").read_text() == sysconfig.get_path("purelib")


def chat(tools: list[str], *turns: dict[str, Any]) -> pb.ChatPrompt:
    given = [{"type": "function", "function": {"name": name}} for name in tools]
    return pb.ChatPrompt(tools=json.dumps(given), messages=[pb.ChatMessage(**turn) for turn in turns])


def called(name: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [pb.ToolCall(id="c", name=name)]}


@pytest.mark.parametrize(
    ("prompt", "says_"),
    [
        (chat(["exec_command"]), COMMAND),
        (chat(["exec_command"], called("exec_command")), DONE),
        (chat(["Edit", "Read"]), '"Read"'),
        (chat(["Edit", "Read"], called("Read")), '"old_string": "helo"'),
        (chat(["bash"], {"role": "user", "content": "COMPLETE_TASK"}, called("bash")), FINISH),
        (chat([], {"role": "system", "content": "SEARCH and REPLACE"}), SEARCH_REPLACE),
        (chat([]), DONE),
    ],
)
def test_what_the_scripted_model_says(prompt: pb.ChatPrompt, says_: str) -> None:
    assert says_ in says(prompt, "/folder")
