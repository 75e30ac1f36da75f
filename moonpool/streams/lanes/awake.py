"""A server's event loop that does not sleep while a peer asks again and again: to be woken takes longer than to answer.

Only where processors are to be had: a process that turns without work keeps one from others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

AWAKE_S = 100e-6
"""How long the loop turns for the next question."""
LOOK_S = 0.1
"""How often it is looked whether others want the processor."""
REST_S = 2.0
"""How long the loop sleeps as usual where they do."""
MOST_WAITED = 0.05
"""Share of the time in which this thread wanted a processor that it may have waited for one."""

_RUN = Path("/proc/thread-self/schedstat")


def run_and_wait() -> tuple[int, int]:
    """Nanoseconds in which this thread ran, and in which it waited for a processor.

    Raises:
        OSError: the system does not tell.
    """
    run, wait, _ = _RUN.read_text().split()
    return int(run), int(wait)


class Awake:
    """Keeps the event loop from sleeping between questions that come within `AWAKE_S` after the answer to the last one.

    It goes on turning for so long after each further answer; all else is done as ever. Where the thread has to wait for
    its processor, because there are too few for all who want one, the loop sleeps as usual for `REST_S`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, run_and_wait: Callable[[], tuple[int, int]] = run_and_wait
    ) -> None:
        self._clock = clock
        self._run_and_wait = run_and_wait
        self._seen = 0, 0
        self._look_at = self._rest_until = self._answered_at = 0.0
        self._soon = self._turning = False

    def asked(self) -> None:
        """A question has come."""
        self._soon = self._is_soon(self._clock())

    def answered(self) -> None:
        """It was answered."""
        now = self._answered_at = self._clock()
        if self._soon and not self._turning and now >= self._rest_until:
            self._turn()

    def _turn(self) -> None:
        now = self._clock()
        if now >= self._look_at:
            self._look(now)
        self._turning = now >= self._rest_until and self._is_soon(now)
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)

    def _is_soon(self, now: float) -> bool:
        return now - self._answered_at < AWAKE_S

    def _look(self, now: float) -> None:
        """Rests if the thread had to wait too much since the last look."""
        self._look_at = now + LOOK_S
        try:
            run, wait = self._run_and_wait()
        except OSError:
            self._rest_until = float("inf")
            return
        ran, waited = run - self._seen[0], wait - self._seen[1]
        self._seen = run, wait
        if waited > MOST_WAITED * (ran + waited):
            self._rest_until = now + REST_S
