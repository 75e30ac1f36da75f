"""Responses that are computed without a waiting client: number, progress, and early end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from moonpool.gateway.responses.event_log import EventLog
from moonpool.gateway.serving.errors import HttpError

Phase = Literal["queued", "in_progress"]
MAX_LOG_BYTES = 16 << 20
"""Bytes for events of one tenant's responses. The oldest ended responses' events are forgotten first.

If only responses under way are left, the largest one's first events are forgotten.
"""


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
