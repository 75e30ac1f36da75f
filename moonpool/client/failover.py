"""Trying again: the next conductor after a loss, and pauses before retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from moonpool.base.errors import DeadlineExceeded, InvalidRequest
from moonpool.client.transport import ConductorTransport

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0


class ConductorFailover:
    """The order in which a call tries the conductors.

    Attributes:
        round: how many times all conductors were tried.
        number: index of the conductor to try now.
    """

    def __init__(self, conductors: ConductorList, limit_s: float, number: int | None = None) -> None:
        """Try the conductors with pauses of at most `limit_s` seconds in total.

        `number`: index of the conductor to try first; None: the conductor that answered last.
        """
        self.round = 0
        self.number = conductors.first if number is None else number
        self._conductors = conductors
        self._left = len(conductors)
        self._pauses = backoff_pauses(limit_s)

    @property
    def transport(self) -> ConductorTransport:
        """Transport of the conductor to try now."""
        return self._conductors[self.number]

    def found(self) -> None:
        """Note that the conductor has answered."""
        self._conductors.first = self.number

    def failed(self) -> float | None:
        """Note that the conductor was not reached. Returns the pause before the next attempt; None: give up."""
        self.number = (self.number + 1) % len(self._conductors)
        self._left -= 1
        if self._left:
            return 0.0
        self.round += 1
        self._left = len(self._conductors)
        return next(self._pauses, None)


class ConductorList:
    """All conductors' transports, in the order given. The conductor that answered last is tried first.

    Raises:
        InvalidRequest: the list is empty.
    """

    def __init__(self, transports: Sequence[ConductorTransport]) -> None:
        if not transports:
            raise InvalidRequest("address", "at least one conductor must be given")
        self._transports = transports
        self.first = 0

    def __len__(self) -> int:
        return len(self._transports)

    def __getitem__(self, number: int) -> ConductorTransport:
        return self._transports[number]

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()


def backoff_pauses(limit_s: float, first_s: float = FIRST_PAUSE_S, last_s: float = LAST_PAUSE_S) -> Iterator[float]:
    """Pauses between attempts to reach a conductor, in seconds: they double, and their sum is at most `limit_s`."""
    spent, pause = 0.0, first_s
    while spent + pause <= limit_s:
        yield pause
        spent += pause
        pause = min(pause * 2, last_s)


def loop_time() -> float:
    """The running event loop's time, in seconds."""
    return asyncio.get_running_loop().time()


def remaining_s(deadline: float) -> float:
    """Seconds until `deadline`, a time of the event loop.

    Raises:
        DeadlineExceeded: the deadline has passed.
    """
    left = deadline - loop_time()
    if left <= 0:
        raise DeadlineExceeded("the time for this call has passed")
    return left


async def pause_before_retry(pause_s: float | None, deadline: float) -> None:
    """Wait before the next attempt.

    Call this while the last attempt's error is handled: without a further attempt, the error is raised again.
    """
    if pause_s is None or loop_time() + pause_s >= deadline:
        raise
    await asyncio.sleep(pause_s)
