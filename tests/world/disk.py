"""A disk in memory of what was synced: a killed process loses nothing, and a loss of power what was not synced."""

from __future__ import annotations

import random
import shutil
from collections.abc import Container
from pathlib import Path

from tests.unit.kvstore.ssd.power import PowerFiles

RECORDS = "records"
"""Folder of a kvstore's deletions. They are synced as they are written, and not through the file layer."""


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
        self.files = PowerFiles(self.path, without=without)

    def new_life(self, *, power: bool) -> None:
        """The process has died, and with `power` the machine has lost its power."""
        self._lives += 1
        before, self.path = self.path, self._folder / str(self._lives)
        self.files.move(self.path)
        if power:
            self.files.boot = str(self._lives)
            self.files.lose_power(self._chance)
            if (before / RECORDS).exists():
                shutil.copytree(before / RECORDS, self.path / RECORDS)
