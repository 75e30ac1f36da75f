"""The cluster as the conductor told of it last, asked again when that is more than a second ago."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool.client import AsyncClient, ClusterState
from moonpool.errors import Unavailable

FRESH_S = 1.0
QUERY_TIMEOUT_S = 5.0


class Cluster:
    """The conductor's cluster. Requests that come together ask once."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float]) -> None:
        """Ask `client`; `clock` gives seconds."""
        self._client = client
        self._clock = clock
        self._lock = asyncio.Lock()
        self._state: ClusterState | None = None
        self._asked_at = 0.0

    async def state(self) -> ClusterState:
        """The cluster.

        Raises:
            Unavailable: the conductor does not answer, or no engine has ever joined it.
        """
        async with self._lock:
            if self._state is None or self._clock() - self._asked_at > FRESH_S:
                self._state = None
                self._state = await self._client.cluster_state(timeout_s=QUERY_TIMEOUT_S)
                self._asked_at = self._clock()
            if not self._state.model:
                raise Unavailable("no prefill and no decode instance has joined")
            return self._state
