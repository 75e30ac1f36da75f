"""Serving: a grpc.aio server with health, reflection, call limits and error mapping, as one context manager.

Handlers are made from the service descriptors: the contract's method `Foo` is the servicer's method `Foo`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moonpool.base import world
from moonpool.base.config import format_address, is_loopback, parse_address
from moonpool.base.errors import ConfigError, InvalidRequest, NotFound, Unsupported
from moonpool.base.rpc import messages
from moonpool.base.rpc.carried_calls import CarriedCalls, CarriedMethod
from moonpool.base.rpc.errors import DETAIL_KEY, to_status
from moonpool.base.rpc.messages import END_OF_STREAM
from moonpool.base.rpc.peer_calls import DEFAULT_LIMITS, CallLimits, PeerCalls
from moonpool.base.rpc.roles import RoleGate
from moonpool.base.rpc.stream_writes import write_whole
from moonpool.base.rpc.tls import Security
from moonpool.base.rpc.tuning import CONNECTION_OPTIONS, open_files_limit
from moonpool.base.telemetry.logs import get_logger
from moonpool.v1 import calls_pb2

log = get_logger(__name__)
Service = tuple[ServiceDescriptor, object]
LIVENESS, READINESS = "liveness", "readiness"
"""Names under which orchestrators and the endpoint picker protocol ask: whether the process answers; takes requests."""
_CALLS = calls_pb2.DESCRIPTOR.services_by_name["CallsService"]
_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_OPTIONS: list[tuple[str, Any]] = [
    *CONNECTION_OPTIONS,
    ("grpc.so_reuseport", 0),
    # The server must not take the clients' pings for abuse.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A peer that begins calls faster than they are handed over has its turn like others, and its further calls wait:
    # with gRPC's own bounds (1,000 of all connections), calls of others were refused.
    ("grpc.http2.max_requests_per_read", 4),
    ("grpc.server.max_pending_requests", 1 << 14),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 15),
]


class RunningServer:
    """A server that is listening.

    Attributes:
        port: the actual port.
        address: "host:port" of the listen address with that port.
        client_address: the same for clients without a certificate; "" = such clients cannot connect.
    """

    def __init__(self, host: str, port: int, client_address: str, health: _Health) -> None:
        self.port = port
        self.address = format_address(host, port)
        self.client_address = client_address
        self._health = health

    def set_serving(self, serving: bool) -> None:
        """Tell health checks whether new requests are welcome, for every service and as a whole."""
        self._health.set(serving)

    def lacking(self) -> str:
        """What new requests wait for, "" = nothing: what `/readyz` says (`PrometheusMetrics.ready`)."""
        return "" if self._health.serving else "the service takes no new requests"


class _Health(health_pb2_grpc.HealthServicer):
    """The standard health service with one answer for all the process's services, changed without awaiting."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(("", LIVENESS, READINESS, *names))
        self._serving = True
        self._closing = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> None:
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Say NOT_SERVING for good; watches end, because they would hold up the server's end."""
        self._closing = True
        self.set(False)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> health_pb2.HealthCheckResponse:  # noqa: N802
        if request.service not in self._names:
            raise NotFound(f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if self._closing:
                return
            await changed.wait()

    def _status(self, name: str) -> Any:
        answers = health_pb2.HealthCheckResponse
        if name not in self._names:
            return answers.SERVICE_UNKNOWN
        return answers.SERVING if self._serving or name == LIVENESS else answers.NOT_SERVING


@asynccontextmanager
async def serving(
    listen: str,
    services: Sequence[Service],
    *,
    grace_s: float = 5.0,
    limits: CallLimits = DEFAULT_LIMITS,
    security: Security | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve `services` at `listen` ("host:port", port 0 = any free) while the body runs.

    On leaving, health turns to NOT_SERVING, new calls are refused, and calls in flight get `grace_s` seconds before
    they are cancelled. With `security`, peers show certificates, and the certificates' roles decide on calls. With
    `credentials` instead of `security`, any peer that can connect may call. Without both, connections are in plaintext.

    Raises:
        ConfigError: `listen` is malformed or cannot be bound, for example because the port is taken.
    """
    try:
        host, _ = parse_address(listen)
    except ValueError as error:
        raise ConfigError("listen", str(error)) from error
    gate = None if security is None else security.gate
    ports = 1 if security is None or not security.client_listen else 2  # gRPC bounds each by itself
    options = [
        *_OPTIONS,
        ("grpc.max_concurrent_streams", limits.connection_calls),
        ("grpc.server_handshake_timeout_ms", round(1e3 * limits.handshake_s)),
        # Until a peer confirms the server's settings, gRPC lets each call have 16 MiB of metadata.
        ("grpc.http2.settings_timeout", round(1e3 * limits.handshake_s)),
        ("grpc.max_allowed_incoming_connections", limits.connections or max(1, open_files_limit() // (2 * ports))),
    ]
    peers = PeerCalls(limits)
    server = world.CURRENT.get().network.server([ErrorInterceptor(peers, gate)], options)
    handlers = {descriptor.full_name: _handlers(descriptor, servicer) for descriptor, servicer in services}
    carried = CarriedCalls(_carried_methods(handlers, peers, gate))
    handlers[_CALLS.full_name] = _handlers(_CALLS, carried)
    names = list(handlers)
    server.add_generic_rpc_handlers(
        tuple([grpc.method_handlers_generic_handler(name, methods) for name, methods in handlers.items()])
    )
    health = _Health(names)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection([*names, _HEALTH_NAME, reflection.SERVICE_NAME], server)
    try:
        if security is not None:
            credentials = security.tls.server_credentials(client_certificates=True)
        port = _bind(server, listen, credentials)
        client_address = _bind_clients(server, security)
    except ConfigError:
        await server.stop(None)
        raise
    await server.start()
    try:
        yield RunningServer(host, port, client_address, health)
    finally:
        health.close()
        carried.close()
        await server.stop(grace_s)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen; return the port."""
    if credentials is not None:
        return _add_services(lambda: server.add_secure_port(listen, credentials), "listen", listen)
    if not is_loopback(parse_address(listen)[0]):
        log.warning("connections are in plaintext and open to all who reach them; see tls_cert", listen=listen)
    return _add_services(lambda: server.add_insecure_port(listen), "listen", listen)


def _bind_clients(server: grpc.aio.Server, security: Security | None) -> str:
    """Listen for clients without certificates, if that is wanted; return the address."""
    if security is None or not security.client_listen:
        return ""
    credentials = security.tls.server_credentials(client_certificates=False)
    listen = security.client_listen
    port = _add_services(lambda: server.add_secure_port(listen, credentials), "client_listen", listen)
    address = format_address(parse_address(listen)[0], port)
    log.info("clients with API keys connect here", address=address)
    return address


def _add_services(add: Callable[[], int], field: str, listen: str) -> int:
    try:
        return add()
    except RuntimeError as error:
        raise ConfigError(field, f"cannot listen at {listen}: is the port taken?") from error


def _handlers(service: ServiceDescriptor, servicer: object) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    return {method.name: _handler(method, servicer) for method in service.methods}


def _carried_methods(
    handlers: Mapping[str, Mapping[str, Any]], peers: PeerCalls, gate: RoleGate | None
) -> dict[str, CarriedMethod]:
    """Return the methods that can be carried, guarded as `ErrorInterceptor` does it."""
    found = {}
    for service, methods in handlers.items():
        for name, handler in methods.items():
            if handler.request_streaming:
                continue
            method = f"/{service}/{name}"
            counted = partial(_call_of, peers, gate, method, False)
            behavior = (
                _guard_stream(method, handler.unary_stream, counted)
                if handler.response_streaming
                else _guard_unary(method, handler.unary_unary, counted)
            )
            found[method] = CarriedMethod(behavior, handler.response_serializer, handler.response_streaming)
    return found


def _handler(method: MethodDescriptor, servicer: object) -> grpc.RpcMethodHandler[Any, Any]:
    behavior: Any = getattr(servicer, method.name, None)
    if behavior is None:
        behavior = _not_built(method.full_name)
    # Decoded in the method's own call, where the error mapping sees a malformed message. What a deserialiser raises
    # elsewhere gRPC logs, and goes on: on a stream with None in the message's place.
    behavior = _decoding(method, behavior)
    serializer = messages.serializer(message_factory.GetMessageClass(method.output_type))
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    return make(behavior, None, serializer)


def _decoding(method: MethodDescriptor, behavior: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The method `behavior` for requests that come as bytes."""
    cls = message_factory.GetMessageClass(method.input_type)
    parse = messages.deserializer(cls)

    def decode(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            reason = str(error).rpartition(": ")[2]
            raise InvalidRequest("", f"malformed {cls.__name__}: {reason}") from error

    if method.client_streaming:
        return lambda _, context: behavior(_RequestIterator(context, decode), _StreamContext(context, decode))
    if method.server_streaming:
        return lambda data, context: behavior(decode(data), _StreamContext(context, decode))
    return lambda data, context: behavior(decode(data), context)


class _RequestIterator:
    """A stream's messages; reading raises if a message is malformed.

    Read from the context: gRPC's own iterator does the same through a generator, which costs time for each message.
    """

    def __init__(self, context: Any, decode: Callable[[bytes], Any]) -> None:
        self._read = context.read
        self._decode = decode

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        data = await self._read()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._decode(data)


class _StreamContext:
    """A stream's context with a decoding `read` and a cancellable `write`; the rest is gRPC's own."""

    def __init__(self, context: Any, decode: Callable[[bytes], Any]) -> None:
        self._context = context
        self._decode = decode

    async def read(self) -> Any:
        data = await self._context.read()
        return END_OF_STREAM if data is grpc.aio.EOF else self._decode(data)

    async def write(self, message: Any) -> None:
        await write_whole(self._context.write, message)

    @property
    def bare_write(self) -> Callable[[Any], Awaitable[None]]:
        """The write that gRPC has, which takes less time; for callers that never cancel a write."""
        write: Callable[[Any], Awaitable[None]] = self._context.write
        return write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _not_built(name: str) -> Any:
    async def behavior(request: object, context: object) -> None:
        raise Unsupported(f"{name} is not built yet")

    return behavior


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps a servicer's exceptions to status codes, for all four kinds of call, and logs foreign exceptions.

    Counts each peer's calls, and refuses calls beyond the limits and from peers that may not call.

    Cancellation passes through. A method that answers with a stream may be an async generator or use `context.write`. A
    generator is closed in the call's own task, so `finally` runs at once when the client has left.
    """

    def __init__(self, peers: PeerCalls, gate: RoleGate | None = None) -> None:
        """Take the call counts, and the gate for callers; None: everybody may call everything."""
        self._peers = peers
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.request_streaming and handler.response_streaming:
            make, behavior, streaming = grpc.stream_stream_rpc_method_handler, handler.stream_stream, True
        elif handler.response_streaming:
            make, behavior, streaming = grpc.unary_stream_rpc_method_handler, handler.unary_stream, True
        elif handler.request_streaming:
            make, behavior, streaming = grpc.stream_unary_rpc_method_handler, handler.stream_unary, False
        else:
            make, behavior, streaming = grpc.unary_unary_rpc_method_handler, handler.unary_unary, False
        counted = partial(_call_of, self._peers, self._gate, method, handler.request_streaming)
        guarded = _guard_stream(method, behavior, counted) if streaming else _guard_unary(method, behavior, counted)
        return make(guarded, handler.request_deserializer, handler.response_serializer)


RpcBehavior = Callable[[Any, Any], Any]
CallCounter = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def _call_of(peers: PeerCalls, gate: RoleGate | None, method: str, stream: bool, context: Any) -> Iterator[None]:
    with peers.call(context.peer(), stream=stream):
        if gate is not None:
            gate.admit(method, context)
        yield


def _guard_unary(method: str, behavior: RpcBehavior, counted: CallCounter) -> RpcBehavior:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            with counted(context):
                return await behavior(request, context)
        except Exception as exc:
            await _abort(method, context, exc)

    return guarded


def _guard_stream(method: str, behavior: RpcBehavior, counted: CallCounter) -> RpcBehavior:
    async def guarded(request: Any, context: Any) -> None:
        try:
            with counted(context):
                answer = behavior(request, context)
                if inspect.isawaitable(answer):
                    await answer
                    return
                async with aclosing(answer) as responses:
                    async for response in responses:
                        await context.write(response)
        except Exception as exc:
            await _abort(method, context, exc)

    return guarded


async def _abort(method: str, context: Any, exc: Exception) -> None:
    if isinstance(exc, grpc.aio.AbortError):  # the method chose the status
        raise exc
    if isinstance(exc, BaseExceptionGroup) and exc.split(asyncio.CancelledError)[0] is not None:
        raise asyncio.CancelledError from exc
    code, text, detail = to_status(exc)
    if code is grpc.StatusCode.INTERNAL:
        log.error("call failed", method=method, exc_info=exc)
    try:
        await context.abort(code, text, ((DETAIL_KEY, detail.SerializeToString()),))
    except grpc.aio.InternalError as gone:  # the call's deadline has passed meanwhile: no client waits for a status
        raise asyncio.CancelledError from gone
