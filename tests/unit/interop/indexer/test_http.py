"""Registered publishers, queried as clients of Mooncake's conductor and of Dynamo's indexer do."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import xxhash

from moonpool.base.rpc.process import ProcessContext
from moonpool.base.telemetry.spans import Recorder
from moonpool.interop.indexer.config import IndexerConfig
from moonpool.interop.indexer.service import serve
from tests.unit.interop.adapter.fake_vllm import BLOCK_SIZE, FakeVllm, fake_vllm

WAIT_S = 30.0


class Indexed:
    """A running indexer, and an HTTP client."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, body: object, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await response.json()

    async def until(self, path: str, body: object, wanted: object) -> None:
        """Asks until the answer is the wanted one."""
        async with asyncio.timeout(WAIT_S):
            while (answer := await self.post(path, body)) != (200, wanted):
                await asyncio.sleep(0)
                last = answer
                assert last[0] == 200


class Announced:
    """Takes the lines that a process says."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def write(self, text: str) -> int:
        if text.startswith("ready: "):
            self.ready.set_result(text.removeprefix("ready: ").strip())
        return len(text)

    def flush(self) -> None:
        pass


@contextlib.asynccontextmanager
async def indexer(**settings: Any) -> AsyncIterator[Indexed]:
    said = Announced()
    context = ProcessContext("indexer-0", Recorder("indexer-0", None), said)  # type: ignore[arg-type]
    config = IndexerConfig(id="indexer-0", listen="127.0.0.1:0", **settings)
    task = asyncio.create_task(serve(context, config))
    try:
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
            ready: asyncio.Future[Any] = said.ready
            await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            yield Indexed(session, f"http://{said.ready.result()}")
    finally:
        context.stopping.set()
        await task


def registration(engine: FakeVllm, name: str, **changes: Any) -> dict[str, Any]:
    """In Mooncake's form."""
    return {
        "endpoint": engine.events,
        "replay_endpoint": engine.replays,
        "type": "vLLM",
        "modelname": "m",
        "instance_id": name,
        "block_size": BLOCK_SIZE,
        "dp_rank": 0,
        **changes,
    }


def local_hashes(tokens: list[int]) -> list[int]:
    """Dynamo's hashes of blocks, by another hand."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    size = 4 * BLOCK_SIZE
    return [xxhash.xxh3_64(data[at : at + size], 1337).intdigest() for at in range(0, len(data) - size + 1, size)]


def rolling_hashes(tokens: list[int]) -> list[int]:
    """Mooncake's hashes of sequences, by another hand."""
    found: list[int] = []
    for own in local_hashes(tokens):
        both = b"".join(number.to_bytes(8, "little") for number in (*found[-1:], own))
        found.append(xxhash.xxh3_64(both, 1337).intdigest() if found else own)
    return found


def hit(tokens: int, rank: int = 0) -> dict[str, object]:
    return {"longest_matched": tokens, "DP": {str(rank): tokens}, "GPU": tokens, "CPU": 0, "DISK": 0}


async def test_what_a_publisher_told_before_and_after_is_found_by_tokens_and_hashes(tmp_path: Path) -> None:
    draw = random.Random(5)
    async with indexer() as running, fake_vllm(tmp_path, "one", 100) as engine:
        first = [draw.randrange(100) for _ in range(5 * BLOCK_SIZE)]
        engine.engine.compute(first)
        await engine.publish()  # before anybody listens
        status, answer = await running.post("/register", registration(engine, "vllm-0"))
        assert (status, answer) == (200, {"status": "registered successfully", "instance_id": "vllm-0"})
        query = {"model": "m", "token_ids": [*first, 1], "block_size": BLOCK_SIZE}
        await running.until("/query", query, {"default": {"vllm-0": hit(5 * BLOCK_SIZE)}})
        second = [*first[: 2 * BLOCK_SIZE], *[draw.randrange(100) for _ in range(2 * BLOCK_SIZE)]]
        engine.engine.compute(second)
        await engine.publish()
        await running.until("/query", {**query, "token_ids": second}, {"default": {"vllm-0": hit(4 * BLOCK_SIZE)}})
        by_hash = {"model": "m", "block_size": BLOCK_SIZE}
        for field, hashes in (("seq_hashes", rolling_hashes(second)), ("block_hashes", local_hashes(second))):
            answer = await running.post("/query_by_hash", {**by_hash, field: hashes})
            assert answer == (200, {"default": {"vllm-0": hit(4 * BLOCK_SIZE)}})
        signed = [local_hash_ - (1 << 64) if local_hash_ >> 63 else local_hash_ for local_hash_ in local_hashes(second)]
        answer = await running.post("/query_by_hash", {"model_name": "m", "block_hashes": signed})
        assert answer[1]["scores"] == {"vllm-0": {"0": 4 * BLOCK_SIZE}}
        engine.engine.clear()
        await engine.publish()
        await running.until("/query", query, {"default": {}})


