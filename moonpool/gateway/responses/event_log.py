"""The events of a streamed background response, which clients read from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.types import Message, Receive, Scope, Send

from moonpool.gateway.serving.asgi_reply import AsgiReply
from moonpool.gateway.serving.client_watch import ClientGoneError, while_connected

_END = b"\n\n"
_FORGOTTEN = (
    b'event: error\ndata: {"type": "error", "code": "events_forgotten", "message": '
    b'"the next events are no longer kept; read the response without stream"}' + _END
)


class EventLog:
    """One response's server-sent events, by number.

    Attributes:
        first: number of the first event that is not forgotten.
        num_bytes: size of the events that are not forgotten.
        ended: whether no event comes any more.
        grew: called after events were added, with their bytes.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self.first = 0
        self.num_bytes = 0
        self.ended = False
        self.grew: Callable[[int], None] = lambda num_bytes: None

    def __len__(self) -> int:
        """Events so far, with the forgotten ones."""
        return self.first + len(self._events)

    def add(self, content: bytes) -> None:
        """Add one or more whole events."""
        events = [event + _END for event in content.split(_END) if event]
        added = sum(map(len, events))
        self._events += events
        self.num_bytes += added
        self._wake()
        self.grew(added)

    def forget(self, num_bytes: int) -> int:
        """Forget the first events, at least so many bytes of them; returns how many bytes."""
        count = forgotten = 0
        while forgotten < num_bytes and count < len(self._events):
            forgotten += len(self._events[count])
            count += 1
        del self._events[:count]
        self.first += count
        self.num_bytes -= forgotten
        return forgotten

    def end(self) -> None:
        """Note that no event comes any more."""
        self.ended = True
        self._wake()

    async def send(self, message: Message) -> None:
        """Take a response's part over ASGI: the part's events are added."""
        if content := message.get("body"):
            self.add(content)

    async def from_number(self, number: int) -> AsyncGenerator[bytes, None]:
        """Iterate over the events from a number on, up to the last; events that are there already are one item.

        If the next event is forgotten, an event says so and is the last one.
        """
        while True:
            changed, count = self._changed, len(self)
            if number < self.first:
                yield _FORGOTTEN
                return
            if number < count:
                yield b"".join(self._events[number - self.first :])
                number = count
            elif self.ended:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventLogResponse:
    """Sends the events of a log from a number on. Starlette calls the object like a `Response`.

    A disconnecting client does not change the response.
    """

    def __init__(self, events: EventLog, number: int, headers: Mapping[str, str]) -> None:
        self._events = events
        self._number = number
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._respond(AsgiReply(send, self._headers)))
        except ClientGoneError:
            return

    async def _respond(self, reply: AsgiReply) -> None:
        await reply.send_events(b"")
        async with aclosing(self._events.from_number(self._number)) as events:
            async for event in events:
                await reply.send_events(event)
        await reply.end()
