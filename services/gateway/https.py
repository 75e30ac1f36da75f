"""HTTPS: a certificate and its key from files that are read again when they change.

Each connection asks with its first message; those that are open keep what they began with.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from moonpool.errors import ConfigError
from moonpool.rpc.files import Watched
from moonpool.telemetry.logs import get_logger

log = get_logger(__name__)


class Https:
    """The certificate of a gateway.

    Attributes:
        context: for the server; it takes the files as they are now for each new connection.
    """

    def __init__(self, cert: Path, key: Path, watched: Watched | None = None) -> None:
        """Read the files, both PEM; those between the certificate and its authority stand behind it.

        `watched` tells when they change; None = they are watched here.

        Raises:
            ConfigError: naming `https_cert`: they cannot be read, or do not belong together.
        """
        self._cert, self._key = cert, key
        self._files = watched or Watched([cert, key])
        try:
            self._current = self._read()
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("https_cert", f"{cert} with {key}: {_reason(error)}") from error
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Called when a client has said hello, whether it names a server or not."""
        self._renew()
        connection.context = self._current

    def _renew(self) -> None:
        """Read the files again when they have changed; a pair that cannot be used leaves all as it was."""
        if not self._files.changed():
            return
        try:
            self._current = self._read()
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate not read again", file=str(self._cert), reason=_reason(error))
            return
        log.info("certificate read again", file=str(self._cert))

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._cert, self._key, password="")  # one that needs any is refused, not asked for
        return context


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
