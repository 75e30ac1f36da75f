"""conductor, kvstore and the SDK run from a base install, in an environment without torch."""

import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import ServiceProcess
from moonpool.client import Client

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["linked", pytest.param("built", marks=pytest.mark.slow)])
def base_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment: our package, what its base needs, and nothing else.

    What it needs is not fetched again but linked from this environment, which was installed from the same constraints.
    The package is linked too, or built and installed by pip, which needs the network for what builds it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    if request.param == "built":
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
        install = [
            *pip,
            "install",
            "--no-compile",
            "--no-deps",
            "-c",
            str(ROOT / "constraints.txt"),
            str(ROOT),
            str(ROOT / "packages" / "moonpool-base"),
        ]
        subprocess.run(install, check=True, cwd=folder)
    else:
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            (packages / package).symlink_to(ROOT / package)
    for distribution in needed(project["project"]["dependencies"]):
        for file in distribution.files or ():
            if ".." not in file.parts and distribution.name != "moonpool-base":  # no programs, and our base is there
                link = packages / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    return python


def needed(requirements: Sequence[str]) -> list[Distribution]:
    """Installed distributions that meet requirements, and what these need."""
    found: dict[tuple[str, frozenset[str]], Distribution] = {}
    todo = [(text, frozenset[str]()) for text in requirements]
    while todo:
        text, extras = todo.pop()
        requirement = Requirement(text)
        key = requirement.name, frozenset(requirement.extras)
        asked_for = not requirement.marker or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if asked_for and key not in found:
            found[key] = metadata.distribution(requirement.name)
            todo += [(text, key[1]) for text in found[key].requires or ()]
    return list({each.name: each for each in found.values()}.values())


def run(python: Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=python.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(600)
def test_conductor_and_kvstore_without_torch(
    base_python: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start, the kvstore joins, the SDK sees it; torch is not there."""
    assert run(base_python, "import importlib.util; print(importlib.util.find_spec('torch'))") == "None"
    monkeypatch.setattr(sys, "executable", str(base_python))
    monkeypatch.chdir(tmp_path)
    started: list[ServiceProcess] = []
    try:
        conductor = ServiceProcess(
            "conductor",
            "conductor",
            ["--model", str(checkpoint), "--listen", "127.0.0.1:0"],
            tmp_path / "conductor.log",
        )
        started.append(conductor)
        address = conductor.wait_ready(180)
        store_flags = ["--conductor", address, "--data-dir", str(tmp_path / "kv"), "--listen", "127.0.0.1:0"]
        kvstore = ServiceProcess("kvstore", "kvstore-0", ["--id", "kvstore-0", *store_flags], tmp_path / "kvstore.log")
        started.append(kvstore)
        kvstore.wait_ready(180)
        code = (
            "import sys, threading\n"
            "from moonpool.client import Client\n"
            f"with Client({address!r}) as client:\n"
            "    pause = threading.Event()\n"
            "    for _ in range(1200):\n"
            "        ids = [instance.id for instance in client.cluster_state().instances]\n"
            "        if ids: break\n"
            "        pause.wait(0.05)\n"
            "print(ids, 'torch' in sys.modules)\n"
        )
        assert run(base_python, code) == "['kvstore-0'] False"
        wait_at_rest(address, timeout_s=60)
    finally:
        for service in started:
            service.signal(signal.SIGTERM)
        statuses = [service.wait(60) for service in started]
    assert statuses == [0, 0]


NEEDS_TORCH = (
    ["serve"],
    ["prefill", "--model", "bundled", "--conductor", "h:1"],
    ["model", "create", "tiny-llama", "x"],
)
EACH = """
import sys
from moonpool.cli.main import main
for words in %r:
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


@pytest.mark.timeout(600)
def test_what_needs_torch_says_how_to_install_it(base_python: Path, tmp_path: Path) -> None:
    command = [str(base_python), "-c", EACH % (NEEDS_TORCH,)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    told = [line for line in done.stderr.splitlines() if not line.startswith("docs/errors.md#")]
    assert len(told) == 2 * len(NEEDS_TORCH), done.stderr
    for line, code in zip(told[::2], told[1::2], strict=True):
        assert "install Moonpool with its extra `engine` (docs/install.md)" in line
        assert code == "2"


def test_sdk_is_light() -> None:
    """The SDK imports neither torch nor the services."""
    names = ("torch", "moonpool.conductor", "moonpool.kvstore", "lmdb")
    code = f"import sys, moonpool.client\nprint([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert Client.__doc__
