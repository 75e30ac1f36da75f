"""What documents, docstrings and comments name exists: flags, variables, modules, files, names, links and headings."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from moonpool.base import errors
from moonpool.base.config import ServiceConfig
from moonpool.base.remedies import CODES, PAGE, WORDS
from moonpool.cli import contexts, kvstore
from moonpool.cli.main import app
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.request_metrics import REASONS
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.prefill.config import PrefillConfig
from moonpool.engine.remote.config import StageConfig
from moonpool.gateway.config import GatewayConfig
from moonpool.interop.adapter.config import AdapterConfig
from moonpool.interop.indexer.config import IndexerConfig
from moonpool.kvstore.config import KVStoreConfig
from tests.integration.documents import PAGES, commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *(path for top in ("docs", "services") for path in sorted((ROOT / top).rglob("*.md")))]
CODE = ("benchmarks", "deploy", "kernels", "moonpool", "packages", "services", "tests", "tools")
CONFIGS: dict[str, type[ServiceConfig]] = {
    "conductor": ConductorConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "stage": StageConfig,
    "kvstore": KVStoreConfig,
    "gateway": GatewayConfig,
    "adapter": AdapterConfig,
    "indexer": IndexerConfig,
}
FOREIGN = {
    "--variant",
    "--include",
    "--scale",
    "--default-ulimit",
    "--kv-events-config",
    "--kv-transfer-config",
    "--model-path",
    "--disaggregation-mode",
    "--with",
    "--nodes",
    "--gres",
    "--batch",
    "--signal",
    "--now",
    "--gpus",
}
"""Flags of programs that are not ours: debootstrap, docker, uv, vLLM, SGLang, Slurm and systemctl."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
VARIABLE = re.compile(r"\bMOONPOOL_[A-Z0-9_]*[A-Z0-9]\b")


def lines(document: Path) -> Iterator[tuple[str, str]]:
    """Where a line stands, and the line; one that ends with a backslash is joined with the next."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for number, line in enumerate(text.splitlines(), 1):
        yield f"{document.relative_to(ROOT)}:{number}", line


ALL_LINES = [where for document in DOCUMENTS for where in lines(document)]


def options(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every verb below a command of Typer, with its flags."""
    yield name, {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    for verb in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from options(command.get_command(None, verb), f"{name} {verb}".strip())


@pytest.fixture(scope="module")
def verbs() -> dict[str, set[str]]:
    """The flags of each verb of `moonpool`, those that are passed on to others included."""
    found = dict(options(typer.main.get_command(app)))
    found |= options(typer.main.get_command(kvstore.app), "kvstore")
    found |= options(typer.main.get_command(contexts.delete_app), "delete")
    for verb, config in CONFIGS.items():
        names = [name for group in config.flags().values() for name in group]
        found[verb] = {f"--{name.replace('_', '-')}" for name in names} | {"--config", "--set", "--help"}
    return found


@pytest.fixture(scope="module")
def sources() -> str:
    """All code that may name a flag or read a variable."""
    suffixes = {".py", ".sh", ".cpp", ".h", ".yaml"}
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return "\n".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "compose.yaml", ROOT / "Makefile"])


def test_flags(verbs: dict[str, set[str]], sources: str) -> None:
    known = FOREIGN.union(*verbs.values()) | set(re.findall(r'"(--[a-z][a-z0-9-]*)"', sources))
    assert [(where, flag) for where, line in ALL_LINES for flag in FLAG.findall(line) if flag not in known] == []


def test_flags_belong_to_the_verb_before_them(verbs: dict[str, set[str]]) -> None:
    wrong, seen = [], 0
    for where, line in ALL_LINES:
        for words in re.findall(r"\bmoonpool ([a-z][^`#|]*)", line):
            names = (" ".join(words.split()[:count]) for count in (2, 1))
            verb = next((name for name in names if name in verbs), None)
            flags = FLAG.findall(words) if verb is not None else []
            wrong += [(where, verb, flag) for flag in flags if flag not in verbs[verb or ""]]
            seen += len(flags)
    assert wrong == []
    assert seen > 50


