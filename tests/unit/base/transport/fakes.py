"""Small servers of the KV streams, made of the shared server halves, with faults that tests can ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.kv.frames import FrameOpener, split_run
from moonpool.base.kv.keys import chain_root, namespace, unpack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.inbound_transfer import InboundTransfer, TransferState
from moonpool.base.kv_transfer.read_server import FrameReceiver, FrameWriter, check_hello
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.messages import PayloadMessage
from moonpool.base.rpc.server import Service, serving
from moonpool.base.transport.send_queue import SendQueue
from moonpool.v1 import decode_pb2, kv_pb2, kvstore_pb2
from tests.slices import slice_to_send

LAYOUT = KVLayout.uniform(layers=3, kv_heads=2, head_dim=4, block_size=16, dtype="float32")
NAMESPACE = namespace(bytes(32), LAYOUT)
ROOT = chain_root(NAMESPACE, "")
HELLO = kv_pb2.StreamHello(
    sender=kv_pb2.Instance(id="prefill-0", epoch=5, kind=kv_pb2.INSTANCE_KIND_PREFILL),
    namespace=NAMESPACE,
    layout=LAYOUT.to_proto(),
)
DECODE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
STORE = kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"]
SERVER = kv_pb2.Instance(id="server-0", epoch=77)


def content(layer: int, block: int) -> bytearray:
    """A slice unlike any other."""
    return bytearray((layer * 101 + block * 7 + i) % 255 + 1 for i in range(LAYOUT.slice_bytes(0)))


@asynccontextmanager
async def served(*services: Service) -> AsyncIterator[tuple[Channels, str]]:
    """Services on a free port, and channels to reach them."""
    async with serving("127.0.0.1:0", services, grace_s=0.0) as server, Channels() as channels:
        yield channels, server.address


class FakeStreams:
    """What the fakes share: one send_queue per call, a reader of requests, and the wish to break a stream."""

    def __init__(self) -> None:
        self.calls = 0
        self.break_now = asyncio.Event()
        self.silent = False
        self.event = asyncio.Event()

    async def run(
        self, requests: Any, context: Any, handle: Callable[[Any, SendQueue], None], send_queue: SendQueue
    ) -> None:
        self.calls += 1

        async def breaker() -> None:
            await self.break_now.wait()
            self.break_now.clear()
            raise Unavailable("broken on purpose")

        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(send_queue.drain(context.write))
            breaking = tasks.create_task(breaker())
            async for request in requests:
                handle(request, send_queue)
                self.event.set()
                self.event.clear()
            breaking.cancel()
            send_queue.finish()
            await writer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something that arrives makes it true."""
        async with asyncio.timeout(60):
            while not condition():
                await self.event.wait()


class FakeDecode(FakeStreams):
    """Receives transfers into memory."""

    def __init__(self, *, window: int = 1 << 20, hold_credits: bool = False) -> None:
        super().__init__()
        self.window = window
        self.hold_credits = hold_credits
        self.held_back: list[kv_pb2.Credit] = []
        self.send_queues: list[SendQueue] = []
        self.transfers: dict[int, InboundTransfer] = {}
        self.memory: dict[tuple[int, int, int], bytearray] = {}
        self.closes: list[tuple[int, bool]] = []
        self.frames = 0
        self.corrupt: set[int] = set()
        self.verdicts = True

    def promise(self, transfer_id: int, num_blocks: int, last_valid: int = 16, held: int = 0) -> kv_pb2.TransferTarget:
        self.transfers[transfer_id] = InboundTransfer(transfer_id, 1, LAYOUT, num_blocks, held, last_valid)
        return kv_pb2.TransferTarget(decode=SERVER, transfer_id=transfer_id, generation=1, held_blocks=held)

    async def ReceiveKV(self, requests: Any, context: Any) -> None:
        send_queue, receiver = SendQueue(), FrameReceiver(self.window)
        self.send_queues.append(send_queue)

        def handle(request: PayloadMessage[decode_pb2.ReceiveKVRequest], send_queue: SendQueue) -> None:
            message = request.message
            match message.WhichOneof("message"):
                case "hello":
                    check_hello(message.hello, namespace=NAMESPACE, layout=LAYOUT)
                    if not self.silent:
                        send_queue.post(decode_pb2.ReceiveKVResponse(welcome=receiver.welcome(SERVER)))
                case "open":
                    transfer = self.transfers[message.open.transfer_id]
                    transfer.bind(range(transfer.num_blocks))
                    self._decide(transfer, send_queue)
                case "frame":
                    assert isinstance(request.payload, memoryview)
                    self.frames += 1
                    if (credit := receiver.consumed(request.payload.nbytes)) is not None:
                        if self.hold_credits:
                            self.held_back.append(credit)
                        else:
                            send_queue.post(decode_pb2.ReceiveKVResponse(credit=credit))
                    self._frame(message.frame, request.payload, send_queue)
                case "close":
                    self.closes.append((message.close.transfer_id, message.close.aborted))
                    transfer = self.transfers[message.close.transfer_id]
                    if not transfer.done:
                        transfer.fail("closed before it was complete")
                        self._decide(transfer, send_queue)

        await self.run(requests, context, handle, send_queue)

    def give_credits(self) -> None:
        self.hold_credits = False
        for credit in self.held_back:
            self.send_queues[-1].post(decode_pb2.ReceiveKVResponse(credit=credit))
        self.held_back.clear()

    def fail(self, transfer_id: int, reason: str) -> None:
        self.transfers[transfer_id].fail(reason)
        self._decide(self.transfers[transfer_id], self.send_queues[-1])

    def _frame(self, header: kv_pb2.FrameHeader, payload: memoryview, send_queue: SendQueue) -> None:
        transfer = self.transfers[header.transfer]
        if not transfer.matches(header.generation) or transfer.done:
            return
        if header.transfer in self.corrupt:
            payload = memoryview(bytes(payload[:-1]) + bytes([payload[-1] ^ 1]))
        try:
            for run, data, _ in transfer.opener.open(header, payload):
                transfer.accept(run)
                for block, offset, piece in split_run(run, data, LAYOUT):
                    cell = (header.transfer, run.layer, block)
                    memory = self.memory.setdefault(cell, bytearray(LAYOUT.slice_bytes(0)))
                    memory[offset : offset + piece.nbytes] = piece
        except MoonpoolError as error:
            transfer.fail(str(error))
        self._decide(transfer, send_queue)

    def _decide(self, transfer: InboundTransfer, send_queue: SendQueue) -> None:
        if not transfer.done or not self.verdicts:
            return
        complete = transfer.state is TransferState.COMPLETE
        verdict = decode_pb2.TransferVerdict(
            transfer_id=transfer.transfer_id,
            generation=transfer.generation,
            status=decode_pb2.TRANSFER_STATUS_COMPLETE if complete else decode_pb2.TRANSFER_STATUS_FAILED,
            reason=transfer.reason,
        )
        send_queue.post(decode_pb2.ReceiveKVResponse(verdict=verdict))


