"""Pictures by URL, from hosts that the operator has listed, and from nowhere else.

A host's name is looked up once, and the connection goes to the address that was looked at: global, and of that name's
certificate. No redirect is followed. Size and time are bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterator
from urllib.parse import SplitResult, urlsplit

from moonpool.base.errors import InvalidRequest
from moonpool.base.pictures.limits import MAX_BYTES

FETCH_S = 10.0
"""Time for all of a file."""
MAX_URL_CHARS = 8192
_PORTS = {"https": 443, "http": 80}
_UNICAST, _NAT64 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")


def address_of(host: str, port: int) -> tuple[str, int]:
    """The first address of a host.

    Raises:
        OSError: the name is not known.
    """
    (*_, address) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return str(address[0]), int(address[1])


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's, not of this network or machine."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(found.packed[-4:]) if found in _NAT64 else None
        found = found.ipv4_mapped or found.sixtofour or translated or found
    if isinstance(found, ipaddress.IPv6Address) and found not in _UNICAST:
        return False  # Python calls some of the others global, such as ::10.0.0.1
    return found.is_global and not found.is_multicast


class PictureFetcher:
    """Fetches files.

    Args:
        hosts: names of hosts from which pictures may be fetched, in lower case.
        look_up: finds a host's address.
        is_allowed: whether an address may be connected to.
        within_s: time for all of a file, seconds.
    """

    def __init__(
        self,
        hosts: Collection[str],
        look_up: Callable[[str, int], tuple[str, int]] = address_of,
        is_allowed: Callable[[str], bool] = is_public,
        within_s: float = FETCH_S,
    ) -> None:
        self._hosts, self._look_up, self._is_allowed = frozenset(hosts), look_up, is_allowed
        self.within_s = within_s

    def fetch(self, field: str, url: str) -> bytes:
        """Blocking. The file behind a URL.

        Raises:
            InvalidRequest: the URL may not be fetched, or there is no file of bounded size; names `field`.
        """
        try:
            parts = urlsplit(url) if len(url) <= MAX_URL_CHARS else SplitResult("", "", "", "", "")
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            parts, port = SplitResult("", "", "", "", ""), 0
        host = (parts.hostname or "").lower()
        if port != _PORTS.get(parts.scheme) or "@" in parts.netloc or not url.isascii() or not url.isprintable():
            raise InvalidRequest(field, "must be data:image/...;base64,... or a plain https URL")
        if host not in self._hosts:
            known = f"only from {', '.join(sorted(self._hosts))}" if self._hosts else "from elsewhere"
            raise InvalidRequest(field, f"pictures are not fetched {known}: send data:image/...;base64,...")
        try:
            address, port = self._look_up(host, port)
            if not self._is_allowed(address):
                raise InvalidRequest(field, f"the address of {host} is not public")
            return self._read(field, parts, (address, port))
        except (OSError, http.client.HTTPException) as error:
            raise InvalidRequest(field, f"{host} does not give the picture: {error or type(error).__name__}") from None

    def _read(self, field: str, url: SplitResult, address: tuple[str, int]) -> bytes:
        host = url.hostname or ""
        connection = http.client.HTTPConnection(host, timeout=self.within_s)
        connection.sock = plain = socket.create_connection(address, timeout=self.within_s)
        with contextlib.closing(connection), _ended_after(self.within_s, plain.dup()):
            if url.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
            connection.request("GET", path, headers={"Accept": "image/*", "Connection": "close"})
            with contextlib.closing(connection.getresponse()) as response:
                if response.status != http.client.OK:
                    why = f"{host} answers with {response.status}, and redirects are not followed"
                    raise InvalidRequest(field, why)
                found = response.read(MAX_BYTES + 1)
            if len(found) > MAX_BYTES:
                raise InvalidRequest(field, f"the picture has more than {MAX_BYTES} bytes")
            return found


@contextlib.contextmanager
def _ended_after(seconds: float, duplicate: socket.socket) -> Iterator[None]:
    """End a connection after a time, however slowly the other end goes on.

    `duplicate` is another socket of the connection: TLS and `http.client` replace, let go and close the first one.
    """

    def end() -> None:
        with contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        duplicate.close()
