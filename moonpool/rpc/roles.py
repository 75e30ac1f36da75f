"""Who calls, and what each may call. A certificate names its owner's role, and its common name who that is.

The role is a URI among the certificate's alternative names, `moonpool:role:prefill`. What is not in the table is
refused, and a test compares the table with the contracts.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.errors import ConfigError, Mismatch, PermissionDenied, Unauthenticated
from moonpool.rpc.files import Watched
from moonpool.rpc.keys import ApiKeys
from moonpool.telemetry.logs import get_logger

ROLE_URI = "moonpool:role:"
ENGINES = frozenset({"prefill", "decode"})
INSTANCES = ENGINES | {"kvstore"}
CLIENTS = frozenset({"client", "gateway", "operator"})
OPERATORS = frozenset({"operator"})
KEEPERS = ENGINES | {"client"}
"""Who keeps KV in kvstores; a client under keys of its tenant only (`moonpool.kv.values.check_owned`)."""
READERS = OPERATORS | {"conductor"}
ROLES = ("conductor", "prefill", "decode", "kvstore", "gateway", "client", "operator")

_CONDUCTOR = {
    "Generate": CLIENTS,
    "Join": INSTANCES,
    "Explain": OPERATORS | {"gateway"},
    "ChangeRole": OPERATORS,
    "ClusterState": OPERATORS | {"gateway"},
    "CreateContext": CLIENTS,
    "UpdateContext": CLIENTS,
    "ListContexts": CLIENTS,
    "DeleteContext": CLIENTS,
    "DeleteKV": CLIENTS,
    "ConductorStats": OPERATORS | {"gateway"},
}
_PREFILL = {
    "Prefill": frozenset({"conductor"}),
    "ReadKV": ENGINES,
    "Cancel": frozenset({"conductor"}),
    "Forget": frozenset({"conductor"}),
    "PrefillStats": READERS,
}
_DECODE = {
    "Reserve": frozenset({"conductor"}),
    "ReceiveKV": ENGINES,
    "ReadKV": ENGINES,
    "Steps": frozenset({"conductor"}),
    "Forget": frozenset({"conductor"}),
    "DecodeStats": READERS,
}
_KVSTORE = {
    "Put": KEEPERS,
    "Get": KEEPERS,
    "Find": KEEPERS,
    "Remove": frozenset({"client"}),
    "MatchPrefix": ENGINES | READERS,
    "Pin": READERS,
    "Unpin": READERS,
    "Watch": ENGINES | READERS,
    "Forget": frozenset({"conductor"}),
    "SyncRecords": frozenset({"conductor"}),
    "Compact": OPERATORS,
    "Warm": READERS,
    "ReuseCurve": READERS,
    "KVStoreStats": READERS,
}
ALLOWED: Mapping[str, frozenset[str]] = {
    f"/moonpool.v1.{service}/{method}": roles
    for service, table in (
        ("ConductorService", _CONDUCTOR),
        ("PrefillService", _PREFILL),
        ("DecodeService", _DECODE),
        ("KVStoreService", _KVSTORE),
    )
    for method, roles in table.items()
}
"""Roles by method."""
FOR_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""What everybody may call whose connection was accepted."""


log = get_logger(__name__)


class Caller(NamedTuple):
    """Who calls: a role, and a name, which is the tenant's for a client."""

    role: str
    name: str


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller() -> Caller | None:
    """Who made the call that is being answered; None where connections are not secured."""
    return _caller.get()


def tenant_of(asked: str) -> str:
    """The tenant of the call that is being answered, whatever a client says of itself.

    Args:
        asked: the tenant that the request names. Gateways and operators speak for others; a client does not.

    Raises:
        PermissionDenied: a client names a tenant that is not its own.
    """
    return permitted(asked, own_tenant())


def own_tenant() -> str | None:
    """The only tenant that the caller speaks for; None for any, as for all but clients."""
    who = caller()
    return who.name if who is not None and who.role == "client" else None


