"""Files that are read again when they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.base import world

Signature = tuple[int, int, int]
CHECK_INTERVAL_S = 0.5
"""Files are looked at so often at most, seconds: a look may take long where they lie on another machine."""


class WatchedFiles:
    """Files watched for changes, at most every `LOOK_S` seconds on `clock`."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = world.monotonic) -> None:
        self._paths = list(paths)
        self._clock = clock
        self._looked_at = clock()
        self._signatures = self._sign()

    def changed(self) -> bool:
        """Whether a file differs from the last look, or has come or gone."""
        now = self._clock()
        if now - self._looked_at < CHECK_INTERVAL_S:
            return False
        self._looked_at, before = now, self._signatures
        self._signatures = self._sign()
        return self._signatures != before

    def _sign(self) -> list[Signature | None]:
        return [_signature(path) for path in self._paths]


def _signature(path: Path) -> Signature | None:
    """What differs when a file has changed; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
