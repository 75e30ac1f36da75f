"""gRPC in memory: servers and channels as `grpc.aio` has them, with latency, link faults, resets and a log of messages.

Real handlers, interceptors and serialised messages run; only the connection is not real.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tests.world.loop import NODE, Node, VirtualTime, draws
from tests.world.sockets import Address, MemorySocket

EOF = grpc.aio.EOF
LATENCY_S, JITTER_S = 0.0003, 0.0002
"""Of a message on its way: a constant, and the mean of what comes on top."""
FIRST_PORT = 20_001
WINDOW = 16
"""Messages that wait for a reader; then writers wait, as HTTP/2's flow control has it for bytes."""
RESENT_S = 0.2
"""After so long a lost message is sent again, and then after twice as long."""


@dataclass(frozen=True, slots=True)
class LinkFault:
    """What happens to messages from one process to another, until a time on the loop's clock.

    Attributes:
        until: end of the fault.
        delay_s: what each message takes longer; infinite: nothing comes through before `until`.
        loss: share of messages that are lost on their way, and sent again.
    """

    until: float
    delay_s: float = math.inf
    loss: float = 0.0


_WORLD = Context()
"""Where messages travel: no node's context."""


class MessageLog:
    """A digest of all messages, and with a `path` the messages themselves, a line each."""

    def __init__(self, path: str | None = None) -> None:
        self.messages = self.calls = 0
        self._digest = hashlib.sha256()
        self._file = None if path is None else open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as the process

    def add(self, now: float, connection: tuple[str, str], what: str, method: str, data: bytes) -> None:
        line = f"{now:.9f} {'>'.join(connection)} {what} {method} {len(data)}"
        self.messages += 1
        self._digest.update(line.encode())
        self._digest.update(data)
        if self._file is not None:
            self._file.write(f"{line} {hashlib.sha256(data).hexdigest()[:12]}\n")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]


