"""An engine that is broken or lies: requests fail by name or go on elsewhere, and the adapter goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from moonpool.base.errors import ConfigError, InvalidRequest, MoonpoolError, Unavailable
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.interop.adapter import engine_answer, engine_http
from moonpool.interop.adapter.base import EngineClient, EngineFacts, EngineLoad, EngineOutput, EnginePrompt
from moonpool.interop.adapter.checked_client import MAX_RANKS, CheckedClient
from moonpool.interop.adapter.engine_answer import EngineAnswer
from moonpool.interop.adapter.engine_http import EngineHttp
from moonpool.interop.adapter.sglang import SglangClient
from moonpool.interop.adapter.vllm import VllmClient
from moonpool.interop.kv_events.stream import EventSource
from tests.unit.interop.adapter.fake_sglang import fake_sglang

VOCAB = 100
SOURCE = EventSource(0, "ipc://none", "", "")
FACTS = EngineFacts("liar 1", "1", 16, 64, 1024, (SOURCE,), ())
IDLE = EngineLoad(0, 0, 0.0)
PROMPT = EnginePrompt("r", array("i", [1] * 20), SamplingParams(logprobs=1), 7, 4, 0, (2,), "", 0, -1)
Handler = Callable[[web.Request], Any]


class Liar(EngineClient):
    """Tells what a test says."""

    def __init__(self, *outputs: EngineOutput, facts: EngineFacts = FACTS, load: EngineLoad = IDLE) -> None:
        self.outputs, self.facts, self.told = outputs, facts, load
        self.closed = False

    async def describe(self) -> EngineFacts:
        return self.facts

    async def load(self) -> tuple[str, EngineLoad]:
        return "1", self.told

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        try:
            for output in self.outputs:
                yield output
        finally:
            self.closed = True

    async def clear_cache(self) -> bool:
        return True

    async def aclose(self) -> None: ...


def scored(tokens: Any, logprob: float = -1.0, top: int = 1, likely: int = 3, **changes: Any) -> EngineOutput:
    """Tokens with log probabilities."""
    count = len(tokens)
    found = Logprobs(
        array("f", [logprob] * count), array("I", [1] * count),
        array("i", [likely] * top * count), array("f", [logprob] * top * count),
    )  # fmt: skip
    return replace(EngineOutput(tuple(tokens), found), **changes)


LIES = {
    "more tokens than asked": [scored([5] * 5)],
    "more tokens, one by one": [scored([5])] * 5,
    "tokens behind the end": [scored([5], finish="stop"), scored([5])],
    "a token outside the vocabulary": [scored([VOCAB])],
    "a negative token": [scored([-1])],
    "a token of 2**40": [scored([1 << 40])],
    "a token that is a fraction": [scored([5.5])],
    "a token that is a text": [scored(["5"])],
    "no log probabilities": [EngineOutput((5,))],
    "log probabilities of other tokens": [replace(scored([5, 6]), token_ids=(5,))],
    "a log probability that is no number": [scored([5], logprob=float("nan"))],
    "more likely tokens than asked": [scored([5], top=2)],
    "a likely token outside the vocabulary": [scored([5], likely=VOCAB)],
    "more cached tokens than the prompt has": [scored([5], cached_tokens=10**9)],
    "a negative number of cached tokens": [scored([5], cached_tokens=-1)],
    "a number of cached tokens that is a text": [scored([5], cached_tokens="5")],
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_cannot_be_is_placed_elsewhere(lie: str) -> None:
    liar = Liar(*LIES[lie])
    with pytest.raises(Unavailable):
        [output async for output in CheckedClient(liar, VOCAB).generate(PROMPT)]
    assert liar.closed


async def test_an_honest_answer_is_passed_on() -> None:
    outputs = [EngineOutput(cached_tokens=16), scored([5, 99]), scored([0]), scored([2], finish="stop")]
    assert [output async for output in CheckedClient(Liar(*outputs), VOCAB).generate(PROMPT)] == outputs


@pytest.mark.parametrize(
    "facts",
    [
        {"block_size": 0}, {"block_size": 1 << 20}, {"block_size": 16.0}, {"blocks": 0}, {"blocks": 10**9},
        {"max_tokens": 0}, {"max_tokens": 10**30}, {"sources": ()}, {"sources": (SOURCE,) * (MAX_RANKS + 1)},
    ],
)  # fmt: skip
async def test_an_engine_that_cannot_be_is_not_there(facts: Mapping[str, Any]) -> None:
    assert await CheckedClient(Liar(), VOCAB).describe() == FACTS
    with pytest.raises(Unavailable, match="the engine tells a"):
        await CheckedClient(Liar(facts=replace(FACTS, **facts)), VOCAB).describe()


@pytest.mark.parametrize(
    "load", [(10**12, 0, 0.0), (0, -1, 0.0), (0, 0, float("nan")), (0, 0, float("inf")), (0, 0, 0.0, 1 << 40)]
)
async def test_a_load_that_cannot_be_is_a_missed_look(load: Any) -> None:
    assert await CheckedClient(Liar(), VOCAB).load() == (await Liar().load())
    with pytest.raises(Unavailable, match="the engine tells a"):
        await CheckedClient(Liar(load=EngineLoad(*load)), VOCAB).load()


async def test_ranks_of_sglang_are_bounded(tmp_path: Any) -> None:
    async with fake_sglang(tmp_path, "one", VOCAB) as engine:
        engine.info["dp_size"] = 10**9
        client = CheckedClient(SglangClient(EngineHttp("SGLang", engine.url)), VOCAB)
        with pytest.raises(Unavailable, match="number of ranks"):
            await client.describe()
        await client.aclose()


class Chatty(Liar):
    """Says something for ever, and no token."""

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        while True:
            await asyncio.sleep(0)
            yield EngineOutput(cached_tokens=0)


async def test_an_engine_that_says_much_and_no_token_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_answer, "TOKEN_TIMEOUT_S", 0.05)
    over = asyncio.Event()
    answer = EngineAnswer(PROMPT, lambda _: over.set(), lambda _: None)
    answer.start(Chatty())
    await asyncio.wait_for(over.wait(), 30)
    assert isinstance(answer.error, Unavailable)
    assert "gave no token" in str(answer.error)


# --- HTTP ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def engine_at(handler: Handler) -> AsyncIterator[EngineHttp]:
    """A client of a server that answers everything by `handler`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = EngineHttp("vLLM", f"http://127.0.0.1:{runner.addresses[0][1]}", "key")
    try:
        yield http
    finally:
        await http.aclose()
        await runner.cleanup()


