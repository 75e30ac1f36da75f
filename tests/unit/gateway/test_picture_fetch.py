"""Pictures by URL: from listed hosts at public addresses, in bounded size and time, and from nowhere else."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.pictures.limits import MAX_BYTES
from moonpool.gateway.serving.picture_fetch import PictureFetcher, address_of, is_public

HOST = "pictures.example"


class Server(BaseHTTPRequestHandler):
    """Answers by the path."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012 - of all

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Host"]))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/cat")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/large":
            self.wfile.write(bytes(MAX_BYTES + 1))
        elif self.path == "/slow":
            self.server.released.wait(60)  # type: ignore[attr-defined]
        elif self.path == "/endless":
            with contextlib.suppress(OSError):  # the client has left
                while not self.server.released.wait(0.01):  # type: ignore[attr-defined]
                    self.wfile.write(b"x")
        else:
            self.wfile.write(b"cat")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is told."""


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    Server.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        found.released = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield "127.0.0.1", found.server_address[1]
        finally:
            found.released.set()  # type: ignore[attr-defined]
            found.shutdown()
            thread.join()


def fetcher(server: tuple[str, int], within_s: float = 10.0) -> PictureFetcher:
    return PictureFetcher([HOST], lambda host, port: server, lambda address: True, within_s)


def test_a_file_of_a_listed_host_is_fetched(server: tuple[str, int]) -> None:
    assert fetcher(server).fetch("p", f"http://{HOST}/cat?size=1") == b"cat"
    assert Server.asked == [("/cat?size=1", HOST)]


@pytest.mark.parametrize(
    ("path", "why"),
    [("/moved", "302, and redirects are not followed"), ("/none", "404"), ("/large", "more than")],
)
def test_what_is_no_file_of_bounded_size_is_refused(server: tuple[str, int], path: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as error:
        fetcher(server).fetch("messages.0.content.0.image_url.url", f"http://{HOST}{path}")
    assert error.value.field == "messages.0.content.0.image_url.url"
    assert len(Server.asked) == 1


@pytest.mark.parametrize("path", ["/slow", "/endless"])
def test_a_host_that_does_not_come_to_an_end_is_left(server: tuple[str, int], path: str) -> None:
    """The file is what has come until then, which is no whole picture; or the host is blamed."""
    began, found = time.monotonic(), b""
    with contextlib.suppress(InvalidRequest):
        found = fetcher(server, within_s=0.2).fetch("p", f"http://{HOST}{path}")
    assert not found.strip(b"x")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/cat",
        "http://127.0.0.1/cat",
        f"http://{HOST}:8080/cat",
        f"http://user@{HOST}/cat",
        f"http://{HOST}@other.example/cat",
        f"ftp://{HOST}/cat",
        "file:///etc/passwd",
        f"http://{HOST}/cat\r\nX: y",
        f"http://{HOST}.other.example/cat",
        f"http://{HOST}/" + "x" * 9000,
        "http://[::1/cat",
        "",
    ],
)
def test_other_urls_are_refused_unasked(server: tuple[str, int], url: str) -> None:
    with pytest.raises(InvalidRequest):
        fetcher(server).fetch("p", url)
    assert Server.asked == []


def test_a_listed_host_at_an_address_of_this_network_is_refused(server: tuple[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="not public"):
        PictureFetcher([HOST], lambda host, port: server).fetch("p", f"http://{HOST}/cat")
    assert Server.asked == []


def test_without_hosts_nothing_is_fetched(server: tuple[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="not fetched from elsewhere: send data"):
        PictureFetcher([], lambda host, port: server, lambda address: True).fetch("p", f"http://{HOST}/cat")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("169.254.169.254", False), ("192.168.0.1", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("224.0.0.1", False), ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:10.0.0.1", False),
        ("2002:0a00:0001::1", False), ("64:ff9b::10.0.0.1", False), ("64:ff9b::93.184.216.34", True),
        ("::10.0.0.1", False), ("::ffff:0:10.0.0.1", False), ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_host_is_looked_up_with_its_port() -> None:
    assert address_of("127.0.0.1", 443) == ("127.0.0.1", 443)
    assert address_of("::1", 80) == ("::1", 80)
