"""A file layer whose operations fail, stop, or are counted as a test wants."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import lmdb

from moonpool.base.kv.file_io import FileSpan, ReadOutcome
from moonpool.kvstore.ssd.files import FileLayer


def at_once(change: Callable[[Path], None], path: Path) -> "Future[None]":
    """Changes a file in this thread; what is no error of the file system is raised."""
    done: Future[None] = Future()
    try:
        change(path)
    except OSError as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


class FaultyFiles(FileLayer):
    """The real file layer with faults.

    Operations are named "write", "read", "sync", "truncate", "unlink", "rename", "sync_folder", "note", "probe",
    "open_index" and "transaction".

    Attributes:
        steps: names of the operations so far, with the file's name where it has one.
        boot: what `boot_id` answers.
    """

    def __init__(self, *, boot: str = "one", max_open: int = 512) -> None:
        super().__init__(max_open=max_open)
        self.steps: list[tuple[str, str]] = []
        self.boot = boot
        self._faults: dict[str, list[BaseException | None]] = {}
        self._always: dict[str, BaseException] = {}

    def fail(self, name: str, error: BaseException, times: int | None = None, *, after: int = 0) -> None:
        """Lets an operation fail so many times, or from now on, `after` so many that succeed."""
        self._faults[name] = [None] * after + [error] * (times or 0)
        if times is None:
            self._always[name] = error

    def mend(self) -> None:
        """Nothing fails any more."""
        self._faults.clear()
        self._always.clear()

    def named(self, name: str) -> list[str]:
        """Files that an operation was asked for, in order."""
        return [file for step, file in self.steps if step == name]

    def step(self, name: str, path: Path | None = None) -> None:
        """An operation is about to be done."""
        file = path.name if path is not None else ""
        self.steps.append((name, file))
        planned = self._faults.get(name)
        error = planned.pop(0) if planned else self._always.get(name)
        if error is not None:
            raise error

    def later(self, change: Callable[[Path], None], path: Path) -> "Future[None]":
        return at_once(change, path)

    def read(self, path: Path, spans: Sequence[FileSpan]) -> ReadOutcome:
        self.step("read", path)
        return super().read(path, spans)

    def write(self, path: Path, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
        self.step("write", path)
        super().write(path, parts, offset)

    def sync(self, path: Path) -> None:
        self.step("sync", path)
        super().sync(path)

    def truncate(self, path: Path, size: int) -> None:
        self.step("truncate", path)
        super().truncate(path, size)

    def unlink(self, path: Path, *, readable: bool = False, durable: bool = False) -> None:
        self.step("unlink", path)
        super().unlink(path, readable=readable, durable=durable)

    def rename(self, path: Path, new: Path) -> None:
        self.step("rename", path)
        super().rename(path, new)

    def sync_folder(self, folder: Path) -> None:
        self.step("sync_folder", folder)
        super().sync_folder(folder)

    def write_note(self, path: Path, text: str) -> None:
        self.step("note", path)
        super().write_note(path, text)

    def probe(self, folder: Path, nbytes: int) -> None:
        self.step("probe", folder)
        super().probe(folder, nbytes)

    def boot_id(self) -> str:
        return self.boot

    def open_index(self, path: Path, map_bytes: int, *, sync: bool) -> lmdb.Environment:
        self.step("open_index", path)
        return super().open_index(path, map_bytes, sync=sync)

    @contextlib.contextmanager
    def transaction(self, env: lmdb.Environment) -> Iterator[lmdb.Transaction]:
        self.step("transaction")
        with super().transaction(env) as txn:
            yield txn


def counting(steps: Sequence[tuple[str, str]]) -> Callable[[], list[tuple[str, str]]]:
    """Steps since this was called."""
    begin = len(steps)
    return lambda: list(steps[begin:])
