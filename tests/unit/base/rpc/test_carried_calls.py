"""Calls that share a stream: as calls of their own, over real connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from moonpool.base.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from moonpool.base.rpc.call_carrier import CARRIED_AFTER, CARRY, MAX_CARRIED_BYTES, CarryingChannel
from moonpool.base.rpc.carried_calls import (
    FRAME_BYTES,
    FRAME_PARTS,
    MAX_FRAMES,
    WINDOW,
    CarriedCalls,
    CarriedMethod,
)
from moonpool.base.rpc.channels import CheckedChannel
from moonpool.base.rpc.messages import END_OF_STREAM
from moonpool.base.rpc.server import RunningServer, serving
from moonpool.base.rpc.wrapped_channel import WrappedChannel
from moonpool.v1 import calls_pb2, calls_pb2_grpc, conductor_pb2, conductor_pb2_grpc, kv_pb2

CONDUCTOR = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
LIMIT_S = 20.0


def asked(messages: int, **fields: Any) -> conductor_pb2.GenerateRequest:
    """A request for so many messages."""
    return conductor_pb2.GenerateRequest(sampling=kv_pb2.Sampling(max_tokens=messages), **fields)


class Conductor:
    """Answers by request id."""

    def __init__(self) -> None:
        self.written = 0
        self.entered, self.left, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.metadata: list[tuple[str, str]] = []

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Any) -> conductor_pb2.ExplainResponse:
        self.metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith("x-")]
        match request.request_id:
            case "invalid":
                raise InvalidRequest("request_id", "is wrong")
            case "overloaded":
                raise Overloaded("full", reason="queue_full", retry_after_s=2.0)
            case "unknown":
                raise NotFound("no such request")
            case "bug":
                raise ValueError("a secret")
            case "waits":
                self.entered.set()
                try:
                    await self.go_on.wait()
                finally:
                    self.left.set()
        left_s = context.time_remaining()
        timing = conductor_pb2.Timing(e2e_s=-1.0 if left_s is None else left_s)
        return conductor_pb2.ExplainResponse(timeline=conductor_pb2.Timeline(timing=timing))

    async def Generate(self, request: conductor_pb2.GenerateRequest, context: Any) -> None:
        for position in range(request.sampling.max_tokens):
            delta = conductor_pb2.TokenDelta(position=position, text=request.text)
            await context.write(conductor_pb2.GenerateResponse(delta=delta))
            self.written += 1
        if request.request_id == "fails":
            raise NotFound("lost")


class CountingChannel(WrappedChannel):
    """Counts the calls that a channel begins, by method."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.begun: list[str] = []

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._counted(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._counted(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._counted(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._counted(method, self._channel.stream_stream(method, *args, **kwargs))

    def _counted(self, method: str, make: Any) -> Any:
        def begin(*args: Any, **kwargs: Any) -> Any:
            self.begun.append(method)
            return make(*args, **kwargs)

        return begin


class Peer:
    """A client of a server, whose calls are carried."""

    def __init__(self, address: str) -> None:
        self.counted = CountingChannel(grpc.aio.insecure_channel(address))
        self.channel = CheckedChannel(CarryingChannel(self.counted))
        self.stub: Any = conductor_pb2_grpc.ConductorServiceStub(self.channel)

    async def warm(self, *, forever: bool = False) -> None:
        """Call until calls are carried; or until a call fails."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                before = len(self.counted.begun)
                await self.explain("")
                if len(self.counted.begun) == before and not forever:
                    return

    async def explain(self, request_id: str, **options: Any) -> conductor_pb2.ExplainResponse:
        answer: conductor_pb2.ExplainResponse = await self.stub.Explain(
            conductor_pb2.ExplainRequest(request_id=request_id), **options
        )
        return answer


@asynccontextmanager
async def running(grace_s: float = 5.0) -> AsyncIterator[tuple[Conductor, RunningServer]]:
    conductor = Conductor()
    async with serving("127.0.0.1:0", [(CONDUCTOR, conductor)], grace_s=grace_s) as server:
        yield conductor, server


@asynccontextmanager
async def carrying() -> AsyncIterator[tuple[Conductor, Peer]]:
    """A server, and a client whose calls are carried already."""
    async with running() as (conductor, server):
        peer = Peer(server.address)
        try:
            await peer.warm()
            yield conductor, peer
        finally:
            await peer.channel.close()


async def test_after_a_few_calls_all_calls_share_one_stream() -> None:
    async with carrying() as (_, peer):
        before = list(peer.counted.begun)
        assert before.count(CARRY) == 1
        assert before.count(before[0]) >= CARRIED_AFTER
        await asyncio.gather(*[peer.explain("") for _ in range(100)])
        assert peer.counted.begun == before


async def test_errors_are_those_of_calls_of_their_own() -> None:
    async with carrying() as (_, peer):
        with pytest.raises(InvalidRequest, match="is wrong") as invalid:
            await peer.explain("invalid")
        assert invalid.value.field == "request_id"
        with pytest.raises(Overloaded) as overloaded:
            await peer.explain("overloaded")
        assert (overloaded.value.reason, overloaded.value.retry_after_s) == ("queue_full", 2.0)
        with pytest.raises(NotFound, match="no such request"):
            await peer.explain("unknown")
        with pytest.raises(Internal) as bug:
            await peer.explain("bug")
        assert "secret" not in str(bug.value)
        unknown = peer.channel.unary_unary("/moonpool.v1.ConductorService/Nothing", bytes, bytes)
        with pytest.raises(Unsupported):
            await unknown(b"")
        malformed = peer.channel.unary_unary("/moonpool.v1.ConductorService/Explain", bytes, bytes)
        with pytest.raises(InvalidRequest, match="malformed ExplainRequest"):
            await malformed(b"\xff\xff")


async def test_metadata_and_time_limits_arrive() -> None:
    async with carrying() as (conductor, peer):
        answer = await peer.explain("", timeout=LIMIT_S, metadata=(("x-trace", "7"),))
        assert LIMIT_S - 5 < answer.timeline.timing.e2e_s <= LIMIT_S
        assert conductor.metadata == [("x-trace", "7")]
        assert (await peer.explain("")).timeline.timing.e2e_s == -1.0


async def test_a_stream_comes_whole_and_in_order_and_then_its_end() -> None:
    async with carrying() as (_, peer):
        call = peer.stub.Generate(asked(100, text="a"))
        assert [message.delta.position async for message in call] == list(range(100))
        assert await call.read() is END_OF_STREAM
        call = peer.stub.Generate(asked(3, request_id="fails"))
        assert [(await call.read()).delta.position for _ in range(3)] == [0, 1, 2]
        with pytest.raises(NotFound, match="lost"):
            await call.read()


async def test_a_client_that_does_not_read_holds_up_its_own_call_only() -> None:
    async with carrying() as (conductor, peer):
        call = peer.stub.Generate(asked(10 * WINDOW))
        async with asyncio.timeout(LIMIT_S):
            while conductor.written < WINDOW:
                await peer.explain("")
            for _ in range(20):
                await peer.explain("")
        assert conductor.written == WINDOW
        assert len([message async for message in call]) == 10 * WINDOW


async def test_a_cancelled_call_ends_at_the_server() -> None:
    async with carrying() as (conductor, peer), asyncio.timeout(LIMIT_S):
        waiting = asyncio.ensure_future(peer.explain("waits"))
        await conductor.entered.wait()
        waiting.cancel()
        await conductor.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await peer.explain("")


async def test_a_call_has_its_time_limit() -> None:
    async with carrying() as (conductor, peer), asyncio.timeout(LIMIT_S):
        with pytest.raises(DeadlineExceeded):
            await peer.explain("waits", timeout=0.05)
        await conductor.left.wait()


async def test_large_requests_have_calls_of_their_own() -> None:
    async with carrying() as (_, peer):
        before = len(peer.counted.begun)
        text = "a" * (MAX_CARRIED_BYTES + 1)
        call = peer.stub.Generate(asked(2, text=text))
        assert [len(message.delta.text) async for message in call] == [len(text)] * 2
        assert len(peer.counted.begun) == before + 1


async def test_a_server_that_closes_refuses_new_calls_and_ends_those_that_run() -> None:
    conductor, leave = Conductor(), asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with serving("127.0.0.1:0", [(CONDUCTOR, conductor)], grace_s=LIMIT_S) as server:
            ready.set_result(server.address)
            await leave.wait()

    async with asyncio.timeout(2 * LIMIT_S), asyncio.TaskGroup() as group:
        served = group.create_task(serve())
        peer = Peer(await ready)
        await peer.warm()
        waiting = group.create_task(peer.explain("waits"))
        await conductor.entered.wait()
        leave.set()
        with pytest.raises(Unavailable):
            await peer.warm(forever=True)
        conductor.go_on.set()
        assert (await waiting).timeline.timing.e2e_s == -1.0
        await served
        with pytest.raises(Unavailable):
            await peer.explain("")
        await peer.channel.close()


async def test_a_stream_that_breaks_fails_its_calls_and_is_opened_again() -> None:
    async with running(grace_s=0.0) as (conductor, server):
        peer = Peer(server.address)
        await peer.warm()
        waiting = asyncio.ensure_future(peer.explain("waits"))
        await conductor.entered.wait()
    with pytest.raises(Unavailable):
        await waiting
    async with serving(server.address, [(CONDUCTOR, Conductor())]):
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await peer.warm()
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        assert peer.counted.begun.count(CARRY) >= 2
    await peer.channel.close()


async def test_a_server_of_an_older_version_gets_calls_of_their_own() -> None:
    async def explain(data: bytes, context: object) -> bytes:
        return data

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(explain)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CONDUCTOR.full_name, {"Explain": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = Peer(f"127.0.0.1:{port}")
    try:
        for _ in range(4 * CARRIED_AFTER):
            await peer.explain("")
        assert peer.counted.begun.count(CARRY) == 1
        assert len(peer.counted.begun) == 1 + 4 * CARRIED_AFTER
    finally:
        await peer.channel.close()
        await server.stop(None)


async def test_closing_a_channel_cancels_its_calls_unless_they_get_time() -> None:
    async with running() as (conductor, server), asyncio.timeout(LIMIT_S):
        patient, hasty = Peer(server.address), Peer(server.address)
        await asyncio.gather(patient.warm(), hasty.warm())
        waits, cut = (asyncio.ensure_future(peer.explain("waits")) for peer in (patient, hasty))
        await conductor.entered.wait()
        await hasty.channel.close()
        with pytest.raises(asyncio.CancelledError):
            await cut
        closing = asyncio.ensure_future(patient.channel.close(LIMIT_S))
        conductor.go_on.set()
        assert (await waits).timeline.timing.e2e_s == -1.0
        await closing


async def test_a_message_of_too_many_parts_ends_the_stream() -> None:
    async with running() as (_, server), grpc.aio.insecure_channel(server.address) as channel:
        stream = calls_pb2_grpc.CallsServiceStub(channel).Carry(timeout=LIMIT_S)
        await stream.write(calls_pb2.CarryRequest(cancelled=range(FRAME_PARTS)))
        await stream.write(calls_pb2.CarryRequest(cancelled=range(FRAME_PARTS + 1)))
        await stream.read()
        with pytest.raises(grpc.aio.AioRpcError, match=f"more than {FRAME_PARTS} parts") as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class DeafClient:
    """A client's end at the server: takes the first message alone."""

    def __init__(self) -> None:
        self.taken = 0

    async def bare_write(self, message: calls_pb2.CarryResponse) -> None:
        self.taken += 1
        if self.taken > 1:
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_client_that_lies_about_what_it_reads_fills_no_memory(refused: bool) -> None:
    """Neither by answers, which it acknowledges without reading, nor by calls that are refused."""
    piece, written, sent = b"x" * 65_536, 0, 0

    async def behave(request: bytes, context: Any) -> None:
        nonlocal written
        while True:
            await context.write(piece)
            written += len(piece)

    async def requests() -> AsyncIterator[calls_pb2.CarryRequest]:
        nonlocal sent
        method = "/none/None" if refused else "/some/Method"
        while True:
            begun = [calls_pb2.CallBegin(call=1, method=method)] * (FRAME_PARTS - 1 if refused else not sent)
            yield calls_pb2.CarryRequest(begun=begun, read=[calls_pb2.CallRead(call=1, messages=1 << 20)])
            sent += 1
            await asyncio.sleep(0)

    calls = CarriedCalls({"/some/Method": CarriedMethod(behave, bytes, True)})
    carrying = asyncio.create_task(calls.Carry(requests(), DeafClient()))
    for _ in range(100 * MAX_FRAMES):
        await asyncio.sleep(0)
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    frames = sent if refused else written // FRAME_BYTES
    assert MAX_FRAMES / 2 <= frames <= MAX_FRAMES + 2
