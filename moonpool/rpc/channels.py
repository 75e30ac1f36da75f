"""Client connections: one channel per address, bounds on what is received, probes, and the KV streams' codecs."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from moonpool.errors import Unavailable
from moonpool.rpc import codec
from moonpool.rpc.limits import MESSAGE_BYTES
from moonpool.rpc.tls import CHANNEL_OPTIONS, Tls
from moonpool.rpc.tuning import LARGE_MESSAGE_OPTIONS

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # A peer that vanished without closing its connection is noticed within 40 s even when nothing is being sent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again quickly, and a dropped channel takes its connection with it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # Instances talk to each other directly whatever the environment says about proxies.
    ("grpc.enable_http_proxy", 0),
    *LARGE_MESSAGE_OPTIONS,
]

OLD_S = 3600.0
"""So long calls may go on over a connection whose certificates have changed since."""

Metadata = tuple[tuple[str, str], ...]
StreamOpener = Callable[..., "grpc.aio.StreamStreamCall[Any, Any]"]


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A new channel with our options; connects on first use. The caller closes it. Without `tls` it is in plaintext."""
    if tls is None:
        return CheckedChannel(grpc.aio.insecure_channel(address, options=_OPTIONS))
    options = [*_OPTIONS, *CHANNEL_OPTIONS]
    return CheckedChannel(grpc.aio.secure_channel(address, tls.channel_credentials(), options=options))


class CheckedChannel(grpc.aio.Channel):
    """A channel on which generated stubs, too, refuse answers that would cost too much to parse (limits.py)."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.unary_unary(*args, **_checked(kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.unary_stream(*args, **_checked(kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.stream_unary(*args, **_checked(kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.stream_stream(*args, **_checked(kwargs))


def _checked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a stub's method, with our deserialiser in the place of a message class' `FromString`."""
    cls = getattr(kwargs.get("response_deserializer"), "__self__", None)
    if isinstance(cls, type) and issubclass(cls, Message):
        return {**kwargs, "response_deserializer": codec.plain_deserializer(cls)}
    return kwargs


class Channels:
    """One channel per address, shared by everyone in the process; closed together.

    When certificates have changed, `get` gives new channels. Calls on the old ones may end, within `OLD_S` seconds.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._generation = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
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
            channel = self._channels[address] = open_channel(address, self._tls)
        return channel

    def _renew(self) -> None:
        """Puts channels aside that were made with certificates that have changed since."""
        if self._tls is None:
            return
        self._tls.renew()
        if self._generation != self._tls.generation:
            self._generation = self._tls.generation
            old, self._channels = self._channels, {}
            for channel in old.values():
                ending = asyncio.ensure_future(channel.close(OLD_S))
                self._ending[ending] = channel
                ending.add_done_callback(self._ending.pop)

    async def probe(self, address: str, timeout_s: float) -> None:
        """As `probe`, secured as all channels are."""
        await probe(address, timeout_s, self._tls)

    async def drop(self, address: str) -> None:
        """Close the channel to `address`, if there is one; its calls are cancelled."""
        channel = self._channels.pop(address, None)
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
    """Ask the health service at `address` whether it serves.

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
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{address} does not answer: {error.details() or error.code().name}") from error
    finally:
        await channel.close()
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{address} answers that it is not serving")


def payload_stream(
    channel: grpc.aio.Channel,
    service: str,
    method: str,
    request_cls: type[Message],
    response_cls: type[Message],
) -> StreamOpener:
    """A callable that opens the bidirectional stream `service`/`method`, as a generated stub's attribute would.

    On the stream, messages of a class with a `payload` field are `PayloadMessage`s, others plain messages, just as on
    the server's side (see codec.py). For example `payload_stream(channel, "moonpool.v1.DecodeService", "ReceiveKV",
    ReceiveKVRequest, ReceiveKVResponse)(timeout=...)`.
    """
    return channel.stream_stream(
        f"/{service}/{method}",
        request_serializer=codec.serializer(request_cls),
        response_deserializer=codec.deserializer(response_cls),
    )
