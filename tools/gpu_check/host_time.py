"""One thread's seconds by part, while some classes' methods are watched."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any


class HostTime:
    """Counts the seconds that the thread which made this object spends in watched methods, without those inside.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By part."""
        self.calls: Counter[str] = Counter()
        """By part, of all threads."""
        self._thread, self._inside = threading.get_ident(), [0.0]
        self._restore: list[tuple[type, str, Any]] = []

    def watch(self, owner: type, method: str, part: str) -> None:
        """Count a method of a class as a part; a class is watched once."""
        plain: Callable[..., Any] = getattr(owner, method)
        if (owner, method) in [(watched, name) for watched, name, _ in self._restore]:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls[part] += 1
            if threading.get_ident() != self._thread:
                return plain(*args, **kwargs)
            began = self._clock()
            self._inside.append(0.0)
            try:
                return plain(*args, **kwargs)
            finally:
                took = self._clock() - began
                self.seconds[part] += took - self._inside.pop()
                self._inside[-1] += took

        self._restore.append((owner, method, plain))
        setattr(owner, method, timed)

    def clear(self) -> None:
        """Count from zero."""
        self.seconds.clear()
        self.calls.clear()

    def close(self) -> None:
        """Stop watching."""
        for owner, method, plain in reversed(self._restore):
            setattr(owner, method, plain)
        self._restore.clear()
