"""Files that are read again when they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

Signature = tuple[int, int, int]

LOOK_S = 0.5
"""Files are looked at so often at most, seconds: a look may take long where they lie on another machine."""


class Watched:
    """Files of which a change is noticed, not more often than every `LOOK_S` seconds of `clock`."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = list(paths)
        self._clock = clock
        self._looked_at = clock()
        self._signatures = self._sign()

    def changed(self) -> bool:
        """Whether one of them is another one than at the last look, or has come or gone."""
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at, before = now, self._signatures
        self._signatures = self._sign()
        return self._signatures != before

    def _sign(self) -> list[Signature | None]:
        return [_signature(path) for path in self._paths]


def _signature(path: Path) -> Signature | None:
    """What differs when a file has changed; None when it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
