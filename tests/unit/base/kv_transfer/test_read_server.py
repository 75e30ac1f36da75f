"""Server halves: the handshake, credits given, frames written."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.errors import Mismatch, StreamBroken, TransferFailed
from moonpool.base.kv.frames import FrameOpener, Slice, pack_frames
from moonpool.base.kv_transfer.read_server import FrameReceiver, FrameWriter, check_hello
from moonpool.base.rpc.messages import payload_deserializer
from moonpool.base.transport import fault_injection
from moonpool.base.transport.flow_control import EgressLink
from moonpool.base.transport.send_queue import SendQueue
from moonpool.v1 import kv_pb2, kvstore_pb2
from tests.slices import slice_to_send
from tests.unit.base.transport.fakes import HELLO, LAYOUT, NAMESPACE, SERVER, content

SLICE = LAYOUT.slice_bytes(0)


def changed(**changes: object) -> kv_pb2.StreamHello:
    hello = kv_pb2.StreamHello()
    hello.CopyFrom(HELLO)
    for name, value in changes.items():
        setattr(hello if name == "namespace" else hello.layout, name, value)
    return hello


def test_check_hello() -> None:
    assert check_hello(HELLO) == LAYOUT
    assert check_hello(HELLO, namespace=NAMESPACE, layout=LAYOUT) == LAYOUT
    other = changed(namespace=bytes(32))
    assert check_hello(other, layout=LAYOUT) == LAYOUT
    for hello, field in (
        (other, "namespace"),
        (changed(namespace=b"short"), "namespace"),
        (changed(head_dim=8), "layout.head_dim"),
        (changed(dtype="int4"), "layout.dtype"),
        (kv_pb2.StreamHello(), "layout.version"),
    ):
        with pytest.raises(Mismatch) as caught:
            check_hello(hello, namespace=NAMESPACE, layout=LAYOUT)
        assert caught.value.field == field


def test_frame_receiver() -> None:
    receiver = FrameReceiver(100)
    assert receiver.welcome(SERVER) == kv_pb2.StreamWelcome(receiver=SERVER, credit_bytes=100)
    assert receiver.consumed(24) is None
    assert receiver.consumed(1) == kv_pb2.Credit(bytes=25)


def framed(transfer: int) -> tuple[kv_pb2.FrameHeader, list[memoryview]]:
    [frame] = pack_frames(transfer, 0, slices(1), LAYOUT)
    return frame


def slices(count: int) -> list[Slice]:
    return [slice_to_send(LAYOUT, 0, block, content(0, block)) for block in range(count)]


def make_writer(send_queue: SendQueue, link: EgressLink | None = None) -> FrameWriter:
    return FrameWriter(
        send_queue, LAYOUT, lambda header: kvstore_pb2.GetResponse(frame=header), link=link, target_bytes=SLICE
    )


async def test_frame_writer_sends_as_credits_allow() -> None:
    send_queue = SendQueue()
    writer = make_writer(send_queue)
    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    drain = asyncio.ensure_future(send_queue.drain(write))
    sending = asyncio.ensure_future(writer.send(9, 0, slices(3), timeout_s=10))
    await asyncio.sleep(0)
    assert not written
    writer.grant(kv_pb2.Credit(bytes=2 * SLICE))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(written) == 2
    writer.grant(kv_pb2.Credit(bytes=SLICE))
    assert await sending == 3 * SLICE
    send_queue.finish()
    await drain
    for index, data in enumerate(written):
        received = payload_deserializer(kvstore_pb2.GetResponse)(data)
        assert isinstance(received.payload, memoryview)
        ((run, piece, _),) = FrameOpener(LAYOUT).open(received.message.frame, received.payload)
        assert (received.message.frame.transfer, run.first_block, bytes(piece)) == (9, index, bytes(content(0, index)))


async def test_frame_writer_loses_no_credits() -> None:
    send_queue = SendQueue(room_bytes=SLICE)
    writer = make_writer(send_queue)
    writer.grant(kv_pb2.Credit(bytes=8 * SLICE))
    with pytest.raises(TransferFailed):  # nobody writes: the second frame finds no room
        await writer.send(1, 0, slices(2), timeout_s=0.01)
    assert writer.credits.available == 7 * SLICE
    send_queue.close(StreamBroken("gone"))
    with pytest.raises(StreamBroken, match="gone"):
        await writer.send(1, 0, slices(1), timeout_s=1)
    assert writer.credits.available == 7 * SLICE


async def test_frame_writer_offers_only_what_needs_no_waiting() -> None:
    send_queue = SendQueue(room_bytes=2 * SLICE)
    writer = make_writer(send_queue)

    def wrap(header: kv_pb2.FrameHeader) -> kvstore_pb2.GetResponse:
        return kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(transfer=header.transfer, frame=header))

    assert not writer.offer(*framed(1), wrap)  # no credits
    writer.grant(kv_pb2.Credit(bytes=8 * SLICE))
    assert writer.offer(*framed(1), wrap)
    assert (len(send_queue), writer.credits.available) == (1, 7 * SLICE)
    assert writer.offer(*framed(2), wrap)
    assert not writer.offer(*framed(3), wrap)  # no room
    assert (len(send_queue), writer.credits.available) == (2, 6 * SLICE)
    assert not make_writer(SendQueue(), EgressLink(1.0)).offer(*framed(1), wrap)
    full = make_writer(SendQueue(max_messages=0))
    full.grant(kv_pb2.Credit(bytes=SLICE))
    with pytest.raises(StreamBroken, match="takes none"):
        full.offer(*framed(1), wrap)
    assert full.credits.available == SLICE
    send_queue.close(StreamBroken("gone"))
    assert not writer.offer(*framed(4), wrap)
    assert writer.credits.available == 6 * SLICE


async def test_frame_writer_takes_credits_for_what_it_offers() -> None:
    writer = make_writer(SendQueue())
    writer.grant(kv_pb2.Credit(bytes=LAYOUT.share_bytes(0)))
    data = memoryview(content(0, 0))[LAYOUT.share_bytes(0) :]
    [frame] = pack_frames(1, 0, [slice_to_send(LAYOUT, 0, 0, data, heads=range(1, 2))], LAYOUT)
    assert writer.offer(*frame, lambda header: kvstore_pb2.GetResponse(frame=header))
    assert writer.credits.available == 0


async def test_frame_writer_takes_credits_for_what_the_reader_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a frame that fault injection has shortened, the reader hands back what came."""
    monkeypatch.setattr(fault_injection, "corruptor", lambda frame: (frame[0], [memoryview(b"".join(frame[1]))[:-1]]))
    writer = make_writer(SendQueue())
    writer.grant(kv_pb2.Credit(bytes=8 * SLICE))
    assert writer.offer(*framed(1), lambda header: kvstore_pb2.GetResponse(frame=header))
    assert writer.credits.out == SLICE - 1


async def test_frame_writer_waits_for_the_link_only_so_long() -> None:
    writer = make_writer(SendQueue(), EgressLink(1.0))
    writer.grant(kv_pb2.Credit(bytes=8 * SLICE))
    with pytest.raises(TransferFailed, match="link"):
        await writer.send(1, 0, slices(1), timeout_s=0.01)
    assert writer.credits.available == 8 * SLICE


async def test_frame_writer_closed() -> None:
    writer = make_writer(SendQueue())
    sending = asyncio.ensure_future(writer.send(1, 0, slices(1), timeout_s=10))
    await asyncio.sleep(0)
    writer.close(StreamBroken("the reader is gone"))
    with pytest.raises(StreamBroken, match="gone"):
        await sending
