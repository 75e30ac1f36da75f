"""Which blocks a caller may put, read and remove: engines any, clients those under keys of their own tenant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.errors import PermissionDenied
from moonpool.kv.values import tenant_tag
from moonpool.rpc.roles import caller, is_client


@dataclass(frozen=True, slots=True)
class Owner:
    """Who speaks on a stream or in a call; engines, and all callers where connections are not secured, are free.

    Attributes:
        tenant: the only one that it speaks for; None for any.
    """

    tenant: str | None = None

    @classmethod
    def of_call(cls) -> Owner:
        """Who made the call that is being answered."""
        who = caller()
        return cls(who.name if who is not None and is_client() else None)

    def check(self, keys: Iterable[bytes]) -> None:
        """Raises PermissionDenied unless the keys are its own."""
        if self.tenant is None:
            return
        tag = tenant_tag(self.tenant)
        if not all(key.endswith(tag) for key in keys):
            raise PermissionDenied("a client has keys of its own tenant only")

    def speaks_for(self, asked: str) -> str:
        """The tenant whose blocks it puts; raises PermissionDenied when it asks for another one."""
        if self.tenant is None:
            return asked
        if asked not in ("", self.tenant):
            raise PermissionDenied("the request names a tenant that is not the caller's")
        return self.tenant
