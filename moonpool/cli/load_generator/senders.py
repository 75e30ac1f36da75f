"""How a request of a load is sent: through the SDK, or over HTTP."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from moonpool.base.errors import ConfigError, Internal, InvalidRequest, Overloaded, StreamBroken, Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest
from moonpool.cli.load_generator.prompts import PromptSource
from moonpool.client import AsyncClient, GenerateArguments, GenerateResult, Slo, TokenEvent

LINE_BYTES = 1 << 22
"""A stream's longest event, bytes."""
ERROR_BYTES = 1 << 16
PIECE_BYTES = 1 << 16
END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


def greedy(max_tokens: int) -> SamplingParams:
    """Sample exactly so many greedy tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def sdk_sender(
    client: AsyncClient,
    arguments: Callable[[int], GenerateArguments],
    *,
    on_event: Callable[[int, TokenEvent, float], None] = lambda index, event, now: None,
    on_result: Callable[[int, GenerateResult], None] = lambda index, result: None,
) -> SendRequest:
    """Send requests through the SDK.

    Args:
        client: of the conductor.
        arguments: a request's arguments, by index.
        on_event: called with each event and its time.
        on_result: called with the result of a request that has succeeded.
    """

    async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        stream = client.stream(**arguments(index))
        async for event in stream:
            now = clock()
            outcome.note(len(event.token_ids), now)
            on_event(index, event, now)
        assert stream.result is not None, "the stream has ended"
        on_result(index, stream.result)

    return send


def prompt_arguments(prompts: PromptSource, slo: Slo) -> Callable[[int], GenerateArguments]:
    """Ask for greedy answers to `prompts`; a request that is predicted to miss `slo` is refused."""
    return lambda index: {
        "token_ids": prompts.tokens(index).tolist(),
        "sampling": greedy(prompts.output_tokens(index)),
        "slo": slo,
    }


def http_sender(urls: Sequence[str], body: Callable[[int], Mapping[str, Any]], api_key: str) -> SendRequest:
    """Send requests over HTTP, each on a separate connection, to each URL in turn. Tokens count when their text comes.

    Raises:
        ConfigError: a URL is no http URL; names `address`.
    """
    places = [_split_url(url) for url in urls]

    async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        host, port, path = places[index % len(places)]
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
            try:
                # HTTP/1.0: the answer comes as produced, and ends with the connection.
                writer.write(http_request(f"{host}:{port}", body(index), path=path, version="1.0", api_key=api_key))
                await _read_head(reader)
                await _read_events(reader, outcome, clock)
            finally:
                writer.close()
        except OSError as error:
            raise Unavailable(str(error)) from error

    return send


@contextlib.asynccontextmanager
async def kept_http_sender(address: str, requests: Sequence[bytes], connections: int) -> AsyncIterator[SendRequest]:
    """Send whole HTTP requests over connections that are kept. No event is parsed, so that this costs little.

    Args:
        address: HOST:PORT of a gateway.
        requests: what is sent, by index.
        connections: opened before the first request; as many as there are requests at the same time.
    """
    host, _, port = address.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(connections)]
    idle = list(opened)

    async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        reader, writer = connection = idle.pop()
        try:
            writer.write(requests[index])
            await _read_chunks(reader, outcome, clock)
        finally:
            idle.append(connection)

    try:
        yield send
    finally:
        for _, writer in opened:
            writer.close()


def completion_body(token_ids: Sequence[int], max_tokens: int, slo: Slo | None = None) -> dict[str, Any]:
    """Ask `/v1/completions` for a streamed greedy answer of exactly `max_tokens` tokens."""
    limits = {"slo": {"ttft_s": slo.ttft_s}} if slo is not None and slo.ttft_s is not None else {}
    return {
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **limits,
    }


def _split_url(url: str) -> tuple[str, int, str]:
    """Return host, port and the path before `/v1`."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise ConfigError("address", f"{url}: {error}") from None
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError("address", f"must be HOST:PORT of a conductor or http://HOST:PORT of a gateway, is {url!r}")
    return parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1")


def http_request(
    host: str, content: Mapping[str, Any], *, path: str = "", version: str = "1.1", api_key: str = ""
) -> bytes:
    """Write a request to `/v1/completions` below `path`."""
    body = json.dumps(content).encode()
    head = f"POST {path}/v1/completions HTTP/{version}\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    if api_key:
        head += f"authorization: Bearer {api_key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


async def _read_head(reader: asyncio.StreamReader) -> None:
    """Read an answer's head.

    Raises:
        MoonpoolError: the answer is a refusal.
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


async def _read_events(reader: asyncio.StreamReader, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
    """Read an event stream to the end; the usage tells how many tokens the texts were.

    Raises:
        StreamBroken: the stream ends too early, or with an error.
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


async def _read_chunks(reader: asyncio.StreamReader, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
    """Read a streamed response to the end; the response begins with the first token.

    Raises:
        StreamBroken: the response is a refusal, or ends too early.
    """
    answer = bytearray(await reader.read(PIECE_BYTES))
    outcome.first = outcome.last = clock()
    if not answer.startswith(b"HTTP/1.1 200 OK"):
        raise StreamBroken(answer.decode(errors="replace"))
    while answer[-len(END_OF_CHUNKS) :] != END_OF_CHUNKS:
        piece = await reader.read(PIECE_BYTES)
        if not piece:
            raise StreamBroken(answer.decode(errors="replace"))
        answer += piece
    outcome.last = clock()
    outcome.tokens = sum(map(int, _COMPLETION_TOKENS.findall(answer)))
