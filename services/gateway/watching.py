"""The data of the page as JSON: cluster and requests. Operators get all of it, others what belongs to their tenant."""

from __future__ import annotations

from dataclasses import asdict, replace

from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import AsyncClient
from moonpool.client.phases import NAMES, phases
from moonpool.errors import NotFound
from services.gateway.cluster import Cluster
from services.gateway.door import Door, json_response

STATE = "/moonpool/state"
REQUESTS = "/moonpool/requests"
NO_STORE = {"cache-control": "no-store"}


class Watching:
    """`/moonpool/state` and `/moonpool/requests`."""

    def __init__(self, door: Door, cluster: Cluster, client: AsyncClient) -> None:
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
            raise _unknown(name) from None
        if not sees(found.timeline.tenant):
            raise _unknown(name)
        if not self._door.oversees(request):  # queues of instances are made by others' requests
            found = replace(found, candidates=())
        drawn = {"phases": [asdict(phase) for phase in phases(found)], "names": NAMES}
        return json_response({"request_id": name, **asdict(found), **drawn}, NO_STORE)


def _unknown(name: str) -> NotFound:
    """The same words whether there is such a request or not: another tenant's is no business of this one."""
    return NotFound(f"no request {name!r} is known")
