"""Callers, and what each caller may call: certificate roles, API keys with tenants and budgets.

A certificate names the owner's role as a URI among the alternative names, `moonpool:role:prefill`; the common name
names the owner. A method that is not in the table is refused; a test compares the table with the contracts.

Each line in a key file is `sha256:HEX [rpm=N] [tpm=N] TENANT`, where HEX is a key's SHA-256, or `tenant [rpm=N] [tpm=N]
TENANT` for the requests and tokens per minute that all a tenant's keys have together. `#` begins a comment. Keys are
random, so a plain hash is enough. Files are read again when they change.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, model_validator

from moonpool.base import world
from moonpool.base.config import OptionalAddress, ServiceConfig
from moonpool.base.errors import ConfigError, Mismatch, PermissionDenied, Unauthenticated
from moonpool.base.telemetry.logs import get_logger

Signature = tuple[int, int, int]
CHECK_INTERVAL_S = 0.5
"""Files are looked at so often at most, seconds: a look may take long where they lie on another machine."""


class WatchedFiles:
    """Files watched for changes, at most every `LOOK_S` seconds on `clock`."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = world.monotonic) -> None:
        self._paths = list(paths)
        self._clock = clock
        self._looked_at = clock()
        self._signatures = self._sign()

    def changed(self) -> bool:
        """Whether a file differs from the last look, or has come or gone."""
        now = self._clock()
        if now - self._looked_at < CHECK_INTERVAL_S:
            return False
        self._looked_at, before = now, self._signatures
        self._signatures = self._sign()
        return self._signatures != before

    def _sign(self) -> list[Signature | None]:
        return [_signature(path) for path in self._paths]


def _signature(path: Path) -> Signature | None:
    """What differs when a file has changed; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


MAX_TENANT_CHARS = 256
_KEY_LINE = re.compile(
    r"(?:sha256:(?P<hash>[0-9a-f]{64})|tenant)(?P<limits>(?:[ \t]+[rt]pm=[1-9]\d{0,11})*)"
    r"[ \t]+(?P<tenant>(?![rt]pm=)\S.*)",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"([rt]pm)=(\d+)", re.IGNORECASE)
log = get_logger(__name__)


def hash_key(key: str) -> str:
    """A key as written in the file, without "sha256:"."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What may be used in a minute; None = any number."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BudgetOwner:
    """The owner of a budget: `name` is unique, `told` is the owner's name in a refusal."""

    name: str
    told: str
    limits: KeyLimits


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key file's contents.

    Attributes:
        tenants: tenant by the key's hash.
        limits: limits by the key's hash, if the key has limits.
        shared: by tenant, where the tenant's keys have some together.
    """

    tenants: dict[str, str]
    limits: dict[str, KeyLimits]
    shared: dict[str, KeyLimits]

    def owners(self, key_hash: str) -> list[BudgetOwner]:
        """Budget owners for a request with this key."""
        tenant = self.tenants[key_hash]
        own, shared = self.limits.get(key_hash), self.shared.get(tenant)
        found = [(f"key {key_hash}", "this key", own), (f"tenant {tenant}", "this key's tenant", shared)]
        return [BudgetOwner(name, told, limits) for name, told, limits in found if limits is not None]


def parse_keys(text: str) -> KeyFile:
    """Read a key file.

    Raises:
        ValueError: names the wrong line's number, never the content.
    """
    file = KeyFile({}, {}, {})
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _KEY_LINE.fullmatch(content)
        if found is None:
            raise ValueError(f"line {number} is not of the form sha256:HEX [rpm=N] [tpm=N] TENANT")
        if len(found["tenant"]) > MAX_TENANT_CHARS:
            raise ValueError(f"line {number}: a tenant has at most {MAX_TENANT_CHARS} characters")
        _add_line(file, number, (found["hash"] or "").lower(), found["tenant"], _limits(number, found["limits"]))
    return file


def _add_line(file: KeyFile, number: int, key_hash: str, tenant: str, limits: KeyLimits | None) -> None:
    """Add a key's line, or without a hash a tenant's line."""
    if key_hash in file.tenants:
        raise ValueError(f"line {number}: this key stands here twice")
    if not key_hash and (tenant in file.shared or limits is None):
        raise ValueError(f"line {number}: a tenant has one line, with rpm=N or tpm=N or both")
    if key_hash:
        file.tenants[key_hash] = tenant
    if limits is not None:
        target = file.limits if key_hash else file.shared
        target[key_hash or tenant] = limits


def _limits(number: int, text: str) -> KeyLimits | None:
    given = [(name.lower(), int(count)) for name, count in _LIMIT.findall(text)]
    if len(dict(given)) < len(given):
        raise ValueError(f"line {number}: rpm and tpm stand there once")
    found = dict(given)
    return KeyLimits(found.get("rpm"), found.get("tpm")) if found else None


class ApiKeys:
    """A key file's keys."""

    def __init__(self, path: Path, clock: Callable[[], float] = world.monotonic) -> None:
        """Read the file, and again when changed; `clock` says when to look.

        Raises:
            ConfigError: naming `api_keys`: the file cannot be read or is wrong.
        """
        self._path = path
        try:
            self._watched = WatchedFiles([path], clock)
            self._file = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError("api_keys", f"{path}: {error}") from error

    def tenant(self, key: str) -> str:
        """A key's tenant.

        Raises:
            Unauthenticated: no key was given or there is no such key.
        """
        self._renew()
        if not key:
            raise Unauthenticated("no API key was given; send it as `Authorization: Bearer KEY`")
        tenant = self._file.tenants.get(hash_key(key))
        if tenant is None:
            raise Unauthenticated("this API key is not known")
        return tenant

    def owners(self, key: str) -> list[BudgetOwner]:
        """The budgets that a request with this key uses: the key's and the tenant's, if any.

        Raises:
            Unauthenticated: as of `tenant`.
        """
        self.tenant(key)
        return self._file.owners(hash_key(key))

    def _renew(self) -> None:
        """Read the file again if changed; a wrong or missing file leaves the keys as they were."""
        if not self._watched.changed():
            return
        try:
            self._file = self._read()
            log.info("API keys read again", keys=len(self._file.tenants))
        except (OSError, ValueError) as error:
            log.warning("API keys not read again", file=str(self._path), reason=str(error))

    def _read(self) -> KeyFile:
        return parse_keys(self._path.read_text(encoding="utf-8"))


