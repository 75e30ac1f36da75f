"""The cluster as the conductor told of it last, asked again when that is more than a second ago."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool.client import AsyncClient, ClusterState
from moonpool.errors import MoonpoolError, Unavailable

FRESH_S = 1.0
QUERY_TIMEOUT_S = 5.0


class Cluster:
    """The conductor's cluster. Requests that come together ask once, and share the answer or its failure."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float]) -> None:
        """Ask `client`; `clock` gives seconds."""
        self._client = client
        self._clock = clock
        self._lock = asyncio.Lock()
        self._told: ClusterState | MoonpoolError | None = None
        self._told_at = 0.0

    async def state(self) -> ClusterState:
        """The cluster.

        Raises:
            MoonpoolError: the conductor does not answer, or no engine has ever joined it.
        """
        arrived = self._clock()
        async with self._lock:
            if not self._is_fresh(arrived):
                self._told = await self._ask()
                self._told_at = self._clock()
            told = self._told
        if isinstance(told, MoonpoolError):
            raise told.with_traceback(None)
        if told is None or not told.model:
            raise Unavailable("no prefill and no decode instance has joined")
        return told

    def _is_fresh(self, arrived: float) -> bool:
        """Whether the last answer is good for a request; a failure is only for those that waited for it."""
        if isinstance(self._told, ClusterState):
            return arrived - self._told_at <= FRESH_S
        return self._told is not None and arrived <= self._told_at

    async def _ask(self) -> ClusterState | MoonpoolError:
        try:
            return await self._client.cluster_state(timeout_s=QUERY_TIMEOUT_S)
        except MoonpoolError as error:
            return error
