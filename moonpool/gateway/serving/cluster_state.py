"""A cached view of the cluster: at most one conductor query a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.client import AsyncClient, ClusterState

MAX_AGE_S = 1.0
QUERY_TIMEOUT_S = 5.0


class ClusterStateCache:
    """The conductor's last description of the cluster. Requests that wait at the same time share one query."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._client = client
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last_answer: ClusterState | MoonpoolError | None = None
        self._answered_at = 0.0

    async def state(self) -> ClusterState:
        """The cluster, at most `MAX_AGE_S` old.

        Raises:
            MoonpoolError: the conductor does not answer, or no engine instance has ever joined.
        """
        arrived = self._clock()
        async with self._lock:
            if not self._is_fresh(arrived):
                self._last_answer = await self._query()
                self._answered_at = self._clock()
            answer = self._last_answer
        if isinstance(answer, MoonpoolError):
            raise answer.with_traceback(None)
        if answer is None or not answer.model:
            raise Unavailable("no prefill and no decode instance has joined")
        return answer

    def forget(self) -> None:
        """Ask the conductor anew for the next request: something has changed."""
        self._last_answer = None

    def _is_fresh(self, arrived: float) -> bool:
        """Whether the last answer serves a request. An error serves only the requests that waited for the query."""
        if isinstance(self._last_answer, ClusterState):
            return arrived - self._answered_at <= MAX_AGE_S
        return self._last_answer is not None and arrived <= self._answered_at

    async def _query(self) -> ClusterState | MoonpoolError:
        try:
            return await self._client.cluster_state(timeout_s=QUERY_TIMEOUT_S)
        except MoonpoolError as error:
            return error
