"""serving(), channels and the error interceptor, over real connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from moonpool.base.errors import (
    ConfigError,
    FrameError,
    Internal,
    InvalidRequest,
    MoonpoolError,
    NotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from moonpool.base.rpc.channels import Channels, probe
from moonpool.base.rpc.messages import END_OF_STREAM, PayloadMessage
from moonpool.base.rpc.peer_calls import CallLimits
from moonpool.base.rpc.server import LIVENESS, READINESS, RunningServer, Service, serving
from moonpool.base.transport.grpc import payload_stream
from moonpool.v1 import conductor_pb2, decode_pb2, decode_pb2_grpc, kv_pb2, kvstore_pb2, kvstore_pb2_grpc

DECODE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
KVSTORE = kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"]
CONDUCTOR = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
DEADLINE_S = 20.0


class Decode:
    """Answers by request id; one method of each shape."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.entered = asyncio.Event()

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: object) -> decode_pb2.ReserveResponse:
        match request.sequence.request_id:
            case "invalid":
                raise InvalidRequest("sequence.token_ids", "empty")
            case "overloaded":
                raise Overloaded("full", reason="no_decode_room", retry_after_s=2.0)
            case "bug":
                raise ValueError("a secret")
            case "group":
                async with asyncio.TaskGroup():
                    raise NotFound("gone")
        return decode_pb2.ReserveResponse(lease_s=3.0)

    async def ReceiveKV(
        self, requests: AsyncIterator[PayloadMessage[decode_pb2.ReceiveKVRequest]], context: object
    ) -> AsyncIterator[decode_pb2.ReceiveKVResponse]:
        async for request in requests:
            assert isinstance(request.payload, memoryview)
            yield decode_pb2.ReceiveKVResponse(credit=kv_pb2.Credit(bytes=sum(request.payload)))

    async def Steps(
        self, requests: object, context: grpc.aio.ServicerContext[decode_pb2.StepsRequest, decode_pb2.StepsResponse]
    ) -> None:
        while isinstance(request := await context.read(), decode_pb2.StepsRequest):
            if request.cancel.request_id == "bad":
                raise InvalidRequest("cancel.request_id", "bad")
            await context.write(
                decode_pb2.StepsResponse(failed=[decode_pb2.SequenceFailed(request_id=request.cancel.request_id)])
            )


class KVStore:
    """Sends payloads; says when its reader has left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Get(
        self, requests: AsyncIterator[kvstore_pb2.GetRequest], context: object
    ) -> AsyncIterator[PayloadMessage[kvstore_pb2.GetResponse]]:
        async for request in requests:
            frame = kvstore_pb2.GetResponse(frame=kv_pb2.FrameHeader(transfer=request.open.transfer))
            yield PayloadMessage(frame, [memoryview(b"ab"), memoryview(b"c")])

    async def Watch(self, request: object, context: object) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        try:
            while True:
                yield kvstore_pb2.WatchResponse(epoch=1)
        finally:
            await asyncio.sleep(0)  # cleaning up may wait
            self.left.set()


async def read(call: Any) -> Any:
    """The next message; typeshed's type is a union with EOF that tells nothing."""
    return await call.read()


def decode_stub(channels: Channels, server: RunningServer) -> "decode_pb2_grpc.DecodeServiceAsyncStub":
    return decode_pb2_grpc.DecodeServiceStub(channels.get(server.address))


async def failure(call: object) -> MoonpoolError:
    with pytest.raises(MoonpoolError) as caught:
        await call  # type: ignore[misc]
    return caught.value


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    services: list[Service] = [(DECODE, Decode()), (CONDUCTOR, object())]
    async with serving("127.0.0.1:0", services, grace_s=0) as running:
        yield running


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    async with Channels() as opened:
        yield opened


async def test_unary(server: RunningServer, channels: Channels) -> None:
    stub = decode_stub(channels, server)
    assert (await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S)).lease_s == 3.0
    assert server.address == f"127.0.0.1:{server.port}"
    assert server.port > 0


