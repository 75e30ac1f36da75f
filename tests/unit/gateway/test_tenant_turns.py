"""Drawn loads of some tenants beside a calm one: the calm tenant's request waits for few of the others' works."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moonpool.base import world
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.json_parts import UNCHECKED_BYTES
from moonpool.base.rpc.api_keys import hash_key
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.serving.body_limits import BODY_COPIES, SCORE_BYTES
from moonpool.gateway.serving.generation_response import MAX_LOOP_SCORES
from moonpool.gateway.serving.tokenizer import MAX_VARIANT_BYTES
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.fakes.beside import Held

from .fakes import CHAT, TURNS, make_gateway, ready, scope, settings, tokenizer
from .test_client_disconnect import Connection
from .test_logprobs import scored
from .test_reasoning import THOUGHT, texts

TENANTS = ("ann", "bob", "eve")
PADDING = b" " * UNCHECKED_BYTES
"""Behind a body: a large one is parsed on a thread."""

TOOLS = [{"type": "function", "function": {"name": f"look_{number}"}} for number in range(8)]


def drawn_request(draws: random.Random) -> tuple[str, bytes]:
    """An endpoint, and a body that costs a thread something."""
    words = " ".join(draws.choices(("one", "two", "*three*", "[four]"), k=draws.randrange(1, 12)))
    path, body = draws.choice(
        [
            ("/tokenize", {"prompt": words}),
            ("/tokenize", {"messages": [{"role": "user", "content": words}]}),
            ("/detokenize", {"tokens": [draws.randrange(100) for _ in range(draws.randrange(1, 90))]}),
            ("/moonpool/markdown", {"text": words}),
            ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": words}]}),
            ("/v1/responses/input_tokens", {"input": words}),
            ("/v1/completions", {"prompt": [words[:8]] * draws.randrange(2, 40), "echo": True}),
            (CHAT, {"messages": [{"role": "user", "content": words}]}),
            (CHAT, {"messages": [{"role": "user", "content": words}], "tools": TOOLS[: draws.randrange(1, 9)]}),
        ]
    )
    large = path == CHAT or draws.random() < 0.3
    return path, json.dumps(body).encode() + PADDING * large


class Clients:
    """Clients of a gateway whose threads work when the test says so.

    Attributes:
        threads: what the gateway has handed to threads.
        http: a client of the gateway.
    """

    def __init__(self, app: Any, threads: Held, http: httpx2.AsyncClient) -> None:
        self.app, self.threads, self.http = app, threads, http

    def ask(self, tenant: str, path: str, body: bytes) -> asyncio.Task[httpx2.Response]:
        headers = {"authorization": f"Bearer {tenant}", "content-type": "application/json"}
        return asyncio.create_task(self.http.post(path, content=body, headers=headers))

    async def settled(self) -> None:
        """Everything waits for a thread, or is over."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def works_until(self, asked: asyncio.Task[httpx2.Response]) -> int:
        """Let works be done, one after the other, until a request is answered; return their number."""
        await self.settled()
        done = 0
        while not asked.done():
            assert self.threads.waiting
            self.threads.release(1)
            done += 1
            await self.settled()
        return done


@asynccontextmanager
async def held_gateway(
    folder: Path, conductor: FakeConductor | None = None, encoder: Tokenizer | None = None, **changes: Any
) -> AsyncIterator[Clients]:
    clock = dataclasses.replace(world.Clock(), thread_time=lambda: 0.0)  # all works cost the same: they are counted
    world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))
    keys = folder / "keys"
    keys.write_text("".join(f"sha256:{hash_key(tenant)} {tenant}\n" for tenant in (*TENANTS, "calm")))
    threads, fake = Held(), ready(conductor or FakeConductor(lambda request: answer([1])))
    app = make_gateway(fake.async_client(), settings(api_keys=keys, **changes), threads, encoder or tokenizer())
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Clients(app, threads, http)


