"""`make clients`: programs that people use run against Moonpool's gateway; a cell that changes fails.

Each program runs in an environment of its own, which is installed below `.clients` at pinned versions. SDKs talk with a
served model, coding agents with a scripted one (`scripted.py`), once for each family of `SPEAKS`. What each program
does is a cell of the table in docs/clients.md: a listed cell must work, and a cell that works must be listed.

    python -m tests.clients                     run all programs
    python -m tests.clients openai_sdk codex_agent
    python -m tests.clients --write             write the table
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.bundled import model_dir
from moonpool.cli.models import chosen_model
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import Client
from tests.clients.scripted import SPEAKS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
LEFT_OUT = "left_out.txt"
BEGIN, END = "<!-- cells -->\n", "<!-- end of cells -->\n"
PROGRAM_LIMIT_S = 900.0
INSTALL_LIMIT_S = 1200.0
READY_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Program:
    """A program of the table.

    Attributes:
        name: name of its script in `programs`.
        package: the package whose version the table has.
        version: that version.
        environment: where it is installed.
    """

    name: str
    package: str
    version: str
    environment: Environment

    @property
    def is_agent(self) -> bool:
        """Whether it edits a file with the scripted model."""
        return self.name.endswith("_agent")


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages that are installed together: of Python, or of Node if they are named with @.

    Attributes:
        name: its folder.
        packages: packages with their versions.
        not_after: the day after which no release is taken.
        without: packages that others ask for and that are left out. Torch is then the one of the running environment.
    """

    name: str
    packages: tuple[str, ...]
    not_after: str
    without: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        """Whether the packages are of Node."""
        return "@" in self.packages[0]

    def install(self, folder: Path) -> str:
        """Install the packages below a folder, unless they are there. Returns why that is not possible, or ""."""
        place, wanted = folder / self.name, json.dumps([*self.packages, self.not_after, *self.without])
        stamp = place / "installed.json"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return ""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / LEFT_OUT).write_text("".join(f'{name}; python_version < "3"\n' for name in self.without))
        for command in self._npm(place) if self.is_node else self._uv(place):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)[:200]
            if done.returncode:
                return (done.stderr.strip() or "failed").splitlines()[-1][:200]
        if "torch" in self.without:
            (site,) = place.glob("lib/python*/site-packages")
            (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
        stamp.write_text(wanted, encoding="utf-8")
        return ""

    def _uv(self, place: Path) -> list[list[str]]:
        uv = [sys.executable, "-m", "uv"]
        python = ["--python", str(place / "bin" / "python")]
        bounds = ["--exclude-newer", self.not_after, "--override", str(place / LEFT_OUT)]
        install = [*uv, "pip", "install", "--quiet", *python, *bounds, *self.packages]
        return [[*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place)], install]

    def _npm(self, place: Path) -> list[list[str]]:
        quiet = ["--no-audit", "--no-fund", "--loglevel", "error"]
        return [["npm", "install", *quiet, "--prefix", str(place), "--before", self.not_after, *self.packages]]

    def command(self, folder: Path, program: Program, scratch: Path) -> tuple[list[str], str]:
        """How a program's script runs, and the folder of its commands."""
        place = folder / self.name
        if not self.is_node:
            return [str(place / "bin" / "python"), str(HERE / "programs" / f"{program.name}.py")], str(place / "bin")
        commands = str(place / "node_modules" / ".bin")
        if program.is_agent:
            return [sys.executable, str(HERE / "programs" / f"{program.name}.py")], commands
        for file in (HERE / "programs").glob("*.mjs"):  # modules are looked for beside a script
            shutil.copy(file, place)
        return ["node", str(place / f"{program.name}.mjs")], commands


def programs() -> list[Program]:
    """All programs, as programs.toml lists them."""
    listed = tomllib.loads((HERE / "programs.toml").read_text(encoding="utf-8"))
    found = []
    for each in listed["environment"]:
        environment = Environment(
            each["name"], tuple(each["packages"]), listed["not_after"], tuple(each.get("without", ()))
        )
        versions = dict(_name_and_version(package) for package in environment.packages)
        found += [Program(name, package, versions[package], environment) for name, package in each["programs"].items()]
    return found


def _name_and_version(package: str) -> tuple[str, str]:
    name, _, version = package.rpartition("@") if "==" not in package else package.partition("==")
    return name.partition("[")[0], version


def listed_cells(page: str) -> dict[str, tuple[str, list[str]]]:
    """Version and working cells of each program in the table."""
    table = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table if row]
    return {name: (version, cells.split(", ") if cells else []) for name, _, version, cells in rows}


