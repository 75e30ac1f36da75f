"""Waiting without sleep, for a moment: to be woken takes a process longer than to answer a brief message."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

AWAKE_S = 100e-6
"""How long an event loop turns for the next question of who asks again at once."""


def spin_s(seconds: float) -> float:
    """The same where this process has more than one processor, else 0: who is waited for needs the only one."""
    count = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    return seconds if count > 1 else 0.0


class Awake:
    """Keeps an event loop from sleeping between the questions of a peer that asks again as soon as it is answered.

    It begins when a question came within `AWAKE_S` after the answer to the one before, and ends when one has not. So a
    peer that asks now and then costs nothing. All else that the loop has to do is done as ever, as it goes on turning.
    """

    def __init__(self, awake_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._awake_s = spin_s(AWAKE_S) if awake_s is None else awake_s
        self._clock = clock
        self._answered_at = 0.0
        self._soon = self._turning = False
        self._loop = asyncio.get_running_loop()

    def asked(self) -> None:
        """A question has come."""
        self._soon = self._is_soon()

    def answered(self) -> None:
        """It was answered."""
        self._answered_at = self._clock()
        if self._soon and not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = self._is_soon()
        if self._turning:
            self._loop.call_soon(self._turn)

    def _is_soon(self) -> bool:
        return self._clock() - self._answered_at < self._awake_s
