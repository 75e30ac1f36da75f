"""HTTP towards one engine: connections, TLS, keys, and streams of server-sent events."""

import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable

CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0
LINE_BYTES = 1 << 20
"""Longest line in a stream of server-sent events."""
ANSWER_BYTES = 16 << 20
"""Longest answer that is no stream."""
REASON_CHARS = 200
_LOST = (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError, RecursionError)
"""What a lost or broken engine raises; JSON that is nested too deep a RecursionError."""


class EngineHttp:
    """Connections to the engine at a URL.

    Args:
        name: the engine's make, for messages.
        url: "http://HOST:PORT" or "https://HOST:PORT".
        api_key: "" = not needed.
        ca: authorities that the engine's certificate must come from (PEM); None = those of the system.

    Raises:
        ConfigError: the authorities cannot be read.
    """

    def __init__(self, name: str, url: str, api_key: str = "", ca: Path | None = None) -> None:
        self.name, self.url = name, url.rstrip("/")
        trusted: ssl.SSLContext | bool = True
        if ca is not None:
            try:
                trusted = ssl.create_default_context(cafile=ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError("engine_ca", f"{ca}: {error}") from error
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trusted),
            # Compressed answers may be small on the way and large here.
            headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {api_key}"} if api_key else {})},
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=LINE_BYTES,
        )

    async def aclose(self) -> None:
        await self._client.close()

    async def get(self, path: str) -> str:
        """The text at a path; raises Unavailable."""
        try:
            async with self._client.get(self.url + path, timeout=_asking(), allow_redirects=False) as response:
                text = (await _whole(response)).decode()
        except _LOST as error:
            raise self.lost(error) from error
        if response.status != 200:
            raise Unavailable(f"{self.name} at {self.url}: {path} answers {response.status}")
        return text

    async def get_json(self, path: str) -> Any:
        """The JSON at a path; raises Unavailable."""
        try:
            return msgspec.json.decode(await self.get(path))
        except (ValueError, RecursionError) as error:
            raise self.lost(error) from error

    async def posted(self, path: str) -> bool:
        """Whether the engine does what a path says; raises Unavailable."""
        try:
            async with self._client.post(self.url + path, timeout=_asking(), allow_redirects=False) as response:
                return response.status == 200
        except _LOST as error:
            raise self.lost(error) from error

    async def post_json(self, path: str, body: object, most_bytes: int = 0) -> Any:
        """The whole answer to a request, of at most so many bytes; 0: `ANSWER_BYTES`.

        Raises:
            Unavailable: the engine is lost, or cannot go on.
            InvalidRequest: the engine refuses the request.
        """
        try:
            async with self._client.post(self.url + path, json=body, allow_redirects=False) as response:
                content = await _whole(response, most_bytes)
                if response.status != 200:
                    raise self._refusal(response.status, content)
                return msgspec.json.decode(content)
        except _LOST as error:
            raise self.lost(error) from error

    async def events(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """The messages of a stream of server-sent events, up to `[DONE]`. Raises as `post_json`."""
        try:
            asked = self._client.post(self.url + path, json=body, headers=headers, allow_redirects=False)
            async with asked as response:
                if response.status != 200:
                    raise self._refusal(response.status, await _whole(response))
                async for line in response.content:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield msgspec.json.decode(data)
        except _LOST as error:
            raise self.lost(error) from error
        raise Unavailable(f"{self.name} broke off an answer")

    def lost(self, error: Exception) -> Unavailable:
        """What an error on the way means."""
        return Unavailable(f"{self.name} at {self.url}: {error or type(error).__name__}")

    def _refusal(self, status: int, content: bytes) -> Exception:
        try:
            error = msgspec.json.decode(content)["error"]
            told = str(error["message"] if isinstance(error, Mapping) else error)
        except (ValueError, RecursionError, KeyError, TypeError):
            told = content.decode(errors="replace")
        if 400 <= status < 500 and status not in (408, 429):
            return InvalidRequest("sequence", f"{self.name} refuses it: {told[:REASON_CHARS]}")
        return Unavailable(f"{self.name} answers {status}: {told[:REASON_CHARS]}")


async def _whole(response: aiohttp.ClientResponse, most_bytes: int = 0) -> bytes:
    """An answer's body. Raises ValueError if the body is too long."""
    content, most_bytes = bytearray(), most_bytes or ANSWER_BYTES
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > most_bytes:
            raise ValueError(f"an answer of more than {most_bytes} bytes")
    return bytes(content)


def endpoint_for(endpoint: str, rank: int, host: str) -> str:
    """How a client connects to an endpoint at which the engine binds; a rank's port is the first port + rank."""
    scheme, _, place = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    bound, _, port = place.rpartition(":")
    return f"tcp://{host if bound in ('*', '0.0.0.0', '[::]', '::') else bound}:{int(port) + rank}"  # noqa: S104


def _asking() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
