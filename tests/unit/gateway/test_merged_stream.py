"""Several prompts in one plain completion: their answers are numbered on, and one that fails ends all."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moonpool.base.errors import Overloaded
from moonpool.base.rpc.api_keys import hash_key
from moonpool.base.runtime.tenant_turns import LEAST_BESIDE, TenantPlaces
from moonpool.client import AsyncClient, AsyncTokenStream
from moonpool.client.testing import FakeConductor, Script, answer
from moonpool.client.transport import GenerateCall
from moonpool.gateway.serving.merged_stream import (
    MAX_QUEUED_EVENTS,
    MAX_RUNNING_PROMPTS,
    MIN_BEGUN_PROMPTS,
    MergedStream,
)
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.gateway.test_client_disconnect import HeldCall, Holding
from tests.unit.gateway.test_openai_completions import events

from .fakes import Answers, answering, make_gateway, ready, settings, tokenizer


def of_prompt(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Prompt "7" is answered with "7 8 ", after three prompt tokens of which one was cached."""
    token = int(request.text) if request.text else request.tokens.token_ids[0]
    return answer([token, token + 1], request_id=f"r{token}", prompt_tokens=3, cached_tokens=1)


@pytest.mark.parametrize("prompts", [["10", "20", "30"], [[10, 5], [20, 5], [30, 5]]], ids=["texts", "tokens"])
async def test_prompts(prompts: list[Any]) -> None:
    async with answering(FakeConductor(of_prompt)) as gateway:
        answered = await gateway.plain(prompt=prompts)
        body = answered.json()
        streamed = events((await gateway.plain(prompt=prompts, stream=True)).text)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "10 11 "),
        (1, "20 21 "),
        (2, "30 31 "),
    ]
    assert (body["id"], answered.headers["x-request-id"]) == ("cmpl-r10", "r10")
    used = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    assert body["usage"] == {**used, "prompt_tokens_details": {"cached_tokens": 3}}
    texts = ["", "", ""]
    for event in streamed:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["10 11 ", "20 21 ", "30 31 "]
    assert [event["choices"][0]["finish_reason"] for event in streamed].count("stop") == 3


async def test_answers_of_each_prompt() -> None:
    """With two answers each, those of the second prompt are 2 and 3."""

    def two(request: pb.GenerateRequest) -> Script:
        placed, first, second, finished = of_prompt(request)
        second.delta.choice, second.delta.position = 1, 0
        for _ in range(2):
            finished.finished.choices.add(reason=finished.finished.reason)
        return [placed, first, second, finished]

    async with answering(FakeConductor(two)) as gateway:
        choices = (await gateway.plain(prompt=["10", "20"], n=2)).json()["choices"]
        streamed = events((await gateway.plain(prompt=["10", "20"], n=2, stream=True)).text)
    assert [choice["text"] for choice in choices] == ["10 ", "11 ", "20 ", "21 "]
    texts = [""] * 4
    for event in streamed:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["10 ", "11 ", "20 ", "21 "]


async def test_one_that_is_refused_refuses_all() -> None:
    overloaded = Overloaded("busy", reason="queue_full", retry_after_s=2.0)
    fake = FakeConductor(lambda request: [overloaded] if request.text == "20" else of_prompt(request))
    async with answering(fake) as gateway:
        refused = await gateway.plain(prompt=["10", "20", "30"])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")


async def test_one_that_ends_before_its_first_token_gives_its_place_back() -> None:
    overloaded = Overloaded("busy", reason="queue_full", retry_after_s=2.0)
    client, places = ready(FakeConductor(lambda request: [overloaded])).async_client(), TenantPlaces(1, 1)
    async with MergedStream([client.stream(prompt="x")], 1, 1, places, "ann") as several:
        with pytest.raises(Overloaded):
            async for _ in several:
                pass
    assert not places


async def test_leaving_cancels_all() -> None:
    """Those that run and wait."""
    holding = [Holding(answer()[:2]) for _ in range(2)]
    streams = [AsyncClient(transport=transport).stream(prompt="x") for transport in holding]
    async with MergedStream(streams, len(streams), 1, TenantPlaces(2, 2), "ann") as several:
        async for _ in several:
            break
        await asyncio.gather(*(transport.call.held.wait() for transport in holding))
    assert all(transport.call.cancelled for transport in holding)


async def test_streams_are_made_when_there_is_a_task_for_them() -> None:
    """The event loop is not held by a long list. Prompt tokens of those that have ended count, too."""
    made, client = 0, ready(FakeConductor(of_prompt)).async_client()

    def make(number: int) -> Iterator[AsyncTokenStream]:
        nonlocal made
        for index in range(number):
            made += 1
            yield client.stream(token_ids=[index])

    number, most = 3 * MAX_RUNNING_PROMPTS, list[int]()
    async with MergedStream(make(number), number, 1, TenantPlaces(64, 64), "ann") as several:
        ended = 0
        async for event in several:
            most.append(made - ended)
            ended += event.finish_reason is not None
    assert made == number
    assert max(most) <= MAX_RUNNING_PROMPTS + MAX_QUEUED_EVENTS + 1
    assert several.prompt_tokens == 3 * number
    assert several.result is not None
    assert several.result.usage.prompt_tokens == 3 * number
    texts = [choice.text for choice in several.result.choices]
    assert texts == [f"{index} {index + 1} " for index in range(number)]


class Unanswered(Holding):
    """A transport whose requests never get a token."""

    def __init__(self, expected: int) -> None:
        super().__init__([])
        self.asked, self.expected = 0, expected
        self.first, self.begun = asyncio.Event(), asyncio.Event()

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> GenerateCall:
        self.asked += 1
        self.first.set()
        if self.asked == self.expected:
            self.begun.set()
        return HeldCall(answer()[:1])


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x"] * 50}),
        ("/v1/embeddings", {"input": ["x"] * 50}),
        ("/v1/embeddings", {"input": [[1, 2]] * 50}),
        ("/rerank", {"query": "x", "documents": [str(number) for number in range(50)]}),
    ],
)
async def test_few_of_a_list_begin_before_the_first_tokens_come(
    path: str, body: dict[str, Any], beside: bool, tmp_path: Path
) -> None:
    """However many lists a tenant sends; beside another tenant's request one."""
    (tmp_path / "keys").write_text("".join(f"sha256:{hash_key(tenant)} {tenant}\n" for tenant in ("ann", "calm")))
    expected = 1 + LEAST_BESIDE if beside else MIN_BEGUN_PROMPTS
    transport = Unanswered(expected)
    with ThreadPoolExecutor(1) as threads:
        client = AsyncClient(transport=transport)
        app = make_gateway(client, settings(api_keys=tmp_path / "keys"), threads, tokenizer())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as http:

            def ask(tenant: str, path: str, body: dict[str, Any]) -> asyncio.Task[httpx2.Response]:
                return asyncio.create_task(http.post(path, json=body, headers={"authorization": f"Bearer {tenant}"}))

            asked = []
            async with asyncio.timeout(60):
                if beside:
                    asked.append(ask("calm", "/v1/completions", {"prompt": "x"}))
                    await transport.first.wait()
                asked += [ask("ann", path, body) for _ in range(3)]
                await transport.begun.wait()
            for _ in range(200):
                await asyncio.sleep(0)
            assert transport.asked == expected
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def test_bodies(gateway: Answers) -> None:
    """One prompt in a list is one; each has its own sampling."""
    assert (await gateway.plain(prompt=["x"])).json()["choices"][0]["text"] == "1 2 3 "
    assert (await gateway.plain(prompt=[["x"]])).status_code == 400
    assert len(gateway.fake.requests) == 1
