"""Notices a peer that is connected and does not answer: it hangs, was stopped, or the way to it is cut.

gRPC notices a connection that is closed at once, and one that is silent by its keepalive only, after up to 40 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

QUIET, ASKED = 0.4, 0.3
"""Shares of the silence: nothing has come for the first, then the peer is asked `ASKS` times for the second."""
ASKS = 2


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that waits for the peer. `lost`: it was given up because the peer does not answer."""

    give_up: Callable[[], object]
    lost: bool = False


class Pulse:
    """One peer's, for all calls to it over one connection.

    While calls wait and nothing comes, the peer is asked whether it is there. When it does not say so, they are given
    up. Who asks may be late himself, so one answer that does not come is not enough.
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

    def begin(self, give_up: Callable[[], object]) -> Waiting:
        """A call waits from now on, until `end`."""
        one = Waiting(give_up)
        if not self._waiting:
            self.heard()  # nobody waited: its silence begins now
        self._waiting.add(one)
        if self._silence_s and (self._watching is None or self._watching.done()):
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return one

    def end(self, one: Waiting) -> None:
        """A call waits no more; may be called again."""
        self._waiting.discard(one)

    @contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[Waiting]:
        """While the body runs a call waits; the peer was heard when it is left without an error."""
        one = self.begin(give_up)
        try:
            yield one
            self.heard()
        finally:
            self.end(one)

    async def aclose(self) -> None:
        """Ends watching; may be called again."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def heard(self) -> None:
        """Something came."""
        self._heard_at = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            left_s = self._heard_at + QUIET * self._silence_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif await self._is_there():
                self.heard()
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
        lost, self._waiting = self._waiting, set()
        for one in lost:
            one.lost = True
            one.give_up()


async def ask(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Asks the service behind a channel whether it is there, for `Pulse`.

    Raises:
        TimeoutError: no answer came. Any other is one; and of a broken connection its calls hear themselves.
    """
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError from None