async def test_salts_tenants_models_and_instances_are_apart(tmp_path: Path) -> None:
    async with (
        indexer() as running,
        fake_vllm(tmp_path, "one", 100) as first,
        fake_vllm(tmp_path, "two", 100) as two,
    ):
        tokens = list(range(3 * BLOCK_SIZE))
        first.engine.compute(tokens, salt="s")
        await first.publish()
        two.engine.compute(tokens[: 2 * BLOCK_SIZE])
        await two.publish()
        assert (await running.post("/register", registration(first, "a", tenant_id="t")))[0] == 200
        dynamos = {"model_name": "m", "instance_id": 7, "block_size": BLOCK_SIZE, "endpoint": two.events}
        dynamos["replay_endpoint"] = two.replays
        assert await running.post("/register", dynamos) == (201, {"status": "ok"})
        query = {"model": "m", "token_ids": tokens}
        salted = {**query, "tenant_id": "t", "cache_salt": "s"}
        await running.until("/query", salted, {"t": {"a": hit(3 * BLOCK_SIZE)}})
        await running.until("/query", query, {"default": {"7": hit(2 * BLOCK_SIZE)}})
        for other in ({**salted, "cache_salt": ""}, {**salted, "tenant_id": "u"}, {**salted, "instance_id": "b"}):
            assert (await running.post("/query", other))[1] == {other["tenant_id"]: {}}
        assert (await running.post("/query", {**query, "lora_name": "l"}))[1] == {"default": {}}
        assert (await running.post("/query", {**query, "model": "other"}))[1] == {"default": {}}
        status, answer = await running.post("/query", {"model_name": "other", "token_ids": tokens})
        assert (status, answer) == (404, {"error": "no indexer for model=other tenant=default"})
        assert sorted(worker["instance_id"] for worker in await running.get("/workers")) == ["7", "a"]
        gone = await running.post("/unregister", {"modelname": "m", "instance_id": "a", "tenant_id": "t"})
        assert gone == (200, {"status": "unregistered successfully", "removed_instances": ["a|t|0"]})
        assert (await running.post("/query", salted))[1] == {"t": {}}


async def test_tiers_are_told_apart_and_sglangs_words_are_known(tmp_path: Path) -> None:
    async with indexer() as running, fake_vllm(tmp_path, "one", 100) as engine:
        model, tokens = engine.engine, list(range(4 * BLOCK_SIZE))
        model.maps = False  # arrays, as SGLang has them
        hashes = model.hashes(tokens)
        model.compute(tokens[: 2 * BLOCK_SIZE])
        for medium, first in (("CPU_PINNED", 0), ("DISK", 2)):
            blocks = hashes[first : first + 2]
            fields = [hashes[first - 1] if first else None, tokens[first * BLOCK_SIZE :][: 2 * BLOCK_SIZE]]
            model.events.append(["BlockStored", blocks, *fields, BLOCK_SIZE, None, medium])
        await engine.publish()
        await running.post("/register", registration(engine, "sg", type="SGLang"))
        wanted = {"longest_matched": 4 * BLOCK_SIZE, "DP": {"0": 4 * BLOCK_SIZE}}
        wanted |= {"GPU": 2 * BLOCK_SIZE, "CPU": 2 * BLOCK_SIZE, "DISK": 0}
        query = {"model": "m", "token_ids": tokens}
        await running.until("/query", query, {"default": {"sg": wanted}})
        model.events.append(["BlockRemoved", hashes[:1], "GPU"])
        await engine.publish()
        await running.until("/query", query, {"default": {"sg": wanted | {"GPU": 0}}})


