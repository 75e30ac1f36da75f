"""`moonpool bench serve`: an open-loop benchmark of a running stack or OpenAI-compatible server."""

import asyncio
import contextlib
import dataclasses
import json
import math
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import ConfigError, Internal, InvalidRequest, Overloaded, StreamBroken, Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.load_generator import (
    LoadSummary,
    RequestOutcome,
    SendRequest,
    latency_chart,
    open_loop,
    poisson_arrivals,
    summarize,
    trace_loop,
)
from moonpool.client import AsyncClient, Slo
from moonpool.simulator.traces.mooncake import BLOCK_SIZE, Trace, TraceRequest

ORDINARY_TOKENS = 16
"""Ids below are left to special tokens."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Lengths in tokens.

    Attributes:
        prompt_tokens: per prompt; of a trace's at most so many, 0 = all.
        shared_tokens: part shared by a conversation.
        conversations: how many there are.
        output_tokens: per answer; of a trace's at most so many, 0 = all.
    """

    prompt_tokens: int
    shared_tokens: int
    conversations: int
    output_tokens: int


class PromptSource:
    """One load's prompts. Request `index`'s tokens are a function of the seed."""

    def __init__(
        self,
        shape: PromptShape,
        trace: Sequence[TraceRequest],
        seed: int,
        vocab_size: int,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """`trace` is empty for conversations; `block_size`: tokens per trace block."""
        self._shape = shape
        self._trace = trace
        self._seed = seed
        self._block_size = block_size
        self.vocab_size = vocab_size

    def tokens(self, index: int) -> "array[int]":
        """A request's prompt."""
        shape = self._shape
        if self._trace:
            return self._trace[index].tokens(self.vocab_size, self._block_size)[: shape.prompt_tokens or None]
        shared = self._random(shape.shared_tokens, "conversation", index % shape.conversations)
        return shared + self._random(shape.prompt_tokens - shape.shared_tokens, "turn", index)

    def output_tokens(self, index: int) -> int:
        """Tokens in the request's answer."""
        most = self._shape.output_tokens
        if not self._trace:
            return most
        wanted = self._trace[index].output_length
        return max(1, min(most or wanted, wanted))

    def _random(self, count: int, *name: object) -> "array[int]":
        generator = random.Random(f"{self._seed}/{name}")
        return array("i", generator.choices(range(ORDINARY_TOKENS, self.vocab_size), k=max(0, count)))


LINE_BYTES = 1 << 22
"""A stream's longest event, bytes."""
ERROR_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def sdk_target(addresses: Sequence[str], prompts: PromptSource, ttft_slo_s: float) -> AsyncIterator[SendRequest]:
    """Requests through the SDK; a request that is predicted to miss the TTFT limit is refused."""
    slo = Slo(ttft_s=ttft_slo_s if math.isfinite(ttft_slo_s) else None)
    async with AsyncClient(addresses) as client:

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            sampling = SamplingParams(max_tokens=prompts.output_tokens(index), temperature=0.0, ignore_eos=True)
            async for event in client.stream(token_ids=prompts.tokens(index).tolist(), sampling=sampling, slo=slo):
                outcome.note(len(event.token_ids), clock())

        yield send


@contextlib.asynccontextmanager
async def http_target(
    urls: Sequence[str], prompts: PromptSource, ttft_slo_s: float, api_key: str
) -> AsyncIterator[SendRequest]:
    """Requests over HTTP, each on a separate connection, to each URL in turn. Tokens count when their text comes.

    Raises:
        ConfigError: naming `address`: one is no http URL.
    """
    places = [_split_url(url) for url in urls]
    limits = {"slo": {"ttft_s": ttft_slo_s}} if math.isfinite(ttft_slo_s) else {}

    async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
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
                writer.write(_http_request(f"{host}:{port}", path, json.dumps(body).encode(), api_key))
                await _read_head(reader)
                await _read_events(reader, outcome, clock)
            finally:
                writer.close()
        except OSError as error:
            raise Unavailable(str(error)) from error

    yield send


def _split_url(url: str) -> tuple[str, int, str]:
    """Host, port and the path before `/v1`."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise ConfigError("address", f"{url}: {error}") from None
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError("address", f"must be HOST:PORT of a conductor or http://HOST:PORT of a gateway, is {url!r}")
    return parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1")


def _http_request(host: str, path: str, body: bytes, api_key: str) -> bytes:
    """HTTP/1.0: the answer comes as produced, and ends with the connection."""
    head = f"POST {path}/v1/completions HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json\r\n"
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


SHOWN_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}


@dataclasses.dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is sent, and where to.

    Attributes:
        addresses: HOST:PORT of conductors, each next asked after the last is lost, or http://HOST:PORT of gateways,
            asked in turn.
        model: folder or file of the model that is served; the vocabulary makes the prompts.
        requests: how many; a trace's first requests, 0 = all.
        rate: requests per second, Poisson; 0 with a trace.
        trace: file with times and lengths; None = conversations at a rate.
        time_scale: trace seconds in one second.
        shape: lengths of prompts and answers.
        warmup: first requests that do not count.
        ttft_slo_s, tpot_slo_s: limits of goodput, seconds.
        seed: for arrivals and prompts.
        api_key: for a gateway that asks for one.
    """

    addresses: Sequence[str]
    model: Path
    requests: int
    rate: float
    trace: Path | None
    time_scale: float
    shape: PromptShape
    warmup: int
    ttft_slo_s: float
    tpot_slo_s: float
    seed: int
    api_key: str = ""

    def check(self) -> None:
        """Check what flags alone do not.

        Raises:
            ConfigError: names the flag that is wrong.
        """
        if (self.rate > 0) == (self.trace is not None):
            raise ConfigError("rate", "give --rate, or --trace for the times of a trace")
        if self.time_scale <= 0:
            raise ConfigError("time_scale", f"must be positive, is {self.time_scale:g}")
        if self.trace is None and not self.shape.shared_tokens < self.shape.prompt_tokens:
            raise ConfigError("shared_tokens", "must be less than --prompt-tokens")
        if self.trace is None and not (self.requests and self.shape.output_tokens):
            raise ConfigError("requests", "--requests and --output-tokens must be above 0 without a trace")


async def send_load(plan: BenchPlan) -> list[RequestOutcome]:
    """Sends each request when due: of a trace also after those that the request waits for."""
    vocabulary = load_config(plan.model).vocab_size
    if plan.trace is None:
        arrivals = poisson_arrivals(plan.rate, plan.requests, plan.seed)
        async with _target(plan, PromptSource(plan.shape, (), plan.seed, vocabulary)) as send:
            return await open_loop(arrivals, send)
    source = Trace(plan.trace, plan.requests)
    wanted = list(source)
    prompts = PromptSource(plan.shape, wanted, plan.seed, vocabulary, source.block_size or BLOCK_SIZE)
    async with _target(plan, prompts) as send:
        return await trace_loop(wanted, plan.time_scale, send)


def _target(plan: BenchPlan, prompts: PromptSource) -> contextlib.AbstractAsyncContextManager[SendRequest]:
    if any("://" in address for address in plan.addresses):
        return http_target(plan.addresses, prompts, plan.ttft_slo_s, plan.api_key)
    return sdk_target(plan.addresses, prompts, plan.ttft_slo_s)


def json_report(plan: BenchPlan, summary: LoadSummary) -> dict[str, object]:
    """The JSON object for one run, without the key."""
    given = dataclasses.asdict(plan) | {"model": plan.model.name, "trace": plan.trace.name if plan.trace else None}
    del given["api_key"]
    flags = {name: None if value == math.inf else value for name, value in given.items()}
    return {"flags": flags, "summary": dataclasses.asdict(summary)}


def summary_table(summary: LoadSummary) -> str:
    """The summary for people."""
    lines = [
        f"{summary.requests} requests in {summary.duration_s:.2f} s, errors: {summary.errors or 'none'}",
        f"{summary.requests_per_s:.2f} requests/s, {summary.goodput_per_s:.2f} within the limits, "
        f"{summary.tokens_per_s:.1f} tokens/s",
        f"{'ms':6}" + "".join(f"{point:>12}" for point in ("mean", "p50", "p90", "p99")),
    ]
    for name, title in SHOWN_LATENCIES.items():
        values = getattr(summary, name)
        if values:
            lines.append(f"{title:6}" + "".join(f"{1e3 * value:12.2f}" for value in values.values()))
    return "\n".join(lines)


def exit_status(outcomes: Sequence[RequestOutcome]) -> int:
    """0 = every request was answered or refused for overload, 1 = a request failed otherwise."""
    return int(any(outcome.error not in ("", "Overloaded") for outcome in outcomes))


def run_serve(plan: BenchPlan, *, as_json: bool, out: Path | None, picture_file: Path | None) -> int:
    """Sends the load, prints the summary, writes the files; returns the exit status.

    Raises:
        ConfigError: names the flag that is wrong.
        TraceError: the trace is wrong.
    """
    plan.check()
    outcomes = asyncio.run(send_load(plan))
    summary = summarize(outcomes, warmup=plan.warmup, ttft_slo_s=plan.ttft_slo_s, tpot_slo_s=plan.tpot_slo_s)
    result = json.dumps(json_report(plan, summary), indent=2)
    for path, text in (
        (out, result + "\n"),
        (picture_file, latency_chart(f"{', '.join(plan.addresses)} under load", outcomes)),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(result if as_json else summary_table(summary))
    return exit_status(outcomes)
