"""The seam below both clients: what they ask of a conductor, and gRPC as the real way to ask it.

A transport speaks the contract's messages and raises Moonpool's errors; it knows nothing of the SDK's types. Tests put
`moonpool.client.testing.FakeConductor` in its place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from moonpool.client.translate import MAX_REQUEST_BYTES
from moonpool.errors import MoonpoolError, Unavailable
from moonpool.rpc.errors import DETAIL_KEY, from_rpc_error
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]

Response = TypeVar("Response", bound=Message)


class NotConnected(Unavailable):
    """The conductor could not be reached, or the connection broke: nobody there has answered."""


class Call(Protocol):
    """A running Generate call of the blocking client."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """Messages as they come; raises MoonpoolError."""
        ...

    def cancel(self) -> None:
        """End the call, and with it the request everywhere; may be called at any time and again."""
        ...


class AsyncCall(Protocol):
    """A running Generate call of the asyncio client."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """Messages as they come; raises MoonpoolError."""
        ...

    def cancel(self) -> None:
        """End the call, and with it the request everywhere; may be called at any time and again."""
        ...


class Transport(Protocol):
    """What the blocking client asks of a conductor. All times are seconds; all calls raise MoonpoolError."""

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> Call:
        """Begin a request."""
        ...

    def explain(self, request: pb.ExplainRequest, timeout_s: float) -> pb.ExplainResponse:
        """Ask how a request was placed."""
        ...

    def cluster_state(self, request: pb.ClusterStateRequest, timeout_s: float) -> pb.ClusterStateResponse:
        """Ask for the cluster's picture."""
        ...

    def stats(self, request: pb.ConductorStatsRequest, timeout_s: float) -> pb.ConductorStatsResponse:
        """Ask for the conductor's gauges."""
        ...

    def close(self) -> None:
        """End all calls; may be called again."""
        ...


class AsyncTransport(Protocol):
    """What the asyncio client asks of a conductor. All times are seconds; all calls raise MoonpoolError."""

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncCall:
        """Begin a request."""
        ...

    async def explain(self, request: pb.ExplainRequest, timeout_s: float) -> pb.ExplainResponse:
        """Ask how a request was placed."""
        ...

    async def cluster_state(self, request: pb.ClusterStateRequest, timeout_s: float) -> pb.ClusterStateResponse:
        """Ask for the cluster's picture."""
        ...

    async def stats(self, request: pb.ConductorStatsRequest, timeout_s: float) -> pb.ConductorStatsResponse:
        """Ask for the conductor's gauges."""
        ...

    async def aclose(self) -> None:
        """End all calls; may be called again."""
        ...


def translate(error: grpc.RpcError) -> MoonpoolError:
    """Our error for a failed call; UNAVAILABLE that no Moonpool service said is `NotConnected`."""
    ours = from_rpc_error(error)
    metadata: Any = (error.trailing_metadata() or ()) if hasattr(error, "trailing_metadata") else ()
    answered = any(key == DETAIL_KEY for key, _ in metadata)
    if isinstance(ours, Unavailable) and not answered:
        return NotConnected(ours.message)
    return ours


class GrpcTransport:
    """Blocking gRPC; usable from several threads."""

    def __init__(self, address: str) -> None:
        """Connect to "host:port" on first use."""
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = ConductorServiceStub(self._channel)

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> Call:
        """Begin a request."""
        return _GrpcCall(self._stub.Generate(request, timeout=timeout_s))

    def explain(self, request: pb.ExplainRequest, timeout_s: float) -> pb.ExplainResponse:
        """Ask how a request was placed."""
        return _unary(self._stub.Explain, request, timeout_s)

    def cluster_state(self, request: pb.ClusterStateRequest, timeout_s: float) -> pb.ClusterStateResponse:
        """Ask for the cluster's picture."""
        return _unary(self._stub.ClusterState, request, timeout_s)

    def stats(self, request: pb.ConductorStatsRequest, timeout_s: float) -> pb.ConductorStatsResponse:
        """Ask for the conductor's gauges."""
        return _unary(self._stub.ConductorStats, request, timeout_s)

    def close(self) -> None:
        """Close the channel; its calls are cancelled."""
        self._channel.close()


class _GrpcCall:
    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise translate(error) from None

    def cancel(self) -> None:
        self._call.cancel()


def _unary(method: grpc.UnaryUnaryMultiCallable[Any, Response], request: Message, timeout_s: float) -> Response:
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise translate(error) from None


class AsyncGrpcTransport:
    """gRPC on the running event loop; connects on first use."""

    def __init__(self, address: str) -> None:
        """Note the address; the channel belongs to the loop that runs at first use."""
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncCall:
        """Begin a request."""
        return _AsyncGrpcCall(self._stub().Generate(request, timeout=timeout_s))

    async def explain(self, request: pb.ExplainRequest, timeout_s: float) -> pb.ExplainResponse:
        """Ask how a request was placed."""
        return await _answer(self._stub().Explain(request, timeout=timeout_s))

    async def cluster_state(self, request: pb.ClusterStateRequest, timeout_s: float) -> pb.ClusterStateResponse:
        """Ask for the cluster's picture."""
        return await _answer(self._stub().ClusterState(request, timeout=timeout_s))

    async def stats(self, request: pb.ConductorStatsRequest, timeout_s: float) -> pb.ConductorStatsResponse:
        """Ask for the conductor's gauges."""
        return await _answer(self._stub().ConductorStats(request, timeout=timeout_s))

    async def aclose(self) -> None:
        """Close the channel; its calls are cancelled."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
        return ConductorServiceStub(self._channel)


class _AsyncGrpcCall:
    """An iterator and not a generator: one that is left half-way needs no clearing up by the event loop."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None
        if not isinstance(message, pb.GenerateResponse):
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self._call.cancel()


async def _answer(call: Awaitable[Response]) -> Response:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
