"""Searches for stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopWatcher:
    """Passes text on, up to the first of several stop strings, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until it is decided. Of several stop strings the one
    that is complete first wins (of those that end together, the one that begins first), so the result does not depend
    on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in dict.fromkeys(stops) if stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown now. Nothing is shown after a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._first_match()
        if found is not None:
            begin, self.matched = found
            shown, self._held = self._held[:begin], ""
            return shown
        keep = max(self._prefix_length(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what is still held back: the text has ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        matches = [(begin + len(stop), begin, stop) for begin, stop in found if begin >= 0]
        if not matches:
            return None
        _, begin, stop = min(matches)
        return begin, stop

    def _prefix_length(self, stop: str) -> int:
        """Return the length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
