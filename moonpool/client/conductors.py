"""The conductors that a client knows: which one is asked, and which one next when it is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.client.transport import Transport
from moonpool.errors import InvalidRequest

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0


class Conductors:
    """All of them, in the order given. The one that answered last is asked first.

    Raises:
        InvalidRequest: there is none.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        if not transports:
            raise InvalidRequest("address", "at least one conductor must be given")
        self._transports = transports
        self.first = 0

    def __len__(self) -> int:
        return len(self._transports)

    def __getitem__(self, number: int) -> Transport:
        return self._transports[number]

    async def aclose(self) -> None:
        """Closes all."""
        for transport in self._transports:
            await transport.aclose()


class Search:
    """One call's way to a conductor that answers.

    Attributes:
        round: how often all of them were asked.
        number: of the one that is asked now.
    """

    def __init__(self, conductors: Conductors, limit_s: float, number: int | None = None) -> None:
        """Tries them for `limit_s` seconds of pauses, from the one of this `number`, or that answered last, on."""
        self.round = 0
        self.number = conductors.first if number is None else number
        self._conductors = conductors
        self._left = len(conductors)
        self._pauses = backoffs(limit_s)

    @property
    def transport(self) -> Transport:
        """Who is asked now."""
        return self._conductors[self.number]

    def found(self) -> None:
        """It has answered."""
        self._conductors.first = self.number

    def failed(self) -> float | None:
        """It was not reached: another one is asked after this pause, seconds; None when the time is over."""
        self.number = (self.number + 1) % len(self._conductors)
        self._left -= 1
        if self._left:
            return 0.0
        self.round += 1
        self._left = len(self._conductors)
        return next(self._pauses, None)


def backoffs(limit_s: float, first_s: float = FIRST_PAUSE_S, last_s: float = LAST_PAUSE_S) -> Iterator[float]:
    """Pauses between attempts to reach a conductor, seconds, doubling, together at most `limit_s`."""
    spent, pause = 0.0, first_s
    while spent + pause <= limit_s:
        yield pause
        spent += pause
        pause = min(pause * 2, last_s)