async def test_blocks_of_a_lora_adapter_match_no_other_model(tmp_path: Path) -> None:
    async with indexer() as running, fake_vllm(tmp_path, "one", 100) as engine, fake_vllm(tmp_path, "two", 100) as two:
        tokens = list(range(3 * BLOCK_SIZE))
        engine.engine.compute(tokens, salt="s", lora="sql")
        engine.engine.compute(tokens[: 2 * BLOCK_SIZE], salt="s")
        await engine.publish()
        two.engine.compute(tokens)
        await two.publish()
        await running.post("/register", registration(engine, "a"))
        await running.post("/register", registration(two, "b", lora_name="sql"))  # tells no adapter by itself
        query = {"model": "m", "token_ids": tokens}
        salted = {**query, "cache_salt": "s"}
        await running.until("/query", {**salted, "lora_name": "sql"}, {"default": {"a": hit(3 * BLOCK_SIZE)}})
        await running.until("/query", {**query, "lora_name": "sql"}, {"default": {"b": hit(3 * BLOCK_SIZE)}})
        await running.until("/query", salted, {"default": {"a": hit(2 * BLOCK_SIZE)}})
        for other in (query, {**salted, "lora_name": "chat"}):
            assert (await running.post("/query", other))[1] == {"default": {}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/register", {"instance_id": "a", "block_size": 16, "modelname": "m"}, "endpoint"),
        ("/register", {"endpoint": "tcp://h:1", "instance_id": "a", "block_size": 0, "modelname": "m"}, "block_size"),
        ("/register", {"endpoint": "udp://h:1", "instance_id": "a", "block_size": 16, "modelname": "m"}, "endpoint"),
        ("/register", {"endpoint": "tcp://h:1", "instance_id": "a", "block_size": 16}, "model"),
        (
            "/register",
            {"endpoint": "tcp://h:1", "instance_id": "a", "block_size": 16, "modelname": "m", "type": "Mooncake"},
            "type",
        ),
        ("/query", {"token_ids": [1]}, "model"),
        ("/query", {"model": "m", "token_ids": ["x"]}, "token_ids"),
        ("/query", [], "body"),
    ],
)
async def test_bad_bodies_are_refused_by_the_fields_name(path: str, body: object, field: str) -> None:
    async with indexer() as running:
        status, answer = await running.post(path, body)
        assert status == 400
        assert field in answer["error"]


async def test_a_key_guards_everything_but_health(tmp_path: Path) -> None:
    async with indexer(api_key="k", max_publishers=1) as running, fake_vllm(tmp_path, "one", 100) as engine:
        body = registration(engine, "a")
        assert (await running.post("/register", body))[0] == 401
        assert (await running.post("/register", body, key="x"))[0] == 401
        assert (await running.post("/register", body, key="k"))[0] == 200
        assert (await running.post("/register", body, key="k"))[0] == 400  # it is there already
        assert (await running.post("/register", {**body, "instance_id": "b"}, key="k"))[0] == 429
        assert await running.get("/health") == {"status": "ok"}


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"authorization: Bearer \xff\xfe", b"{}", b"401"),
        (b"authorization: Bearer secret\r\ncontent-encoding: gzip", b"{}", b"400"),
        (b"authorization: Bearer secret", b'{"model": "\xff"}', b"400"),
        (b"authorization: Bearer secret", b'{"x":' + b"[" * 100_000, b"400"),
    ],
    ids=["key", "coding", "text", "deep"],
)
async def test_odd_bytes_are_refused(head: bytes, body: bytes, status: bytes) -> None:
    async with indexer(api_key="secret") as indexed:
        reader, writer = await asyncio.open_connection(*indexed.url.removeprefix("http://").split(":"))
        more = b"host: x\r\nconnection: close\r\ncontent-length: %d" % len(body)
        writer.write(b"POST /query HTTP/1.1\r\n" + head + b"\r\n" + more + b"\r\n\r\n" + body)
        answered = await reader.read()
        writer.close()
    assert answered.startswith(b"HTTP/1.1 " + status), answered
