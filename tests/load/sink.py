"""The decode side of a load test: takes KV over the real `ReceiveKV`, checks every frame, and keeps nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv_transfer.inbound_transfer import InboundTransfer, TransferState
from moonpool.base.kv_transfer.read_server import FrameReceiver, check_hello
from moonpool.base.rpc.server import serving
from moonpool.base.transport.send_queue import SendQueue
from moonpool.engine.setup import EngineSetup
from moonpool.v1 import decode_pb2, kv_pb2

GENERATION = 1


class Sink:
    """Expected transfers and the KV that has come for them."""

    def __init__(self, plan: EngineSetup) -> None:
        self.instance = kv_pb2.Instance(id="load-sink", epoch=1, kind=kv_pb2.INSTANCE_KIND_DECODE)
        self._plan = plan
        self._transfers: dict[int, InboundTransfer] = {}

    def expect(self, number: int, tokens: int) -> kv_pb2.TransferTarget:
        """Where a prompt's KV is to be sent."""
        layout = self._plan.layout
        blocks = layout.blocks_for(tokens)
        valid = layout.valid_tokens(tokens, blocks - 1)
        self._transfers[number] = InboundTransfer(number, GENERATION, layout, blocks, 0, valid)
        return kv_pb2.TransferTarget(decode=self.instance, transfer_id=number, generation=GENERATION)

    def forget(self, number: int) -> bool:
        """The prompt has ended; whether all its KV has come."""
        return self._transfers.pop(number).state is TransferState.COMPLETE

    async def ReceiveKV(self, requests: AsyncIterator[Any], context: Any) -> None:
        """The contract's method."""
        send_queue, receiver = SendQueue(), FrameReceiver()
        first = await anext(requests)
        check_hello(first.message.hello, namespace=self._plan.namespace, layout=self._plan.layout)
        send_queue.post(decode_pb2.ReceiveKVResponse(welcome=receiver.welcome(self.instance)))
        async with asyncio.TaskGroup() as group:
            group.create_task(send_queue.drain(context.write))
            async for request in requests:
                self._take(request.message, request.payload, send_queue)
                credit = receiver.consumed(len(request.payload), idle=not self._receiving())
                if credit is not None:
                    send_queue.post(decode_pb2.ReceiveKVResponse(credit=credit))
            send_queue.finish()

    def _receiving(self) -> bool:
        return any(transfer.state is TransferState.RECEIVING for transfer in self._transfers.values())

    def _take(self, message: decode_pb2.ReceiveKVRequest, payload: memoryview, send_queue: SendQueue) -> None:
        match message.WhichOneof("message"):
            case "open":
                transfer = self._transfers.get(message.open.transfer_id)
                if transfer is not None:
                    transfer.bind(range(transfer.num_blocks))
            case "frame":
                transfer = self._transfers.get(message.frame.transfer)
                if transfer is None or transfer.done:
                    return
                try:
                    for run, _, _ in transfer.opener.open(message.frame, payload):
                        transfer.accept(run)
                except MoonpoolError as error:
                    transfer.fail(str(error))
                if transfer.done:
                    send_queue.post(_verdict(transfer))
            case "close":
                transfer = self._transfers.get(message.close.transfer_id)
                if transfer is not None and not transfer.done:
                    transfer.fail("closed before all had come")
                    send_queue.post(_verdict(transfer))


def _verdict(transfer: InboundTransfer) -> decode_pb2.ReceiveKVResponse:
    complete = transfer.state is TransferState.COMPLETE
    status = decode_pb2.TRANSFER_STATUS_COMPLETE if complete else decode_pb2.TRANSFER_STATUS_FAILED
    verdict = decode_pb2.TransferVerdict(
        transfer_id=transfer.transfer_id, generation=GENERATION, status=status, reason=transfer.reason
    )
    return decode_pb2.ReceiveKVResponse(verdict=verdict)


@contextlib.asynccontextmanager
async def sink(plan: EngineSetup) -> AsyncIterator[Sink]:
    """A sink that listens."""
    decode = Sink(plan)
    contract = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"], decode
    async with serving("127.0.0.1:0", [contract], grace_s=1.0) as server:
        decode.instance.address = server.address
        yield decode
