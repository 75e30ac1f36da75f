"""TLS certificates that are read again when their files change."""

from __future__ import annotations

import ssl
from pathlib import Path

from moonpool.base import world
from moonpool.base.errors import ConfigError
from moonpool.base.rpc.watched_files import WatchedFiles
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.process_info import expiry_warning

log = get_logger(__name__)


class ReloadedCertificate:
    """A certificate that is read again after its files change.

    Attributes:
        context: TLS context for the server; each new connection uses the files as they are then.
    """

    def __init__(self, cert: Path, key: Path, watched: WatchedFiles | None = None) -> None:
        """Read certificate and key, both in PEM format. The file of the certificate may have a chain.

        `watched` says when the files change; None: the object watches the files itself.

        Raises:
            ConfigError: the files cannot be read, or do not belong together; names `ssl_certfile`.
        """
        self._cert, self._key = cert, key
        self._files = watched or WatchedFiles([cert, key])
        try:
            self._current = self._read()
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("ssl_certfile", f"{cert} with {key}: {_ssl_reason(error)}") from error
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Choose the certificate of a connection, after the client's hello."""
        self._renew()
        connection.context = self._current

    def _renew(self) -> None:
        """Read the files again if they have changed. If the new files cannot be used, keep the old certificate."""
        if not self._files.changed():
            return
        try:
            self._current = self._read()
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate not read again", file=str(self._cert), reason=_ssl_reason(error))
            return
        log.info("certificate read again", file=str(self._cert))

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # A key with a password is refused, not prompted for.
        context.load_cert_chain(self._cert, self._key, password="")
        if warning := expiry_warning(self._cert.read_bytes(), world.unix_time()):
            log.warning(warning, file=str(self._cert))
        return context


def _ssl_reason(error: OSError) -> str:
    return error.strerror or str(error)
