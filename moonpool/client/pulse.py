"""Notices a conductor that is connected and does not answer: it hangs, was stopped, or the way to it is cut.

gRPC notices a connection that is closed at once, and one that is silent by its keepalive only, after up to 40 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

QUIET, ASKED = 0.4, 0.3
"""Shares of the silence: nothing has come for the first, then the conductor is asked `ASKS` times for the second."""
ASKS = 2


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that waits for the conductor. `lost`: it was given up because the conductor does not answer."""

    give_up: Callable[[], object]
    lost: bool = False


class Pulse:
    """One conductor's, for all calls of a client to it.

    While calls wait and nothing comes, the conductor is asked whether it is there. When it does not say so, they are
    given up. Who asks may be late himself, so one answer that does not come is not enough.
    """

    def __init__(self, ask: Callable[[float], Awaitable[None]], silence_s: float) -> None:
        """Nothing happens before a call waits.

        Args:
            ask: asks, for an answer within so many seconds; raises TimeoutError when none comes.
            silence_s: seconds after which calls are given up; 0 = never.
        """
        self._ask = ask
        self._silence_s = silence_s
        self._waiting: set[Waiting] = set()
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[Waiting]:
        """While the body runs a call waits; the conductor was heard when it is left without an error."""
        one = Waiting(give_up)
        if not self._waiting:
            self._heard()  # nobody waited: its silence begins now
        self._waiting.add(one)
        if self._silence_s and (self._watching is None or self._watching.done()):
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield one
            self._heard()
        finally:
            self._waiting.discard(one)

    async def aclose(self) -> None:
        """Ends watching; may be called again."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            left_s = self._heard_at + QUIET * self._silence_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif await self._is_there():
                self._heard()
            else:
                self._give_up()

    async def _is_there(self) -> bool:
        since = self._heard_at
        for _ in range(ASKS):
            try:
                await self._ask(ASKED * self._silence_s)
            except TimeoutError:
                if self._heard_at == since:
                    continue
            return True
        return False

    def _give_up(self) -> None:
        for one in self._waiting:
            one.lost = True
            one.give_up()
        self._waiting.clear()
