"""Client connections: one channel per address, probes, and a monitor for peers that stop answering."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from moonpool.base import world
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.base.rpc import messages
from moonpool.base.rpc.errors import from_rpc_error
from moonpool.base.rpc.messages import END_OF_STREAM
from moonpool.base.rpc.tls import CHANNEL_OPTIONS, Tls
from moonpool.base.rpc.tuning import CONNECTION_OPTIONS

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


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A new channel with our options; connects on first use. The caller closes the channel.

    Without `tls` the channel is plaintext.
    """
    network = world.CURRENT.get().network
    if tls is None:
        return CheckedChannel(network.channel(address, _OPTIONS))
    return CheckedChannel(network.channel(address, [*_OPTIONS, *CHANNEL_OPTIONS], tls.channel_credentials()))


class CheckedChannel(grpc.aio.Channel):
    """A channel on which generated stubs, too, refuse answers that would cost too much to parse."""

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
        return _client_calls(self._channel.unary_unary(*args, **_checked(kwargs)))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _client_calls(self._channel.unary_stream(*args, **_checked(kwargs)))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _client_calls(self._channel.stream_unary(*args, **_checked(kwargs)))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _client_calls(self._channel.stream_stream(*args, **_checked(kwargs)))


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
        """Put channels aside that were made with certificates that have changed since."""
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
        """Close the channel to `address`, if there is one; open calls are cancelled."""
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


QUIET_SHARE, PROBE_SHARE = 0.4, 0.3
"""Shares of the silence: no message for the first share, then `PROBES` probes within the second."""
PROBES = 2


class ProcessorWait:
    """Seconds for which a peer has had no processor since the peer was heard: silence in this time proves no failure.

    The kernel is asked at most every `RESAMPLE_S`, not at each message; so up to `RESAMPLE_S` before the last message
    may count too.
    """

    RESAMPLE_S = 0.1

    def __init__(self, total_s: Callable[[], float]) -> None:
        """`total_s`: seconds for which the peer has had no processor since the peer's start."""
        self._total_s = total_s
        self._then_s = 0.0
        self._sampled_at = -math.inf

    def heard(self, now: float) -> None:
        """A message came at `now`, a time of the event loop."""
        if now - self._sampled_at >= self.RESAMPLE_S:
            self._sampled_at = now
            self._then_s = self._total_s()

    def since_s(self) -> float:
        """Seconds without a processor since the peer was heard."""
        return self._total_s() - self._then_s


@dataclass(slots=True, eq=False)
class MonitoredCall:
    """A call that waits for the peer. `lost`: the call was given up because the peer does not answer."""

    give_up: Callable[[], object]
    lost: bool = False


class ConnectionMonitor:
    """Monitors one peer, for all calls over one connection.

    While calls wait without messages, the monitor asks the peer for a sign of life. If none comes, the calls are given
    up. This process may be late too, so one missing answer is not enough.
    """

    def __init__(
        self,
        ask: Callable[[float], Awaitable[None]],
        silence_s: float,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Has no effect before a call waits.

        Args:
            ask: asks, for an answer within so many seconds; raises TimeoutError when none comes.
            silence_s: seconds after which calls are given up; 0 = never. Seconds in which this process did not run, or
                the peer had no processor, do not count.
            waited_s: seconds for which the peer has had no processor, since the peer's start.
        """
        self._ask = ask
        self._silence_s = silence_s
        self._no_processor = ProcessorWait(waited_s)
        self._waiting: dict[MonitoredCall, None] = {}  # in the order in which they began
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    def begin(self, give_up: Callable[[], object]) -> MonitoredCall:
        """A call waits from now on, until `end`."""
        call = MonitoredCall(give_up)
        if not self._waiting:
            self.heard()  # no call waited: the silence begins now
        self._waiting[call] = None
        if self._silence_s and (self._watching is None or self._watching.done()):
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return call

    def end(self, call: MonitoredCall) -> None:
        """A call waits no more; may be called again."""
        self._waiting.pop(call, None)

    @contextmanager
    def waiting(self, give_up: Callable[[], object]) -> Iterator[MonitoredCall]:
        """While the body runs, a call waits; a body that ends without an error counts as news from the peer."""
        call = self.begin(give_up)
        try:
            yield call
            self.heard()
        finally:
            self.end(call)

    async def aclose(self) -> None:
        """End watching; may be called again."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def heard(self) -> None:
        """Something came."""
        self._heard_at = asyncio.get_running_loop().time()
        self._no_processor.heard(self._heard_at)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            left_s = self._left_s()
            if left_s > 0:
                due = loop.time() + left_s
                await asyncio.sleep(left_s)
                self._heard_at += max(0.0, loop.time() - due)  # this process did not run
            elif await self._is_there():
                self.heard()
            elif self._left_s() <= 0:
                self._give_up()

    def _left_s(self) -> float:
        """Seconds of silence until the peer is asked."""
        due = self._heard_at + self._no_processor.since_s() + QUIET_SHARE * self._silence_s
        return due - asyncio.get_running_loop().time()

    async def _is_there(self) -> bool:
        since = self._heard_at
        for _ in range(PROBES):
            try:
                await self._ask(PROBE_SHARE * self._silence_s)
            except TimeoutError:
                if self._heard_at == since:
                    continue
            return True
        return False

    def _give_up(self) -> None:
        lost, self._waiting = self._waiting, {}
        for call in lost:
            call.lost = True
            call.give_up()


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
