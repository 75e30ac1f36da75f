"""The flags of services that clients reach at a port of their own, with an API key in the place of a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from moonpool.config import OptionalAddress, ServiceConfig
from moonpool.errors import ConfigError


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
            raise ConfigError("client_listen", "needs --api-keys, and --tls-cert, --tls-key and --tls-ca")
        if self.api_keys is not None and not self.client_listen:
            raise ConfigError("api_keys", "needs --client-listen, where their owners connect")
        return self
