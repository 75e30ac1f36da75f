"""Pins the KV of conversations that clients continue by an id, for a bounded time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.base.telemetry.logs import get_logger
from moonpool.client import AsyncClient, Message

MAX_PINS = 4096
"""Pins that are remembered, to be ended early. Those that are forgotten end with their time."""
MAX_WAITING = 64
"""Pins that wait for the conductor at the same time; further conversations are not pinned."""
RELEASE_S = 1.0
"""Seconds after which the KV of an earlier turn is pinned no longer; the later turn's KV includes that KV."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PinnedTurn:
    """A conversation up to an answer.

    Attributes:
        tenant: owner of the conversation.
        name: id by which a later request continues the conversation.
        before: id by which this turn continued the conversation; may be `name`.
        messages: all turns, with the answer.
        tools: functions that the model was shown.
        cache_salt: salt of the KV; "" for none.
        model: name of the model or LoRA adapter, as the conductor knows the name; "" for the model.
    """

    tenant: str
    name: str
    before: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    cache_salt: str
    model: str


class ResponsePins:
    """The pins of this gateway. A failed pin is no error: evicted KV is computed again."""

    def __init__(self, client: AsyncClient, pin_s: float) -> None:
        """`pin_s`: seconds for which a turn stays pinned; 0 = no pins."""
        self._client = client
        self._pin_s = pin_s
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()  # of contexts, by tenant and id
        self._tasks: dict[asyncio.Task[None], tuple[str, str]] = {}  # tenants and ids of what is being pinned

    def keep(self, turn: PinnedTurn) -> None:
        """Pin a turn in place of the turn before."""
        if self._pin_s and len(self._tasks) < MAX_WAITING:
            self._start((turn.tenant, turn.name), self._keep(turn))

    def release(self, tenant: str, name: str) -> None:
        """End the pin of a response or conversation that is deleted; one that is being pinned ends afterwards."""
        waiting = [task for task, key in self._tasks.items() if key == (tenant, name)]
        if waiting or (tenant, name) in self._names:
            self._start((tenant, name), self._release((tenant, name), waiting))

    def _start(self, key: tuple[str, str], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = key
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Stop pinning; present pins stay for their time."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, turn: PinnedTurn) -> None:
        contexts, tenant = self._client.contexts, turn.tenant
        try:
            made = await contexts.create(
                messages=turn.messages,
                tools=turn.tools,
                tenant=tenant,
                ttl_s=self._pin_s,
                pin_only=True,
                cache_salt=turn.cache_salt,
                model=turn.model,
            )
            earlier = self._names.pop((tenant, turn.before), None)
            self._names[tenant, turn.name] = made.id
            if len(self._names) > MAX_PINS:
                self._names.popitem(last=False)
            if earlier is not None:
                await contexts.update(earlier, ttl_s=RELEASE_S, tenant=tenant)
        except MoonpoolError as error:
            log.debug("a conversation was not pinned", id=turn.name, error=str(error))

    async def _release(self, key: tuple[str, str], waiting: Sequence[asyncio.Task[None]]) -> None:
        if waiting:
            await asyncio.wait(waiting)
        if (pinned := self._names.pop(key, None)) is not None:
            with suppress(MoonpoolError):  # the pin ends with its time
                await self._client.contexts.update(pinned, ttl_s=RELEASE_S, tenant=key[0])