def with_cells(page: str, worked: Mapping[str, Sequence[str]]) -> str:
    """The page with what worked; programs that did not run keep their rows."""
    before = listed_cells(page)
    head = "| script | program | version | what works |\n|---|---|---|---|\n"
    rows = ""
    for program in programs():
        cells = worked.get(program.name, before.get(program.name, ("", ()))[1])
        rows += f"| {program.name} | {program.package} | {program.version} | {', '.join(cells)} |\n"
    start, _, rest = page.partition(BEGIN)
    return f"{start}{BEGIN}{head}{rows}{END}{rest.partition(END)[2]}"


@contextmanager
def served_model(folder: Path) -> Iterator[tuple[str, str]]:
    """A stack that serves SmolLM2, or the bundled model. Yields the address and the model's name."""
    plan = StackPlan(model=chosen_model("smollm2"), data_dir=folder, http_port=0, kv_cache_memory_bytes=512 << 20)
    with LocalStack(plan) as stack, Client(stack.address) as client:
        yield f"http://{stack.http_address}", client.cluster_state().model


@contextmanager
def scripted_model(folder: Path, family: str) -> Iterator[tuple[str, str]]:
    """A gateway in front of the scripted model of a family, which edits a file in `folder`."""
    ready = folder.parent / f"ready-{family}"
    command = [sys.executable, "-m", "tests.clients.scripted", "--ready", str(ready), "--folder", str(folder)]
    command += ["--speaks", family]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            until = time.monotonic() + READY_LIMIT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the scripted model does not start")
                time.sleep(0.1)
            yield ready.read_text(encoding="utf-8"), "scripted"
        finally:
            process.send_signal(signal.SIGTERM)


def run(program: Program, folder: Path, server: tuple[str, str], edited: Path) -> dict[str, str]:
    """Run a program. Returns what went wrong in each cell, "" for nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        command, path = program.environment.command(folder, program, Path(scratch))
        environment = os.environ | {"CLIENTS_URL": server[0], "CLIENTS_MODEL": server[1], "CLIENTS_FOLDER": str(edited)}
        environment["CLIENTS_TOKENIZER"] = str(model_dir())
        environment["PATH"] = f"{path}:{environment['PATH']}"
        log = folder / f"{program.name}.log"
        with log.open("w", encoding="utf-8") as errors:
            try:
                done = subprocess.run(
                    command,
                    cwd=scratch,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    timeout=PROGRAM_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"(all)": f"took more than {PROGRAM_LIMIT_S:g} s"}
    cells = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"cell"')]
    found = {each["cell"]: each["error"] for each in cells}
    return found if found and not done.returncode else {**found, "(end)": f"see {log}"}


def changed_cells(name: str, wanted: Sequence[str], found: Mapping[str, str]) -> list[str]:
    """What is not as the table says: cells that are listed and do not work, and cells that work and are not listed.

    Args:
        name: the program.
        wanted: its cells in the table.
        found: what went wrong in each cell, "" for nothing.
    """
    broken = {cell: found.get(cell, "did not run") for cell in wanted if found.get(cell, "did not run")}
    new = {cell: "works, and is not listed" for cell, error in found.items() if not error and cell not in wanted}
    return [f"{name}.{cell}: {why}" for cell, why in sorted((broken | new).items())]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts to run; all if none is named")
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients", help="where programs are installed")
    parser.add_argument("--write", action="store_true", help="write the table in docs/clients.md")
    options = parser.parse_args(arguments)
    chosen = [item for item in programs() if not options.names or item.name in options.names]
    expected = listed_cells(PAGE.read_text(encoding="utf-8"))
    worked: dict[str, list[str]] = {}
    changed, skipped = [], []
    folder: Path = options.folder.absolute()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        edited = Path(scratch) / "edited"
        edited.mkdir()
        servers: dict[str, tuple[str, str]] = {}
        for program in chosen:
            if reason := program.environment.install(folder):
                skipped.append(program.name)
                print(f"SKIPPED {program.name}: cannot be installed: {reason}", flush=True)
                continue
            found: dict[str, str] = {}
            for family in SPEAKS if program.is_agent else ("",):
                if family not in servers:
                    served = scripted_model(edited, family) if family else served_model(Path(scratch) / "stack")
                    servers[family] = stack.enter_context(served)
                cells = run(program, folder, servers[family], edited)
                found |= {f"{cell}_{family}" if family else cell: error for cell, error in cells.items()}
            worked[program.name] = [cell for cell, error in found.items() if not error]
            print(f"{program.name} {program.version}: {', '.join(worked[program.name]) or 'nothing'}", flush=True)
            changed += changed_cells(program.name, expected.get(program.name, ("", []))[1], found)
    if options.write:
        PAGE.write_text(with_cells(PAGE.read_text(encoding="utf-8"), worked), encoding="utf-8")
    print(f"{sum(map(len, worked.values()))} cells work, {len(changed)} changed, {len(skipped)} programs skipped")
    print("\n".join(f"CHANGED {each}" for each in changed))
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