async def test_errors_reach_the_caller_typed(
    server: RunningServer, channels: Channels, caplog: pytest.LogCaptureFixture
) -> None:
    stub = decode_stub(channels, server)

    async def ask(name: str) -> MoonpoolError:
        request = decode_pb2.ReserveRequest(sequence=kv_pb2.SequenceSpec(request_id=name))
        return await failure(stub.Reserve(request, timeout=DEADLINE_S))

    invalid, overloaded = await ask("invalid"), await ask("overloaded")
    assert isinstance(invalid, InvalidRequest)
    assert invalid.field == "sequence.token_ids"
    assert isinstance(overloaded, Overloaded)
    assert (overloaded.reason, overloaded.retry_after_s) == ("no_decode_room", 2.0)
    assert isinstance(await ask("group"), NotFound)
    assert not caplog.records
    bug = await ask("bug")
    assert isinstance(bug, Internal)
    assert "secret" not in str(bug)
    (record,) = (r for r in caplog.records if r.name == "moonpool.base.rpc.server")
    assert record.exc_info is not None or "secret" in str(record.msg)


async def test_reader_writer_stream_and_its_error(server: RunningServer, channels: Channels) -> None:
    call = decode_stub(channels, server).Steps(timeout=DEADLINE_S)
    await call.write(decode_pb2.StepsRequest(cancel=decode_pb2.CancelSequence(request_id="a")))
    answer = await call.read()
    assert isinstance(answer, decode_pb2.StepsResponse)
    assert answer.failed[0].request_id == "a"
    await call.write(decode_pb2.StepsRequest(cancel=decode_pb2.CancelSequence(request_id="bad")))
    assert isinstance(await failure(call.read()), InvalidRequest)


async def test_payload_streams_both_ways(server: RunningServer, channels: Channels) -> None:
    opener = payload_stream(
        channels.get(server.address),
        DECODE.full_name,
        "ReceiveKV",
        decode_pb2.ReceiveKVRequest,
        decode_pb2.ReceiveKVResponse,
    )
    call = opener(timeout=DEADLINE_S)
    await call.write(PayloadMessage(decode_pb2.ReceiveKVRequest(frame=kv_pb2.FrameHeader(transfer=1)), b"\x01\x02"))
    assert (await read(call)).credit.bytes == 3
    await call.done_writing()
    assert await call.read() is END_OF_STREAM

    async with serving("127.0.0.1:0", [(KVSTORE, KVStore())], grace_s=0) as store:
        opener = payload_stream(
            channels.get(store.address), KVSTORE.full_name, "Get", kvstore_pb2.GetRequest, kvstore_pb2.GetResponse
        )
        call = opener(timeout=DEADLINE_S)
        await call.write(kvstore_pb2.GetRequest(open=kv_pb2.ReadOpen(transfer=7)))
        answer = await read(call)
        assert (answer.message.frame.transfer, bytes(answer.payload)) == (7, b"abc")
        call.cancel()


async def test_malformed_frames_are_a_frame_error(server: RunningServer, channels: Channels) -> None:
    opener: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    opener = channels.get(server.address).stream_stream(f"/{DECODE.full_name}/ReceiveKV")
    call = opener(timeout=DEADLINE_S)
    await call.write(b"\x7a\xff")
    assert isinstance(await failure(call.read()), FrameError)


async def test_a_generator_is_closed_when_its_reader_leaves(channels: Channels) -> None:
    servicer = KVStore()
    async with serving("127.0.0.1:0", [(KVSTORE, servicer)], grace_s=0) as store:
        stub = kvstore_pb2_grpc.KVStoreServiceStub(channels.get(store.address))
        call = stub.Watch(kvstore_pb2.WatchRequest())
        await read(call)
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await servicer.left.wait()


async def test_what_is_missing_is_unsupported(server: RunningServer, channels: Channels) -> None:
    stub = decode_stub(channels, server)
    assert isinstance(await failure(stub.DecodeStats(decode_pb2.DecodeStatsRequest())), Unsupported)
    unknown: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    unknown = channels.get(server.address).unary_unary("/no.Such/Method")
    assert isinstance(await failure(unknown(b"")), Unsupported)


