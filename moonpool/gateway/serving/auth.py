"""Authentication: an API key's tenant, and what a request may do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from starlette.requests import Request

from moonpool.base import world
from moonpool.base.errors import PermissionDenied
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.client.tracing import TRACEPARENT, is_traceparent
from moonpool.gateway.serving.body import Body, BodyT
from moonpool.gateway.serving.body_reader import BodyReader, BodyWork
from moonpool.gateway.serving.budgets import BudgetCharge, Budgets
from moonpool.gateway.serving.served_request import served_request

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "x-dynamo-session-id", "x-session-affinity")
"""Headers that name a request's session, the general one and known clients' own. The first that is there counts."""
MAX_REMEMBERED_IDS = 4096
"""Ids that clients gave their requests, by which a request can be asked for."""
CheckedBodyT = TypeVar("CheckedBodyT", bound=Body, covariant=True)
OtherBodyT = TypeVar("OtherBodyT", bound=Body)
TENANT_SCOPE = "moonpool.tenant"
"""Key in the scope of a request that the gateway sends to itself: the tenant, whose key was checked before."""


class Authenticator:
    """Checks API keys and budgets."""

    def __init__(
        self,
        keys: ApiKeys | None,
        clock: Callable[[], float],
        operator_tenants: Collection[str],
        bodies: BodyReader,
    ) -> None:
        """Check requests.

        Args:
            keys: the API keys; None if no key is needed.
            clock: returns seconds.
            operator_tenants: tenants that see the whole cluster.
            bodies: reads and parses bodies.
        """
        self._keys = keys
        self._budgets = Budgets(clock)
        self._operator_tenants = operator_tenants
        self._bodies = bodies
        self._request_ids: dict[tuple[str, str], str] = {}  # by tenant and the client's own id, the oldest first

    def tenant(self, request: Request) -> str:
        """Tenant of a request that uses no budget.

        Raises:
            Unauthenticated: the API key is missing or unknown.
        """
        if TENANT_SCOPE in request.scope:
            return str(request.scope[TENANT_SCOPE])
        return "" if self._keys is None else self._keys.tenant(_api_key(request))

    def visible_tenants(self, request: Request) -> Callable[[str], bool]:
        """A function that says whether the caller may see a tenant. An operator sees every tenant.

        Raises:
            Unauthenticated: the API key is missing or unknown.
        """
        own = self.tenant(request)
        return lambda tenant: self._is_operator(own) or tenant == own

    def is_operator(self, request: Request) -> bool:
        """Whether the caller is an operator. Without API keys, every caller is an operator.

        Raises:
            Unauthenticated: the API key is missing or unknown.
        """
        return self._is_operator(self.tenant(request))

    def require_operator(self, request: Request) -> None:
        """Refuse callers that are not operators.

        Raises:
            Unauthenticated: the API key is missing or unknown.
            PermissionDenied: the tenant of the key is not an operator.
        """
        if not self.is_operator(request):
            raise PermissionDenied("this key's tenant is not among the gateway's operator_tenants")

    def _is_operator(self, tenant: str) -> bool:
        return self._keys is None or tenant in self._operator_tenants

    async def read_body(self, request: Request, cls: type[BodyT], *, uses_budget: bool = True) -> CheckedRequest[BodyT]:
        """Check the API key and, with `uses_budget`, the budgets. Then read and check the body.

        Raises:
            Unauthenticated: the API key is missing or unknown.
            BudgetSpentError: the key or the tenant has used up a budget.
            HttpError: the body is too large, too slow or not JSON.
            Unavailable: the bodies of all requests in progress take too much memory.
            InvalidRequest: a field is wrong; names the field.
        """
        if self._keys is None or not uses_budget or TENANT_SCOPE in request.scope:
            caller = AuthenticatedCaller(self.tenant(request))
        else:
            caller = self._admit(self._keys, _api_key(request))
        parsed = await self._bodies.read(request, cls, caller.tenant)
        given = request.headers.get(TRACEPARENT, "")
        served = served_request(request.scope)
        name, own = served.id, served.own_id
        # Clients and proxies may send an id again while the first request runs.
        request_id = f"{name}-{world.random_hex(4)}" if own else name
        served.notes["tenant"] = caller.tenant
        if own:
            served.notes["full_id"] = request_id
            self._remember_id(caller.tenant, name, request_id)
        trace = given if is_traceparent(given) else ""
        client_id, session = name if own else "", _session_id(request)
        return CheckedRequest(caller, parsed.body, parsed.warning, trace, request_id, client_id, session, parsed.work)

    async def pace(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a body that is read elsewhere, and wait as long as further ones of the tenant must."""
        await self._bodies.pace.keep(tenant, num_bytes)

    def _remember_id(self, tenant: str, client_id: str, request_id: str) -> None:
        self._request_ids.pop((tenant, client_id), None)
        self._request_ids[tenant, client_id] = request_id
        if len(self._request_ids) > MAX_REMEMBERED_IDS:
            del self._request_ids[next(iter(self._request_ids))]

    def full_request_id(self, request: Request, name: str) -> str:
        """The id of the caller's last request with the caller's own `x-request-id` `name`; `name` if there is none.

        Raises:
            Unauthenticated: the API key is missing or unknown.
        """
        return self._request_ids.get((self.tenant(request), name), name)

    def _admit(self, keys: ApiKeys, key: str) -> AuthenticatedCaller:
        return AuthenticatedCaller(keys.tenant(key), self._budgets.admit(keys.owners(key)))


@dataclass(frozen=True, slots=True)
class AuthenticatedCaller:
    """The caller of a request: the tenant, and the budgets that the request's tokens are charged to."""

    tenant: str = ""
    budget: BudgetCharge = field(default_factory=BudgetCharge)


@dataclass(frozen=True, slots=True)
class CheckedRequest(Generic[CheckedBodyT]):
    """A request with a checked API key and body.

    Attributes:
        caller: tenant and budgets.
        body: the body, checked.
        warning_headers: response headers that name ignored fields of the body.
        traceparent: W3C trace context of the client; "" for none.
        request_id: unique id of the request.
        client_id: the client's own id of the request, with which `request_id` begins; "" for none.
        session_id: the session that the request's head names; "" for none.
        work: does what costs as much as the body is large, away from the event loop if the body is large.
    """

    caller: AuthenticatedCaller
    body: CheckedBodyT
    warning_headers: dict[str, str]
    traceparent: str
    request_id: str
    client_id: str
    session_id: str
    work: BodyWork

    def of(self, body: OtherBodyT) -> CheckedRequest[OtherBodyT]:
        """The request with a body within this one."""
        return CheckedRequest(self.caller, body, {}, "", "", "", "", self.work)


def _api_key(request: Request) -> str:
    """The API key, from OpenAI's header or from Anthropic's; "" without a key."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _session_id(request: Request) -> str:
    """The session that the head names; "" for none."""
    return next((found for name in SESSION_HEADERS if (found := request.headers.get(name))), "")
