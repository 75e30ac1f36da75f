"""TLS between processes: this process's certificate, the authority of the peers, and a service's security settings.

Files are read again when they change: new connections use the new contents, open connections stay.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from moonpool.base import world
from moonpool.base.config import ENV_PREFIX, ServiceConfig
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.api_keys import ApiKeys
from moonpool.base.rpc.roles import RoleGate
from moonpool.base.rpc.watched_files import WatchedFiles
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.process_info import expiry_warning

NAME = "moonpool"
"""DNS name in every service's certificate. Channels check this name at every address: instances move."""
CHANNEL_OPTIONS: list[tuple[str, Any]] = [("grpc.ssl_target_name_override", NAME)]
log = get_logger(__name__)


class Tls:
    """One process's certificates.

    Attributes:
        generation: grows each time the files were read again.
    """

    def __init__(
        self,
        ca: Path,
        cert: Path | None = None,
        key: Path | None = None,
        clock: Callable[[], float] = world.monotonic,
    ) -> None:
        """Read the files, all PEM.

        Args:
            ca: certificates of the authorities that peers' certificates must come from.
            cert: own certificate, followed by the intermediate certificates; None for a client that shows none.
            key: private key of the certificate.
            clock: by which the files are looked at again.

        Raises:
            ConfigError: naming the setting: the file cannot be read, or certificate or key is missing.
        """
        if (cert is None) != (key is None):
            raise ConfigError("tls_key" if key is None else "tls_cert", "certificate and key go together")
        self._paths = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
        self.generation = 0
        self._watched = WatchedFiles([path for path in self._paths.values() if path is not None], clock)
        self._files = self._read()
        self._contexts: dict[bool, tuple[int, ssl.SSLContext]] = {}  # by side, with the generation of the files

    @classmethod
    def of(cls, config: ServiceConfig) -> Tls | None:
        """As the settings say; None: connections are in plaintext.

        Raises:
            ConfigError: a file cannot be read.
        """
        return None if config.tls_ca is None else cls(config.tls_ca, config.tls_cert, config.tls_key)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Tls | None:
        """What MOONPOOL_TLS_CA, MOONPOOL_TLS_CERT and MOONPOOL_TLS_KEY name; None without the first.

        Raises:
            ConfigError: a file cannot be read.
        """
        ca, cert, key = (environment.get(f"{ENV_PREFIX}TLS_{name}") for name in ("CA", "CERT", "KEY"))
        if not ca:
            return None
        return cls(Path(ca), Path(cert) if cert else None, Path(key) if key else None)

    @property
    def has_certificate(self) -> bool:
        """Whether this process shows a certificate to peers."""
        return self._paths["tls_cert"] is not None

    def socket_context(self, *, server: bool) -> ssl.SSLContext:
        """For a connection beside gRPC on which both ends show certificates; TLS 1.3.

        Raises:
            ConfigError: certificate and key do not fit each other, and no earlier files did.
        """
        self.renew()
        generation, context = self._contexts.get(server, (-1, None))
        if generation != self.generation:
            try:
                context = self._new_context(server=server)
            except (OSError, ssl.SSLError) as error:
                if context is None:
                    raise ConfigError("tls_cert", f"{self._paths['tls_cert']}: {error}") from error
                log.warning("certificates not used for new connections", reason=str(error))
            assert context is not None
            self._contexts[server] = self.generation, context
        assert context is not None
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a client's connection beside gRPC, with the certificate if there is one.

        Raises:
            OSError: a file is gone, or its content is damaged.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self._paths["tls_ca"])
        if (cert := self._paths["tls_cert"]) is not None:
            context.load_cert_chain(cert, self._paths["tls_key"])
        return context

    def shown(self) -> str:
        """What peers see of this process, in words: no certificate, an expired one, or one."""
        path, content = self._paths["tls_cert"], self._files.get("tls_cert")
        if path is None or content is None:
            return "connections without a certificate: set MOONPOOL_TLS_CERT and MOONPOOL_TLS_KEY"
        warning = expiry_warning(content, world.unix_time())
        return f"{path}: {warning}" if "expired" in warning else f"{path}: is it of another authority?"

    def _new_context(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        cert, key = self._paths["tls_cert"], self._paths["tls_key"]
        assert cert is not None, "the transport asks for a certificate before"
        context.load_verify_locations(self._paths["tls_ca"])
        context.load_cert_chain(cert, key)
        if server:
            context.num_tickets = 0  # no connection is resumed
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one new channel."""
        self.renew()
        return grpc.ssl_channel_credentials(
            self._files["tls_ca"], self._files.get("tls_key"), self._files.get("tls_cert")
        )

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """For a server's port, asked again with each connection.

        Args:
            client_certificates: peers must show a certificate of the authority.
        """
        shown = self.generation

        def fetch() -> Any:  # None: as before
            nonlocal shown
            self.renew()
            if shown == self.generation:
                return None
            shown = self.generation
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), fetch, require_client_authentication=client_certificates
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = self._files["tls_key"], self._files["tls_cert"]
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self._files["tls_ca"])

    def renew(self) -> None:
        """Read the files again if they have changed (`Watched`); if a file is gone, all files stay as they were."""
        if not self._watched.changed():
            return
        try:
            self._files = self._read()
        except ConfigError as error:
            log.warning("certificates not read again", reason=str(error))
            return
        self.generation += 1
        log.info("certificates read again", files=[str(path) for path in self._paths.values() if path])

    def _read(self) -> dict[str, bytes]:
        found = {}
        for name, path in self._paths.items():
            if path is None:
                continue
            try:
                found[name] = path.read_bytes()
            except OSError as error:
                raise ConfigError(name, f"cannot read {path}: {error.strerror}") from error
            if b"-----BEGIN " not in found[name]:
                raise ConfigError(name, f"{path} is not a PEM file")
        if (cert := found.get("tls_cert")) and (warning := expiry_warning(cert, world.unix_time())):
            log.warning(warning, file=str(self._paths["tls_cert"]))
        return found


def open_blocking_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """A new channel for a command's blocking calls; without `tls`, as the environment says (`Tls.from_environment`).

    Raises:
        ConfigError: a file that the environment names cannot be read.
    """
    tls = tls or Tls.from_environment()
    # Not through a proxy from the environment: the service itself must answer.
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel_credentials(), options=[*options, *CHANNEL_OPTIONS])


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates, and which callers may call what.

    Attributes:
        client_listen: "host:port" at which peers need no certificate; "" for nowhere.
    """

    tls: Tls
    gate: RoleGate
    client_listen: str = ""

    @classmethod
    def of(cls, config: ServiceConfig, client_listen: str = "", api_keys: Path | None = None) -> Security | None:
        """As the settings say; None: connections are in plaintext.

        Args:
            config: the service's.
            client_listen: where clients may connect that have no certificate.
            api_keys: file with clients' keys.

        Raises:
            ConfigError: a file cannot be used.
        """
        tls = Tls.of(config)
        if tls is None:
            return None
        keys = None if api_keys is None else ApiKeys(api_keys)
        return cls(tls, RoleGate(config.tls_revoked, keys), client_listen)

    @staticmethod
    def tls_of(security: Security | None) -> Tls | None:
        """The certificates, where there are any."""
        return None if security is None else security.tls
