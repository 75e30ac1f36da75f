"""What bodies may cost: the memory that they hold, and how fast they come. See also `moonpool.base.json_parts`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moonpool.base.errors import Unavailable

BODY_COPIES = 4
"""Memory for a request in progress, as a multiple of the body's size: the text, and the derived objects."""
SCORE_BYTES = 100
"""Of an answer's log probability as JSON: one of an answer that is sent whole counts as so many bytes of a body."""
MAX_PACED = 1024
"""Tenants beyond which those whose bytes are all due are forgotten."""


class BodyMemory:
    """The memory that all requests in progress may take: bodies, and log probabilities of answers that are sent whole.

    A tenant may take as much as is free afterwards, so that one tenant gets at most half of the memory, and a later
    tenant finds some.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Memory that is taken now, in bytes."""
        return self._held.total()

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Hold memory for one body while the body of the `with` runs. Yields a function that takes more bytes.

        That function raises Unavailable if the memory is used up.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            wanted = num_bytes * BODY_COPIES
            if self._held[tenant] + wanted > self._most_bytes - (self.held_bytes + wanted):
                raise Unavailable(
                    f"requests and log probabilities in progress take all of body_memory_bytes ({self._most_bytes})"
                )
            taken += wanted
            self._held[tenant] += wanted

        try:
            yield take
        finally:
            self._held[tenant] -= taken
            if not self._held[tenant]:
                del self._held[tenant]


PACE_BYTES_PER_S, PACE_AHEAD_BYTES = 8 << 20, 8 << 20
"""How fast a tenant's bodies are read for long, and how much may come at once: more text than engines compute, and a
tenth of a processor to read and parse.
"""


class BodyPace:
    """How fast each tenant's bodies are read: to read and parse large ones takes processors from others' answers."""

    def __init__(self, bytes_per_s: float = PACE_BYTES_PER_S, ahead_bytes: int = PACE_AHEAD_BYTES) -> None:
        self._bytes_per_s = bytes_per_s
        self._ahead_s = ahead_bytes / bytes_per_s
        self._due: dict[str, float] = {}  # by tenant, when what was read so far is due at this pace

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._due)

    def wait_s(self, tenant: str, num_bytes: int, now: float) -> float:
        """Count bytes that a tenant's body has brought; returns the seconds to wait before more are read."""
        due = max(self._due.get(tenant, 0.0), now) + num_bytes / self._bytes_per_s
        if len(self._due) >= MAX_PACED:
            self._due = {name: until for name, until in self._due.items() if until > now}
        self._due[tenant] = due
        return max(0.0, due - now - self._ahead_s)

    async def keep(self, tenant: str, num_bytes: int) -> None:
        """Count bytes, and wait until more may be read."""
        if wait_s := self.wait_s(tenant, num_bytes, asyncio.get_running_loop().time()):
            await asyncio.sleep(wait_s)
