"""gRPC as a connection: one call's messages.

Every stream begins on gRPC, and stays there if no other transport can be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.rpc import messages
from moonpool.base.rpc.channels import StreamCall
from moonpool.base.rpc.messages import END_OF_STREAM, PayloadMessage
from moonpool.base.transport.config import GRPC_NAME
from moonpool.base.transport.connection import Connection, M, OutgoingItem, ReceiveCallbacks, UnsentRest

_NO_PAYLOAD = memoryview(b"")


class GrpcConnection(Connection[M]):
    """The client's side of a call as a connection; owns the call.

    Payloads come in separate memory, or are copied into the receive buffer on arrival. No payload is borrowed.
    """

    name = GRPC_NAME

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._error: Exception | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def closed(self) -> bool:
        return self._error is not None

    async def run(self, callbacks: ReceiveCallbacks) -> Exception:
        while True:
            try:
                received = await self._call.read()
            except MoonpoolError as error:
                return error
            if received is END_OF_STREAM:
                return StreamBroken("ended by the peer")
            if received is None:  # gRPC logs what a deserialiser raises, and goes on with None
                return StreamBroken("a message could not be decoded")
            if not self._resumed.is_set():
                await self._resumed.wait()
            if isinstance(received, PayloadMessage):
                await self._deliver(received, callbacks)
            else:
                callbacks.take(received, _NO_PAYLOAD)

    async def _deliver(self, received: PayloadMessage[Any], callbacks: ReceiveCallbacks) -> None:
        """A separate function: references to the reader's memory must not stay until the next message."""
        message, payload = received.message, received.payload
        assert isinstance(payload, memoryview), "received payloads are views"
        buffer = callbacks.receive_into(message, payload.nbytes)
        callbacks.take(message, await buffer.receive(payload) if buffer else payload)

    def pause(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    async def write(self, item: OutgoingItem | UnsentRest) -> None:
        await self._call.write(item)

    def close(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._call.cancel()


StreamOpener = Callable[..., StreamCall]


def payload_stream(
    channel: grpc.aio.Channel,
    service: str,
    method: str,
    request_cls: type[Message],
    response_cls: type[Message],
) -> StreamOpener:
    """A callable that opens the bidirectional stream `service`/`method`, as a generated stub's attribute would.

    On the stream, messages with a `payload` field are `PayloadMessage`s, others plain messages, just as on the server's
    side (see `rpc.messages`). For example `payload_stream(channel, "moonpool.v1.DecodeService", "ReceiveKV",
    ReceiveKVRequest, ReceiveKVResponse)(timeout=...)`.
    """
    open_stream: StreamOpener = channel.stream_stream(
        f"/{service}/{method}",
        request_serializer=messages.serializer(request_cls),
        response_deserializer=messages.deserializer(response_cls),
    )
    return open_stream
