"""A monitor for a peer that stops answering."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

QUIET_SHARE, PROBE_SHARE = 0.4, 0.3
"""Shares of the silence: no message for the first share, then `PROBES` probes within the second."""
PROBES = 2


class ProcessorWait:
    """Seconds for which a peer has had no processor since the peer was heard: silence in this time proves no failure.

    The kernel is asked at most every `RESAMPLE_S`, not at each message; so up to `RESAMPLE_S` before the last message
    may count too.
    """

    RESAMPLE_S = 0.1

    def __init__(self, total_s: Callable[[], float]) -> None:
        """`total_s`: seconds for which the peer has had no processor since the peer's start."""
        self._total_s = total_s
        self._then_s = 0.0
        self._sampled_at = -math.inf

    def heard(self, now: float) -> None:
        """A message came at `now`, a time of the event loop."""
        if now - self._sampled_at >= self.RESAMPLE_S:
            self._sampled_at = now
            self._then_s = self._total_s()

    def since_s(self) -> float:
        """Seconds without a processor since the peer was heard."""
        return self._total_s() - self._then_s


@dataclass(slots=True, eq=False)
class MonitoredCall:
    """A call that waits for the peer. `lost`: the call was given up because the peer does not answer."""

    give_up: Callable[[], object]
    lost: bool = False


class ConnectionMonitor:
    """Monitors one peer, for all calls over one connection.

    While calls wait without messages, the monitor asks the peer for a sign of life. If none comes, the calls are given
    up. This process may be late too, so one missing answer is not enough.
    """

    def __init__(
        self,
        ask: Callable[[float], Awaitable[None]],
        silence_s: float,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Has no effect before a call waits.

        Args:
            ask: asks, for an answer within so many seconds; raises TimeoutError when none comes.
            silence_s: seconds after which calls are given up; 0 = never. Seconds in which this process did not run, or
                the peer had no processor, do not count.
            waited_s: seconds for which the peer has had no processor, since the peer's start.
        """
        self._ask = ask
        self._silence_s = silence_s
        self._no_processor = ProcessorWait(waited_s)
        self._waiting: dict[MonitoredCall, None] = {}  # in the order in which they began
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    def begin(self, give_up: Callable[[], object]) -> MonitoredCall:
        """A call waits from now on, until `end`."""
        call = MonitoredCall(give_up)
        if not self._waiting:
            self.heard()  # no call waited: the silence begins now
        self._waiting[call] = None
        if self._silence_s and (self._watching is None or self._watching.done()):
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return call

    def end(self, call: MonitoredCall) -> None:
        """A call waits no more; may be called again."""
        self._waiting.pop(call, None)

    @contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[MonitoredCall]:
        """While the body runs, a call waits; a body that ends without an error counts as news from the peer."""
        call = self.begin(give_up)
        try:
            yield call
            self.heard()
        finally:
            self.end(call)

    async def aclose(self) -> None:
        """End watching; may be called again."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def heard(self) -> None:
        """Something came."""
        self._heard_at = asyncio.get_running_loop().time()
        self._no_processor.heard(self._heard_at)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            left_s = self._left_s()
            if left_s > 0:
                due = loop.time() + left_s
                await asyncio.sleep(left_s)
                self._heard_at += max(0.0, loop.time() - due)  # this process did not run
            elif await self._is_there():
                self.heard()
            elif self._left_s() <= 0:
                self._give_up()

    def _left_s(self) -> float:
        """Seconds of silence until the peer is asked."""
        due = self._heard_at + self._no_processor.since_s() + QUIET_SHARE * self._silence_s
        return due - asyncio.get_running_loop().time()

    async def _is_there(self) -> bool:
        since = self._heard_at
        for _ in range(PROBES):
            try:
                await self._ask(PROBE_SHARE * self._silence_s)
            except TimeoutError:
                if self._heard_at == since:
                    continue
            return True
        return False

    def _give_up(self) -> None:
        lost, self._waiting = self._waiting, {}
        for call in lost:
            call.lost = True
            call.give_up()
