"""Callers, and what each caller may call, by the role that a certificate names.

A certificate names the owner's role as a URI among the alternative names, `moonpool:role:prefill`; the common name
names the owner. A method that is not in the table is refused; a test compares the table with the contracts.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.base import world
from moonpool.base.errors import ConfigError, Mismatch, PermissionDenied, Unauthenticated
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.base.rpc.watched_files import WatchedFiles
from moonpool.base.telemetry.logs import get_logger

log = get_logger(__name__)
ROLE_URI = "moonpool:role:"
ENGINE = "engine"
"""An instance that joins as prefill and as decode instance, in turn (`either_role`)."""
ENGINES = frozenset({"prefill", "decode", ENGINE})
ADAPTER = "adapter"
"""An adapter joins as prefill and as decode instance, for an engine that moves its own KV."""
INSTANCES = ENGINES | {"kvstore", ADAPTER}
CLIENTS = frozenset({"client", "gateway", "operator"})
OPERATORS = frozenset({"operator"})
KEEPERS = ENGINES | {"client"}
"""Roles that keep KV in kvstores; a client only under one tenant's keys (`moonpool.base.kv.values.check_owned`)."""
READERS = OPERATORS | {"conductor"}
ROLES = ("conductor", "prefill", "decode", "kvstore", "gateway", "client", "operator", ENGINE, ADAPTER)
_CONDUCTOR = {
    "Generate": CLIENTS,
    "Join": INSTANCES,
    "Explain": OPERATORS | {"gateway"},
    "ChangeRole": OPERATORS,
    "DrainInstance": OPERATORS,
    "ClusterState": OPERATORS | {"gateway"},
    "CreateContext": CLIENTS,
    "UpdateContext": CLIENTS,
    "ListContexts": CLIENTS,
    "DeleteContext": CLIENTS,
    "UpdateSession": CLIENTS,
    "AnnouncePrompts": CLIENTS,
    "DeleteKV": CLIENTS,
    "WatchKV": OPERATORS | {"gateway"},
    "LoadLoraAdapter": OPERATORS | {"gateway"},
    "UnloadLoraAdapter": OPERATORS | {"gateway"},
    "ConductorStats": OPERATORS | {"gateway"},
}
_PREFILL = {
    "Prefill": frozenset({"conductor"}),
    "ReadKV": ENGINES,
    "Cancel": frozenset({"conductor"}),
    "Forget": frozenset({"conductor"}),
    "LoadLora": frozenset({"conductor"}),
    "UnloadLora": frozenset({"conductor"}),
    "PrefillStats": READERS,
}
_DECODE = {
    "Reserve": frozenset({"conductor"}),
    "ReceiveKV": ENGINES,
    "ReadKV": ENGINES,
    "Steps": frozenset({"conductor"}),
    "Forget": frozenset({"conductor"}),
    "LoadLora": frozenset({"conductor"}),
    "UnloadLora": frozenset({"conductor"}),
    "DecodeStats": READERS,
}
_ADAPTER = {"HandOver": frozenset({ADAPTER})}
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
        ("AdapterService", _ADAPTER),
    )
    for method, roles in table.items()
}
"""Roles by method."""
FOR_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.", "/moonpool.v1.CallsService/")
"""Calls open to everybody with an accepted connection. Each call that `CallsService` carries is checked by itself."""


class RpcCaller(NamedTuple):
    """A caller: a role, and a name, which is the tenant's for a client."""

    role: str
    name: str


_caller: ContextVar[RpcCaller | None] = ContextVar("caller", default=None)


def current_caller() -> RpcCaller | None:
    """The caller of the call being answered; None if connections are not secured."""
    return _caller.get()


def tenant_of(asked: str) -> str:
    """The tenant of the call being answered, whatever a client claims.

    Args:
        asked: the tenant that the request names. Gateways and operators speak for others; a client does not.

    Raises:
        PermissionDenied: a client names another client's tenant.
    """
    return check_tenant(asked, own_tenant())


