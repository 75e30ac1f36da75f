"""Token streams: one request's events, and how a stream continues after the conductor is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from moonpool.base.errors import Overloaded, Unavailable
from moonpool.client.background import BackgroundLoop
from moonpool.client.failover import ConductorFailover, ConductorList, loop_time, pause_before_retry, remaining_s
from moonpool.client.result_collector import ResultCollector
from moonpool.client.transport import GenerateCall, NotConnected, is_cancelled
from moonpool.client.types import GenerateResult, Placement, TokenEvent
from moonpool.v1 import conductor_pb2, kv_pb2


class StreamState(Enum):
    """A token stream's state.

    A lost stream goes from RECEIVING back to CONNECTING: the next call asks for the rest of the answer.
    """

    NEW = "new"
    """Not iterated yet."""
    CONNECTING = "connecting"
    """A call was started; no message has arrived."""
    RECEIVING = "receiving"
    """Messages arrive."""
    ENDED = "ended"
    """The iteration is over: complete, failed or abandoned."""
    CANCELLED = "cancelled"
    """`cancel` was called."""


_TRANSITIONS = {
    StreamState.NEW: {StreamState.CONNECTING, StreamState.CANCELLED},
    StreamState.CONNECTING: {StreamState.RECEIVING, StreamState.ENDED, StreamState.CANCELLED},
    StreamState.RECEIVING: {StreamState.CONNECTING, StreamState.ENDED, StreamState.CANCELLED},
    StreamState.ENDED: set[StreamState](),
    StreamState.CANCELLED: set[StreamState](),
}


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """A stream's time limits, in seconds.

    Attributes:
        request_s: for the whole request.
        connect_s: for retries if conductors cannot be reached.
        resume_s: for attempts to resume a lost stream; 0: the stream is not resumed.
    """

    request_s: float
    connect_s: float
    resume_s: float


class AsyncTokenStream:
    """One request's events. The request starts with the iteration; a stream can be iterated once.

    Leaving the iteration (break, an exception, garbage collection), cancelling the task that iterates, or `aclose`
    cancels the request everywhere.
    """

    def __init__(
        self,
        conductors: ConductorList,
        request: conductor_pb2.GenerateRequest,
        timeouts: StreamTimeouts,
        on_placed: Callable[[], None],
    ) -> None:
        self._conductors = conductors
        self._request = request
        self._timeouts = timeouts
        self._on_placed = on_placed
        self._collector = ResultCollector()
        self._failover = ConductorFailover(conductors, timeouts.connect_s, 0)
        self._running_at: int | None = None
        self._state = StreamState.NEW
        self._call: GenerateCall | None = None
        self._cut_short: conductor_pb2.GenerateResponse | None = None
        """The early end that a draining conductor sent; the result if no other conductor goes on."""

    @property
    def result(self) -> GenerateResult | None:
        """The whole answer; None before the iteration has ended."""
        return self._collector.result

    @property
    def request_id(self) -> str:
        """The request's id; "" before the request is placed."""
        return self._collector.request_id

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; 0 before the request is placed."""
        return self._collector.prompt_tokens

    @property
    def placement(self) -> Placement | None:
        """Where the request runs now; None before the request is placed."""
        return self._collector.placements[-1] if self._collector.placements else None

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Start the request and iterate over the events.

        Raises:
            MoonpoolError: the request failed; see `moonpool.base.errors`.
            RuntimeError: the stream was iterated or cancelled before.
        """
        if self._state is not StreamState.NEW:
            raise RuntimeError("a stream of tokens can be iterated once")
        self._enter(StreamState.CONNECTING)
        return self._events()

    def cancel(self) -> None:
        """Cancel the request if still running. Idempotent."""
        self._enter(StreamState.CANCELLED)
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _enter(self, state: StreamState) -> None:
        """Change the state if the table of transitions has the change. The last two states are final."""
        if state in _TRANSITIONS[self._state]:
            self._state = state

    async def _events(self) -> AsyncIterator[TokenEvent]:
        deadline = loop_time() + self._timeouts.request_s
        self._failover = ConductorFailover(
            self._conductors,
            self._timeouts.connect_s,
            self._conductors.choose(self._request.tenant, self._request.session.id),
        )
        try:
            while self._state is not StreamState.CANCELLED:
                try:
                    self._call = self._start_call(remaining_s(deadline))
                    async for message in self._call:
                        if self._state is StreamState.CONNECTING:
                            self._enter(StreamState.RECEIVING)
                            self._failover.found()
                            self._cut_short = None
                        if self._is_cut_short(message):
                            self._cut_short = message
                            self._call.cancel()
                            raise NotConnected("the conductor drains, and the answer goes on at another conductor")
                        event = self._collector.take(message)
                        if message.HasField("placed") and not message.placed.corrected:
                            self._on_placed()
                        if event is not None:
                            yield event
                    self._collector.ended()
                    return
                except (Unavailable, Overloaded) as error:
                    pause_s = self._pause_after(error)
                    if self._cut_short is not None and pause_s is None:
                        self._collector.take(self._cut_short)
                        return
                    await pause_before_retry(pause_s, deadline)
                    self._enter(StreamState.CONNECTING)
        except (Exception, asyncio.CancelledError):
            if self._state is not StreamState.CANCELLED or is_cancelled():
                raise  # otherwise the error is the effect of `cancel`
        finally:
            self._enter(StreamState.ENDED)
            self._on_placed = _nothing  # what is called may know this stream
            self._run_at(None)
            if self._call is not None:
                self._call.cancel()

    def _is_cut_short(self, message: conductor_pb2.GenerateResponse) -> bool:
        """Whether a draining conductor has ended the answer early, so that another conductor may resume the answer."""
        if not message.HasField("finished"):
            return False
        reasons = message.finished.reason, *[end.reason for end in message.finished.choices]
        if kv_pb2.FINISH_REASON_CANCELLED not in reasons:
            return False
        return len(self._conductors) > 1 and self._collector.resumable and self._timeouts.resume_s > 0.0

    def _run_at(self, number: int | None) -> None:
        """Count the request at the conductor that has it now; None: at none."""
        if self._running_at is not None:
            self._conductors.ended(self._running_at)
        if number is not None:
            self._conductors.began(number)
        self._running_at = number

    def _start_call(self, timeout_s: float) -> GenerateCall:
        self._run_at(self._failover.number)
        return self._failover.transport.generate(self._collector.resume(self._request), timeout_s)

    def _pause_after(self, error: Unavailable | Overloaded) -> float | None:
        """Seconds until the next attempt; None for no further attempt."""
        receiving = self._state is StreamState.RECEIVING
        lost, resuming = isinstance(error, NotConnected), self._collector.started
        if resuming and not (self._collector.resumable and self._timeouts.resume_s):
            return None
        if receiving and not lost:
            return None  # the conductor is there: the error is the conductor's answer
        if receiving:
            self._failover = ConductorFailover(self._conductors, self._timeouts.resume_s, self._failover.number)
        pause_s = self._failover.failed()
        if lost or resuming:
            return pause_s
        # The conductor answers and refuses. Another conductor may serve, or this conductor soon if just started.
        again = len(self._conductors) > 1 or not self._failover.round
        return pause_s if isinstance(error, Unavailable) and again else None


