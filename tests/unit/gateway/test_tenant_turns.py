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
from moonpool.base.json_parts import UNCHECKED_BYTES
from moonpool.base.rpc.api_keys import hash_key
from moonpool.client.testing import FakeConductor, answer
from tests.unit.fakes.beside import Held

from .fakes import CHAT, make_gateway, ready, scope, settings, tokenizer
from .test_client_disconnect import Connection

TENANTS = ("ann", "bob", "eve")
PADDING = b" " * UNCHECKED_BYTES
"""Behind a body: a large one is parsed on a thread."""


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
async def held_gateway(folder: Path) -> AsyncIterator[Clients]:
    clock = dataclasses.replace(world.Clock(), thread_time=lambda: 0.0)  # all works cost the same: they are counted
    world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))
    keys = folder / "keys"
    keys.write_text("".join(f"sha256:{hash_key(tenant)} {tenant}\n" for tenant in (*TENANTS, "calm")))
    threads, fake = Held(), ready(FakeConductor(lambda request: answer([1])))
    app = make_gateway(fake.async_client(), settings(api_keys=keys), threads, tokenizer())
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
