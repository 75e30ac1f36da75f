"""Responses that are computed without a waiting client: number, progress, and early end.

A response requested as a stream has an event log, which clients read from any event on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Literal

from starlette.types import Message, Receive, Scope, Send

from services.gateway.serving.errors import HttpError
from services.gateway.serving.generation import AsgiReply, ClientGoneError, while_connected

Phase = Literal["queued", "in_progress"]
MAX_LOG_BYTES = 16 << 20
"""Bytes for events in one tenant's ended responses; the oldest responses' events are forgotten first."""
_END = b"\n\n"


class EventLog:
    """One response's server-sent events, by number."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self.num_bytes = 0
        """Size of the events."""
        self.ended = False
        """Whether no event comes any more."""

    def __len__(self) -> int:
        return len(self._events)

    def add(self, content: bytes) -> None:
        """Add one or more whole events."""
        self._events += [event + _END for event in content.split(_END) if event]
        self.num_bytes += len(content)
        self._wake()

    def end(self) -> None:
        """Note that no event comes any more."""
        self.ended = True
        self._wake()

    async def send(self, message: Message) -> None:
        """Take a response's part over ASGI: the part's events are added."""
        if content := message.get("body"):
            self.add(content)

    async def from_number(self, number: int) -> AsyncGenerator[bytes, None]:
        """Iterate over the events from a number on, up to the last; events that are there already are one item."""
        while True:
            changed, count = self._changed, len(self._events)
            if number < count:
                yield b"".join(self._events[number:count])
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
        self, tenant: str, response_id: str, work: Coroutine[Any, Any, None], events: EventLog | None = None
    ) -> None:
        """Run a response's work, which raises nothing and calls `placed` after an instance has taken the request.

        `events`: where the work puts events; None = no events.
        """
        key = (tenant, response_id)
        if events is not None:
            self._logs[key] = events
        self._tasks[key] = asyncio.create_task(work)
        self._tasks[key].add_done_callback(lambda _: self._ended(key))

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
        self._logs.pop((tenant, response_id), None)

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
        kept = [it for it, log in self._logs.items() if it[0] == key[0] and log.ended]
        num_bytes = sum(self._logs[it].num_bytes for it in kept)
        for oldest in kept:
            if num_bytes <= MAX_LOG_BYTES:
                return
            num_bytes -= self._logs.pop(oldest).num_bytes


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
