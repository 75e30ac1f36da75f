"""A cached view of the cluster: at most one conductor query a second, for which requests do not wait.

A request needs the model and its limits, which rarely change, and asks the conductor itself. So a request goes on with
the state before, however old, while the conductor is late or lost, or knows no engine: one that starts or drains knows
none, while another conductor serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.client import AsyncClient, ClusterState

MAX_AGE_S = 1.0
QUERY_TIMEOUT_S = 5.0
LATE_S = 0.2
"""Seconds that a request waits for a newer state than the one that is known."""


class ClusterStateCache:
    """The conductor's last description of the cluster. Requests that wait at the same time share one query."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._client = client
        self._clock = clock
        self._last: ClusterState | None = None
        self._last_served: ClusterState | None = None
        """The last one with a model."""
        self._answered_at = 0.0
        self._query: asyncio.Task[ClusterState] | None = None

    async def state(self) -> ClusterState:
        """The cluster for a request: mostly `MAX_AGE_S` old at most, older while the conductor does not say it.

        Raises:
            MoonpoolError: the conductor has never answered, or no engine instance has ever joined.
        """
        last = self._last
        if last is None:
            return await self.state_now()
        if self._age_s <= MAX_AGE_S:
            return self._for_request(last)
        query = self._asked()
        await asyncio.wait([query], timeout=LATE_S)
        return self._for_request(self._last or last)

    def _for_request(self, state: ClusterState) -> ClusterState:
        return _with_model(state if state.model or self._last_served is None else self._last_served)

    async def state_now(self) -> ClusterState:
        """The cluster, at most `MAX_AGE_S` old, for those who ask how the cluster is.

        Raises:
            MoonpoolError: as `state`.
        """
        if self._last is not None and self._age_s <= MAX_AGE_S:
            return _with_model(self._last)
        try:
            return _with_model(await asyncio.shield(self._asked()))
        except MoonpoolError as error:
            raise error.with_traceback(None) from None

    def forget(self) -> None:
        """Ask the conductor anew for the next request: something has changed."""
        self._last = self._last_served = self._query = None

    @property
    def _age_s(self) -> float:
        return self._clock() - self._answered_at

    def _asked(self) -> asyncio.Task[ClusterState]:
        """The query under way, or a new one."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(self._ask())
            self._query.add_done_callback(_ignore_error)
        return self._query

    async def _ask(self) -> ClusterState:
        own = asyncio.current_task()
        try:
            state = await self._client.cluster_state(timeout_s=QUERY_TIMEOUT_S)
        except DeadlineExceeded as error:  # the gateway's limit for its own question: the client's time is not over
            raise Unavailable(f"{error.message}, how the cluster is") from None
        if self._query is own:  # else what was asked for has been forgotten meanwhile
            self._last, self._answered_at = state, self._clock()
            if state.model:
                self._last_served = state
        return state


def _ignore_error(query: asyncio.Task[ClusterState]) -> None:
    """Whoever waits sees the error; nobody may wait."""
    if not query.cancelled():
        query.exception()


def _with_model(state: ClusterState) -> ClusterState:
    if not state.model:
        raise Unavailable("no prefill and no decode instance has joined")
    return state
