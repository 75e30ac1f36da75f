"""The endpoint picker, asked as Envoy asks it: whole and streamed bodies, subsets, refusals."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.tls import NAME
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.telemetry.spans import Recorder
from moonpool.conductor import endpoint_picker
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.picker_body import read_body
from moonpool.conductor.service import conductor
from moonpool.v1 import conductor_pb2
from moonpool.v1.ext_proc_pb2 import (
    BodyResponse,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from moonpool.v1.ext_proc_pb2_grpc import ExternalProcessorStub
from tests.unit.base.rpc.certificates import issue
from tests.unit.conductor.fakes import BLOCK_SIZE, FakeMember, decode, prefill
from tests.unit.conductor.stack import TINY, WAIT_S, Stack, stack, tiny

DESTINATION = "x-gateway-destination-endpoint"
DUPLEX = ProtocolConfiguration(
    request_body_mode=ProtocolConfiguration.FULL_DUPLEX_STREAMED,
    response_body_mode=ProtocolConfiguration.FULL_DUPLEX_STREAMED,
)
BUFFERED = ProtocolConfiguration(request_body_mode=ProtocolConfiguration.BUFFERED)


class Proxy:
    """One HTTP request at a proxy."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **message: Any) -> None:
        await self.call.write(ProcessingRequest(**message))

    async def headers(self, config: ProtocolConfiguration, *, alone: bool = False, **headers: str) -> None:
        found = [HeaderValue(key=key.replace("_", "-"), raw_value=value.encode()) for key, value in headers.items()]
        message = HttpHeaders(headers=HeaderMap(headers=found), end_of_stream=alone)
        await self.send(request_headers=message, protocol_config=config)

    async def body(self, *pieces: bytes) -> None:
        for at, piece in enumerate(pieces):
            await self.send(request_body=HttpBody(body=piece, end_of_stream=at == len(pieces) - 1))

    async def read(self) -> ProcessingResponse:
        response: ProcessingResponse = await asyncio.wait_for(self.call.read(), WAIT_S)
        return response


@asynccontextmanager
async def proxied(*engines: FakeMember, **settings: Any) -> AsyncIterator[tuple[Stack, Any]]:
    """A conductor with engines that have HTTP servers at NAME:80; yields the stub of its picker, too."""
    async with stack(picker_listen="127.0.0.1:0", **settings) as running:
        for engine in engines:
            hello: conductor_pb2.JoinHello = await running.serve(engine)
            hello.http_address = f"{engine.id}:80"
            await running.follow(engine, hello)
            await running.joined(engine)
        await running.join(decode())
        await running.until(lambda: running.cluster.registry.ready)
        async with Channels() as channels:
            yield running, ExternalProcessorStub(channels.get(running.servicer.picker_address))


def set_headers(response: Any) -> dict[str, str]:
    return {
        set_header.header.key: set_header.header.raw_value.decode()
        for set_header in response.header_mutation.set_headers
    }


def body_of(responses: Sequence[ProcessingResponse]) -> bytes:
    parts = [response.request_body.response.body_mutation.streamed_response for response in responses]
    assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [True]
    return b"".join(part.body for part in parts)


def held(tokens: list[int]) -> list[bytes]:
    return list(block_keys(chain_root(b"n" * 32, ""), tokens, BLOCK_SIZE))


