"""Nothing is run that was not given: services start in folders that hold anybody's Python files."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.config import SERVICE_MODULES
from moonpool.base.fork_server import ForkServer, Program, execute
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import StackPlan
from moonpool.client import Client
from tests.integration.conftest import BLOCK, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack, Executed
from tests.integration.test_cli import environment

ROOT = Path(__file__).parents[2]
MODULES = (
    *("blake3", "cryptography", "gguf", "grpc", "jinja2", "llguidance", "lmdb", "numpy", "pydantic", "safetensors"),
    *("setproctitle", "structlog", "tokenizers", "torch", "typer", "uvloop", "xxhash", "yaml"),
    *("json", "runpy", "signal", "sitecustomize", "socket", "struct", "usercustomize"),
)
"""Files with names of what services import, from packages and from Python itself."""
PACKAGES = ("kernels", "moonpool", "services", "simulator")
"""Folders with names of Moonpool's own, now or before, and of other projects."""
SCRIPT = """import sys
from moonpool.cli.entry import main
sys.exit(main())
"""
"""As pip writes the installed command."""


class Hostile:
    """A folder of modules, each of which leaves a mark and fails when it is imported."""

    def __init__(
        self, folder: Path, marks: Path, packages: Sequence[str] = PACKAGES, modules: Sequence[str] = MODULES
    ) -> None:
        self.folder, self._marks = folder, marks
        folder.mkdir(exist_ok=True)
        marks.mkdir(exist_ok=True)
        for name in modules:
            (folder / f"{name}.py").write_text(self._code(name))
        for name in packages:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(self._code(name))

    def _code(self, name: str) -> str:
        return f"open({str(self._marks / name)!r}, 'w').close()\nraise ImportError('from a folder of somebody else')\n"

    def run(self) -> list[str]:
        """Names of the modules that were imported."""
        return sorted(os.listdir(self._marks))


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    """The working folder of this test."""
    found = Hostile(tmp_path / "folder", tmp_path / "marks")
    monkeypatch.chdir(found.folder)
    return found


def test_the_files_are_hostile(hostile: Hostile) -> None:
    """Python as it is imports them."""
    done = subprocess.run([sys.executable, "-c", "import tokenizers"], capture_output=True, text=True)
    assert "from a folder of somebody else" in done.stderr
    assert hostile.run() == ["tokenizers"]


@pytest.mark.parametrize("kind", [CheckedStack, Executed], ids=["forked", "executed"])
def test_a_stack_serves(kind: type[CheckedStack], plan: StackPlan, reference: Reference, hostile: Hostile) -> None:
    """Services and engines, whose working folder this is. Those that are executed have only what they need."""
    prompt = tokens(3 * BLOCK + 5, kind.__name__)
    with kind(dataclasses.replace(plan, http_port=0)) as stack, Client(stack.address) as client:
        services = stack.services.values()
        folders = {os.readlink(f"/proc/{service.pid}/cwd") for service in services}
        with_torch = [each.id for each in services if "libtorch" in Path(f"/proc/{each.pid}/maps").read_text()]
        assert kind is not Executed or with_torch == []
        given = client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=8, temperature=0.0))
    assert folders == {str(hostile.folder)}
    reference.assert_greedy(prompt, given.token_ids)
    assert hostile.run() == []


def test_a_fork_server_imports_nothing_from_its_folder(hostile: Hostile, tmp_path: Path) -> None:
    """Neither before a fork, nor in the process that it forks."""
    server = ForkServer(("tokenizers", "grpc", "a_module_that_is_not_there"))
    try:
        assert said_by("moonpool.base.native.build", tmp_path, server) == 0
    finally:
        server.close()
    assert hostile.run() == []


def said_by(module: str, folder: Path, server: ForkServer | None = None) -> int:
    with (folder / "said").open("ab") as said:
        program = Program(module, ["--help"], os.environ, said.fileno(), said.fileno())
        return (execute(program) if server is None else server.start(program)).wait(60)


IN_A_STACK = ("conductor", "kvstore", "prefill", "decode", "gateway")
"""Services that start in the hostile folder as parts of a stack, with workers: `test_a_stack_serves`."""


@pytest.mark.parametrize(
    "module",
    [
        *(
            pytest.param(module, marks=pytest.mark.slow if service in IN_A_STACK else ())
            for service, module in SERVICE_MODULES.items()
        ),
        pytest.param("moonpool.engine.worker", marks=pytest.mark.slow),
        "moonpool.base.native.build",
        "moonpool.cli.main",
    ],
)
def test_each_program_starts(module: str, hostile: Hostile, tmp_path: Path) -> None:
    assert said_by(module, tmp_path) == 0, (tmp_path / "said").read_text()
    assert hostile.run() == []


def test_python_m_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    """Without `-P`, Python puts that folder before all packages; a `moonpool` there is Python's own choice."""
    modules = [*MODULES, "contextlib", "functools", "importlib", "typing"]
    hostile = Hostile(tmp_path / "folder", tmp_path / "marks", ("kernels", "services"), modules)
    command = [sys.executable, "-m", "moonpool.cli.main", "ps"]
    variables = environment() | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=hostile.folder, env=variables, capture_output=True, text=True)
    assert (done.returncode, hostile.run()) == (0, []), done.stderr


def test_the_command_serves_the_model_of_a_hostile_folder(tmp_path: Path) -> None:
    """A model's folder is where people start: with a file that has the name of a library, and one beside the script."""
    model, commands = (Hostile(tmp_path / name, tmp_path / "marks", packages) for name, packages in FOLDERS.items())
    lines = lines_of_serve(model, commands, {})
    assert any(line.startswith("ready") for line in lines), "".join(lines)
    assert model.run() == []


@pytest.mark.slow
def test_an_empty_part_of_pythonpath_is_not_the_working_folder(tmp_path: Path) -> None:
    """For all that comes after Python's own start: `PYTHONPATH=$PYTHONPATH:/my/code` where the variable was not set.

    The checkout goes first, as site-packages does not: Python would take `moonpool` before the command begins.
    """
    before = ("sitecustomize", "usercustomize")
    modules = [name for name in MODULES if name not in before]
    model = Hostile(tmp_path / "model", tmp_path / "marks", modules=modules)
    commands = Hostile(tmp_path / "commands", tmp_path / "marks", ())
    lines = lines_of_serve(model, commands, {"PYTHONPATH": f"{ROOT}::/nothing", "LD_LIBRARY_PATH": ":/nothing"})
    assert any(line.startswith("ready") for line in lines), "".join(lines)
    assert model.run() == []


def lines_of_serve(model: Hostile, commands: Hostile, more: dict[str, str]) -> list[str]:
    """Serve the bundled model's copy in a hostile folder until the stack is ready; return what is said."""
    shutil.copytree(model_dir(), model.folder, dirs_exist_ok=True)
    script = commands.folder / "moonpool"
    script.write_text(SCRIPT)
    started = [sys.executable, str(script), "serve", ".", "--port", "0", "--threads", "1"]
    variables = environment() | {"XDG_RUNTIME_DIR": str(commands.folder)} | more
    with subprocess.Popen(
        started, cwd=model.folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        process.send_signal(signal.SIGTERM)
        return [*lines, process.communicate(timeout=60)[0]]


FOLDERS: Mapping[str, Sequence[str]] = {"model": PACKAGES, "commands": ()}
"""Beside the script there is no `moonpool`: Python would take that before the command begins."""
