"""Which conductor gets a request, the next one after a loss, and pauses before retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from moonpool.base import world
from moonpool.base.errors import DeadlineExceeded, InvalidRequest
from moonpool.base.kv.rendezvous import draw
from moonpool.client.transport import ConductorTransport

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
AVOIDED_S = 5.0
"""Seconds for which requests go to other conductors first, after a conductor did not take a call."""


class ConductorFailover:
    """The order in which a call tries the conductors.

    Attributes:
        round: how many times all conductors were tried.
        number: index of the conductor to try now.
    """

    def __init__(self, conductors: ConductorList, limit_s: float, number: int) -> None:
        """Try the conductors, conductor `number` first, with pauses of at most `limit_s` seconds in total."""
        self.round = 0
        self.number = number
        self._conductors = conductors
        self._left = len(conductors)
        self._pauses = backoff_pauses(limit_s)

    @property
    def transport(self) -> ConductorTransport:
        """Transport of the conductor to try now."""
        return self._conductors[self.number]

    def found(self) -> None:
        """Note that the conductor has answered."""
        self._conductors.answered(self.number)

    def failed(self) -> float | None:
        """Note that the conductor did not take the call. Returns the pause before the next attempt; None: give up."""
        self._conductors.failed(self.number)
        self.number = (self.number + 1) % len(self._conductors)
        self._left -= 1
        if self._left:
            return 0.0
        self.round += 1
        self._left = len(self._conductors)
        return next(self._pauses, None)


class ConductorList:
    """All conductors' transports, in the order given, and which of them a call tries first.

    Requests are spread: a request goes to the conductor with the fewest open requests of this client, among equals to
    the one that has got the fewest. A session's requests go to one conductor, which knows the session; which one
    follows from the session's name and the conductors' names alone, so all clients agree. A conductor that did not take
    a call is passed over for `AVOIDED_S`, then gets one request as a trial. Other calls, such as of the cluster's
    state, go to the conductor that answered such a call last.

    Attributes:
        first: index of the conductor for calls that are no requests.

    Raises:
        InvalidRequest: the list is empty.
    """

    def __init__(self, transports: Sequence[ConductorTransport], names: Sequence[str] = ()) -> None:
        """`names`: by which clients with other lists know the conductors, such as addresses; "0", "1" by default."""
        if not transports:
            raise InvalidRequest("address", "at least one conductor must be given")
        self._transports = transports
        self._names = names or [str(number) for number in range(len(transports))]
        self._open = [0] * len(transports)
        self._begun = [0] * len(transports)
        self._avoided_until: dict[int, float] = {}
        self.first = 0

    def __len__(self) -> int:
        return len(self._transports)

    def __getitem__(self, number: int) -> ConductorTransport:
        return self._transports[number]

    def choose(self, tenant: str = "", session: str = "") -> int:
        """Return the conductor that a request tries first."""
        numbers = range(len(self))
        if len(self) == 1:
            return 0
        now = world.monotonic()
        willing = [number for number in numbers if self._avoided_until.get(number, now) <= now] or numbers
        if session:
            key = f"{tenant}\0{session}".encode()
            chosen = max(willing, key=lambda number: draw(key, self._names[number]))
        else:
            chosen = min(willing, key=lambda number: (self._open[number], self._begun[number]))
        if chosen in self._avoided_until:  # a trial: others pass by until it has answered
            self._avoided_until[chosen] = now + AVOIDED_S
        return chosen

    def began(self, number: int) -> None:
        """A request runs at a conductor, until `ended`."""
        self._open[number] += 1
        self._begun[number] += 1

    def ended(self, number: int) -> None:
        """A request runs there no more."""
        self._open[number] -= 1

    def answered(self, number: int) -> None:
        """A conductor has answered."""
        self._avoided_until.pop(number, None)

    def failed(self, number: int) -> None:
        """A conductor did not take a call, or was lost."""
        self._avoided_until[number] = world.monotonic() + AVOIDED_S

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
        raise DeadlineExceeded("the time for this call has passed, and no conductor has taken the call")
    return left


async def pause_before_retry(pause_s: float | None, deadline: float) -> None:
    """Wait before the next attempt.

    Call this while the last attempt's error is handled: without a further attempt, the error is raised again.
    """
    if pause_s is None or loop_time() + pause_s >= deadline:
        raise
    await asyncio.sleep(pause_s)
