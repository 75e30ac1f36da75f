"""What holds for every request: ids, names of the model, paths, heads, bodies, origins, half-closed connections."""

import asyncio
import gzip
import json
import socket
import struct

import anthropic
import pytest

from moonpool.base.errors import Overloaded
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway import http_connection, http_server
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, MODEL_TOKENS, TURNS, Answers, answering
from .test_client_disconnect import Holding
from .test_http_server import BODY, HEAD, STREAM, HeldUntil, ask, serving

POST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CLOSE = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
OLD = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = {"content-type": "application/json"}
ORIGIN = "https://chat.example.com"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


async def test_a_clients_own_id_is_returned_and_begins_the_requests_id(gateway: Answers) -> None:
    answered = await gateway.http.post(CHAT, json={"messages": TURNS}, headers={"x-request-id": "trace-1.a:b"})
    assert answered.headers["x-request-id"] == "trace-1.a:b"
    assert gateway.asked.request_id.startswith("trace-1.a:b-")
    for stream in (False, True):
        refused = await gateway.http.post(CHAT, json={"stream": stream}, headers={"x-request-id": "mine"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")


async def test_a_request_is_found_by_the_clients_own_id() -> None:
    async with answering(FakeConductor()) as gateway:
        await gateway.http.post(CHAT, json={"messages": TURNS}, headers={"x-request-id": "mine"})
        gateway.fake.explanations[gateway.asked.request_id] = pb.ExplainResponse(timeline=pb.Timeline())
        found = await gateway.http.get("/moonpool/requests/mine")
        assert (found.status_code, found.json()["request_id"]) == (200, "mine")
        assert (await gateway.http.get("/moonpool/requests/yours")).status_code == 404


async def test_the_same_id_twice_makes_two_requests(gateway: Answers) -> None:
    for _ in range(2):
        await gateway.http.post(CHAT, json={"messages": TURNS}, headers={"x-request-id": "mine"})
    assert len({request.request_id for request in gateway.fake.requests}) == 2


@pytest.mark.parametrize("given", ["", "a b", "x" * 97, "a~b", "é".encode().decode("latin-1")])
async def test_an_id_that_is_no_plain_name_is_replaced(gateway: Answers, given: str) -> None:
    answered = await gateway.http.get("/health", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert answered.headers["x-request-id"] not in ("", given)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", "", 200),
        ("[::1]:8000", "", 200),
        ("LOCALHOST", "", 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost:8000", ORIGIN, 403),
        ("localhost:8000", "null", 403),
        ("192.168.7.7", "", 200),
        ("evil.example.com:8000", "", 403),
        ("evil.example.com:8000", "http://evil.example.com:8000", 403),
        ("127.0.0.1.evil.example.com", "", 403),
    ],
)
async def test_without_keys_no_web_page_reaches_the_gateway(host: str, origin: str, status: int) -> None:
    """Neither by a name that its owner has pointed at this machine, nor from another origin."""
    headers = {"host": host} | ({"origin": origin} if origin else {})
    async with answering(FakeConductor(), allowed_hosts="") as gateway:
        for answered in (
            await gateway.http.get("/moonpool/state", headers=headers),
            await gateway.http.post(CHAT, json={"messages": TURNS}, headers=headers),
        ):
            assert answered.status_code == status
        if status == 403:
            assert answered.json()["error"]["code"] == "host_not_allowed"
            assert not gateway.fake.requests


async def test_hosts_and_origins_that_are_allowed() -> None:
    async with answering(FakeConductor(), allowed_hosts="llm.example.com") as gateway:
        assert (await gateway.http.get("/health", headers={"host": "llm.example.com:80"})).status_code == 200
        assert (await gateway.http.get("/health", headers={"host": "127.0.0.1"})).status_code == 403
    async with answering(FakeConductor(), allowed_hosts="", allowed_origins=ORIGIN, advertise="moon") as gateway:
        assert (await gateway.http.get("/health", headers={"host": "moon", "origin": ORIGIN})).status_code == 200


async def test_a_refusal_of_the_conductor_has_the_requests_id() -> None:
    overloaded = Overloaded("busy", reason="queue_full", retry_after_s=2.0)
    async with answering(FakeConductor(lambda _: [overloaded])) as gateway:
        refused = await gateway.chat()
        assert refused.status_code == 429
        assert refused.headers["x-request-id"] == gateway.asked.request_id != ""


async def test_prompts_of_one_request_have_ids_of_their_own(gateway: Answers) -> None:
    await gateway.plain(prompt=["a", "b"])
    first, second = sorted(request.request_id for request in gateway.fake.requests)
    assert second == f"{first}-1"


async def test_served_names() -> None:
    async with answering(FakeConductor(), served_model_name="best,tiny-chat") as gateway:
        for name in ("best", "tiny-chat", None):
            answered = await gateway.chat(model=name)
            assert (answered.status_code, answered.json()["model"]) == (200, "best")
        assert {request.model for request in gateway.fake.requests} == {""}
        for name in ("tiny", "other"):
            refused = await gateway.chat(model=name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        listed = (await gateway.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["best", "tiny-chat"]
        assert (await gateway.http.get("/v1/models/tiny-chat")).json()["max_model_len"] == MODEL_TOKENS
        assert (await gateway.http.get("/v1/models/tiny")).status_code == 404
        assert (await gateway.http.get("/health")).json()["model"] == "best"
        assert (
            await gateway.metric('vllm:request_success_total{engine="0",finished_reason="stop",model_name="best"}')
            == "3.0"
        )


async def test_any_name_stands_for_the_model() -> None:
    async with answering(FakeConductor(), any_model_name=True) as gateway:
        for name in ("gpt-4o", "tiny"):
            answered = await gateway.chat(model=name)
            assert (answered.status_code, answered.json()["model"]) == (200, "tiny")
        assert {request.model for request in gateway.fake.requests} == {""}


async def test_models_for_anthropics_client(gateway: Answers) -> None:
    client = anthropic.AsyncAnthropic(base_url="http://gateway", api_key="any", http_client=gateway.http)
    (model,) = (await client.models.list()).data
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.created_at.timestamp() == 7
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_paths_with_a_slash_at_the_end(gateway: Answers) -> None:
    assert (await gateway.http.get("/v1/models/")).json()["object"] == "list"
    assert (await gateway.http.post(f"{CHAT}/", json={"messages": TURNS})).status_code == 200
    assert (await gateway.http.get("/")).headers["content-type"].startswith("text/html")


async def test_version_ping_and_load(gateway: Answers) -> None:
    assert (await gateway.http.get("/version")).json()["version"]
    assert (await gateway.http.get("/ping")).status_code == (await gateway.http.post("/ping")).status_code == 200
    assert (await gateway.http.get("/load")).json() == {"server_load": 0}


async def test_load_counts_the_requests_that_are_being_answered() -> None:
    holding = Holding(answer()[:2])
    async with serving(AsyncClient(transport=holding)) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM)
        await holding.call.held.wait()
        asked = b"GET /load HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert (await ask(port, asked)).endswith(b'{"server_load":1}')
        writer.close()


async def test_bodies_with_a_byte_order_mark_and_compressed_ones(gateway: Answers) -> None:
    body = json.dumps({"messages": TURNS}).encode()
    marked = await gateway.http.post(CHAT, content=b"\xef\xbb\xbf" + body, headers=JSON)
    assert marked.status_code == 200
    for name, content in (("gzip", gzip.compress(body)), ("br", body)):
        refused = await gateway.http.post(CHAT, content=content, headers={**JSON, "content-encoding": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (415, "content-encoding")
    plain = await gateway.http.post(CHAT, content=body, headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200


async def test_pages_of_allowed_origins() -> None:
    async with answering(FakeConductor(), allowed_origins=f"{ORIGIN},http://localhost:3000") as gateway:
        allowed = await gateway.http.options(CHAT, headers=PREFLIGHT)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = await gateway.http.options(CHAT, headers={**PREFLIGHT, "origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers
        for body in ({"messages": TURNS}, {"messages": TURNS, "stream": True}, {}):
            answered = await gateway.http.post(CHAT, json=body, headers={"origin": ORIGIN})
            assert answered.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answered.headers["access-control-expose-headers"]
            other = await gateway.http.post(CHAT, json=body, headers={"origin": "https://evil.example.com"})
            assert "access-control-allow-origin" not in other.headers


async def test_without_the_setting_no_other_origin_is_allowed(gateway: Answers) -> None:
    refused = await gateway.http.options(CHAT, headers=PREFLIGHT)
    assert refused.status_code == 405
    answered = await gateway.http.post(CHAT, json={"messages": TURNS}, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answered.headers


async def test_heads_over_16_kib_are_refused() -> None:
    async with serving() as (_, port):
        for filler in (20_000, 60_000):
            head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"y" * filler + b"\r\n\r\n"
            assert (await ask(port, head)).split(b" ")[1] in (b"400", b"431")
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"y" * 15_000 + b"\r\n\r\n"
        assert (await ask(port, head)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        POST,
        STREAM,
        CLOSE,
    ],
    ids=["get", "post", "stream", "close"],
)
async def test_a_client_that_has_only_finished_sending_is_answered(request_bytes: bytes) -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        writer.write_eof()
        assert (await reader.read()).removeprefix(CONTINUE).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_client_that_has_only_finished_sending_is_answered_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often it is looked whether the client is gone."""
    monkeypatch.setattr(http_connection, "PROBE_S", (0.0,))
    holding = HeldUntil(answer())
    async with serving(AsyncClient(transport=holding)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST)
        writer.write_eof()
        await holding.begun.wait()
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        for _ in range(9):
            await asyncio.sleep(0)
        holding.go.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_client_that_leaves_later_ends_its_request_with_the_next_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "PROBE_S", ())
    monkeypatch.setattr(http_server, "SWEEP_S", 0.01)
    holding = Holding([])
    async with serving(AsyncClient(transport=holding)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST)
        writer.write_eof()
        await holding.call.held.wait()
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        client = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        writer.transport.abort()
        await holding.call.ended.wait()


@pytest.mark.parametrize("request_bytes", [POST, STREAM, CLOSE, OLD], ids=["whole", "stream", "close", "http/1.0"])
async def test_a_client_that_leaves_after_its_request_ends_the_request(request_bytes: bytes) -> None:
    """An interim response tells that the client is gone, before there is anything else to send.

    HTTP/1.0 has none, and its clients are gone when they send no more.
    """
    holding = Holding([])
    async with serving(AsyncClient(transport=holding)) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        await holding.call.held.wait()
        assert not holding.call.cancelled
        writer.close()
        await holding.call.ended.wait()