ROLE_URI = "moonpool:role:"
ENGINES = frozenset({"prefill", "decode"})
ADAPTER = "adapter"
"""An adapter joins as prefill and as decode instance, for an engine that moves its own KV."""
INSTANCES = ENGINES | {"kvstore", ADAPTER}
CLIENTS = frozenset({"client", "gateway", "operator"})
OPERATORS = frozenset({"operator"})
KEEPERS = ENGINES | {"client"}
"""Roles that keep KV in kvstores; a client only under one tenant's keys (`moonpool.base.kv.values.check_owned`)."""
READERS = OPERATORS | {"conductor"}
ROLES = ("conductor", "prefill", "decode", "kvstore", "gateway", "client", "operator", ADAPTER)
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
FOR_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Calls open to everybody with an accepted connection."""


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
    """Check that the caller has this role, or is an adapter in an engine's role, where connections are secured.

    Raises:
        Mismatch: the caller has another role.
    """
    who = current_caller()
    if who is not None and who.role != role and not (who.role == ADAPTER and role in ENGINES):
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
            who = self._certified(found, pem[0])
        elif open_to_all:
            return
        elif self._keys is None:
            raise Unauthenticated("the connection shows no certificate")
        else:
            who = RpcCaller("client", self._keys.tenant(_bearer(context)))
        if not open_to_all and who.role not in ALLOWED.get(method, frozenset()):
            raise PermissionDenied(f"role {who.role} may not call {method.rpartition('/')[2]}")
        _caller.set(who)

    def _certified(self, found: Mapping[str, list[bytes]], pem: bytes) -> RpcCaller:
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


def _role(found: Mapping[str, list[bytes]]) -> str:
    names = [name.decode(errors="replace") for name in found.get("x509_subject_alternative_name", ())]
    roles = [name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI)]
    if len(roles) != 1 or roles[0] not in ROLES:
        raise Unauthenticated("the certificate names no role of Moonpool")
    return roles[0]


class ClientPortConfig(ServiceConfig):
    """Where clients connect that have no certificate, and what keys they show."""

    client_listen: OptionalAddress = Field(
        "",
        description="HOST:PORT for clients that show an API key and no certificate, with TLS only; default: none",
    )
    api_keys: Path | None = Field(
        None, description="file of these clients' hashed keys and their tenants, a line `sha256:HEX TENANT` each"
    )

    @model_validator(mode="after")
    def _clients(self) -> Self:
        if self.client_listen and (self.api_keys is None or self.tls_ca is None):
            raise ConfigError("client_listen", "needs api_keys, tls_cert, tls_key and tls_ca")
        if self.api_keys is not None and not self.client_listen:
            raise ConfigError("api_keys", "needs client_listen, where their owners connect")
        return self