def test_verbs(verbs: dict[str, set[str]]) -> None:
    """Each command in a shell's fence begins with a verb that there is."""
    found = [
        (document.relative_to(ROOT), word)
        for document in DOCUMENTS
        for fence in re.findall(r"^```sh\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for word in re.findall(r"(?:^|[|$(] ?|bin/)moonpool ([a-z]\w*)", fence, re.MULTILINE)
    ]
    assert [(page, word) for page, word in found if word not in verbs] == []
    assert len(found) > 50


def test_the_commands_of_the_first_pages_are_found() -> None:
    """What `tests/integration/test_document_commands.py` runs; a fence that nobody runs says why."""
    found = {name: list(commands(ROOT / name)) for name in ("README.md", *PAGES)}
    assert sum(not each.reason for page in found.values() for each in page) > 25
    (conductor, *_), (told, *_) = found["docs/machines.md"], found["docs/install.md"]
    assert (conductor.host, conductor.text.split()[:2]) == ("a", ["moonpool", "conductor"])
    assert {each.host for each in found["docs/machines.md"]} == {"a", "b"}
    assert told.reason
    for name in found:
        fences = (ROOT / name).read_text(encoding="utf-8").count("\n```sh\n")
        assert len({each.where for each in found[name]}) >= fences, name


def test_the_page_of_errors_has_the_words_of_the_code_each_at_its_anchor(sources: str) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = [
        (re.findall(r'<a id="([\w-]+)"></a>`([^`]+)`', line), line) for line in text.splitlines() if "<a id=" in line
    ]
    assert [anchors for anchors, _ in rows if not anchors] == []
    assert len({anchor for anchors, _ in rows for anchor, _ in anchors}) == text.count("<a id=")
    by_words = {word: anchors[0][0] for anchors, line in rows if anchors[0][0] not in CODES
                for word in re.findall("`([^`]+)`", line.split(" | ")[0])}  # fmt: skip
    assert by_words == WORDS
    assert {(anchor, name) for anchors, _ in rows for anchor, name in anchors if anchor in CODES} == {
        (code, code) for code in CODES
    }
    assert [word for word in WORDS if word not in sources] == []


def test_the_page_of_errors_has_every_code_over_http_and_every_class(sources: str) -> None:
    http = re.findall(r'HttpError\(\s*[\w.]+,\s*"(\w+)"|\bcode="(\w+)"', sources)
    assert {code for pair in http for code in pair if code} <= CODES
    assert set(REASONS) <= CODES | {"invalid"}
    named = set(re.findall(r"`(\w+)`", (ROOT / PAGE).read_text(encoding="utf-8")))
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")}
    assert classes - named == {"MoonpoolError"}


def test_variables_of_the_environment(sources: str) -> None:
    known = {f"MOONPOOL_{name.upper()}" for config in CONFIGS.values() for name in config.model_fields}
    known |= set(VARIABLE.findall(sources))
    assert [(where, name) for where, line in ALL_LINES for name in VARIABLE.findall(line) if name not in known] == []


def test_modules_that_are_run() -> None:
    ours = re.compile(rf"python (?:-P )?-m ((?:{'|'.join(CODE)})\.?[\w.]*\w)")
    named = [(where, name) for where, line in ALL_LINES for name in ours.findall(line)]
    missing = [(where, name) for where, name in named if not _module(name)]
    assert missing == []
    assert len(named) > 20


def _module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_files() -> None:
    named = re.compile(rf"`((?:{'|'.join(CODE)}|protos)/[\w./-]*\w\.(?:py|cpp|h|proto|sh|toml|yaml))`")
    found = [(where, name) for where, line in ALL_LINES for name in named.findall(line)]
    assert [(where, name) for where, name in found if not (ROOT / name).exists()] == []
    assert len(found) > 20


EXTEND = sorted((ROOT / "docs/extend").glob("*.md"))
EXTEND_LINES = [where for document in EXTEND for where in lines(document)]


def test_paths_in_the_pages_for_extending() -> None:
    """Folders and pages too, and what the tables say to touch."""
    named = re.compile(rf"`((?:{'|'.join(CODE)}|protos|docs)/[\w./-]+)`")
    found = [(where, name) for where, line in EXTEND_LINES for name in named.findall(line)]
    assert [(where, name) for where, name in found if not (ROOT / name).exists()] == []
    assert len(found) > 200


def test_names_in_the_pages_for_extending() -> None:
    """`NAME` in `path`, `NAME` of `path` and `path` (`NAME`): the file has the name."""
    path = rf"`((?:{'|'.join(CODE)}|protos)/[\w./-]+\.\w+)`"
    before, after = re.compile(rf"`([A-Za-z_]\w*)` (?:in|of) {path}"), re.compile(rf"{path} \(`([A-Za-z_]\w*)`")
    found = [(where, *pair) for where, line in EXTEND_LINES for pair in before.findall(line)]
    found += [(where, name, file) for where, line in EXTEND_LINES for file, name in after.findall(line)]
    wrong = [
        entry for entry in found if not re.search(rf"\b{entry[1]}\b", (ROOT / entry[2]).read_text(encoding="utf-8"))
    ]
    assert wrong == []
    assert len(found) > 30


def test_the_index_of_extending_lists_every_page_and_contract() -> None:
    index = (ROOT / "docs/extend/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `([\w/.]+)` \| \[(\w+\.md)\]\(\2\) \|$", index, re.MULTILINE)
    assert sorted(page for _, page in rows) == sorted(path.name for path in EXTEND if path.name != "README.md")
    assert rows
    for contract, page in rows:
        text = (ROOT / "docs/extend" / page).read_text(encoding="utf-8")
        assert (ROOT / contract).is_file(), page
        assert f"`{contract}`" in text, page
        assert re.search(r"^\| order \| file \| ", text, re.MULTILINE), page
        assert re.search(r"^## .*[Tt]est", text, re.MULTILINE), page
    seams = re.findall(r"^([\w/]+/) +base\.py", index, re.MULTILINE)
    assert [seam for seam in seams if not (ROOT / seam / "base.py").is_file()] == []
    assert seams


def test_the_numbers_of_extending_are_those_of_the_pages() -> None:
    """One of a row's numbers counts the rows, or the files of the product, of the page's table."""
    index = (ROOT / "docs/extend/README.md").read_text(encoding="utf-8")
    wrong = []
    for told, page in re.findall(r"^\| [^|]+ \| ([^|]+) \| `[\w/.]+` \| \[(\w+\.md)\]", index, re.MULTILINE):
        text = (ROOT / "docs/extend" / page).read_text(encoding="utf-8")
        table = re.search(r"^\| order \| file \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
        assert table is not None, page
        cells = [row.split("|")[2] for row in table[0].strip().splitlines()[2:]]
        touched = [cell for cell in cells if re.search("`(?:moonpool|kernels)/|the file of your", cell)]
        files = {name for cell in cells for name in re.findall(r"`((?:moonpool|kernels)/[\w./-]+)`", cell)}
        # Without a seam the page lists more places than its table.
        if "no seam yet" not in told and not {len(touched), len(files)} & set(map(int, re.findall(r"\b\d+\b", told))):
            wrong.append((page, told, len(touched), len(files)))
    assert wrong == []


def test_the_trees_of_extending_name_what_exists() -> None:
    """A line of a tree: a folder, then its files, each maybe with a name that the file has."""
    trees = [tree for page in EXTEND for tree in re.findall(r"^```\n(moonpool/.*?)^```", page.read_text(), re.M | re.S)]
    named = [
        (line.split()[0], *found)
        for tree in trees
        for line in tree.splitlines()
        for found in re.findall(r"([\w./]+\.py)(?: \(([A-Z_]+)\))?", line)
    ]
    wrong = [
        (folder, file)
        for folder, file, name in named
        if not (path := ROOT / folder / file).is_file() or not re.search(rf"^{name}\b", path.read_text(), re.MULTILINE)
    ]
    assert wrong == []
    assert named


FOREIGN_NAMES = {
    *("DistBackendError", "FailFast", "Foo", "GenerationMixin", "LlamaModel", "SSL_CERT_FILE", "XRequest", "XResponse"),
    *("_beam_search", "_compute_llama3_parameters", "convert_hf_to_gguf", "generate_merges", "modeling_rope_utils"),
    *("permute", "rotate_half", "tokenization_auto", "tokenization_utils_base", "tokenization_utils_tokenizers"),
}
"""Names in docstrings that other projects define, and placeholders."""
FOREIGN_FILES = {"llama.cpp", "transformers/utils/chat_template_utils.py"}


def _documented(lines: Sequence[str]) -> Iterator[int]:
    """Numbers of lines of docstrings: a docstring's first line begins with its quotes, another string's does not."""
    inside = documents = False
    for number, line in enumerate(lines, 1):
        if not inside:
            documents = line.lstrip().startswith(('"""', 'r"""'))
        if documents:
            yield number
        inside ^= line.count('"""') % 2 == 1
        documents &= inside


def _words(path: Path) -> tuple[set[str], list[tuple[int, str]]]:
    """The words of a file's code, and the lines of its docstrings and comments with their numbers."""
    text, sign, documented = path.read_text(encoding="utf-8"), "//", set[int]()
    if path.suffix == ".py":
        sign = "# "
        documented.update(_documented(text.splitlines()))
    code, prose = list[str](), list[tuple[int, str]]()
    for number, line in enumerate(text.splitlines(), 1):
        before, _, comment = ("", "", line) if number in documented else line.partition(sign)
        code.append(before)
        if "`" in comment or "." in comment:
            prose.append((number, comment))
    return set(re.findall(r"\w+", "\n".join(code))), prose


def test_docstrings_and_comments_name_what_exists() -> None:
    """Files by their path or their neighbour's name; `names` in backticks as words of some code."""
    suffixes = {".py", ".cpp", ".h", ".proto"}
    files = [path for top in (*CODE, "protos") for path in (ROOT / top).rglob("*") if path.suffix in suffixes]
    words = {path: _words(path) for path in files if "_pb2" not in path.name}
    known = FOREIGN_NAMES.union(*(code for code, _ in words.values()))
    known.update(path.stem for path in files)
    named, wrong = 0, []
    for path, (_, prose) in words.items():
        for line, text in prose:
            names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)
            wrong += [(path, line, name) for name in names if not known.issuperset(filter(None, name.split(".")))]
            mentioned = set(re.findall(r"(?<![\w/.`-])(?:\w+/)*\w+\.(?:py|cpp|h|proto)\b", text)) - FOREIGN_FILES
            wrong += [(path, line, file) for file in mentioned if not _is_file(file, path)]
            named += len(names) + len(mentioned)
    assert wrong == []
    assert named > 1000


def _is_file(name: str, beside: Path) -> bool:
    return any((folder / name).is_file() for folder in (ROOT, beside.parent, *(ROOT / "kernels").iterdir()))


def test_links_and_headings() -> None:
    for document in DOCUMENTS:
        for where, line in lines(document):
            for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", line):
                path = document.parent / target if target else document
                assert path.exists(), (where, target)
                assert not heading or heading in _headings(path), (where, target, heading)


def _headings(document: Path) -> set[str]:
    """Of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles}
