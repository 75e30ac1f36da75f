"""Client connections: one channel per address, and calls over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from moonpool.base import world
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.base.rpc import messages
from moonpool.base.rpc.call_carrier import CarryingChannel
from moonpool.base.rpc.errors import from_rpc_error
from moonpool.base.rpc.messages import END_OF_STREAM
from moonpool.base.rpc.tls import CHANNEL_OPTIONS, Tls
from moonpool.base.rpc.tls_diagnosis import tls_trouble
from moonpool.base.rpc.tuning import CONNECTION_OPTIONS
from moonpool.base.rpc.wrapped_channel import WrappedChannel

_OPTIONS: list[tuple[str, Any]] = [
    *CONNECTION_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again quickly, and a dropped channel takes the connection along.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # Instances talk to each other directly whatever the environment says about proxies.
    ("grpc.enable_http_proxy", 0),
]
OLD_S = 3600.0
"""Calls may continue for this long over a connection after certificates have changed."""
Metadata = tuple[tuple[str, str], ...]
StubT = TypeVar("StubT")


def open_channel(address: str, tls: Tls | None = None, *, carries: bool = False) -> grpc.aio.Channel:
    """A new channel with our options; connects on first use. The caller closes the channel.

    Without `tls` the channel is plaintext. With `carries`, calls share a stream.
    """
    network = world.CURRENT.get().network
    if tls is None:
        channel = network.channel(address, _OPTIONS)
    else:
        channel = network.channel(address, [*_OPTIONS, *CHANNEL_OPTIONS], tls.channel_credentials())
    return CheckedChannel(CarryingChannel(channel) if carries else channel)


class CheckedChannel(WrappedChannel):
    """A channel on which generated stubs, too, refuse answers that would cost too much to parse.

    Methods are made once: a stub for each call is cheap.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self._methods: dict[tuple[object, ...], Callable[..., ClientCall]] = {}

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._channel.unary_unary, args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._channel.unary_stream, args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._channel.stream_unary, args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._channel.stream_stream, args, kwargs)

    def _method(self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (*args, *kwargs.values())  # the method's name, and how its messages are written and read
        if key not in self._methods:
            self._methods[key] = _client_calls(make(*args, **_checked(kwargs)))
        return self._methods[key]


class StreamCall(Protocol):
    """What a `ClientCall` and a generated stub's call have in common: a stream's two directions."""

    async def read(self) -> Any:
        """As `ClientCall.read`."""
        ...

    async def write(self, message: Any, /) -> None:
        """As `ClientCall.write`."""
        ...

    async def done_writing(self) -> None:
        """As `ClientCall.done_writing`."""
        ...

    def cancel(self) -> bool:
        """As `ClientCall.cancel`."""
        ...


class ClientCall:
    """A call that raises Moonpool's errors in place of gRPC's.

    Awaiting the call gives the answer of a unary call. A stream is read by `read` or by iteration. All raise
    MoonpoolError if the call fails.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self._call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is END_OF_STREAM:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """Return the next message; END_OF_STREAM after the last; None if the message could not be decoded."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return END_OF_STREAM if message is grpc.aio.EOF else message

    async def write(self, message: Any) -> None:
        """Send a message; return after gRPC has taken the message.

        Raises:
            MoonpoolError: The call has failed.
            asyncio.InvalidStateError: The call has ended; `read` says why.
        """
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def done_writing(self) -> None:
        """End this side of the stream."""
        await self._call.done_writing()

    def cancel(self) -> bool:
        """Cancel the call; return False if the call has ended already."""
        return bool(self._call.cancel())


def _client_calls(make: Callable[..., Any]) -> Callable[..., ClientCall]:
    return lambda *args, **kwargs: ClientCall(make(*args, **kwargs))


def _checked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A stub method's arguments, with our deserialiser in place of a message class' `FromString`."""
    cls = getattr(kwargs.get("response_deserializer"), "__self__", None)
    if isinstance(cls, type) and issubclass(cls, Message):
        return {**kwargs, "response_deserializer": messages.plain_deserializer(cls)}
    return kwargs


class Channels:
    """One channel per address, shared by everyone in the process; closed together.

    When certificates have changed, `get` gives new channels. Calls on the old channels may end, within `OLD_S` seconds.
    """

    def __init__(self, tls: Tls | None = None, *, carries: bool = False) -> None:
        """With `carries`, calls to a server share a stream (`CarryingChannel`): for those who make many."""
        self._tls = tls
        self._carries = carries
        self._generation = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, Any], tuple[grpc.aio.Channel, Any]] = {}  # by address and kind
        self._ending: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` ("host:port").

        Raises:
            Unavailable: the channels are closed.
        """
        if self._closed:
            raise Unavailable("this process is closing its connections")
        self._renew()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._tls, carries=self._carries)
        return channel

    def stub(self, address: str, make: Callable[[grpc.aio.Channel], StubT]) -> StubT:
        """A generated stub, as `make`, on the channel to `address`; one for all calls.

        Raises:
            Unavailable: the channels are closed.
        """
        channel = self.get(address)
        known = self._stubs.get((address, make))
        if known is None or known[0] is not channel:
            known = self._stubs[address, make] = channel, make(channel)
        stub: StubT = known[1]
        return stub

    def _renew(self) -> None:
        """Put channels aside that were made with certificates that have changed since."""
        if self._tls is None:
            return
        self._tls.renew()
        if self._generation != self._tls.generation:
            self._generation = self._tls.generation
            old, self._channels = self._channels, {}
            self._stubs.clear()
            for channel in old.values():
                ending = asyncio.ensure_future(channel.close(OLD_S))
                self._ending[ending] = channel
                ending.add_done_callback(self._ending.pop)

    async def trouble(self, address: str) -> str:
        """As `tls_trouble`, with the certificates of these channels."""
        return await tls_trouble(address, self._tls)

    async def probe(self, address: str, timeout_s: float) -> None:
        """As `probe`, secured as all channels are."""
        await probe(address, timeout_s, self._tls)

    async def drop(self, address: str) -> None:
        """Close the channel to `address`, if there is one; open calls are cancelled."""
        channel = self._channels.pop(address, None)
        for key in [key for key in self._stubs if key[0] == address]:
            del self._stubs[key]
        if channel is not None:
            await channel.close()

    async def aclose(self) -> None:
        """Close all channels; may be called again."""
        self._closed = True
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
        for task, channel in list(self._ending.items()):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await channel.close()


async def probe(address: str, timeout_s: float, tls: Tls | None = None) -> None:
    """Ask the health service at `address` whether the service serves.

    Raises:
        Unavailable: no answer within `timeout_s` seconds, or the answer is no.
    """
    channel = open_channel(address, tls)
    try:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except MoonpoolError as error:
        raise Unavailable(f"{address} does not answer: {error}") from error
    finally:
        await channel.close()
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{address} answers that it is not serving")


async def check_health(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Ask the service behind a channel for a sign of life, for `ConnectionMonitor`.

    Raises:
        TimeoutError: no answer came. Any other error is an answer; calls notice a broken connection themselves.
    """
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        await ClientCall(check(health_pb2.HealthCheckRequest(), timeout=timeout_s))
    except DeadlineExceeded:
        raise TimeoutError from None
    except MoonpoolError:
        return
