"""Plain counts about the code: `python -m tools.house` (part of `make lint`).

Prints circles of imports, public classes that share a name, the median function, lines per package, and how far tests
reach into private things. Lazy imports and imports for types alone count like any other. Exits with 1 when a bound is
broken.
"""

import ast
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SHIPPED = ("moonpool",)
MAX_MEDIAN_FUNCTION = 8
_GENERATED = ("_pb2.py", "_pb2_grpc.py")

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the repository, with forward slashes."""
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")

    @property
    def is_shipped(self) -> bool:
        return self.path.split("/")[0] in SHIPPED

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@dataclass
class Report:
    """What was counted. Each finding names a place."""

    file_circles: list[list[str]] = field(default_factory=list)
    package_circles: list[list[str]] = field(default_factory=list)
    median_function: float = 0.0
    package_lines: Counter[str] = field(default_factory=Counter)
    twin_classes: list[str] = field(default_factory=list)
    private_accesses: list[str] = field(default_factory=list)
    string_patches: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every bound holds."""
        found = (self.file_circles, self.package_circles, self.twin_classes, self.private_accesses, self.string_patches)
        return not any(found) and self.median_function <= MAX_MEDIAN_FUNCTION


def sources(root: Path) -> list[Source]:
    """Every Python file of the project that a person wrote: tracked by git, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    paths = [path for path in sorted(set(listed)) if not path.endswith(_GENERATED) and (root / path).is_file()]
    return [Source(path, (root / path).read_text(encoding="utf-8")) for path in paths]


def package_of(module: str, packages: set[str]) -> str:
    """A module's folder: a package is its own folder, a file belongs to the package around."""
    return module if module in packages else module.rpartition(".")[0]


def imports(files: Sequence[Source]) -> dict[str, set[str]]:
    """Which module imports which, among `files`, wherever the import stands."""
    modules = {source.module for source in files}
    graph: dict[str, set[str]] = {}
    for source in files:
        is_package = source.path.endswith("/__init__.py")
        around = source.module if is_package else source.module.rpartition(".")[0]
        found = {name for node in ast.walk(ast.parse(source.text)) for name in _imported(node, modules, around)}
        graph[source.module] = (found & modules) - {source.module}
    return graph


def _imported(node: ast.AST, modules: set[str], package: str) -> Iterator[str]:
    """Modules that a statement in a module of `package` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
        origin = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            name = f"{origin}.{alias.name}"
            yield name if name in modules else origin


def package_graph(graph: Graph, packages: set[str]) -> dict[str, set[str]]:
    """The same between folders.

    A folder and the folders inside are apart, except for the inner folder's own imports. A program (`__main__`) stands
    above all folders: nobody imports it.
    """
    folders: dict[str, set[str]] = {}
    for module, targets in graph.items():
        if module.endswith("__main__"):
            continue
        own = package_of(module, packages)
        others = {package_of(target, packages) for target in targets} - {own}
        folders.setdefault(own, set()).update(others)
    return folders


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that reach each other (Tarjan's strongly connected components with more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def function_lengths(source: Source) -> Iterator[int]:
    """Code lines in each function: signature and body, without the docstring."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None:
                length -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield length


def twin_classes(files: Sequence[Source]) -> Iterator[str]:
    """Names that several modules give to a public class, each with the places."""
    places: dict[str, list[str]] = {}
    for source in files:
        for node in ast.parse(source.text).body:
            if isinstance(node, ast.ClassDef) and not _is_private(node.name):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{name}: {', '.join(found)}"


def private_accesses(source: Source) -> Iterator[str]:
    """Places where a test names something private in another object."""
    tree = ast.parse(source.text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            yield f"{source.path}:{node.lineno} .{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private(alias.name):
                    yield f"{source.path}:{node.lineno} import {alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("setattr", "getattr", "object"):
            for argument in node.args[1:2]:
                name = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and _is_private(name) and name not in own:
                    yield f'{source.path}:{node.lineno} "{name}"'


def string_patches(source: Source) -> Iterator[str]:
    """Places where a test replaces something by dotted path."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Call) and _called(node) in ("setattr", "patch", "delattr") and node.args:
            target = node.args[0]
            text = target.value if isinstance(target, ast.Constant) else None
            if isinstance(target, ast.JoinedStr) or (isinstance(text, str) and "." in text):
                yield f"{source.path}:{node.lineno}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _called(value) == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "os", "sys")


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def inspect(files: Sequence[Source]) -> Report:
    """Count everything."""
    shipped = [source for source in files if source.is_shipped]
    packages = {source.module for source in shipped if source.path.endswith("__init__.py")}
    graph = imports(shipped)
    tests = [source for source in files if source.is_test]
    lines: Counter[str] = Counter()
    for source in files:
        lines[source.path.rpartition("/")[0] or "."] += source.lines
    return Report(
        file_circles=circles(graph),
        package_circles=circles(package_graph(graph, packages)),
        median_function=statistics.median(length for s in shipped for length in function_lengths(s)),
        package_lines=lines,
        twin_classes=list(twin_classes(shipped)),
        private_accesses=[place for source in tests for place in private_accesses(source)],
        string_patches=[place for source in tests for place in string_patches(source)],
    )


def show(report: Report) -> None:
    """Print the counts, and the places behind those that should be 0."""
    for package, lines in sorted(report.package_lines.items()):
        print(f"{lines:7,}  {package}")
    print(f"{report.package_lines.total():7,}  lines in all\n")
    counted = (
        ("circles of packages", [" <-> ".join(circle) for circle in report.package_circles]),
        ("circles of files", [" <-> ".join(circle) for circle in report.file_circles]),
        ("public classes of one name", report.twin_classes),
        ("private accesses in tests", report.private_accesses),
        ("string patches in tests", report.string_patches),
    )
    for name, places in counted:
        print(f"{name}: {len(places)}")
        for place in places:
            print(f"    {place}")
    print(f"median function: {report.median_function:g} lines (at most {MAX_MEDIAN_FUNCTION})")


def main() -> int:
    """Count the project around this file."""
    report = inspect(sources(Path(__file__).resolve().parents[1]))
    show(report)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