async def test_limit_is_8_mib_and_not_overload(server: RunningServer, channels: Channels) -> None:
    stub = decode_stub(channels, server)

    def request(size: int) -> decode_pb2.ReserveRequest:
        return decode_pb2.ReserveRequest(sequence=kv_pb2.SequenceSpec(token_ids=bytes(size)))

    await stub.Reserve(request(5 << 20), timeout=DEADLINE_S)  # over gRPC's own default of 4 MiB
    too_large = await failure(stub.Reserve(request(9 << 20), timeout=DEADLINE_S))
    assert type(too_large) is InvalidRequest
    assert "larger than max" in str(too_large)


async def test_a_process_that_takes_no_requests_lives_and_is_not_ready(
    server: RunningServer, channels: Channels
) -> None:
    check = channels.get(server.address).unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    for welcome, ready in (
        (True, health_pb2.HealthCheckResponse.SERVING),
        (False, health_pb2.HealthCheckResponse.NOT_SERVING),
    ):
        server.set_serving(welcome)
        found = [
            await check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)
            for name in (LIVENESS, READINESS)
        ]
        assert [answer.status for answer in found] == [health_pb2.HealthCheckResponse.SERVING, ready]


async def test_health_follows_set_serving(server: RunningServer, channels: Channels) -> None:
    await probe(server.address, DEADLINE_S)
    watch: grpc.aio.UnaryStreamCall[Message, health_pb2.HealthCheckResponse]
    watch = channels.get(server.address).unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest(service=DECODE.full_name), timeout=DEADLINE_S)
    assert (await read(watch)).status == health_pb2.HealthCheckResponse.SERVING
    server.set_serving(False)
    assert (await read(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(Unavailable, match="not serving"):
        await probe(server.address, DEADLINE_S)
    server.set_serving(True)
    await probe(server.address, DEADLINE_S)
    watch.cancel()


async def test_too_many_fields_are_an_invalid_request_to_servers_and_nothing_to_clients() -> None:
    """Also through generated stubs, which bring their own deserialisers."""
    tokens = b"\x0a\x00" * (1 << 20)

    class Talkative:
        async def DecodeStats(self, request: object, context: object) -> Any:
            return decode_pb2.DecodeStatsResponse.FromString(b"\x12\x00" * 100_000)

    async with serving("127.0.0.1:0", [(DECODE, Talkative())], grace_s=0) as running, Channels() as channels:
        opener: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        opener = channels.get(running.address).unary_unary(f"/{DECODE.full_name}/DecodeStats")
        error = await failure(opener(tokens, timeout=DEADLINE_S))
        assert type(error) is InvalidRequest
        assert "too many fields" in str(error)
        answer = await decode_stub(channels, running).DecodeStats(decode_pb2.DecodeStatsRequest(), timeout=DEADLINE_S)
        assert answer is None


async def test_a_peer_beyond_its_limits_is_refused_until_its_calls_have_ended() -> None:
    limits = CallLimits(calls=3, streams=2)
    service: Service = (DECODE, Decode())
    async with serving("127.0.0.1:0", [service], grace_s=0, limits=limits) as running, Channels() as channels:
        stub = decode_stub(channels, running)
        calls = [stub.Steps(timeout=DEADLINE_S) for _ in range(2)]
        for call in calls:
            cancel = decode_pb2.CancelSequence(request_id="here")
            await call.write(decode_pb2.StepsRequest(cancel=cancel))
            await read(call)
        refused = await failure(stub.Steps(timeout=DEADLINE_S).read())
        assert isinstance(refused, Overloaded)
        assert refused.reason == "peer_calls"
        await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S)
        await calls[0].done_writing()
        assert await read(calls[0]) is END_OF_STREAM
        await stub.Steps(timeout=DEADLINE_S).write(decode_pb2.StepsRequest())


async def test_watching_health_does_not_hold_up_the_end(channels: Channels) -> None:
    async with asyncio.timeout(DEADLINE_S), serving("127.0.0.1:0", [], grace_s=1e6) as running:
        watch: grpc.aio.UnaryStreamCall[Message, health_pb2.HealthCheckResponse]
        watch = channels.get(running.address).unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest())
        assert (await read(watch)).status == health_pb2.HealthCheckResponse.SERVING
    last = await read(watch)  # gRPC may drop what was said just before a call's end
    assert last is END_OF_STREAM or last.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await read(watch) is END_OF_STREAM


