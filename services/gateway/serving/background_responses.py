"""Responses that are computed while no client waits: how many there are, how far they are, and how they end early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, Literal

from services.gateway.serving.errors import HttpError

Phase = Literal["queued", "in_progress"]


class BackgroundResponses:
    """The responses of this gateway that are under way, by tenant and id."""

    def __init__(self, max_per_tenant: int, timeout_s: float) -> None:
        """Start with none.

        Args:
            max_per_tenant: responses of one tenant that may be under way at the same time.
            timeout_s: time limit of a response.
        """
        self._max_per_tenant = max_per_tenant
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._placed: set[tuple[str, str]] = set()
        self.timeout_s = timeout_s
        """Time limit of a response. After it, a response that is not under way here has ended without an answer."""

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

    def start(self, tenant: str, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run the work of a response, which raises nothing and tells `placed` when an instance has taken it."""
        key = (tenant, response_id)
        self._tasks[key] = asyncio.create_task(work)
        self._tasks[key].add_done_callback(lambda _: self._forget(key))

    def placed(self, tenant: str, response_id: str) -> None:
        """Note that a response is being computed."""
        self._placed.add((tenant, response_id))

    def phase(self, tenant: str, response_id: str) -> Phase | None:
        """How far a response is; None if it is not under way here."""
        if (tenant, response_id) not in self._tasks:
            return None
        return "in_progress" if (tenant, response_id) in self._placed else "queued"

    async def cancel(self, tenant: str, response_id: str) -> None:
        """End a response, if it is under way here."""
        if (task := self._tasks.get((tenant, response_id))) is not None:
            await _ended([task])

    async def close(self) -> None:
        """End all responses."""
        await _ended(list(self._tasks.values()))

    def _forget(self, key: tuple[str, str]) -> None:
        del self._tasks[key]
        self._placed.discard(key)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
