"""The cluster's state over HTTP: a cached query of the conductor, JSON endpoints, and the dashboard page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from http import HTTPStatus
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import AsyncClient, ClusterState
from moonpool.client.explain import PHASE_NAMES, request_phases
from moonpool.errors import MoonpoolError, NotFound, Unavailable
from services.gateway.auth import Authenticator
from services.gateway.json_body import json_response

MAX_AGE_S = 1.0


QUERY_TIMEOUT_S = 5.0


class ClusterStateCache:
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
            return arrived - self._told_at <= MAX_AGE_S
        return self._told is not None and arrived <= self._told_at

    async def _ask(self) -> ClusterState | MoonpoolError:
        try:
            return await self._client.cluster_state(timeout_s=QUERY_TIMEOUT_S)
        except MoonpoolError as error:
            return error


STATE_PATH = "/moonpool/state"


REQUESTS_PATH = "/moonpool/requests"


NO_STORE = {"cache-control": "no-store"}


class ClusterEndpoints:
    """`/moonpool/state` and `/moonpool/requests`."""

    def __init__(self, door: Authenticator, cluster: ClusterStateCache, client: AsyncClient) -> None:
        self._door = door
        self._cluster = cluster
        self._client = client

    async def state(self, request: Request) -> Response:
        """The cluster, as `moonpool state --json` prints it.

        Raises:
            PermissionDenied: the key is no operator's.
        """
        self._door.operator(request)
        return json_response(asdict(await self._cluster.state()), NO_STORE)

    async def requests(self, request: Request) -> Response:
        """The last requests that were answered: an operator's are all, others' are their tenant's."""
        sees = self._door.sight(request)
        last = (await self._cluster.state()).recent.last
        return json_response({"requests": [asdict(ended) for ended in last if sees(ended.tenant)]}, NO_STORE)

    async def request(self, request: Request) -> Response:
        """One request, as `moonpool explain --json` prints it, and its phases.

        Raises:
            NotFound: there is none, or it is another tenant's.
        """
        sees, name = self._door.sight(request), request.path_params["name"]
        try:
            found = await self._client.explain(name)
        except NotFound:
            raise _unknown_request(name) from None
        if not sees(found.timeline.tenant):
            raise _unknown_request(name)
        if not self._door.oversees(request):  # queues of instances are made by others' requests
            found = replace(found, candidates=())
        drawn = {"phases": [asdict(phase) for phase in request_phases(found)], "names": PHASE_NAMES}
        return json_response({"request_id": name, **asdict(found), **drawn}, NO_STORE)


def _unknown_request(name: str) -> NotFound:
    """The same words whether there is such a request or not: another tenant's is no business of this one."""
    return NotFound(f"no request {name!r} is known")


PAGE_PATH = "/"


PAGE_FILES_PATH = "/page/{name}"


PAGE_INDEX = "index.html"


PAGE_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Nothing of the page is loaded from elsewhere, sent elsewhere, or shown within another site."""


class DashboardPage:
    """The page's files, read once."""

    def __init__(self) -> None:
        folder = resources.files("services.gateway") / "static"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.count(".") == 1}

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(PAGE_INDEX)

    async def file(self, request: Request) -> Response:
        """A script, a style or a picture of it.

        Raises:
            HTTPException: there is no such file.
        """
        name: str = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        kind = PAGE_MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], headers=PAGE_HEADERS, media_type=kind)