async def test_a_streamed_request_goes_where_its_prefix_is_and_on_unchanged() -> None:
    first, second, tokens = prefill(0), prefill(1), list(range(6 * BLOCK_SIZE))
    second.keys = held(tokens)
    async with proxied(first, second, policy="sglang") as (running, stub):  # the longest prefix decides
        await running.until(lambda: running.servicer.core.cluster.index.held("prefill-1") == 6)
        proxy = Proxy(stub.Process())
        sent = json.dumps({"prompt": [*tokens, 7], "stream": True, "unknown": "x" * 150_000}).encode()
        await proxy.headers(DUPLEX, content_type="application/json")
        await proxy.body(sent[:1000], sent[1000:90_000], sent[90_000:])
        picked = await proxy.read()
        headers = set_headers(picked.request_headers.response)
        assert headers[DESTINATION].split(",") == ["prefill-1:80", "prefill-0:80"]
        told: Any = picked.dynamic_metadata["envoy.lb"]
        assert told[DESTINATION] == headers[DESTINATION]
        pieces = [await proxy.read()]
        while not pieces[-1].request_body.response.body_mutation.streamed_response.end_of_stream:
            pieces.append(await proxy.read())
        assert body_of(pieces) == sent
        assert len(running.servicer.core.cluster.claims) == 1  # the prompt counts at its engine
        message = ProcessingRequest(response_headers=HttpHeaders())
        message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": "prefill-0:80"})
        await proxy.call.write(message)
        assert (await proxy.read()).HasField("response_headers")
        assert not running.servicer.core.cluster.claims
        assert (running.servicer.endpoints_as_picked, running.servicer.endpoints_elsewhere) == (0, 1)
        await proxy.send(response_body=HttpBody(body=b"data: 1\n\n"))
        passed = (await proxy.read()).response_body.response.body_mutation.streamed_response
        assert (passed.body, passed.end_of_stream) == (b"data: 1\n\n", False)
        await proxy.send(response_trailers=HttpTrailers())
        assert (await proxy.read()).HasField("response_trailers")
        await proxy.call.done_writing()
        await running.rest()


async def test_a_buffered_chat_is_answered_step_by_step() -> None:
    async with proxied(prefill()) as (running, stub):
        proxy = Proxy(stub.Process())
        await proxy.headers(BUFFERED)
        assert (await proxy.read()) == ProcessingResponse(request_headers={})  # type: ignore[arg-type]
        turns = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "image_url"}]}]
        await proxy.body(json.dumps({"messages": turns, "max_tokens": 3}).encode())
        picked = (await proxy.read()).request_body.response
        assert set_headers(picked) == {DESTINATION: "prefill-0:80"}
        assert picked.clear_route_cache
        served = HeaderValue(key=f"{DESTINATION}-served", value="prefill-0:80")
        await proxy.send(response_headers=HttpHeaders(headers=HeaderMap(headers=[served])))
        assert (await proxy.read()).HasField("response_headers")
        assert (running.servicer.endpoints_as_picked, running.servicer.endpoints_elsewhere) == (1, 0)
        proxy.call.cancel()  # the client has left: the prompt counts no more
        await running.until(lambda: not running.servicer.core.cluster.claims)


async def test_requests_without_a_body_and_subsets() -> None:
    async with proxied(prefill(0), prefill(1)) as (_, stub):
        proxy = Proxy(stub.Process())
        await proxy.headers(DUPLEX, alone=True)
        assert len(set_headers((await proxy.read()).request_headers.response)[DESTINATION].split(",")) == 2
        for allowed, status in ((["prefill-1:80"], 0), (["other:80"], 503), ([], 503)):
            proxy, message = Proxy(stub.Process()), ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True))
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": allowed})
            await proxy.call.write(message)
            response = await proxy.read()
            assert response.immediate_response.status.code == status
            if not status:
                assert set_headers(response.request_headers.response)[DESTINATION] == "prefill-1:80"


