"""Files that are read again when they change."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[int, int, int]


def signature(path: Path) -> Signature | None:
    """What differs when a file has changed; None when it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