async def test_a_malformed_request_tells_its_kind(server: RunningServer, channels: Channels) -> None:
    opener: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    opener = channels.get(server.address).unary_unary(f"/{DECODE.full_name}/Reserve")
    error = await failure(opener(b"\xff\xff", timeout=DEADLINE_S))
    assert type(error) is InvalidRequest
    assert str(error) == "malformed ReserveRequest: Wire format was corrupt"
    stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    stream = channels.get(server.address).stream_stream(f"/{DECODE.full_name}/Steps")
    call = stream(timeout=DEADLINE_S)
    await call.write(b"\xff\xff")
    assert str(await failure(call.read())).startswith("malformed StepsRequest: ")


async def test_reflection_lists_the_services(server: RunningServer, channels: Channels) -> None:
    call = channels.get(server.address).stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(timeout=DEADLINE_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await read(call)
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {DECODE.full_name, CONDUCTOR.full_name, "grpc.health.v1.Health"}
    call.cancel()


async def test_probe_of_nobody_is_unavailable() -> None:
    with socket.socket() as taken:  # bound and not listening: refused at once
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Unavailable, match="does not answer"):
            await probe(f"127.0.0.1:{taken.getsockname()[1]}", DEADLINE_S)


async def test_a_taken_port_names_the_setting(server: RunningServer) -> None:
    with pytest.raises(ConfigError) as caught:
        async with serving(server.address, []):
            pass
    assert caught.value.field == "listen"
    assert server.address in caught.value.message
    with pytest.raises(ConfigError, match="listen: must be HOST:PORT"):
        async with serving("nowhere", []):
            pass


async def test_channels_are_shared_dropped_and_closed(server: RunningServer) -> None:
    channels = Channels()
    first = channels.get(server.address)
    assert channels.get(server.address) is first
    await channels.drop(server.address)
    await channels.drop(server.address)
    assert channels.get(server.address) is not first
    await decode_stub(channels, server).Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S)
    await channels.aclose()
    await channels.aclose()
    with pytest.raises(Unavailable):
        channels.get(server.address)


async def test_leaving_gives_calls_their_grace_and_no_more(channels: Channels) -> None:
    async with serving("127.0.0.1:0", [(DECODE, Decode())], grace_s=0) as running:
        call = decode_stub(channels, running).Steps()
        await call.write(decode_pb2.StepsRequest(cancel=decode_pb2.CancelSequence(request_id="a")))
        await call.read()
    assert isinstance(await failure(call.read()), Unavailable)


class Cancelling:
    """Is told to stop while it writes something that its reader does not take."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Any) -> None:
        async def write() -> None:
            self.writing.set()
            reason = "x" * (3 << 20)
            await context.write(decode_pb2.StepsResponse(failed=[decode_pb2.SequenceFailed(reason=reason)]))

        task = asyncio.ensure_future(write())
        await self.writing.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise InvalidRequest("message", "wrong")


async def test_a_status_follows_a_write_that_was_cancelled(channels: Channels) -> None:
    """gRPC loses the status of a call that is ended while a write is under way, and the peer waits for ever."""
    async with serving("127.0.0.1:0", [(DECODE, Cancelling())], grace_s=0) as running:
        call = decode_stub(channels, running).Steps(timeout=DEADLINE_S)
        await read(call)
        assert isinstance(await failure(call.read()), InvalidRequest)