async def endless(request: web.Request, piece: bytes, status: int = 200) -> web.StreamResponse:
    response = web.StreamResponse(status=status)
    await response.prepare(request)
    while True:
        await response.write(piece)


async def told(http: EngineHttp) -> list[str]:
    """What becomes of each kind of question."""
    found = []
    for ask in (http.get("/x"), http.get_json("/x"), http.post_json("/x", {}), _events(http)):
        with pytest.raises(MoonpoolError) as caught:
            await asyncio.wait_for(ask, 60)
        assert isinstance(caught.value, Unavailable | InvalidRequest)
        found.append(str(caught.value))
    return found


async def _events(http: EngineHttp) -> list[Any]:
    return [event async for event in http.events("/x", {})]


@pytest.mark.parametrize("status", [200, 500])
async def test_endless_answers_are_broken_off(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "ANSWER_BYTES", 1 << 18)
    async with engine_at(lambda request: endless(request, b"x" * 65536, status)) as http:
        *whole, stream = await told(http)
        assert all("more than 262144 bytes" in error for error in whole)
        assert "more than" in stream  # a line without an end


async def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(json.dumps({"data": "x" * (32 << 20)}).encode())

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["accept-encoding"] == "identity"
        return web.Response(body=bomb, headers={"content-encoding": "gzip"})

    async with engine_at(handler) as http:
        assert len(await told(http)) == 4


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_prompts_and_keys_follow_no_redirect(status: int) -> None:
    elsewhere = list[str]()

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/elsewhere":
            elsewhere.append(await request.text())
            return web.json_response({})
        return web.Response(status=status, headers={"location": "/elsewhere"})

    async with engine_at(handler) as http:
        assert all(str(status) in error for error in await told(http))
        assert await http.posted("/x") is False
    assert elsewhere == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"NaN", b"[" * 100_000, b"[]", b"3", b'"x"', b'{"data":[]}', b'{"version":1e999}', b"null"],
    ids=range(10),
)
async def test_nonsense_is_an_engine_that_is_not_there(content: bytes) -> None:
    async with engine_at(lambda request: _answered(content)) as http:
        for made in (VllmClient, SglangClient):
            client = CheckedClient(made(http), VOCAB)
            with pytest.raises((Unavailable, ConfigError)):  # the latter names what the engine must be started with
                await client.describe()
            with suppress(Unavailable):
                life, _ = await client.load()
                assert (made, life) == (VllmClient, "")  # a page of metrics without the engine's: another life


async def _answered(content: bytes) -> web.Response:
    return web.Response(body=content)


@pytest.mark.parametrize(
    "line",
    [
        b"NaN", b"[1]", b"7", b'{"choices":[{"token_ids":[1e999]}]}', b'{"choices":[{},{}]}', b'{"choices":7}',
        b'{"choices":[{"token_ids":[5],"logprobs":{"content":[{"logprob":null}]}}]}', b'{"error":{"message":"broken"}}',
        b'{"choices":[{"token_ids":[5],"logprobs":{"content":[{"logprob":-1,"rank":-5}]}}]}', b"x" * (3 << 20),
        b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[null,5]]}}', b'{"output_ids":7}',
        b'{"meta_info":{"completion_tokens":"many"}}', b'{"usage":[],"choices":[{"token_ids":[5]}],"meta_info":[1]}',
    ],
    ids=range(14),
)  # fmt: skip
@pytest.mark.parametrize("made", [VllmClient, SglangClient])
async def test_a_stream_of_nonsense_is_placed_elsewhere(made: Any, line: bytes) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"data: " + line + b"\n\ndata: [DONE]\n\n")

    async with engine_at(handler) as http:
        client = CheckedClient(made(http), VOCAB)
        with pytest.raises(Unavailable):
            [output async for output in client.generate(PROMPT)]


async def test_what_an_engine_says_of_a_refusal_is_cut() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "x" * 100_000}}, status=400)

    async with engine_at(handler) as http:
        assert all(len(error) < 1_000 for error in await told(http))