class FakeStore(FakeStreams):
    """Keeps blocks in a dictionary: key -> layer -> slice."""

    def __init__(self, *, window: int = 1 << 20, frame_bytes: int = 4 * LAYOUT.slice_bytes(0)) -> None:
        super().__init__()
        self.window = window
        self.frame_bytes = frame_bytes
        self.blocks: dict[bytes, dict[int, bytes]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.puts: dict[int, tuple[list[Any], dict[int, dict[int, bytearray]]]] = {}
        self.openers: dict[int, FrameOpener] = {}
        self.put_closes: list[tuple[int, bool]] = []
        self.get_closes: list[int] = []
        self.refuse = ""
        self.refusal = kvstore_pb2.PutRefused(reason="full")
        self.acks = True
        self.frames = 0
        self.takes = False  # frames that come with their transfer's opening
        self.lost_at: tuple[int, int] | None = None  # (layer, block): what is found missing when it is reached
        self.corrupt = False
        self.mute = False
        self.done_early = False
        self.heads: range | None = None  # sent whatever was asked for
        self.before_layer: Callable[[int], Awaitable[None]] | None = None
        """Awaited before each layer of a read is sent."""
        self.writers: list[FrameWriter] = []
        self.forgotten: list[list[str]] = []
        """Deletions that each writing transfer is younger than, as its opening says."""

    async def Put(self, requests: Any, context: Any) -> None:
        receiver = FrameReceiver(self.window)
        transfers: set[int] = set()

        def give_back(credit: kv_pb2.Credit | None, send_queue: SendQueue) -> None:
            if credit is not None:
                send_queue.post(kvstore_pb2.PutResponse(credit=credit))

        def handle(request: PayloadMessage[kvstore_pb2.PutRequest], send_queue: SendQueue) -> None:
            message = request.message
            match message.WhichOneof("message"):
                case "hello":
                    check_hello(message.hello)
                    send_queue.post(kvstore_pb2.PutResponse(welcome=receiver.welcome(SERVER)))
                case "open":
                    transfers.add(message.open.transfer)
                    assert isinstance(request.payload, memoryview)
                    if self._put_open(message.open, request.payload, send_queue):
                        transfers.discard(message.open.transfer)
                    give_back(receiver.consumed(request.payload.nbytes, idle=not transfers), send_queue)
                case "frame":
                    assert isinstance(request.payload, memoryview)
                    self.frames += 1
                    self._put_frame(message.frame, request.payload, send_queue)
                    give_back(receiver.consumed(request.payload.nbytes, idle=not transfers), send_queue)
                case "close":
                    self.put_closes.append((message.close.transfer, message.close.aborted))
                    self.puts.pop(message.close.transfer, None)
                    transfers.discard(message.close.transfer)
                    give_back(None if transfers else receiver.idle(), send_queue)

        await self.run(requests, context, handle, SendQueue())

    def _put_open(self, opening: kvstore_pb2.PutOpen, payload: memoryview, send_queue: SendQueue) -> bool:
        """Whether the transfer came whole, and has ended."""
        keys = unpack_keys(opening.keys)
        self.forgotten.append(list(opening.forgotten))
        self.parents.update(zip(keys, unpack_keys(opening.parent_keys), strict=True))
        if self.refuse == "open":
            self._refuse(opening.transfer, send_queue)
            return False
        if self.mute:
            return False
        self.puts[opening.transfer] = (list(keys), {})
        self.openers[opening.transfer] = FrameOpener(LAYOUT, keys=keys)
        present = [index for index, key in enumerate(keys) if key in self.blocks]
        opened = kvstore_pb2.PutOpened(transfer=opening.transfer, present=present)
        if self.takes and opening.HasField("frame"):
            self.frames += 1
            acks, self.acks = self.acks, False
            self._put_frame(opening.frame, payload, send_queue)
            self.acks = acks
            opened.taken = True
            del self.puts[opening.transfer]
        send_queue.post(kvstore_pb2.PutResponse(opened=opened))
        return opened.taken

    def _refuse(self, transfer: int, send_queue: SendQueue) -> None:
        self.refusal.transfer = transfer
        send_queue.post(kvstore_pb2.PutResponse(refused=self.refusal))

    def _put_frame(self, header: kv_pb2.FrameHeader, payload: memoryview, send_queue: SendQueue) -> None:
        if header.transfer not in self.puts:
            return
        if self.refuse == "frame":
            self._refuse(header.transfer, send_queue)
            return
        keys, parts = self.puts[header.transfer]
        for run, data, _ in self.openers[header.transfer].open(header, payload):
            for block, offset, piece in split_run(run, data, LAYOUT):
                memory = parts.setdefault(block, {}).setdefault(run.layer, bytearray(LAYOUT.slice_bytes(0)))
                memory[offset : offset + piece.nbytes] = piece
                last_head = run.head_end == LAYOUT.head_shares
                if last_head and len(parts[block]) == LAYOUT.layers:
                    self.blocks[keys[block]] = {layer: bytes(part) for layer, part in parts.pop(block).items()}
                    if self.acks:
                        ack = kvstore_pb2.PutAck(
                            transfer=header.transfer, blocks=[block], durability=kvstore_pb2.DURABILITY_VISIBLE
                        )
                        send_queue.post(kvstore_pb2.PutResponse(ack=ack))

    async def Get(self, requests: Any, context: Any) -> None:
        send_queue = SendQueue()
        reads: dict[int, asyncio.Task[None]] = {}
        writer = FrameWriter(
            send_queue, LAYOUT, lambda header: kvstore_pb2.GetResponse(frame=header), target_bytes=self.frame_bytes
        )
        self.writers.append(writer)

        def handle(message: kvstore_pb2.GetRequest, send_queue: SendQueue) -> None:
            match message.WhichOneof("message"):
                case "hello":
                    check_hello(message.hello)
                    send_queue.post(kvstore_pb2.GetResponse(welcome=kv_pb2.StreamWelcome(receiver=SERVER)))
                case "credit":
                    writer.grant(message.credit)
                case "open":
                    task = asyncio.ensure_future(self._read(message.open, writer, send_queue))
                    reads[message.open.transfer] = task
                case "close":
                    self.get_closes.append(message.close.transfer)
                    reads[message.close.transfer].cancel()

        try:
            await self.run(requests, context, handle, send_queue)
        finally:
            for task in reads.values():
                task.cancel()
            await asyncio.gather(*reads.values(), return_exceptions=True)

    async def _read(self, opening: kv_pb2.ReadOpen, writer: FrameWriter, send_queue: SendQueue) -> None:
        keys = unpack_keys(opening.keys)
        blocks = next((index for index, key in enumerate(keys) if key not in self.blocks), len(keys))
        number = opening.transfer
        if self.mute:
            return
        send_queue.post(kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(transfer=number, blocks=blocks)))
        if self.done_early:
            send_queue.post(kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(transfer=number)))
            return
        heads = self.heads or range(opening.head_begin, opening.head_end)
        part = slice(heads.start * LAYOUT.share_bytes(0), heads.stop * LAYOUT.share_bytes(0))
        for layer in range(opening.layer_begin, opening.layer_end):
            if self.before_layer is not None:
                await self.before_layer(layer)
            if self.lost_at is not None and self.lost_at[0] == layer:
                blocks = self.lost_at[1]
                send_queue.post(kvstore_pb2.GetResponse(missing=kv_pb2.ReadMissing(transfer=number, block=blocks)))
            slices = [
                slice_to_send(LAYOUT, layer, i, self.blocks[keys[i]][layer][part], heads=heads, key=keys[i])
                for i in range(blocks)
            ]
            if self.corrupt:
                transfer = kvstore_pb2.GetResponse(
                    frame=kv_pb2.FrameHeader(
                        transfer=number,
                        runs=[kv_pb2.SliceRun(layer=layer, block_count=1, head_end=2, valid_tokens=16)],
                        checksum=1,
                        slice_hashes=[0],
                    )
                )
                await writer.credits.acquire(LAYOUT.slice_bytes(0), timeout_s=10)
                await send_queue.put(transfer, slices[0].data, timeout_s=10)
                return
            await writer.send(number, 0, slices, timeout_s=10)
        send_queue.post(kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(transfer=number)))
