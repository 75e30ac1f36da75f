"""API keys: the key file, the tenants that keys name, and the port for clients with keys.

Each line in a key file is `sha256:HEX [rpm=N] [tpm=N] TENANT`, where HEX is a key's SHA-256, or `tenant [rpm=N] [tpm=N]
TENANT` for the requests and tokens per minute that all a tenant's keys have together. `#` begins a comment. Keys are
random, so a plain hash is enough.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from moonpool.base import world
from moonpool.base.config import OptionalAddress, ServiceConfig
from moonpool.base.errors import ConfigError, Unauthenticated
from moonpool.base.rpc.watched_files import WatchedFiles
from moonpool.base.telemetry.logs import get_logger

log = get_logger(__name__)
MAX_TENANT_CHARS = 256
_KEY_LINE = re.compile(
    r"(?:sha256:(?P<hash>[0-9a-f]{64})|tenant)(?P<limits>(?:[ \t]+[rt]pm=[1-9]\d{0,11})*)"
    r"[ \t]+(?P<tenant>(?![rt]pm=)\S.*)",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"([rt]pm)=(\d+)", re.IGNORECASE)


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
            raise ConfigError("api_keys", f"{path}: {getattr(error, 'strerror', None) or error}") from error

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