def _nothing() -> None:
    """Called in place of what nobody waits for any more."""


class TokenStream:
    """One request's events, for blocking code. The request starts with the iteration, which is possible once.

    Leaving the iteration (break, an exception, garbage collection) or `close` cancels the request everywhere.
    """

    def __init__(self, stream: AsyncTokenStream, loop: BackgroundLoop) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def result(self) -> GenerateResult | None:
        """The whole answer; None before the iteration has ended."""
        return self._stream.result

    @property
    def request_id(self) -> str:
        """The request's id; "" before the request is placed."""
        return self._stream.request_id

    @property
    def placement(self) -> Placement | None:
        """Where the request runs now; None before the request is placed."""
        return self._stream.placement

    def __iter__(self) -> Iterator[TokenEvent]:
        """Start the request and iterate over the events.

        Raises:
            MoonpoolError: the request failed; see `moonpool.base.errors`.
            RuntimeError: the stream was iterated before, or the client is closed.
        """
        return self._events(aiter(self._stream))

    def close(self) -> None:
        """Cancel the request if still running. Idempotent, and may be called from another thread."""
        self._loop.post(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _events(self, events: AsyncIterator[TokenEvent]) -> Iterator[TokenEvent]:
        async def next_event() -> TokenEvent | None:
            return await anext(events, None)

        try:
            while (event := self._loop.run(next_event())) is not None:
                yield event
        finally:
            self.close()
