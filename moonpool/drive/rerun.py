"""Reruns a journal: the same events to the same core must give the same actions."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.drive.journal import CORE_MODULES, Entry, JournalError, actions_crc, read_journal


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event whose actions are not the recorded ones."""

    index: int
    entry: Entry
    actions: tuple[Any, ...]
    """What the core did this time."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """The result for one file of a journal."""

    path: Path
    core: Any
    """The core after the last event that was rerun."""
    events: int
    difference: Difference | None


def journal_files(path: Path) -> list[Path]:
    """The files of a journal: the file itself, or all journals of a folder, older halves first.

    Raises:
        JournalError: there is none.
    """
    found = sorted((p for p in path.glob("*.[01]")), key=_age) if path.is_dir() else [path]
    if not found or not all(p.is_file() for p in found):
        raise JournalError(f"there is no journal at {path}")
    return found


def _age(path: Path) -> tuple[str, int]:
    return path.stem, path.stat().st_mtime_ns


Show = Callable[[int, Entry, list[Any]], None]


def rerun(path: Path, show: Show | None = None, *, check: int = 0, modules: re.Pattern[str] = CORE_MODULES) -> Rerun:
    """Reruns one file; stops at the first action that differs.

    Args:
        path: of a journal's file.
        show: is told each event with its actions, before they are compared.
        check: look at the core's invariants after every so many events; 0 = never.
        modules: whose classes the journal may name.

    Raises:
        JournalError: the file is damaged.
        AssertionError: an invariant of the core does not hold.
    """
    core, entries = read_journal(path, modules)
    count = 0
    for count, entry in enumerate(entries, 1):  # the count is the result
        actions: list[Any] = []
        core.handle(entry.now, entry.event, actions)
        if show is not None:
            show(count, entry, actions)
        if actions_crc(actions) != entry.crc:
            return Rerun(path, core, count, Difference(count, entry, tuple(actions)))
        if check and count % check == 0:
            core.check_invariants()
    return Rerun(path, core, count, None)
