"""A disk that knows what was synced: a killed process loses nothing, and a loss of power what was not synced.

It may be full for a while, or fail, or damage bytes; or the system has no memory for what is read and written.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Literal

import lmdb

from moonpool.base.kv.file_io import FileSpan, ReadOutcome
from tests.unit.kvstore.ssd.power import PowerFiles

DiskFault = Literal["full", "broken", "no memory"]
"""Nothing can be written; or nothing can be written nor read, for want of memory only what needs some."""
ERRORS: dict[DiskFault, int] = {"full": errno.ENOSPC, "broken": errno.EIO, "no memory": errno.ENOMEM}
NEEDS_NONE = ("unlink", "truncate", "remove_folder")
"""Operations that always succeed."""
OF_INDEX = ("transaction", "open_index", "index_sync")

RECORDS = "records"
"""Folder of a kvstore's deletions. They are synced as they are written, and not through the file layer."""


class FailingFiles(PowerFiles):
    """As `PowerFiles`, of a disk that may fail.

    Attributes:
        fault: what the disk has now; None: nothing.
    """

    def __init__(self, root: Path, *, without: Container[str] = ()) -> None:
        super().__init__(root, self._step, without=without)
        self.fault: DiskFault | None = None

    def _step(self, name: str) -> None:
        if self.fault is None or name in NEEDS_NONE:
            return
        if self.fault == "no memory" and name not in ("write", *OF_INDEX):
            return
        if name in OF_INDEX:
            kind = lmdb.MemoryError if self.fault == "no memory" else lmdb.DiskError
            raise kind(os.strerror(ERRORS[self.fault]))
        raise OSError(ERRORS[self.fault], os.strerror(ERRORS[self.fault]))

    def read(self, path: Path, spans: Sequence[FileSpan]) -> ReadOutcome:
        if self.fault in ("broken", "no memory"):
            raise OSError(ERRORS[self.fault], os.strerror(ERRORS[self.fault]))
        return super().read(path, spans)


class Disk:
    """The data folder of one kvstore, in each of whose lives it has another path: the dead never close their files.

    Attributes:
        path: the data folder now.
        files: its file layer.
    """

    def __init__(self, folder: Path, seed: object, *, without: Container[str] = ()) -> None:
        """Take an empty folder for the data folders, and names of syncs that do nothing (`PowerFiles`)."""
        self._folder = folder
        self._chance = random.Random(f"disk {seed}")
        self._lives = 0
        self.path = folder / "0"
        self.path.mkdir(parents=True)
        self.files = FailingFiles(self.path, without=without)

    def damage(self) -> bool:
        """Change some bytes of a segment; returns whether there was one."""
        segments = sorted(each for each in self.path.rglob("*.seg") if each.stat().st_size)
        if not segments:
            return False
        path = self._chance.choice(segments)
        with path.open("r+b") as file:
            at = self._chance.randrange(path.stat().st_size)
            file.seek(at)
            before = file.read(self._chance.randrange(1, 64))
            file.seek(at)
            file.write(bytes(byte ^ self._chance.randrange(1, 256) for byte in before))
        return True

    def new_life(self, *, power: bool) -> None:
        """The process has died, and with `power` the machine has lost its power."""
        self._lives += 1
        before, self.path = self.path, self._folder / str(self._lives)
        self.files.move(self.path)
        if power:
            # No earlier boot's name, nor the first one's: by the name a store knows which index to distrust.
            self.files.boot = f"after life {self._lives}"
            self.files.lose_power(self._chance)
            if (before / RECORDS).exists():
                shutil.copytree(before / RECORDS, self.path / RECORDS)