def own_tenant() -> str | None:
    """The only tenant that the caller speaks for; None for any, as for all but clients."""
    who = current_caller()
    return who.name if who is not None and who.role == "client" else None


def check_tenant(asked: str, own: str | None) -> str:
    """A request's tenant, as `tenant_of`, given the caller's `own_tenant` noted before."""
    if own is not None and asked not in ("", own):
        raise PermissionDenied("the request names a tenant that is not the caller's")
    return asked if own is None else own


def is_client() -> bool:
    """Whether a client made the call that is being answered. A client speaks for one tenant only."""
    return own_tenant() is not None


def require_role(role: str) -> None:
    """Check that the caller has this role, or may have it as engine or adapter, where connections are secured.

    Raises:
        Mismatch: the caller has another role.
    """
    who = current_caller()
    if who is not None and who.role != role and not (who.role in (ENGINE, ADAPTER) and role in ENGINES):
        raise Mismatch("instance.kind", f"the certificate's role is {who.role}, not {role}")


class RoleGate:
    """Lets in callers with an unrevoked certificate or an API key, and with a role that may call the method."""

    def __init__(
        self, revoked: Path | None = None, keys: ApiKeys | None = None, clock: Callable[[], float] = world.monotonic
    ) -> None:
        """Take what a peer may show.

        Args:
            revoked: file with revoked certificates: a line `sha256:HEX` each, the hash over the certificate's DER.
            keys: keys for clients without a certificate; they are their tenants.
            clock: by which the file is looked at again.

        Raises:
            ConfigError: naming `tls_revoked`: the file cannot be read, or a line is wrong.
        """
        self._keys = keys
        self._path = revoked
        self._watched = WatchedFiles([] if revoked is None else [revoked], clock)
        self._revoked: frozenset[str] = frozenset() if revoked is None else self._read(revoked)

    def admit(self, method: str, context: Any) -> None:
        """Check a call, and note the caller for `caller`.

        Args:
            method: full name, "/package.Service/Method".
            context: gRPC's context for the call.

        Raises:
            Unauthenticated: the peer shows neither a certificate nor a key that is accepted.
            PermissionDenied: the peer's role may not call this.
        """
        found = context.auth_context()
        pem = found.get("x509_pem_cert")
        open_to_all = method.startswith(FOR_ALL)
        if pem:
            who = self.certified(found, pem[0])
        elif open_to_all:
            return
        elif self._keys is None:
            raise Unauthenticated("the connection shows no certificate")
        else:
            who = RpcCaller("client", self._keys.tenant(_bearer(context)))
        if not open_to_all and who.role not in ALLOWED.get(method, frozenset()):
            raise PermissionDenied(f"role {who.role} may not call {method.rpartition('/')[2]}")
        _caller.set(who)

    def certified(self, found: Mapping[str, Sequence[bytes]], pem: bytes) -> RpcCaller:
        """Return the owner of a certificate, PEM; `found`: what stands in it, by gRPC's names.

        Raises:
            Unauthenticated: the certificate is revoked, or names no role.
        """
        self._renew()
        if self._revoked and fingerprint(pem) in self._revoked:
            raise Unauthenticated("this certificate is revoked")
        name = found.get("x509_common_name") or [b""]
        return RpcCaller(_role(found), name[0].decode(errors="replace"))

    def _renew(self) -> None:
        """Read the file again if changed. A wrong or missing file leaves the revocations unchanged."""
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
    """Fingerprints in a file's lines; `#` begins a comment.

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
    """SHA-256 over a certificate's DER in hexadecimal: `openssl x509 -fingerprint -sha256` without the colons."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def _bearer(context: Any) -> str:
    """The key that came with a call, "" for none."""
    values = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    scheme, _, key = values[0].partition(" ") if values and isinstance(values[0], str) else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else ""


def _role(found: Mapping[str, Sequence[bytes]]) -> str:
    names = [name.decode(errors="replace") for name in found.get("x509_subject_alternative_name", ())]
    roles = [name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI)]
    if len(roles) != 1 or roles[0] not in ROLES:
        raise Unauthenticated("the certificate names no role of Moonpool")
    return roles[0]