class Network:
    """Everything that is connected, and how long messages take."""

    def __init__(self, time: VirtualTime, seed: int, log: MessageLog, jitter_s: float = JITTER_S) -> None:
        self.log = log
        self._jitter_s = jitter_s
        self.servers: dict[str, MemoryServer] = {}
        self.calls: dict[_Call, None] = {}
        self.sockets: dict[MemorySocket, None] = {}
        self.listeners: dict[Address, MemorySocket] = {}
        self._time = time
        self._draws = draws(f"network {seed}")
        self._last: dict[tuple[str, str], float] = {}
        self._faults: dict[tuple[str, str], LinkFault] = {}
        self._ports = FIRST_PORT
        self._channels = 0

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: object) -> Any:
        return MemoryServer(self, interceptors)

    def channel(self, address: str, options: object, credentials: object = None) -> Any:
        self._channels += 1
        return MemoryChannel(self, address, f"c{self._channels}")

    def tcp_socket(self, family: int) -> Any:
        sock = MemorySocket(self, current_node())
        self.sockets[sock] = None
        return sock

    def port(self) -> int:
        self._ports += 1
        return self._ports

    def send(self, call: _Call, up: bool, deliver: Callable[..., object], *args: Any) -> None:
        """Deliver after the latency, in order on one connection, and as late as a fault of the link makes it."""
        connection = (call.channel.name, call.channel.address) if up else (call.channel.address, call.channel.name)
        server = call.server or self.servers.get(call.channel.address)
        link = None
        if server is not None:
            link = (call.client.name, server.node.name) if up else (server.node.name, call.client.name)
        data = args[0] if args and isinstance(args[0], bytes) else b""
        self.log.add(self._time.now, connection, deliver.__name__, call.method, data)
        self._deliver(connection, link, 0.0, deliver, *args)

    def carry(
        self,
        connection: tuple[str, str],
        link: tuple[str, str],
        what: str,
        data: bytes,
        deliver: Callable[[bytes], object],
        *,
        after_s: float = 0.0,
    ) -> None:
        """Deliver bytes of a TCP connection from one process to another, in order, sent after so many seconds."""
        self.log.add(self._time.now, connection, what, "", data)
        self._deliver(connection, link, after_s, deliver, data)

    def _deliver(
        self,
        connection: tuple[str, str],
        link: tuple[str, str] | None,
        after_s: float,
        deliver: Callable[..., object],
        *args: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + after_s + LATENCY_S + self._jitter_s * self._draws.expovariate(1.0)
        if self._faults and link is not None:
            due = self._delayed(link, due)
        due = max(due, self._last.get(connection, 0.0))
        self._last[connection] = due
        loop.call_at(due, deliver, *args, context=_WORLD)

    def disturb(self, sender: str, receiver: str, seconds: float, delay_s: float = math.inf, loss: float = 0.0) -> None:
        """Disturb a link for so long, as `LinkFault` says; by default nothing comes through."""
        until = asyncio.get_running_loop().time() + seconds
        self._faults[sender, receiver] = LinkFault(until, delay_s, loss)

    def partition(self, text: str, other: str, seconds: float) -> None:
        """Hold all messages between two processes back for so long."""
        self.disturb(text, other, seconds)
        self.disturb(other, text, seconds)

    def heal(self) -> None:
        """End all faults of links."""
        self._faults.clear()

    def reset(self, text: str, other: str) -> None:
        """Break all connections between two processes."""
        for call in list(self.calls):
            if call.server is not None and {call.client.name, call.server.node.name} == {text, other}:
                call.end(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
                call.stop_serving()
        for sock in list(self.sockets):
            if sock.other is not None and {sock.node.name, sock.other.node.name} == {text, other}:
                sock.end(b"", "reset")

    def kill(self, node: Node) -> None:
        """A node has died: the kernel closes its connections."""
        for sock in [sock for sock in self.sockets if sock.node is node]:
            sock.close()
        self.servers = {address: server for address, server in self.servers.items() if server.node is not node}
        for call in list(self.calls):
            if call.client is node:
                call.status = call.status or (grpc.StatusCode.CANCELLED, "", ())
                del self.calls[call]
                self.send(call, True, call.abandon)
            elif call.server is not None and call.server.node is node:
                self.send(call, False, call.end, grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def _delayed(self, link: tuple[str, str], due: float) -> float:
        """When a message arrives that would arrive at `due`."""
        fault = self._faults.get(link)
        if fault is None or fault.until <= due:
            return due
        if math.isinf(fault.delay_s):
            return fault.until
        due, resent_s = due + fault.delay_s, RESENT_S
        while self._draws.random() < fault.loss:
            due, resent_s = due + resent_s, 2 * resent_s
        return due


class _Inbox:
    """Messages that have come to one side of a call.

    Attributes:
        unread: messages that were written and not read.
    """

    def __init__(self) -> None:
        self.unread = 0
        self._over = False
        self._read = asyncio.Event()
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, data: bytes) -> None:
        self._messages.append(data)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self.give_up()
        self._wake()

    def give_up(self) -> None:
        """Nobody reads any more; who writes does not wait."""
        self._over = True
        self._read.set()

    async def room(self) -> None:
        """Wait until a further message may be written."""
        while self.unread >= WINDOW and not self._over:
            self._read.clear()
            await self._read.wait()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        while not self._messages:
            if self._closed:
                return EOF
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.unread -= 1
        self._read.set()
        return self._messages.popleft()


class _Call:
    """One call, both sides of it."""

    def __init__(self, channel: MemoryChannel, method: str, timeout: float | None, metadata: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.network, self.channel, self.method = channel.network, channel, method
        self.client = current_node()
        self.metadata = tuple(metadata or ())
        self.up, self.down = _Inbox(), _Inbox()
        self.status: tuple[grpc.StatusCode, str, tuple[Any, ...]] | None = None
        self.cancelled = self._abandoned = False
        self._callbacks: list[tuple[Callable[[Any], object], Context]] = []
        self.finished: asyncio.Future[None] = self.loop.create_future()
        self.deadline = None if timeout is None else self.loop.time() + timeout
        self._timer = None if timeout is None else self.loop.call_later(max(0.0, timeout), self._late)
        self.server: MemoryServer | None = None
        self._serving: asyncio.Task[None] | None = None
        channel.calls[self] = self.network.calls[self] = None
        self.network.log.calls += 1
        self.network.send(self, True, self._arrive)

    def when_done(self, callback: Callable[[Any], object]) -> None:
        """Call back when the client has the end, in the context of whoever asks."""
        self._callbacks.append((callback, copy_context()))

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.loop.time()

    def write_up(self, data: bytes) -> None:
        self.up.unread += 1
        self.network.send(self, True, self.up.put, data)

    def close_up(self) -> None:
        self.network.send(self, True, self.up.close)

    def write_down(self, data: bytes) -> None:
        self.down.unread += 1
        self.network.send(self, False, self._deliver_down, data)

    def _deliver_down(self, data: bytes) -> None:
        if self.status is None:
            self.down.put(data)

    def _arrive(self) -> None:
        server = self.network.servers.get(self.channel.address)
        if self._abandoned or self.status is not None:
            return
        if server is None or server.stopping:
            self.end(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self.channel.address}: Connection refused")
            return
        self.server = server
        self._serving = self.loop.create_task(server.serve(self), context=server.context.copy())
        server.tasks[self._serving] = None
        self._serving.add_done_callback(lambda task: server.tasks.pop(task, None))

    def _late(self) -> None:
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.stop_serving()

    def stop_serving(self) -> None:
        if self._serving is not None and not self._serving.done():
            self._serving.cancel()

    def cancel(self) -> bool:
        if self.status is not None:
            return False
        self.cancelled = True
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        self.network.send(self, True, self.abandon)
        return True

    def abandon(self) -> None:
        """The server hears that the client has left."""
        self._abandoned = True
        self.stop_serving()

    def end(self, code: grpc.StatusCode, details: str, trailing: tuple[Any, ...] = ()) -> None:
        """The call has ended for its client."""
        if self.status is not None:
            return
        self.status = code, details, trailing
        if self._timer is not None:
            self._timer.cancel()
        self.channel.calls.pop(self, None)
        self.network.calls.pop(self, None)
        self.down.close()
        self.up.give_up()
        if not self.finished.done():
            self.finished.set_result(None)
        for callback, context in self._callbacks:
            self.loop.call_soon(callback, self, context=context)

    def check(self) -> None:
        """Raises how the call ended, unless it ended well."""
        assert self.status is not None, "the call goes on"
        code, details, trailing = self.status
        if self.cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class ClientCall:
    """What a client sees of its call."""

    def __init__(self, call: _Call, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]) -> None:
        self._call, self._serialize, self._deserialize = call, serialize, deserialize

    def cancel(self) -> bool:
        return self._call.cancel()

    def cancelled(self) -> bool:
        return self._call.cancelled

    def done(self) -> bool:
        return self._call.status is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._call.when_done(lambda _: callback(self))

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata(*(await self._end())[2])

    async def code(self) -> grpc.StatusCode:
        return (await self._end())[0]

    async def details(self) -> str:
        return (await self._end())[1]

    async def _end(self) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
        await asyncio.shield(self._call.finished)
        assert self._call.status is not None, "an ended call has its status"
        return self._call.status

    async def wait_for_connection(self) -> None:
        await asyncio.sleep(LATENCY_S)

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        data = await self.read()
        await self._end()
        self._call.check()
        return data

    async def read(self) -> Any:
        try:
            data = await self._call.down.get()
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        if data is not EOF:
            return self._deserialize(data)
        self._call.check()
        return EOF

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    async def write(self, message: Any) -> None:
        if self._call.cancelled:
            raise asyncio.CancelledError
        if self._call.status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._call.up.room()
        if self._call.status is not None:
            self._call.check()
            raise asyncio.InvalidStateError("RPC already finished.")
        self._call.write_up(self._serialize(message))

    async def done_writing(self) -> None:
        self._call.close_up()


def _same(data: Any) -> Any:
    return data


class MemoryChannel(grpc.aio.Channel):
    """A channel to an address of this network."""

    def __init__(self, network: Network, address: str, name: str) -> None:
        self.network, self.address, self.name = network, address, name
        self.calls: dict[_Call, None] = {}

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in list(self.calls):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await asyncio.Event().wait()

    async def channel_ready(self) -> None:
        return

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._method(method, *args[:2], streaming=False, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._method(method, *args[:2], streaming=False, **kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._method(method, *args[:2], streaming=True, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._method(method, *args[:2], streaming=True, **kwargs)

    def _method(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        *,
        streaming: bool,
        **_: object,
    ) -> Callable[..., ClientCall]:
        serialize, deserialize = request_serializer or _same, response_deserializer or _same

        def begin(request: Any = None, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> ClientCall:
            call = _Call(self, method, timeout, metadata)
            if not streaming:
                call.write_up(serialize(request))
                call.close_up()
            return ClientCall(call, serialize, deserialize)

        return begin


class ServicerContext:
    """What a method sees of its call."""

    def __init__(self, call: _Call, handler: Any) -> None:
        self._call, self._handler = call, handler
        self.status: tuple[grpc.StatusCode, str, tuple[Any, ...]] = grpc.StatusCode.OK, "", ()

    def peer(self) -> str:
        return f"ipv4:127.0.0.1:{self._call.channel.name[1:]}"

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._call.metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    def set_trailing_metadata(self, trailing: Any) -> None:
        self.status = (*self.status[:2], tuple(trailing))

    def cancelled(self) -> bool:
        return self._call.cancelled

    def done(self) -> bool:
        return self._call.status is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._call.when_done(callback)

    async def send_initial_metadata(self, metadata: Any) -> None:
        return

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = code, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError(details)

    async def read(self) -> Any:
        data = await self._call.up.get()
        return data if data is EOF else (self._handler.request_deserializer or _same)(data)

    async def write(self, message: Any) -> None:
        await self._call.down.room()
        self._call.write_down((self._handler.response_serializer or _same)(message))


class _HandlerDetails(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: tuple[Any, ...]) -> None:
        self.method, self.invocation_metadata = method, metadata


class MemoryServer:
    """A server at an address of this network, of the node that made it."""

    def __init__(self, network: Network, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self.node, self.context = current_node(), copy_context()
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.stopping = True
        self._network = network
        self._interceptors = list(interceptors)
        self._generic: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._address = ""

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._registered.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        host, _, wanted = address.rpartition(":")
        port = int(wanted) or self._network.port()
        self._address = f"{host}:{port}"
        if self._address in self._network.servers:
            raise RuntimeError(f"{self._address} is taken")
        self._network.servers[self._address] = self
        return port

    async def start(self) -> None:
        self.stopping = False

    async def stop(self, grace: float | None) -> None:
        self.stopping = True
        if self.tasks and grace:
            await asyncio.wait(list(self.tasks), timeout=grace)
        left = list(self.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._network.servers.pop(self._address, None)

    async def serve(self, call: _Call) -> None:
        """Answer one call."""
        handler = await self._handler(_HandlerDetails(call.method, call.metadata))
        if handler is None:
            self._end(call, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        context = ServicerContext(call, handler)
        try:
            request = None if handler.request_streaming else await context.read()
            if request is EOF:
                return
            behavior = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
            await self._answer(behavior(request, context), context, streaming=handler.response_streaming)
            self._end(call, *context.status)
        except grpc.aio.AbortError:
            self._end(call, *context.status)
        except asyncio.CancelledError:
            self._end(call, grpc.StatusCode.CANCELLED, "")

    async def _answer(self, answer: Any, context: ServicerContext, *, streaming: bool) -> None:
        if not streaming:
            await context.write(await answer)
        elif inspect.isawaitable(answer):
            await answer
        else:
            async for message in answer:
                await context.write(message)

    def _end(self, call: _Call, *status: Any) -> None:
        self._network.send(call, False, call.end, *status)

    async def _handler(self, details: _HandlerDetails) -> Any:
        async def find(details: Any) -> Any:
            found = [self._registered.get(details.method), *(each.service(details) for each in self._generic)]
            return next((handler for handler in found if handler is not None), None)

        chain: Callable[[Any], Awaitable[Any]] = find
        for interceptor in reversed(self._interceptors):
            chain = _intercepted(interceptor, chain)
        return await chain(details)


def _intercepted(
    interceptor: grpc.aio.ServerInterceptor, chain: Callable[[Any], Awaitable[Any]]
) -> Callable[[Any], Awaitable[Any]]:
    return lambda details: interceptor.intercept_service(chain, details)


def current_node() -> Node:
    """The node whose code runs."""
    node = NODE.get()
    assert node is not None, "only nodes have connections"
    return node
