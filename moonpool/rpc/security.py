"""What a service's settings say about security, made ready for its server and its channels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.config import ServiceConfig
from moonpool.rpc.keys import ApiKeys
from moonpool.rpc.roles import Gate
from moonpool.rpc.tls import Tls


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates, and who may call what.

    Attributes:
        client_listen: "host:port" at which peers need no certificate; "" for nowhere.
    """

    tls: Tls
    gate: Gate
    client_listen: str = ""

    @classmethod
    def of(cls, config: ServiceConfig, client_listen: str = "", api_keys: Path | None = None) -> Security | None:
        """As the settings say; None: connections are in plaintext.

        Args:
            config: of the service.
            client_listen: where clients may connect that have no certificate.
            api_keys: file of their keys.

        Raises:
            ConfigError: a file cannot be used.
        """
        if config.tls_ca is None:
            return None
        keys = None if api_keys is None else ApiKeys(api_keys)
        tls = Tls(config.tls_ca, config.tls_cert, config.tls_key)
        return cls(tls, Gate(config.tls_revoked, keys), client_listen)

    @staticmethod
    def tls_of(security: Security | None) -> Tls | None:
        """The certificates, where there are any."""
        return None if security is None else security.tls
