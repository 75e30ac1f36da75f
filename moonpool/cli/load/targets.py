"""What a load is sent to: a conductor through the SDK, or a server that speaks OpenAI's plain completions over HTTP."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from urllib.parse import urlsplit

from moonpool.cli.load.frame import Outcome, Send
from moonpool.cli.load.prompts import Prompts
from moonpool.client import AsyncClient, SamplingParams, Slo
from moonpool.errors import ConfigError, Internal, InvalidRequest, Overloaded, StreamBroken, Unavailable

LINE_BYTES = 1 << 22
"""Longest event of a stream."""
ERROR_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def conductor(addresses: Sequence[str], prompts: Prompts, ttft_slo_s: float) -> AsyncIterator[Send]:
    """Requests through the SDK; one that is predicted to miss the TTFT limit is refused."""
    slo = Slo(ttft_s=ttft_slo_s if math.isfinite(ttft_slo_s) else None)
    async with AsyncClient(addresses) as client:

        async def send(index: int, outcome: Outcome, clock: Callable[[], float]) -> None:
            sampling = SamplingParams(max_tokens=prompts.output_tokens(index), temperature=0.0, ignore_eos=True)
            async for event in client.stream(token_ids=prompts.tokens(index).tolist(), sampling=sampling, slo=slo):
                outcome.note(len(event.token_ids), clock())

        yield send


@contextlib.asynccontextmanager
async def gateways(urls: Sequence[str], prompts: Prompts, ttft_slo_s: float, api_key: str) -> AsyncIterator[Send]:
    """Requests over HTTP, each on a connection of its own, to each in turn. Tokens count when their text comes.

    Raises:
        ConfigError: naming `address`: one is no http URL.
    """
    places = [_parts(url) for url in urls]
    limits = {"slo": {"ttft_s": ttft_slo_s}} if math.isfinite(ttft_slo_s) else {}

    async def send(index: int, outcome: Outcome, clock: Callable[[], float]) -> None:
        host, port, path = places[index % len(places)]
        body = {
            "prompt": prompts.tokens(index).tolist(),
            "max_tokens": prompts.output_tokens(index),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **limits,
        }
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
            try:
                writer.write(_request(f"{host}:{port}", path, json.dumps(body).encode(), api_key))
                await _read_head(reader)
                await _read_events(reader, outcome, clock)
            finally:
                writer.close()
        except OSError as error:
            raise Unavailable(str(error)) from error

    yield send


def _parts(url: str) -> tuple[str, int, str]:
    """Host, port and the path before `/v1`."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise ConfigError("address", f"{url}: {error}") from None
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError("address", f"must be HOST:PORT of a conductor or http://HOST:PORT of a gateway, is {url!r}")
    return parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1")


def _request(host: str, path: str, body: bytes, api_key: str) -> bytes:
    """HTTP/1.0: the answer comes as it is, and ends with the connection."""
    head = f"POST {path}/v1/completions HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    if api_key:
        head += f"authorization: Bearer {api_key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


async def _read_head(reader: asyncio.StreamReader) -> None:
    """Read the head of an answer.

    Raises:
        MoonpoolError: it is a refusal.
    """
    words = (await reader.readline()).split()
    while (await reader.readline()).strip():
        pass
    if len(words) < 2 or not words[1].isdigit():
        raise StreamBroken("the server has closed the connection, or does not speak HTTP")
    status = int(words[1])
    if status == 200:
        return
    told = (await reader.read(ERROR_BYTES)).decode(errors="replace")
    if status == 429:
        raise Overloaded(told, reason="http_429", retry_after_s=0.0)
    if status in (400, 401, 404, 413):
        raise InvalidRequest("", told)
    raise Unavailable(told) if status == 503 else Internal(f"HTTP {status}: {told}")


async def _read_events(reader: asyncio.StreamReader, outcome: Outcome, clock: Callable[[], float]) -> None:
    """Read a stream of events to its end; the usage tells how many tokens its texts were.

    Raises:
        StreamBroken: it ends too early, or with an error.
    """
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise StreamBroken(str(event["error"]))
        if any(choice.get("text") for choice in event.get("choices", ())):
            outcome.note(1, clock())
        if event.get("usage"):
            outcome.tokens = event["usage"]["completion_tokens"]
    raise StreamBroken("the stream ended before the answer did")
