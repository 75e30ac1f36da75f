"""How the SDK reaches a conductor: the transport's contract, and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from moonpool.base import world
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.base.rpc.call_carrier import CarryingChannel
from moonpool.base.rpc.channels import check_health
from moonpool.base.rpc.connection_monitor import ConnectionMonitor
from moonpool.base.rpc.errors import DETAIL_KEY, from_rpc_error
from moonpool.base.rpc.tls import CHANNEL_OPTIONS, Tls
from moonpool.base.rpc.tls_diagnosis import tls_trouble
from moonpool.client.tracing import metadata
from moonpool.client.translate import MAX_REQUEST_BYTES
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub

GRPC_OPTIONS: list[tuple[str, Any]] = [
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


class ConductorTransport(Protocol):
    """The conductor's calls that a client needs. Times are in seconds; every call raises MoonpoolError."""

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> GenerateCall:
        """Start a request."""
        ...

    async def query(self, request: Message, timeout_s: float) -> Any:
        """Call the conductor's method `X` with an `XRequest`; returns the `XResponse`."""
        ...

    async def aclose(self) -> None:
        """End all calls. Idempotent."""
        ...


class GenerateCall(Protocol):
    """A running Generate call."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """Iterate over the messages; raises MoonpoolError."""
        ...

    def cancel(self) -> None:
        """End the call, and cancel the request everywhere. Idempotent."""
        ...


class NotTrusted(Unavailable):
    """The conductor is there, but one end does not accept the other's certificate, or only one end speaks TLS."""


class NotConnected(Unavailable):
    """The conductor could not be reached, or the connection broke before an answer."""


class GrpcTransport:
    """gRPC on the running event loop; connects on first use."""

    def __init__(self, address: str, tls: Tls | None = None, api_key: str = "", silence_s: float = 0.0) -> None:
        """Connect to `address`, "host:port", with TLS if `tls` is given. The API key is sent over TLS only.

        The channel belongs to the event loop that runs at first use. Calls fail with `NotConnected` if the conductor
        is silent for `silence_s` seconds; 0: never.
        """
        self._address = address
        self._tls = tls
        send_key = bool(api_key) and tls is not None
        self._key: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {api_key}"),) if send_key else ()
        self._channel: grpc.aio.Channel | None = None
        self._made: Any = None  # the channel's stub
        self._reached = False  # some call was answered, so that certificates fit
        self._monitor = ConnectionMonitor(self._check_health, silence_s)

    def generate(self, request: pb.GenerateRequest, timeout_s: float) -> GenerateCall:
        call = self._stub().Generate(request, timeout=timeout_s, metadata=metadata() + self._key)
        return _GrpcCall(call, timeout_s, self._monitor, self._heard, self._explained)

    async def query(self, request: Message, timeout_s: float) -> Any:
        method = type(request).__name__.removesuffix("Request")
        call = getattr(self._stub(), method)(request, timeout=timeout_s, metadata=self._key)
        late = f"the call's {timeout_s:.3g} s are over; the client waited for the conductor's answer to {method}"
        return await self._answered(late, call.cancel, call)

    async def _answered(self, late: str, give_up: Callable[[], object], answer: Awaitable[Response]) -> Response:
        """As `_await_answer`; a connection that certificates prevent raises NotTrusted, with the cause."""
        try:
            answered = await _await_answer(self._monitor, late, give_up, answer)
        except MoonpoolError as error:
            raise await self._explained(error) from None
        self._heard()
        return answered

    def _heard(self) -> None:
        self._reached = True

    async def _explained(self, error: MoonpoolError) -> MoonpoolError:
        """The error, or the cause if certificates prevent the connection."""
        if isinstance(error, NotConnected) and not self._reached:
            cause = await tls_trouble(self._address, self._tls)
            return NotTrusted(cause) if cause else error
        return error

    async def aclose(self) -> None:
        """Close the channel, which cancels open calls."""
        await self._monitor.aclose()
        channel, self._channel, self._made = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = self._connect()
        return self._channel

    def _stub(self) -> Any:
        if self._made is None:
            self._made = ConductorServiceStub(self._connected())
        return self._made

    async def _check_health(self, timeout_s: float) -> None:
        await check_health(self._connected(), timeout_s)

    def _connect(self) -> grpc.aio.Channel:
        network = world.CURRENT.get().network
        if self._tls is None:
            return CarryingChannel(network.channel(self._address, GRPC_OPTIONS))
        options = [*GRPC_OPTIONS, *CHANNEL_OPTIONS]
        return CarryingChannel(network.channel(self._address, options, self._tls.channel_credentials()))


class _GrpcCall:
    """A call of Generate. An iterator, not a generator: an abandoned iterator needs no cleanup by the event loop."""

    def __init__(
        self,
        call: Any,
        timeout_s: float,
        monitor: ConnectionMonitor,
        heard: Callable[[], object],
        explained: Callable[[MoonpoolError], Awaitable[MoonpoolError]],
    ) -> None:
        """`heard` is called with each message, `explained` gives the error to raise in place of another."""
        self._call = call
        self._timeout_s = timeout_s
        self._monitor = monitor
        self._heard = heard
        self._explained = explained
        self._monitored = monitor.begin(call.cancel)

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        try:
            message: object = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._monitor.end(self._monitored)
            late = f"the call's {self._timeout_s:.3g} s are over; the client waited for the conductor's next message"
            raise await self._explained(moonpool_error(error, late)) from None
        except asyncio.CancelledError:
            self._monitor.end(self._monitored)
            if self._monitored.lost and not is_cancelled():
                raise await self._explained(NotConnected("the conductor does not answer")) from None
            raise
        self._monitor.heard()
        self._heard()
        if not isinstance(message, pb.GenerateResponse):
            self._monitor.end(self._monitored)
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self._monitor.end(self._monitored)
        self._call.cancel()


def is_cancelled() -> bool:
    """Whether somebody has cancelled the running task. A variable with the task would tie the task to its exception."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _await_answer(
    monitor: ConnectionMonitor, late: str, give_up: Callable[[], object], answer: Awaitable[Response]
) -> Response:
    """Wait for a call's answer.

    Args:
        monitor: notices a silent conductor.
        late: what is said if the call's own time ends.
        give_up: ends the call.
        answer: the answer, or the next message.

    Raises:
        NotConnected: the conductor is silent.
        MoonpoolError: the conductor's error.
    """
    with monitor.waiting(give_up) as waiting:
        try:
            return await answer
        except grpc.aio.AioRpcError as error:
            raise moonpool_error(error, late) from None
        except asyncio.CancelledError:
            if waiting.lost and not is_cancelled():
                raise NotConnected("the conductor does not answer") from None
            raise


def moonpool_error(error: grpc.RpcError, late: str) -> MoonpoolError:
    """The Moonpool error for a failed call. UNAVAILABLE from other than a Moonpool service is `NotConnected`.

    gRPC's own words for a call that took too long tell nothing; `late` is said in their place.
    """
    ours = from_rpc_error(error)
    metadata: Any = (error.trailing_metadata() or ()) if hasattr(error, "trailing_metadata") else ()
    answered = any(key == DETAIL_KEY for key, _ in metadata)
    if isinstance(ours, Unavailable) and not answered:
        return NotConnected(ours.message)
    if isinstance(ours, DeadlineExceeded) and not answered:
        return DeadlineExceeded(late)
    return ours
