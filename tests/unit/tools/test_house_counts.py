"""`tools.house` counts circles, functions, classes of one name, private accesses and string patches."""

from tools.house import (
    Source,
    circles,
    function_lengths,
    imports,
    inspect,
    package_graph,
    private_accesses,
    string_patches,
    twin_classes,
)


def source(path: str, text: str = "") -> Source:
    return Source(path, text)


def test_lazy_and_type_only_imports_count() -> None:
    files = [
        source("moonpool/a.py", "def f() -> None:\n    import moonpool.b\n"),
        source("moonpool/b.py", "if TYPE_CHECKING:\n    from moonpool import c\n"),
        source("moonpool/c.py", "from moonpool.a import f\n"),
        source("moonpool/d.py", "from moonpool.a import f\nimport os\n"),
    ]
    graph = imports(files)
    assert graph == {
        "moonpool.a": {"moonpool.b"},
        "moonpool.b": {"moonpool.c"},
        "moonpool.c": {"moonpool.a"},
        "moonpool.d": {"moonpool.a"},
    }
    assert circles(graph) == [["moonpool.a", "moonpool.b", "moonpool.c"]]


def test_relative_imports_count() -> None:
    files = [
        source("tests/x/__init__.py", "from .a import f\n"),
        source("tests/x/a.py", "from . import b\nfrom ..y import c\n"),
        source("tests/x/b.py"),
        source("tests/y/c.py"),
    ]
    assert imports(files) == {
        "tests.x": {"tests.x.a"},
        "tests.x.a": {"tests.x.b", "tests.y.c"},
        "tests.x.b": set(),
        "tests.y.c": set(),
    }


def test_circles_of_packages_are_found_where_files_have_none() -> None:
    files = [
        source("moonpool/x/__init__.py"),
        source("moonpool/y/__init__.py"),
        source("moonpool/x/a.py", "from moonpool.y.b import B\n"),
        source("moonpool/y/b.py"),
        source("moonpool/y/c.py", "from moonpool.x import d\n"),
        source("moonpool/x/d.py"),
    ]
    graph = imports(files)
    assert circles(graph) == []
    assert circles(package_graph(graph, {"moonpool.x", "moonpool.y"})) == [["moonpool.x", "moonpool.y"]]


def test_a_function_is_as_long_as_its_code() -> None:
    text = 'def f(\n    a: int,\n) -> int:\n    """Two\n    lines."""\n    return a\n'
    assert list(function_lengths(source("moonpool/a.py", text))) == [4]


def test_private_names_of_others_are_found() -> None:
    text = (
        "from moonpool.a import _hidden\n"
        "self._own = 1\n"
        "cls._own\n"
        "other._hidden\n"
        "other.it._hidden\n"
        'monkeypatch.setattr(module, "_hidden", 1)\n'
        'getattr(other, "_hidden")\n'
        "other.__class__\n"
    )
    assert [place.split(":")[1] for place in private_accesses(source("tests/a.py", text))] == [
        "1 import _hidden",
        "4 ._hidden",
        "5 ._hidden",
        '6 "_hidden"',
        '7 "_hidden"',
    ]


def test_patches_by_dotted_path_are_found() -> None:
    text = (
        'monkeypatch.setattr("moonpool.a.f", 1)\n'
        'mock.patch("moonpool.a.f")\n'
        'patch.setattr(f"moonpool.{name}", 1)\n'
        'monkeypatch.setattr(module, "f", 1)\n'
        'monkeypatch.setenv("A.B", "1")\n'
    )
    assert [place.split(":")[1] for place in string_patches(source("tests/a.py", text))] == ["1", "2", "3"]


def test_public_classes_of_one_name_are_found() -> None:
    files = [
        source("moonpool/a.py", "class Pool: ...\nclass _Own: ...\ndef f() -> None:\n    class Inner: ...\n"),
        source("moonpool/b.py", "class _Own: ...\nclass Inner: ...\n\nclass Pool(Inner): ...\n"),
    ]
    assert list(twin_classes(files)) == ["Pool: moonpool/a.py:1, moonpool/b.py:4"]
    assert not inspect(files).is_good


def test_a_bound_that_is_broken_is_reported() -> None:
    good = source("moonpool/a.py", "def f() -> None:\n    return\n")
    assert inspect([good]).is_good
    circle = [source("moonpool/b.py", "import moonpool.c\n"), source("moonpool/c.py", "import moonpool.b\n")]
    assert not inspect([good, *circle]).is_good
    assert not inspect([good, source("tests/a.py", "other._hidden\n")]).is_good
    assert inspect([source("moonpool/a.py", good.text + "\n" * 4000)]).is_good, "no cap on the length of a file"
    long = "def f() -> None:\n" + "    g()\n" * 9
    assert not inspect([source("moonpool/a.py", long)]).is_good
