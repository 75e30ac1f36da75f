"""A server's stream on a link: from a peer that reads no answers nothing more is taken."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from moonpool.base.errors import StreamBroken
from moonpool.base.transport.base import ConnectionEnd
from moonpool.base.transport.connection import ReceiveCallbacks
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.server_stream import ServerStream
from moonpool.base.transport.tcp import TcpTransport
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.unit.base.transport.fakes import HELLO
from tests.unit.base.transport.turns import turn

MANY, UNSENT = 2000, 4


class Offers:
    """Stands for a `TransportListener`: the test hands the connection over."""

    attach: Callable[[ConnectionEnd], None]

    def offer(
        self, hello: kv_pb2.StreamHello, attach: Callable[[ConnectionEnd], None], *, one_shot: bool
    ) -> kv_pb2.TransportOffer:
        self.attach = attach
        return kv_pb2.TransportOffer(token=b"token")

    def withdraw(self, token: bytes) -> None:
        assert token == b"token"


class Echo(ServerStream[kvstore_pb2.PutRequest]):
    """Answers each close with the same channel's number."""

    def __init__(self, links: Any) -> None:
        super().__init__(asyncio.Event(), max_unsent=UNSENT, listener=links)
        self.taken: list[int] = []

    async def on_hello(self, message: kvstore_pb2.PutRequest) -> None:
        self.offer_transport(message)

    def on_message(self, message: kvstore_pb2.PutRequest, payload: memoryview) -> None:
        self.taken.append(message.close.transfer)
        self.post(kvstore_pb2.PutResponse(credit_bytes=message.close.transfer))


class Call:
    """The call beside the link: a hello, then nothing."""

    async def requests(self) -> AsyncIterator[Any]:
        yield kvstore_pb2.PutRequest(hello=HELLO)
        await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        raise AssertionError("answers go over the link")


async def test_from_a_peer_that_reads_no_answers_nothing_more_is_taken() -> None:
    offers, call = Offers(), Call()
    stream = Echo(offers)
    running = asyncio.ensure_future(stream.run(call.requests(), call.write))
    await turn()
    near, far = socket.socketpair()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a few answers
    offers.attach(ConnectionEnd(TcpTransport(), FramedSocket(far)))
    answers: list[int] = []
    all_came = asyncio.Event()

    def take(message: kvstore_pb2.PutResponse, payload: object) -> None:
        answers.append(message.credit_bytes)
        if len(answers) == MANY:
            all_came.set()

    peer = TcpTransport().open_connection(
        ConnectionEnd(TcpTransport(), FramedSocket(near)), kvstore_pb2.PutResponse, lambda message: None
    )

    async def send() -> None:
        for number in range(1, MANY + 1):
            await peer.write(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=number)))

    sending = asyncio.ensure_future(send())
    await turn(100)
    assert 0 < len(stream.taken) < MANY
    assert len(stream.send_queue) == UNSENT + 1
    reading = asyncio.ensure_future(peer.run(ReceiveCallbacks(take)))
    async with asyncio.timeout(60):
        await all_came.wait()
    assert answers == stream.taken == list(range(1, MANY + 1))
    await sending
    peer.close(StreamBroken("over"))
    await reading
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
