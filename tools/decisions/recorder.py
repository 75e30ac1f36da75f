"""Writes what cores hear and decide: wraps their `handle` while something runs."""

import gzip
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from traceback import extract_tb
from typing import Any

from tools.decisions.canon import Canon
from tools.decisions.places import beside, cores


@dataclass(frozen=True, slots=True)
class Recording:
    """What one file holds.

    Attributes:
        sha256: hash of the text.
        pairs: number of (event, actions) pairs.
        classes: their names here, which the text does not have; the n-th is `#n`.
        wrong: parts that ended by an exception.
    """

    sha256: str
    pairs: int
    classes: list[str]
    wrong: list[str]


class Recorder:
    """Writes pairs: the core's number, the time and the event on a line, then a line for each action and for `due`.

    Args:
        path: the file, compressed by gzip.
    """

    def __init__(self, path: Path) -> None:
        self._canon, self._hash, self._pairs = Canon(), sha256(), 0
        self._file = gzip.GzipFile(path, "wb", compresslevel=3, mtime=0)
        self._cores: dict[int, tuple[int, object]] = {}  # kept, so that no other one gets the same id
        self._wrong: list[str] = []

    def pair(self, who: str, event: str, actions: Sequence[object], due: object = None) -> None:
        """Take an event, rendered before the core handled the event."""
        text = self._canon.text
        lines = [f"{who} {event}", *(f"  > {text(action)}" for action in actions), f"  = {text(due)}\n"]
        data = "\n".join(lines).encode()
        self._hash.update(data)
        self._file.write(data)
        self._pairs += 1

    def text(self, value: object) -> str:
        """As `Canon.text`."""
        return self._canon.text(value)

    def number(self, core: object) -> int:
        """A core's number among the part's cores, by first appearance."""
        return self._cores.setdefault(id(core), (len(self._cores), core))[0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A separate run with cores numbered anew. An exception ends the run, and is noted."""
        self._cores.clear()
        self.pair("part", name, ())
        try:
            yield
        except Exception as wrong:
            self.pair("wrong", "", ())
            *_, place = extract_tb(wrong.__traceback__)
            self._wrong.append(f"{name}: {type(wrong).__name__}: {wrong}"[:200] + f" ({place.name}: {place.line})")

    def close(self) -> Recording:
        """The file is whole."""
        self._file.close()
        return Recording(self._hash.hexdigest(), self._pairs, self._canon.classes, self._wrong)


@contextmanager
def recorded(path: Path) -> Iterator[Recorder]:
    """Whatever any core handles goes to the file."""
    recorder = Recorder(path)
    kinds, (files, later) = cores(), beside()
    before = [(kind, "handle", kind.handle) for kind in kinds] + [(files, later, getattr(files, later))]
    setattr(files, later, _at_once)
    for kind in kinds:
        kind.handle = _handle(kind.handle, recorder)
    try:
        yield recorder
    finally:
        for kind, name, function in before:
            setattr(kind, name, function)


def _at_once(_: object, change: Callable[[Path], None], path: Path) -> "Future[None]":
    done: Future[None] = Future()
    try:
        change(path)
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


def _handle(original: Any, recorder: Recorder) -> Any:
    def handle(core: Any, now: float, event: object, out: list[object]) -> None:
        heard, before = f"{now!r} {recorder.text(event)}", len(out)
        original(core, now, event, out)
        recorder.pair(f"core {recorder.number(core)}", heard, out[before:], core.due())

    return handle
