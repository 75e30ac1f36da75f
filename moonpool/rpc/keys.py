"""API keys: a file of hashes, tenants and budgets, read again when it changes.

Each line is `sha256:HEX [rpm=N] [tpm=N] TENANT`, where HEX is the SHA-256 of a key, or `tenant [rpm=N] [tpm=N] TENANT`
for what all keys of a tenant have together: requests and tokens per minute. `#` begins a comment. Keys are random, so
that a plain hash is enough: there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moonpool.errors import ConfigError, Unauthenticated
from moonpool.rpc.files import Watched
from moonpool.telemetry.logs import get_logger

MAX_TENANT_CHARS = 256
_LINE = re.compile(
    r"(?:sha256:(?P<hash>[0-9a-f]{64})|tenant)(?P<limits>(?:[ \t]+[rt]pm=[1-9]\d{0,11})*)"
    r"[ \t]+(?P<tenant>(?![rt]pm=)\S.*)",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"([rt]pm)=(\d+)", re.IGNORECASE)

log = get_logger(__name__)


def hashed(key: str) -> str:
    """A key as the file has it, without "sha256:"."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be used in a minute; None = any number."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose budget it is: `name` is unique, `told` is what a refusal calls it."""

    name: str
    told: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a file of keys says.

    Attributes:
        tenants: by hash of the key.
        limits: by hash of the key, where the key has some.
        shared: by tenant, where its keys have some together.
    """

    tenants: dict[str, str]
    limits: dict[str, Limits]
    shared: dict[str, Limits]

    def owners(self, key_hash: str) -> list[Owner]:
        """Whose budgets a request with this key is on."""
        tenant = self.tenants[key_hash]
        own, shared = self.limits.get(key_hash), self.shared.get(tenant)
        found = [(f"key {key_hash}", "this key", own), (f"tenant {tenant}", "this key's tenant", shared)]
        return [Owner(name, told, limits) for name, told, limits in found if limits is not None]


def parse_keys(text: str) -> KeyFile:
    """Read what a file of keys has.

    Raises:
        ValueError: names the line that is wrong, never its content.
    """
    file = KeyFile({}, {}, {})
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is None:
            raise ValueError(f"line {number} is not of the form sha256:HEX [rpm=N] [tpm=N] TENANT")
        if len(found["tenant"]) > MAX_TENANT_CHARS:
            raise ValueError(f"line {number}: a tenant has at most {MAX_TENANT_CHARS} characters")
        _add(file, number, (found["hash"] or "").lower(), found["tenant"], _limits(number, found["limits"]))
    return file


def _add(file: KeyFile, number: int, key_hash: str, tenant: str, limits: Limits | None) -> None:
    """Add a line: of a key, or without a hash of a tenant."""
    if key_hash in file.tenants:
        raise ValueError(f"line {number}: this key stands here twice")
    if not key_hash and (tenant in file.shared or limits is None):
        raise ValueError(f"line {number}: a tenant has one line, with rpm=N or tpm=N or both")
    if key_hash:
        file.tenants[key_hash] = tenant
    if limits is not None:
        target = file.limits if key_hash else file.shared
        target[key_hash or tenant] = limits


def _limits(number: int, text: str) -> Limits | None:
    given = [(name.lower(), int(count)) for name, count in _LIMIT.findall(text)]
    if len(dict(given)) < len(given):
        raise ValueError(f"line {number}: rpm and tpm stand there once")
    found = dict(given)
    return Limits(found.get("rpm"), found.get("tpm")) if found else None


class ApiKeys:
    """The keys of a file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; it is looked at again by `clock`.

        Raises:
            ConfigError: naming `api_keys`: it cannot be read or is wrong.
        """
        self._path = path
        try:
            self._watched = Watched([path], clock)
            self._file = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError("api_keys", f"{path}: {error}") from error

    def tenant(self, key: str) -> str:
        """The tenant of a key.

        Raises:
            Unauthenticated: no key was given or there is no such key.
        """
        self._renew()
        if not key:
            raise Unauthenticated("no API key was given; send it as `Authorization: Bearer KEY`")
        tenant = self._file.tenants.get(hashed(key))
        if tenant is None:
            raise Unauthenticated("this API key is not known")
        return tenant

    def owners(self, key: str) -> list[Owner]:
        """Whose budgets a request with this key is on: the key's, its tenant's, where they have some.

        Raises:
            Unauthenticated: as of `tenant`.
        """
        self.tenant(key)
        return self._file.owners(hashed(key))

    def _renew(self) -> None:
        """Read the file again when it has changed; one that is wrong or gone leaves the keys as they were."""
        if not self._watched.changed():
            return
        try:
            self._file = self._read()
            log.info("API keys read again", keys=len(self._file.tenants))
        except (OSError, ValueError) as error:
            log.warning("API keys not read again", file=str(self._path), reason=str(error))

    def _read(self) -> KeyFile:
        return parse_keys(self._path.read_text(encoding="utf-8"))