def permitted(asked: str, own: str | None) -> str:
    """The tenant that a request is for, as `tenant_of`, of a caller whose `own_tenant` was noted before."""
    if own is not None and asked not in ("", own):
        raise PermissionDenied("the request names a tenant that is not the caller's")
    return asked if own is None else own


def is_client() -> bool:
    """Whether a client made the call that is being answered, which speaks for its own tenant only."""
    return own_tenant() is not None


def require_role(role: str) -> None:
    """Checks that the caller has this role, where connections are secured.

    Raises:
        Mismatch: it has another one.
    """
    who = caller()
    if who is not None and who.role != role:
        raise Mismatch("instance.kind", f"the certificate's role is {who.role}, not {role}")


class Gate:
    """Lets in who has a certificate that is not revoked, or an API key, and a role that may call the method."""

    def __init__(
        self, revoked: Path | None = None, keys: ApiKeys | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take what a peer may show.

        Args:
            revoked: file of revoked certificates: a line `sha256:HEX` each, the hash of the certificate's DER.
            keys: of clients that show no certificate; they are their tenants.
            clock: by which the file is looked at again.

        Raises:
            ConfigError: naming `tls_revoked`: it cannot be read, or a line is wrong.
        """
        self._keys = keys
        self._path = revoked
        self._watched = Watched([] if revoked is None else [revoked], clock)
        self._revoked: frozenset[str] = frozenset() if revoked is None else self._read(revoked)

    def admit(self, method: str, context: Any) -> None:
        """Checks a call, and notes its caller for `caller`.

        Args:
            method: full name, "/package.Service/Method".
            context: gRPC's, of the call.

        Raises:
            Unauthenticated: the peer shows neither a certificate nor a key that is accepted.
            PermissionDenied: its role may not call this.
        """
        found = context.auth_context()
        pem = found.get("x509_pem_cert")
        open_to_all = method.startswith(FOR_ALL)
        if pem:
            who = self._certified(found, pem[0])
        elif open_to_all:
            return
        elif self._keys is None:
            raise Unauthenticated("the connection shows no certificate")
        else:
            who = Caller("client", self._keys.tenant(_bearer(context)))
        if not open_to_all and who.role not in ALLOWED.get(method, frozenset()):
            raise PermissionDenied(f"role {who.role} may not call {method.rpartition('/')[2]}")
        _caller.set(who)

    def _certified(self, found: Mapping[str, list[bytes]], pem: bytes) -> Caller:
        self._renew()
        if self._revoked and fingerprint(pem) in self._revoked:
            raise Unauthenticated("this certificate is revoked")
        name = found.get("x509_common_name") or [b""]
        return Caller(_role(found), name[0].decode(errors="replace"))

    def _renew(self) -> None:
        """Reads the file again when it has changed. One that is wrong or gone leaves what was revoked as it was."""
        if self._path is None or not self._watched.changed():
            return
        try:
            self._revoked = self._read(self._path)
        except ConfigError as error:
            log.warning("revoked certificates not read again", reason=str(error))

    @staticmethod
    def _read(path: Path) -> frozenset[str]:
        try:
            return parse_revoked(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("tls_revoked", f"{path}: {error}") from error


def parse_revoked(text: str) -> frozenset[str]:
    """Fingerprints of a file's lines; `#` begins a comment.

    Raises:
        ValueError: names the line that is wrong.
    """
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip().lower()
        if not content:
            continue
        digest = content.removeprefix("sha256:")
        if content == digest or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"line {number} is not of the form sha256:HEX")
        found.add(digest)
    return frozenset(found)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate's DER in hexadecimal: `openssl x509 -fingerprint -sha256` without its colons."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def _bearer(context: Any) -> str:
    """The key that came with a call, "" for none."""
    values = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    scheme, _, key = values[0].partition(" ") if values and isinstance(values[0], str) else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else ""


def _role(found: Mapping[str, list[bytes]]) -> str:
    names = [name.decode(errors="replace") for name in found.get("x509_subject_alternative_name", ())]
    roles = [name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI)]
    if len(roles) != 1 or roles[0] not in ROLES:
        raise Unauthenticated("the certificate names no role of Moonpool")
    return roles[0]