async def refused(stub: Any, body: bytes, **headers: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    proxy = Proxy(stub.Process())
    await proxy.headers(DUPLEX, **headers)
    await proxy.body(body)
    answer = (await proxy.read()).immediate_response
    told = {set_header.header.key: set_header.header.raw_value.decode() for set_header in answer.headers.set_headers}
    error = json.loads(answer.body)["error"]
    assert answer.details == error["code"]
    return answer.status.code, error, told


async def test_refusals_have_our_reasons(monkeypatch: Any) -> None:
    busy = prefill()
    async with proxied(busy) as (running, stub):
        prompt = json.dumps({"prompt": "Hello"}).encode()
        status, error, told = await refused(stub, prompt, x_slo_ttft_ms="0.001")
        assert (status, error["code"], error["type"]) == (429, "ttft_slo", "rate_limit_error")
        assert told["content-type"] == "application/json"
        assert (await refused(stub, b"{"))[0] == 400
        assert (await refused(stub, b"[]"))[0] == 400
        assert (await refused(stub, prompt, x_slo_ttft_ms="soon"))[1]["message"].startswith("x-slo-ttft-ms")
        assert (await refused(stub, b'{"messages": [1]}'))[1]["message"].startswith("messages[0]")
        assert (await refused(stub, b'{"messages": 1}'))[1]["message"].startswith("messages: must be a list")
        assert (await refused(stub, json.dumps({"prompt": list(range(9999))}).encode()))[0] == 400
        monkeypatch.setattr(endpoint_picker, "MAX_BODY_BYTES", 100)
        assert (await refused(stub, b" " * 101))[0] == 413
        busy.load.draining = True
        assert busy.agent is not None
        busy.agent.notify()
        await running.until(lambda: not running.cluster.registry.ready)
        assert (await refused(stub, b"{}"))[0] == 503
        await running.rest()


WRONG: list[tuple[str, Any]] = [
    ("messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": 1}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "user", "tool_calls": ["f"]}]}),
    ("messages[0].tool_calls[0].function", {"messages": [{"role": "user", "tool_calls": [{"function": 1}]}]}),
    ("messages[0].tool_calls[0].id", {"messages": [{"role": "user", "tool_calls": [{"id": {}}]}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": 1, "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 1}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"text": 1}]}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "user", "content": "x", "tool_call_id": 1}]}),
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("tools", {"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}),
    ("chat_template_kwargs", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": [1]}),
    ("cache_salt", {"prompt": "x", "cache_salt": 1}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [1, None]}),
    ("prompt", {"prompt": [[1, "a"]]}),
    ("prompt", {"prompt": [1, 1 << 31]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": 1.5}),
    ("input", {"input": [[None]]}),
    ("body", "\ud800"),
    ("body", 1),
]


@pytest.mark.parametrize("wrong", range(len(WRONG)), ids=lambda index: f"{index} {WRONG[index][0]}")
def test_wrong_shapes_name_the_field(wrong: int) -> None:
    field, body = WRONG[wrong]
    with pytest.raises(InvalidRequest) as refused:
        require_prompt(read_body(json.dumps(body).encode(), {}))
    assert refused.value.field == field


def require_prompt(message: conductor_pb2.GenerateRequest) -> None:
    """As the conductor does: a chat without turns has no prompt."""
    if message.HasField("chat") and not message.chat.messages:
        raise InvalidRequest("messages", "no turns")


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b"\xff",
        b"{}" * 2,
    ],
)
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_body(raw, {})


def test_limits_become_seconds() -> None:
    slo = read_body(b"", {"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "25.5"}).slo
    assert (slo.ttft_s, slo.tbt_s) == (1.5, 0.0255)


@pytest.mark.parametrize("header", ["nan", "inf", "-inf", "", "1,5", "9" * 400])
def test_limits_are_finite_milliseconds(header: str) -> None:
    with pytest.raises(InvalidRequest, match="must be milliseconds"):
        read_body(b"", {"x-slo-tpot-ms": header})


def test_drawn_bodies_are_requests_or_refused_by_name() -> None:
    """Whatever JSON stands where: a message that can be sent, or an error of the client."""
    draws = random.Random(1)
    names = [
        "messages",
        "prompt",
        "role",
        "content",
        "text",
        "tool_calls",
        "function",
        "name",
        "tools",
        "cache_salt",
        "id",
    ]

    def value(depth: int) -> Any:
        kind = draws.randrange(8 if depth else 6)
        plain: list[Any] = [None, True, draws.choice([0, -1, 7, 1 << 40]), 1.5, draws.choice(["", "user", "x"]), {}]
        if kind < 6:
            return plain[kind]
        if kind == 6:
            return [value(depth - 1) for _ in range(draws.randrange(3))]
        return {draws.choice(names): value(depth - 1) for _ in range(draws.randrange(4))}

    refused = 0
    for _ in range(3000):
        body = {draws.choice(names): value(5) for _ in range(3)} | {"max_tokens": value(1)}
        try:
            read_body(json.dumps(body).encode(), {}).SerializeToString()
        except InvalidRequest:
            refused += 1
    assert 300 < refused < 2700


async def test_a_costly_body_is_refused_before_it_is_parsed_and_bodies_together_have_a_bound(monkeypatch: Any) -> None:
    async with proxied(prefill()) as (running, stub):
        tools = b"[" + b"{}," * 400_000 + b"{}]"
        status, error, _ = await refused(stub, b'{"messages": [], "tools": ' + tools + b"}")
        assert (status, "objects" in error["message"]) == (400, True)
        monkeypatch.setattr(endpoint_picker, "MAX_BODIES_BYTES", 100)
        first = Proxy(stub.Process())
        await first.headers(BUFFERED)
        await first.read()
        await first.send(request_body=HttpBody(body=b" " * 90))
        assert (await first.read()).HasField("request_body")
        assert (await refused(stub, b" " * 20))[0] == 503
        first.call.cancel()
        async with asyncio.timeout(WAIT_S):
            while (status := (await refused(stub, b" " * 90 + b"["))[0]) == 503:
                pass  # until the conductor has seen that the first proxy left
        assert status == 400
        await running.rest()


async def test_without_such_engines_the_answer_is_503() -> None:
    async with stack(prefill(), decode(), picker_listen="127.0.0.1:0") as running, Channels() as channels:
        await running.until(lambda: running.cluster.registry.ready)
        status, error, _ = await refused(ExternalProcessorStub(channels.get(running.servicer.picker_address)), b"{}")
        assert (status, error["code"]) == (503, "unavailable")


async def test_a_body_in_pieces_with_calls_of_tools_and_a_salt() -> None:
    async with proxied(prefill()) as (running, stub):
        proxy = Proxy(stub.Process())
        await proxy.headers(BUFFERED)
        await proxy.read()
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        fields = {"messages": turns, "tools": tools, "chat_template_kwargs": {"x": 1}, "cache_salt": "s"}
        sent = json.dumps(fields).encode()
        await proxy.body(sent[:40], sent[40:])
        assert (await proxy.read()).request_body == BodyResponse()
        assert set_headers((await proxy.read()).request_body.response) == {DESTINATION: "prefill-0:80"}
        await proxy.send(response_body=HttpBody(body=b"{}", end_of_stream=True))
        assert (await proxy.read()).response_body == BodyResponse()
        await proxy.call.done_writing()
        await running.rest()


async def test_a_body_that_ends_with_trailers_is_picked_for_once() -> None:
    async with proxied(prefill()) as (running, stub):
        proxy = Proxy(stub.Process())
        await proxy.headers(DUPLEX)
        await proxy.send(request_body=HttpBody(body=json.dumps({"prompt": [[1, 2], [3]]}).encode()))
        await proxy.send(request_trailers=HttpTrailers())
        assert set_headers((await proxy.read()).request_headers.response) == {DESTINATION: "prefill-0:80"}
        assert (await proxy.read()).HasField("request_body")
        assert (await proxy.read()).HasField("request_trailers")
        await proxy.call.done_writing()
        await running.rest()


async def test_a_subset_may_be_one_text() -> None:
    async with proxied(prefill(0), prefill(1)) as (_, stub):
        proxy, message = Proxy(stub.Process()), ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True))
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": "other:80, prefill-1:80"})
        await proxy.call.write(message)
        assert set_headers((await proxy.read()).request_headers.response)[DESTINATION] == "prefill-1:80"


# --- TLS, and several conductors --------------------------------------------------------------------------------------


async def health(channels: Channels, address: str) -> Any:
    """What a picker's health check says."""
    stub: Any = health_pb2_grpc.HealthStub(channels.get(address))
    answer = await stub.Check(health_pb2.HealthCheckRequest(service="envoy.service.ext_proc.v3.ExternalProcessor"))
    return answer.status


@asynccontextmanager
async def certified(folder: Path, **settings: Any) -> AsyncIterator[str]:
    """A conductor with certificates; yields where its picker is."""
    issue(folder, "conductor")
    files = {"tls_cert": "conductor.pem", "tls_key": "conductor.key", "tls_ca": "ca.pem"}
    tls: dict[str, Any] = {name: folder / file for name, file in files.items()}
    config = ConductorConfig(
        listen="127.0.0.1:0", id="c", model=str(TINY), picker_listen="127.0.0.1:0",
        **tls, **settings,
    )  # fmt: skip
    recorder, metrics = Recorder("c", None), PrometheusMetrics(config.service())
    async with conductor(config, tiny(), 7, recorder, metrics) as (servicer, _):
        yield servicer.picker_address
        await servicer.drain(0.0)


async def reached(address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Whether a proxy gets an answer."""
    options = [("grpc.ssl_target_name_override", NAME)]
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options)
    )
    async with channel:
        proxy = Proxy(ExternalProcessorStub(channel).Process())
        try:
            await proxy.headers(BUFFERED, alone=True)
            return (await proxy.read()).immediate_response.status.code == 503
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("auto", {"plain": False, "anybody": True, "certified": True}),
        ("server", {"plain": False, "anybody": True, "certified": True}),
        ("mutual", {"plain": False, "anybody": False, "certified": True}),
        ("none", {"plain": True, "anybody": False, "certified": False}),
    ],
)
async def test_proxies_connect_within_tls_as_the_setting_says(
    tmp_path: Path, setting: str, found: dict[str, bool]
) -> None:
    async with certified(tmp_path, picker_tls=setting) as address:
        issue(tmp_path, "gateway")
        authority, *own = [(tmp_path / name).read_bytes() for name in ("ca.pem", "gateway.key", "gateway.pem")]
        ways = {
            "plain": None,
            "anybody": grpc.ssl_channel_credentials(authority),
            "certified": grpc.ssl_channel_credentials(authority, *own),
        }
        assert {name: await reached(address, way) for name, way in ways.items()} == found


async def test_tls_for_proxies_needs_a_certificate() -> None:
    with pytest.raises(ConfigError, match="picker_tls: server needs tls_cert"):
        async with stack(picker_listen="127.0.0.1:0", picker_tls="server"):
            pass


async def test_a_proxy_turns_to_a_conductor_that_has_engines() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    first, second = prefill(0), prefill(0)
    async with proxied(first) as (near, _), proxied(second) as (far, _), Channels() as channels:
        pickers = [picker.servicer.picker_address for picker in (near, far)]

        async def told(*statuses: Any) -> None:
            async with asyncio.timeout(WAIT_S):
                while [await health(channels, picker) for picker in pickers] != list(statuses):
                    await near.look()

        await told(serving, serving)
        first.load.draining = True
        assert first.agent is not None
        first.agent.notify()
        await told(not_serving, serving)
        proxy = Proxy(ExternalProcessorStub(channels.get(pickers[1])).Process())
        await proxy.headers(BUFFERED, alone=True)
        assert set_headers((await proxy.read()).request_headers.response) == {DESTINATION: "prefill-0:80"}
        proxy.call.cancel()
        await far.until(lambda: not far.servicer.core.cluster.claims)
