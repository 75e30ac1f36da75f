"""What every endpoint does first: identifies the caller, reads and checks the body, notes the fields it ignores."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from moonpool.errors import PermissionDenied
from moonpool.rpc.keys import ApiKeys
from services.gateway.budgets import Budgets, Spending
from services.gateway.config import GatewayConfig
from services.gateway.fields import Body, BodyT
from services.gateway.forms import compact
from services.gateway.reading import JSON_TYPE, read_body

MAX_IGNORED = 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the tenant, and where it is counted what the request uses."""

    tenant: str = ""
    spending: Spending = field(default_factory=Spending)


class Door:
    """Lets requests in."""

    def __init__(self, config: GatewayConfig, keys: ApiKeys | None, clock: Callable[[], float]) -> None:
        """`keys` are those that are known, None = none is asked for; `clock` gives seconds."""
        self._config = config
        self._keys = keys
        self._budgets = Budgets(clock)

    def tenant(self, request: Request) -> str:
        """Whose request it is, of one that uses nothing.

        Raises:
            Unauthenticated: there is no such key.
        """
        return "" if self._keys is None else self._keys.tenant(_key(request))

    def sight(self, request: Request) -> Callable[[str], bool]:
        """What tells whether a request may see what is a tenant's: an operator's sees all, another one its own.

        Raises:
            Unauthenticated: there is no such key.
        """
        own = self.tenant(request)
        return lambda tenant: self._is_operator(own) or tenant == own

    def oversees(self, request: Request) -> bool:
        """Whether a request is an operator's; without keys everybody is one.

        Raises:
            Unauthenticated: there is no such key.
        """
        return self._is_operator(self.tenant(request))

    def operator(self, request: Request) -> None:
        """Let an operator's request pass; without keys everybody is one.

        Raises:
            Unauthenticated: there is no such key.
            PermissionDenied: it is another tenant's.
        """
        if not self.oversees(request):
            raise PermissionDenied("this key's tenant is not among the gateway's --operator-tenants")

    def _is_operator(self, tenant: str) -> bool:
        return self._keys is None or tenant in self._config.operator_tenants

    async def read(self, request: Request, cls: type[BodyT]) -> tuple[Caller, BodyT, dict[str, str]]:
        """The caller, the checked body, and the answer's warning about fields that were ignored.

        Raises:
            Unauthenticated: there is no such key.
            HttpError: the body is refused.
            BudgetSpentError: the key or its tenant has used up its budget.
            InvalidRequest: names the field that is wrong.
        """
        caller = Caller() if self._keys is None else self._admit(self._keys, _key(request))
        body = await read_body(request, cls, self._config.max_body_bytes, self._config.read_timeout_s)
        body.check()
        return caller, body, _warning(body)

    def _admit(self, keys: ApiKeys, key: str) -> Caller:
        return Caller(keys.tenant(key), self._budgets.admit(keys.owners(key)))


def _key(request: Request) -> str:
    """The API key, in OpenAI's or in Anthropic's header; "" = none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _warning(body: Body) -> dict[str, str]:
    """Names of ignored fields as a header; they come from the client, so only plain ones are repeated."""
    names = list(dict.fromkeys(name if _PLAIN_NAME.fullmatch(name) else "?" for name in body.ignored()))
    if not names:
        return {}
    listed = ", ".join(names[:MAX_IGNORED]) + (", ..." if len(names) > MAX_IGNORED else "")
    return {"warning": f'299 moonpool "ignored fields: {listed}"'}


def json_response(content: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    """An answer with a JSON object."""
    return Response(compact(content), HTTPStatus.OK, headers, media_type=JSON_TYPE)
