"""The house keeps its own rules: layers, verbs, names, what a stranger reads."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED = ("__init__.py", "__pycache__", "py.typed")
VERBS = (
    *("setup", "dev", "run", "up", "down", "up-local", "down-local", "quick", "test", "test-all", "test-containers"),
    *("check", "lint", "format", "bench", "load", "protos", "dist", "clean"),
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_package_stands_on_a_floor() -> None:
    """A package that the layers of `lint-imports` (`make lint`) leave out could import anything."""
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    floors = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    named = {name.strip() for floor in floors for name in floor.split("|")}
    packages = {f"moonpool.{path.stem}" for path in (ROOT / "moonpool").iterdir() if path.name not in IGNORED}
    assert named == packages


def test_every_core_is_plain_python() -> None:
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    held = {
        module
        for contract in contracts
        if "asyncio" in contract.get("forbidden_modules", ())
        for module in contract["source_modules"]
    }
    assert {".".join(path.relative_to(ROOT).parts) for path in (ROOT / "moonpool").rglob("core") if path.is_dir()} - {
        "moonpool.kvstore.core"
    } <= held


WORLDLY = (
    *(f"moonpool/{name}" for name in ("client", "conductor", "gateway", "interop", "kvstore")),
    *(f"moonpool/engine/{name}" for name in ("prefill", "decode")),
    *(f"moonpool/base/{name}" for name in ("cluster", "kv", "kv_transfer", "rpc", "runtime", "transport")),
)
"""Where time, threads, random numbers and connections come from `base.world`, so that `tests/world` runs them."""
FROM_OUTSIDE = re.compile(
    r"(?<!`)\btime\.\w+|\bsecrets\.|\bThreadPoolExecutor\(|\bThread\(|\bgrpc\.aio\.(server|insecure_channel|secure_channel)\("
)
MAY_TAKE_FROM_OUTSIDE = {
    "moonpool/client/background.py": "the thread of the synchronous client",
    "moonpool/base/kv/pool.py": "threads that only map memory, at a start",
    "moonpool/base/transport/blocking.py": "KVClient waits for its sockets itself",
    "moonpool/base/transport/regions.py": "unmaps memory; nobody waits for that",
    "moonpool/base/transport/shared_memory.py": "the age of a file",
    "moonpool/kvstore/ssd/encryption.py": "makes a key of a file, once",
    "moonpool/conductor/trace_recording.py": "writes a recording; nobody waits for that",
}
SET_OF_OBJECTS = re.compile(r"\bself\.\w+: set\[(?!int|str|bytes|tuple|Path|BlockKey)")


def worldly_files() -> list[Path]:
    return [path for folder in WORLDLY for path in sorted((ROOT / folder).rglob("*.py"))]


def test_services_take_time_threads_and_connections_from_the_world() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in worldly_files()
        if FROM_OUTSIDE.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(MAY_TAKE_FROM_OUTSIDE)


def test_no_object_keeps_objects_in_a_set() -> None:
    """Their order would depend on where they lie in memory. A dict without values keeps the order of their coming."""
    for path in worldly_files():
        kept = SET_OF_OBJECTS.findall(path.read_text(encoding="utf-8"))
        assert not kept, f"{path.relative_to(ROOT)}: {kept}"


def test_makefile_has_every_verb() -> None:
    """Each verb exists and explains itself."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    listed = subprocess.run([make, "help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for verb in VERBS:
        assert re.search(rf"^ +make {verb} +\w", listed, re.MULTILINE), verb


def test_ci_runs_make_test() -> None:
    """CI does what a person does."""
    assert "\nmake test\nmake lint\n" in read(".ci/run")


@pytest.mark.parametrize(
    ("verb", "sets"),
    [("run", ["serve"]), ("chat", ["serve"]), ("up-local", ["serve"]), ("setup", ["serve"])]
    + [(verb, ["serve", "dev"]) for verb in ("dev", "quick", "test", "test-all", "test-gpu", "lint", "format")],
)
def test_a_verb_installs_what_it_needs_and_no_more(verb: str, sets: list[str], tmp_path: Path) -> None:
    """In a fresh checkout: who serves and chats needs no tools of developers, and CI's two verbs install theirs."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    for name in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "requirements.lock",
        "packages/moonpool-base/pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    planned = subprocess.run(
        [make, "--dry-run", "PYTHON=true", verb], capture_output=True, text=True, cwd=tmp_path, check=True
    ).stdout
    assert re.findall(r"tools/install\.py (\w+)", planned) == sets


def test_make_test_shows_the_tests_that_need_a_gpu() -> None:
    """It selects them, and each file that has some says why they are skipped."""
    assert '-m "not slow and not engines"\n' in read("Makefile")
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    assert len(marked) > 3
    for path in marked:
        assert path == Path(__file__) or re.search(
            r"pytest\.mark\.gpu.{0,9}pytest\.mark\.skipif\(", path.read_text(), re.S
        )


def test_readme_names_the_two_commands() -> None:
    """A stranger finds them."""
    readme = read("README.md")
    assert "make run" in readme
    assert "make test" in readme


def test_every_document_is_in_an_index() -> None:
    """Decisions are in an index of their own, with their titles."""
    index, docs = read("docs/README.md"), ROOT / "docs"
    for page in sorted(docs.rglob("*.md")):
        if page.parent.name != "adr" and page.name != "README.md":
            assert f"]({page.relative_to(docs).as_posix()})" in index, page.name
    decisions = read("docs/adr/README.md")
    for page in sorted(docs.glob("adr/[0-9]*.md")):
        number, _, title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        assert re.search(rf"^\| {number}( ★)? \| \[{re.escape(title)}\]\({page.name}\) \|", decisions, re.M), page.name


def test_architecture_names_every_folder() -> None:
    """The map has every package of the house."""
    text = read("docs/architecture.md")
    packages = [path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "moonpool").glob("*/__init__.py")]
    for folder in ("base", "engine", "interop"):
        inner = (ROOT / "moonpool" / folder).glob("*/__init__.py")
        packages += [path.parent.relative_to(ROOT).as_posix() for path in inner]
    for package in packages:
        assert package in text, package
