"""API keys: a file of hashes and tenants, read again when it changes.

Each line is `sha256:HEX TENANT`, where HEX is the SHA-256 of a key; `#` begins a comment. Keys are random, so that a
plain hash is enough: there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from moonpool.errors import ConfigError, Unauthenticated
from moonpool.telemetry.logs import get_logger

MAX_TENANT_CHARS = 256
_LINE = re.compile(r"sha256:(?P<hash>[0-9a-f]{64})[ \t]+(?P<tenant>\S.*)", re.IGNORECASE)

Signature = tuple[int, int, int]

log = get_logger(__name__)


def hashed(key: str) -> str:
    """A key as the file has it, without "sha256:"."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str) -> dict[str, str]:
    """Tenants by hash.

    Raises:
        ValueError: names the line that is wrong, never its content.
    """
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is None:
            raise ValueError(f"line {number} is not of the form sha256:HEX TENANT")
        if len(found["tenant"]) > MAX_TENANT_CHARS:
            raise ValueError(f"line {number}: a tenant has at most {MAX_TENANT_CHARS} characters")
        if found["hash"].lower() in tenants:
            raise ValueError(f"line {number}: this key stands here twice")
        tenants[found["hash"].lower()] = found["tenant"]
    return tenants


class ApiKeys:
    """The keys of a file."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: naming `api_keys`: it cannot be read or is wrong.
        """
        self._path = path
        try:
            self._signature = self._sign()
            self._tenants = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError("api_keys", f"{path}: {error}") from error

    def tenant(self, key: str) -> str:
        """The tenant of a key.

        Raises:
            Unauthenticated: no key was given, or there is no such key.
        """
        self._renew()
        if not key:
            raise Unauthenticated("no API key was given; send it as `Authorization: Bearer KEY`")
        tenant = self._tenants.get(hashed(key))
        if tenant is None:
            raise Unauthenticated("this API key is not known")
        return tenant

    def _renew(self) -> None:
        """Read the file again when it has changed; one that is wrong or gone leaves the keys as they were."""
        signature = self._sign()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._tenants = self._read()
            log.info("API keys read again", keys=len(self._tenants))
        except (OSError, ValueError) as error:
            log.warning("API keys not read again", file=str(self._path), reason=str(error))

    def _sign(self) -> Signature | None:
        """What differs when the file has changed; None when it is not there."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> dict[str, str]:
        return parse_keys(self._path.read_text(encoding="utf-8"))
