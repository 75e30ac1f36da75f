"""Authentication and budgets: which tenant a key belongs to, and its requests and tokens per minute.

Each budget is a token bucket that fills evenly and holds one minute's worth. Requests are counted on arrival, tokens
when they are generated, so running requests can overdraw a token budget; new requests wait until it has recovered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from moonpool.errors import PermissionDenied
from moonpool.rpc.auth import ApiKeys, BudgetOwner
from services.gateway.config import GatewayConfig
from services.gateway.errors import BudgetSpentError
from services.gateway.json_body import Body, BodyT, read_body

MINUTE_S = 60.0


class TokenBucket:
    """So many per minute; full at first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def take(self, amount: int, now: float) -> None:
        """Take some, though there may be less."""
        self._fill(now)
        self._level -= amount

    def wait_s(self, now: float) -> float:
        """Seconds until there is one; 0 = now."""
        self._fill(now)
        return max(0.0, (1.0 - self._level) * MINUTE_S / self.per_minute)

    def change(self, per_minute: int, now: float) -> None:
        """Fill by another rate from now on; what was used stays used."""
        self._fill(now)
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        gained = (now - self._filled_at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._filled_at = now


class BudgetCharge:
    """What one request uses, on all budgets that it is on."""

    def __init__(self, tokens: Sequence[TokenBucket] = (), clock: Callable[[], float] = lambda: 0.0) -> None:
        """`tokens` are the budgets of tokens; `clock` gives seconds."""
        self._tokens = tokens
        self._clock = clock
        self._prompt_tokens = 0

    def used(self, prompt_tokens: int, new_tokens: int) -> None:
        """Count new tokens of answers, and what is new of the prompts, which have so many tokens by now."""
        amount = new_tokens + prompt_tokens - self._prompt_tokens
        self._prompt_tokens = prompt_tokens
        for bucket in self._tokens:
            bucket.take(amount, self._clock())


class Budgets:
    """The budgets of this gateway. They begin full, and are not shared with other gateways."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def admit(self, owners: Sequence[BudgetOwner]) -> BudgetCharge:
        """Let a request in, or say when it may come again.

        Raises:
            BudgetSpentError: one of the budgets is used up.
        """
        now = self._clock()
        requests = self._of("requests", owners, now)
        tokens = self._of("tokens", owners, now)
        for what, found in (("requests", requests), ("tokens", tokens)):
            for owner, bucket in found:
                if (wait_s := bucket.wait_s(now)) > 0:
                    raise BudgetSpentError(what, owner.told, bucket.per_minute, wait_s)
        for _, bucket in requests:
            bucket.take(1, now)
        return BudgetCharge([bucket for _, bucket in tokens], self._clock)

    def _of(self, what: str, owners: Sequence[BudgetOwner], now: float) -> list[tuple[BudgetOwner, TokenBucket]]:
        limited = [(owner, getattr(owner.limits, what)) for owner in owners]
        return [(owner, self._bucket((owner.name, what), limit, now)) for owner, limit in limited if limit is not None]

    def _bucket(self, key: tuple[str, str], per_minute: int, now: float) -> TokenBucket:
        bucket = self._buckets.setdefault(key, TokenBucket(per_minute, now))
        if bucket.per_minute != per_minute:
            bucket.change(per_minute, now)
        return bucket


MAX_IGNORED_FIELDS = 16


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class AuthenticatedCaller:
    """Who asks: the tenant, and where it is counted what the request uses."""

    tenant: str = ""
    spending: BudgetCharge = field(default_factory=BudgetCharge)


class Authenticator:
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
        return "" if self._keys is None else self._keys.tenant(_api_key(request))

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

    async def read(self, request: Request, cls: type[BodyT]) -> tuple[AuthenticatedCaller, BodyT, dict[str, str]]:
        """The caller, the checked body, and the answer's warning about fields that were ignored.

        Raises:
            Unauthenticated: there is no such key.
            HttpError: the body is refused.
            BudgetSpentError: the key or its tenant has used up its budget.
            InvalidRequest: names the field that is wrong.
        """
        caller = AuthenticatedCaller() if self._keys is None else self._admit(self._keys, _api_key(request))
        body = await read_body(request, cls, self._config.max_body_bytes, self._config.read_timeout_s)
        body.check()
        return caller, body, _ignored_fields_warning(body)

    def _admit(self, keys: ApiKeys, key: str) -> AuthenticatedCaller:
        return AuthenticatedCaller(keys.tenant(key), self._budgets.admit(keys.owners(key)))


def _api_key(request: Request) -> str:
    """The API key, in OpenAI's or in Anthropic's header; "" = none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _ignored_fields_warning(body: Body) -> dict[str, str]:
    """Names of ignored fields as a header; they come from the client, so only plain ones are repeated."""
    names = list(dict.fromkeys(name if _PLAIN_NAME.fullmatch(name) else "?" for name in body.ignored()))
    if not names:
        return {}
    listed = ", ".join(names[:MAX_IGNORED_FIELDS]) + (", ..." if len(names) > MAX_IGNORED_FIELDS else "")
    return {"warning": f'299 moonpool "ignored fields: {listed}"'}
