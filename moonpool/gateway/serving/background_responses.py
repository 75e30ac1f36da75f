"""Responses that are computed without a waiting client: number, progress, and early end.

A response requested as a stream has an event log, which clients read from any event on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from starlette.types import Message, Receive, Scope, Send

from moonpool.gateway.serving.asgi_reply import AsgiReply, ClientGoneError, while_connected
from moonpool.gateway.serving.errors import HttpError

Phase = Literal["queued", "in_progress"]
MAX_LOG_BYTES = 16 << 20
"""Bytes for events of one tenant's responses. The oldest ended responses' events are forgotten first.

If only responses under way are left, the largest one's first events are forgotten.
"""
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


class BackgroundResponses:
    """The responses of this gateway that are under way, by tenant and id."""

    def __init__(self, max_per_tenant: int, timeout_s: float) -> None:
        """Start with none.

        Args:
            max_per_tenant: one tenant's responses that may be under way at the same time.
            timeout_s: time limit of a response.
        """
        self._max_per_tenant = max_per_tenant
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._placed: set[tuple[str, str]] = set()
        self._logs: dict[tuple[str, str], EventLog] = {}  # the oldest first
        self._log_bytes = Counter[str]()  # by tenant
        self.timeout_s = timeout_s
        """Time limit of a response.

        A response that is not under way here after this time has ended without an answer.
        """

    def check_room(self, tenant: str) -> None:
        """Check that a tenant may start a response.

        Raises:
            HttpError: the tenant has too many under way.
        """
        running = sum(owner == tenant for owner, _ in self._tasks)
        if running >= self._max_per_tenant:
            message = (
                f"{running} background responses are under way, max_background_responses is {self._max_per_tenant}"
            )
            raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, "too_many_background_responses", message)

    def start(
        self,
        tenant: str,
        response_id: str,
        work: Coroutine[Any, Any, None],
        held: ExitStack,
        events: EventLog | None = None,
    ) -> None:
        """Run a response's work, which raises nothing and calls `placed` after an instance has taken the request.

        Args:
            tenant: the response's.
            response_id: id of the response.
            work: computes the response.
            held: what the work holds, the memory of the request's body; closed at the end.
            events: where the work puts events; None = no events.
        """
        key = (tenant, response_id)
        if events is not None:
            self._logs[key] = events
            events.grew = partial(self._grew, tenant)
            self._grew(tenant, events.num_bytes)
        self._tasks[key] = asyncio.create_task(work)
        self._tasks[key].add_done_callback(lambda _: self._ended(key))
        self._tasks[key].add_done_callback(lambda _: held.close())

    def placed(self, tenant: str, response_id: str) -> bool:
        """Note that a response is being computed. Returns whether this is new."""
        count = len(self._placed)
        self._placed.add((tenant, response_id))
        return len(self._placed) > count

    def events(self, tenant: str, response_id: str) -> EventLog | None:
        """The events of a response; None if there are none here, or no longer."""
        return self._logs.get((tenant, response_id))

    def phase(self, tenant: str, response_id: str) -> Phase | None:
        """How far a response is; None if not under way here."""
        if (tenant, response_id) not in self._tasks:
            return None
        return "in_progress" if (tenant, response_id) in self._placed else "queued"

    async def cancel(self, tenant: str, response_id: str) -> None:
        """End a response, if under way here."""
        if (task := self._tasks.get((tenant, response_id))) is not None:
            await _cancelled([task])

    async def delete(self, tenant: str, response_id: str) -> None:
        """End a response, if under way here, and forget the response's events."""
        await self.cancel(tenant, response_id)
        if (tenant, response_id) in self._logs:
            self._forget((tenant, response_id))

    async def close(self) -> None:
        """End all responses."""
        await _cancelled(list(self._tasks.values()))

    def _ended(self, key: tuple[str, str]) -> None:
        del self._tasks[key]
        self._placed.discard(key)
        if (events := self._logs.pop(key, None)) is None:
            return
        events.end()
        self._logs[key] = events  # the last to be forgotten

    def _grew(self, tenant: str, num_bytes: int) -> None:
        self._log_bytes[tenant] += num_bytes
        while self._log_bytes[tenant] > MAX_LOG_BYTES:
            of_tenant = {key: events for key, events in self._logs.items() if key[0] == tenant}
            ended = next((key for key, events in of_tenant.items() if events.ended), None)
            if ended is not None:
                self._forget(ended)
            else:
                largest = max(of_tenant.values(), key=lambda events: events.num_bytes)
                self._log_bytes[tenant] -= largest.forget(max(1, largest.num_bytes // 2))

    def _forget(self, key: tuple[str, str]) -> None:
        self._log_bytes[key[0]] -= self._logs.pop(key).num_bytes
        if not self._log_bytes[key[0]]:
            del self._log_bytes[key[0]]


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
