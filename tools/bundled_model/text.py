"""The texts: which files of the standard library are used, and which of them are held out.

Knows nothing of tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator

#: Folders of the standard library that hold no text of ours: other people's packages, codecs, data.
SKIPPED = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "data"})
#: Shorter texts (in characters) are left out.
SHORTEST = 200


@dataclasses.dataclass(frozen=True)
class Document:
    """One text: its name relative to the standard library (POSIX form) and its content."""

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the text belongs to CPython's test suite."""
        return self.name.startswith("test/") or "/test/" in self.name or "/tests/" in self.name


@dataclasses.dataclass(frozen=True)
class Split:
    """The texts to train on and those to measure with, with their sizes in UTF-8 bytes."""

    training: list[Document]
    held_out: list[Document]
    training_bytes: int
    held_out_bytes: int


def is_held_out(name: str, percent: float) -> bool:
    """Decide by a hash of ``name`` alone whether a document is held out, so that the split never moves."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return number < percent / 100 * 2**64


def split_documents(documents: Iterable[Document], held_out_percent: float) -> Split:
    """Part ``documents``, keeping their order on both sides."""
    training: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if is_held_out(document.name, held_out_percent) else training).append(document)
    return Split(training, held_out, _bytes_of(training), _bytes_of(held_out))


def _bytes_of(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def is_readable(text: str) -> bool:
    """Reject data tables: text that is mostly digits, escapes and punctuation, or has very long lines."""
    letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in text)
    return letters >= 0.7 * len(text) and max(map(len, text.splitlines()), default=0) <= 1000


def collect_documents() -> list[Document]:
    """Return the readable, distinct texts of this interpreter: its library sorted by name, then pydoc's topics."""
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    return choose_documents([*_library_files(stdlib), *_reference_topics()])


def choose_documents(documents: Iterable[Document]) -> list[Document]:
    """Keep what is long enough, readable, and no copy (white space at the ends aside) of a text before it."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        key = hashlib.sha256(document.text.strip().encode()).hexdigest()
        if key not in seen and len(document.text) >= SHORTEST and is_readable(document.text):
            kept.append(document)
        seen.add(key)
    return kept


def _library_files(stdlib: pathlib.Path) -> Iterator[Document]:
    """Yield the UTF-8 modules below ``stdlib`` in the order of their paths."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED & set(relative.parts) or relative.name.startswith(("bad", "_sysconfigdata")):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        yield Document(relative.as_posix(), text)


def _reference_topics() -> Iterator[Document]:
    """Yield the chapters of the language reference that ``pydoc`` carries, sorted by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(f"pydoc_data/topics/{name}", topics[name])