@pytest.mark.parametrize("seed", range(12))
async def test_a_calm_tenant_waits_for_one_work_of_each_other_tenant(seed: int, tmp_path: Path) -> None:
    """For each of its own works: whatever the endpoints, sizes and numbers of the others' requests."""
    draws = random.Random(seed)
    async with held_gateway(tmp_path) as clients:
        path, body = drawn_request(draws)
        own = await clients.works_until(clients.ask("calm", path, body))
        storm = [clients.ask(draws.choice(TENANTS), *drawn_request(draws)) for _ in range(40)]
        await clients.settled()
        beside = await clients.works_until(clients.ask("calm", path, body))
        assert beside <= own * (1 + len(TENANTS)) + 1  # and the work that runs
        while not all(each.done() for each in storm):
            clients.threads.release(1)
            await clients.settled()
        assert [each.result().text for each in storm if each.result().status_code != 200] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/moonpool/markdown", {"text": "x"}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/completions", {"prompt": "x", "echo": True}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "metadata": {"large": "x" * UNCHECKED_BYTES}}),
    ],
)
async def test_what_waits_is_not_done_when_its_client_has_left(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    async with held_gateway(tmp_path) as clients:
        running = clients.ask("ann", "/moonpool/markdown", b'{"text": "runs"}')
        await clients.settled()
        client = Connection(body)
        waiting = asyncio.create_task(clients.app(scope(path, authorization="Bearer ann"), client.receive, client.send))
        await clients.settled()
        client.left.set()
        await waiting
        assert await clients.works_until(running) == 1
        assert not clients.threads.waiting
        assert json.loads((await running).content) == {"html": "<p>runs</p>\n"}


def scoring(tokens: int) -> FakeConductor:
    """Answers with so many tokens in one message, with two likely tokens beside each."""

    def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        placed, *_, last = answer([5])
        delta = pb.TokenDelta(token_ids=[5] * tokens, text="five", logprobs=scored(0, tokens))
        return [placed, pb.GenerateResponse(delta=delta), last]

    return FakeConductor(script)


@pytest.mark.parametrize("stream", [False, True])
async def test_many_log_probabilities_are_written_on_a_thread_and_few_on_the_loop(stream: bool, tmp_path: Path) -> None:
    body = json.dumps({"messages": TURNS, "logprobs": True, "top_logprobs": 2, "stream": stream}).encode()
    most = MAX_LOOP_SCORES // 3
    for tokens, works in ((most, 0), (most + 1, 1)):
        async with held_gateway(tmp_path, scoring(tokens)) as clients:
            asked = clients.ask("ann", CHAT, body)
            assert await clients.works_until(asked) == works
            assert (await asked).text.count('"top_logprobs":[{') == tokens


async def test_log_probabilities_are_not_written_when_their_client_has_left(tmp_path: Path) -> None:
    async with held_gateway(tmp_path, scoring(MAX_LOOP_SCORES)) as clients:
        running = clients.ask("ann", "/moonpool/markdown", b'{"text": "runs"}')
        await clients.settled()
        client = Connection({"messages": TURNS, "logprobs": True, "top_logprobs": 2})
        waiting = asyncio.create_task(clients.app(scope(CHAT, authorization="Bearer ann"), client.receive, client.send))
        await clients.settled()
        client.left.set()
        await waiting
        assert await clients.works_until(running) == 1
        assert not clients.threads.waiting


async def test_new_variables_of_a_template_are_tried_on_a_thread(tmp_path: Path) -> None:
    """Whether the template begins the thinking. What is large is not kept."""
    async with held_gateway(tmp_path, THOUGHT, texts()) as clients:
        for padding, works in (("", 1), ("", 0), ("x" * MAX_VARIANT_BYTES, 1), ("x" * MAX_VARIANT_BYTES, 1)):
            body = json.dumps({"messages": TURNS, "chat_template_kwargs": {"open": True, "padding": padding}}).encode()
            asked = clients.ask("ann", CHAT, body)
            assert await clients.works_until(asked) == works
            assert (await asked).json()["choices"][0]["message"]["content"] == "4."


async def test_log_probabilities_of_whole_answers_take_the_memory_of_bodies(tmp_path: Path) -> None:
    """A stream takes none."""
    tokens = (1 << 20) // 2 // BODY_COPIES // SCORE_BYTES // 3 - 10
    for more, stream, status in ((0, False, 200), (20, False, 503), (20, True, 200)):
        async with held_gateway(tmp_path, scoring(tokens + more), body_memory_bytes=1 << 20) as clients:
            body = json.dumps({"messages": TURNS, "logprobs": True, "top_logprobs": 2, "stream": stream}).encode()
            asked = clients.ask("ann", CHAT, body)
            await clients.works_until(asked)
            answered = await asked
            assert (answered.status_code, "body_memory_bytes" in answered.text) == (status, status == 503)
