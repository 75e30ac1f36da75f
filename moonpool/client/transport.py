"""The seam below the client: what it asks of a conductor, and gRPC as the real way to ask it.

A transport takes and returns the contract's messages and raises Moonpool's errors. Tests put
`moonpool.client.testing.FakeConductor` in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from moonpool.client.tracing import metadata
from moonpool.client.translate import MAX_REQUEST_BYTES
from moonpool.errors import MoonpoolError, Unavailable
from moonpool.rpc.errors import DETAIL_KEY, from_rpc_error
from moonpool.rpc.pulse import Pulse, ask
from moonpool.rpc.tls import CHANNEL_OPTIONS, Tls
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
    """The conductor could not be reached, or the connection broke before it answered."""


class Call(Protocol):
    """A running Generate call."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """Messages as they come; raises MoonpoolError."""
        ...

    def cancel(self) -> None:
        """End the call, and with it the request everywhere; may be called at any time and again."""
        ...


class Transport(Protocol):
    """What a client asks of a conductor. All times are seconds; all calls raise MoonpoolError."""

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> Call:
        """Begin a request."""
        ...

    async def ask(self, request: Message, timeout_s: float) -> Any:
        """Ask anything else: `XRequest` is answered by the `XResponse` of the call `X`."""
        ...

    async def aclose(self) -> None:
        """End all calls; may be called again."""
        ...


def translate(error: grpc.RpcError) -> MoonpoolError:
    """Return our error for a failed call; UNAVAILABLE that does not come from a Moonpool service is `NotConnected`."""
    ours = from_rpc_error(error)
    metadata: Any = (error.trailing_metadata() or ()) if hasattr(error, "trailing_metadata") else ()
    answered = any(key == DETAIL_KEY for key, _ in metadata)
    if isinstance(ours, Unavailable) and not answered:
        return NotConnected(ours.message)
    return ours


class GrpcTransport:
    """gRPC on the running event loop; connects on first use."""

    def __init__(self, address: str, tls: Tls | None = None, api_key: str = "", silence_s: float = 0.0) -> None:
        """Take "host:port", certificates, and a key that is sent only where there are some.

        The channel belongs to the loop that runs at first use. Calls fail with `NotConnected` when the conductor says
        nothing for `silence_s` seconds; 0 = never.
        """
        self._address = address
        self._tls = tls
        shown = bool(api_key) and tls is not None
        self._key: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {api_key}"),) if shown else ()
        self._channel: grpc.aio.Channel | None = None
        self._pulse = Pulse(self._ask, silence_s)

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> Call:
        return _GrpcCall(
            self._stub().Generate(request, timeout=timeout_s, metadata=metadata() + self._key), self._pulse
        )

    async def ask(self, request: Message, timeout_s: float) -> Any:
        call = getattr(self._stub(), type(request).__name__.removesuffix("Request"))(
            request, timeout=timeout_s, metadata=self._key
        )
        return await _heard(self._pulse, call.cancel, call)

    async def aclose(self) -> None:
        """Close the channel; its calls are cancelled."""
        await self._pulse.aclose()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = self._connect()
        return self._channel

    def _stub(self) -> Any:
        return ConductorServiceStub(self._connected())

    async def _ask(self, timeout_s: float) -> None:
        await ask(self._connected(), timeout_s)

    def _connect(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=OPTIONS)
        return grpc.aio.secure_channel(
            self._address, self._tls.channel_credentials(), options=[*OPTIONS, *CHANNEL_OPTIONS]
        )


class _GrpcCall:
    """An iterator and not a generator: abandoned half-way, it needs no cleanup by the event loop."""

    def __init__(self, call: Any, pulse: Pulse) -> None:
        self._call = call
        self._pulse = pulse

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        message: object = await _heard(self._pulse, self._call.cancel, self._call.read())
        if not isinstance(message, pb.GenerateResponse):
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self._call.cancel()


async def _heard(pulse: Pulse, give_up: Callable[[], object], answer: Awaitable[Response]) -> Response:
    """Waits for an answer on a call.

    Raises:
        NotConnected: the conductor does not answer at all.
        MoonpoolError: what it answers.
    """
    with pulse.waiting(give_up) as waiting:
        try:
            return await answer
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if waiting.lost and not (task is not None and task.cancelling()):
                raise NotConnected("the conductor does not answer") from None
            raise
