"""Where the product could run what a file or a peer says: each place is listed, with the reason why nobody else can."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pty", "code", "codeop"}
"""Modules whose data is code."""
CALLS = {
    *("eval", "exec", "compile", "__import__", "import_module", "run_module", "run_path", "exec_module"),
    *(
        "torch.load",
        "numpy.load",
        "np.load",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
    ),
}
PLACES = {
    ("moonpool/engine/channel.py", "pickle"): "a socket pair between an engine and its I/O process, which no other has",
    ("moonpool/base/config.py", "import_module"): "a service's kind, of a table",
    ("moonpool/base/families/__init__.py", "import_module"): "the files of that folder",
    ("moonpool/base/fork_server/__init__.py", "import_module"): "the owner's list, over an inherited socket pair",
    ("moonpool/base/fork_server/__init__.py", "run_module"): "the owner's program, over the same",
    ("moonpool/base/kv/native_copy.py", "import_module"): "a constant",
    ("moonpool/base/runtime/core_classes.py", "import_module"): "constants, and the modules that the command names",
    ("moonpool/base/transport/registry.py", "import_module"): "values of a table",
    ("moonpool/cli/lazy_verbs.py", "import_module"): "constants",
    ("moonpool/cli/service_verbs.py", "import_module"): "constants",
    ("moonpool/conductor/placement/policies/registry.py", "import_module"): "the operator's settings",
    ("moonpool/engine/platforms/stage_platform.py", "import_module"): "values of a table",
}


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Imports, calls and lists of all files, by file."""
    kinds = ast.Import | ast.ImportFrom | ast.Call | ast.List | ast.Tuple
    return [
        (str(path.relative_to(ROOT)), node)
        for path in sorted((ROOT / "moonpool").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
    ]


def found() -> Iterator[tuple[str, str]]:
    """File and what the file uses."""
    for name, node in nodes():
        match node:
            case ast.Import(names):
                yield from ((name, module.name) for module in names if module.name in READERS)
            case ast.ImportFrom(module=str(module)) if module in READERS:
                yield name, module
            case ast.Call(func=ast.Name(called)) if called in CALLS:
                yield name, called
            case ast.Call(func=ast.Attribute(of, called)) if {called, f"{ast.unparse(of)}.{called}"} & CALLS:
                if ast.unparse(of) != "re":  # re.compile
                    yield name, called


def test_every_place_is_listed() -> None:
    assert set(found()) == PLACES.keys()


@pytest.mark.parametrize("option", ["trust_remote_code", "allow_pickle", "shell"])
def test_no_call_allows_code(option: str) -> None:
    given = [
        (path, ast.unparse(keyword.value))
        for path, node in nodes()
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == option
    ]
    assert [(path, value) for path, value in given if value != "False"] == []


def test_every_python_is_started_without_its_working_folder() -> None:
    starts = [
        (path, ast.unparse(node))
        for path, node in nodes()
        if isinstance(node, ast.List | ast.Tuple) and "sys.executable" in map(ast.unparse, node.elts)
    ]
    ways = ("'-P'", "'-I'", "*_AS_A_MODULE")
    alone = "(sys.executable,)"  # a default: the command to which `execute` adds its options
    assert [start for start in starts if start[1] != alone and not any(way in start[1] for way in ways)] == []
    assert len(starts) >= 5
