"""HTTP towards one engine: connections, TLS, keys, and streams of server-sent events."""

import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable

CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0
LINE_BYTES = 1 << 20
"""Longest line in a stream of server-sent events."""


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
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=LINE_BYTES,
        )

    async def aclose(self) -> None:
        await self._client.close()

    async def get(self, path: str) -> str:
        """The text at a path; raises Unavailable."""
        try:
            async with self._client.get(self.url + path, timeout=_asking()) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.lost(error) from error
        if response.status != 200:
            raise Unavailable(f"{self.name} at {self.url}: {path} answers {response.status}")
        return text

    async def get_json(self, path: str) -> Any:
        """The JSON at a path; raises Unavailable."""
        try:
            return msgspec.json.decode(await self.get(path))
        except msgspec.DecodeError as error:
            raise self.lost(error) from error

    async def posted(self, path: str) -> bool:
        """Whether the engine does what a path says; raises Unavailable."""
        try:
            async with self._client.post(self.url + path, timeout=_asking()) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.lost(error) from error

    async def post_json(self, path: str, body: object) -> Any:
        """The whole answer to a request.

        Raises:
            Unavailable: the engine is lost, or cannot go on.
            InvalidRequest: the engine refuses the request.
        """
        try:
            async with self._client.post(self.url + path, json=body) as response:
                if response.status != 200:
                    raise self._refusal(response.status, await response.text())
                return msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self.lost(error) from error

    async def events(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """The messages of a stream of server-sent events, up to `[DONE]`. Raises as `post_json`."""
        try:
            async with self._client.post(self.url + path, json=body, headers=headers) as response:
                if response.status != 200:
                    raise self._refusal(response.status, await response.text())
                async for line in response.content:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield msgspec.json.decode(data)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self.lost(error) from error
        raise Unavailable(f"{self.name} broke off an answer")

    def lost(self, error: Exception) -> Unavailable:
        """What an error on the way means."""
        return Unavailable(f"{self.name} at {self.url}: {error or type(error).__name__}")

    def _refusal(self, status: int, text: str) -> Exception:
        try:
            error = msgspec.json.decode(text)["error"]
            told = error["message"] if isinstance(error, Mapping) else error
        except (msgspec.DecodeError, KeyError, TypeError):
            told = text[:200]
        if 400 <= status < 500 and status not in (408, 429):
            return InvalidRequest("sequence", f"{self.name} refuses it: {told}")
        return Unavailable(f"{self.name} answers {status}: {told}")


def endpoint_for(endpoint: str, rank: int, host: str) -> str:
    """How a client connects to an endpoint at which the engine binds; a rank's port is the first port + rank."""
    scheme, _, place = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    bound, _, port = place.rpartition(":")
    return f"tcp://{host if bound in ('*', '0.0.0.0', '[::]', '::') else bound}:{int(port) + rank}"  # noqa: S104


def _asking() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
