"""How fast `/metrics` is answered: nobody needs a key there, and each answer takes the interpreter lock from others."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from moonpool.base.telemetry.prometheus import exposition, exposition_type

SHARE = 0.2
"""Of the time in which answers are made."""
MAX_PAUSE_S = 1.0


class Scrapes:
    """Metrics for whoever asks: those who wait get the same text, and one text is made after the other, with pauses.

    Who comes alone waits for nothing.
    """

    def __init__(self, registry: CollectorRegistry, share: float = SHARE) -> None:
        self._registry = registry
        self._share = share
        self._turn = asyncio.Lock()
        self._waiting: dict[str, asyncio.Task[tuple[bytes, str]]] = {}
        """By content type, the text that is not begun."""
        self._next_at = 0.0

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics after this call, and the content type, as the header `accept` wants them."""
        kind = exposition_type(accept)
        waiting = self._waiting.get(kind)
        if waiting is None:
            waiting = self._waiting[kind] = asyncio.create_task(self._made(kind, accept))
        return await asyncio.shield(waiting)

    async def _made(self, kind: str, accept: str) -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(0.0, self._next_at - loop.time()))
            del self._waiting[kind]  # who comes from now on may want later figures
            began = loop.time()
            try:
                return await asyncio.to_thread(exposition, self._registry, accept)
            finally:
                now = loop.time()
                self._next_at = now + min(MAX_PAUSE_S, (now - began) * (1.0 / self._share - 1.0))
