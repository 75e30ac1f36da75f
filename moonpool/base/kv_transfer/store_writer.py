"""Writes blocks to a kvstore: the client for the `Put` stream. A callback reads the blocks' bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from moonpool.base.errors import FrameError, InvalidRequest, MoonpoolError, Overloaded, StreamBroken, TransferFailed
from moonpool.base.kv.frames import FRAME_BYTES, MAX_FRAME_SLICES, Slice, bind_all, frame_shape
from moonpool.base.kv.keys import key_bindings, layer_binding, pack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint, StreamMethod
from moonpool.base.telemetry.trace_context import traceparent
from moonpool.base.transport.async_utils import OneTimeEvent
from moonpool.base.transport.fault_injection import frame_to_send, frames_to_send
from moonpool.base.transport.flow_control import TO_STORE
from moonpool.base.transport.mux_channel import MuxChannel
from moonpool.base.transport.mux_stream import MuxStream, StreamClient
from moonpool.base.transport.payloads import PendingPayload
from moonpool.v1 import kvstore_pb2

PUT = StreamMethod("KVStoreService", "Put", kvstore_pb2.PutRequest, kvstore_pb2.PutResponse)
ReadSlice = Callable[[int, int], tuple[memoryview, int]]
"""The slice for a (layer, index into keys), and the slice's hash."""


class BlocksToPut(NamedTuple):
    """Full blocks that are to be put.

    Attributes:
        keys: the blocks' keys; their order numbers them.
        parents: for each block, the key before in the chain.
        tenant: owner of the blocks.
        read: gives slices. The bytes must not change before the put has ended.
        forgotten: deletions of such blocks that these blocks are younger than.
    """

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    tenant: str
    read: ReadSlice
    forgotten: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """Result of a put: how many blocks the store had already, and how many blocks the store took."""

    present: int
    stored: int


def _put_transfer(message: kvstore_pb2.PutResponse) -> Hashable:
    match message.WhichOneof("message"):
        case "opened":
            return message.opened.transfer
        case "ack":
            return message.ack.transfer
        case "refused":
            return message.refused.transfer
    return None


def _refusal(message: kvstore_pb2.PutRefused) -> MoonpoolError:
    text = f"the store refused blocks: {message.reason or 'no reason given'}"
    if message.code in ("invalid_request", "deleted"):
        return InvalidRequest("", text)
    if message.code == "bad_frame":
        return FrameError(text)
    if message.code:
        return Overloaded(text, reason=message.code, retry_after_s=message.retry_after_s)
    return TransferFailed(text)


class _OpenPut:
    """A put under way."""

    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.opened = OneTimeEvent()
        self.visible = OneTimeEvent()
        self.missing = set(range(blocks))
        self.present = 0
        self.taken = False

    def on_message(self, message: kvstore_pb2.PutResponse, payload: memoryview) -> None:
        match message.WhichOneof("message"):
            case "opened":
                self.missing.difference_update(message.opened.present)
                self.present = len(set(message.opened.present))
                self.taken = message.opened.taken
                self.opened.done()
            case "ack":
                self.missing.difference_update(message.ack.blocks)
            case "refused":
                raise _refusal(message.refused)
        if not self.missing:
            self.visible.done()

    def on_broken(self, error: Exception) -> None:
        self.opened.done(error)
        self.visible.done(error)


class StoreWriter(StreamClient[kvstore_pb2.PutRequest, kvstore_pb2.PutResponse]):
    """This process's puts to one kvstore, all on one stream."""

    def __init__(self, store: KVEndpoint, *, frame_bytes: int = FRAME_BYTES) -> None:
        """Connect when the first put begins. `frame_bytes`: payload size aimed at."""
        self._layout = store.layout
        self._frame_bytes = frame_bytes
        self._ids = count(1)
        super().__init__(MuxStream(store.spec(f"KV to store {store.address}", PUT, _put_transfer, priority=TO_STORE)))

    async def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        tenant: str,
        read: ReadSlice,
        forgotten: Sequence[str] = (),
        *,
        timeout_s: float,
    ) -> PutOutcome:
        """Store full blocks, given as the fields of `BlocksToPut`; return when all of them are VISIBLE.

        Blocks that the store has, or that another writer finishes meanwhile, are not sent. The put takes at most
        `timeout_s`.

        Raises:
            InvalidRequest: the store will never take these blocks, for example because a deletion is younger.
            Overloaded: the store has no room; has the reason and the time to retry.
            FrameError: a frame arrived damaged, or was not as declared.
            TransferFailed: the store gave the transfer up, or the put took too long.
            StreamBroken: the stream has ended, or the store cannot be reached.
            Mismatch: the store does not take this KV.
        """
        if len(keys) != len(parents):
            raise ValueError(f"{len(keys)} keys, {len(parents)} parents")
        if not keys:
            return PutOutcome(0, 0)
        began = asyncio.get_running_loop().time()
        try:
            with self._stream.deadlines.within(timeout_s):
                return await self._put(BlocksToPut(keys, parents, tenant, read, forgotten), timeout_s)
        except TimeoutError:
            self._stream.suspect(began)
            raise TransferFailed(f"{self._stream.name}: a put of {len(keys)} blocks took {timeout_s:g} s") from None

    async def _put(self, blocks: BlocksToPut, timeout_s: float) -> PutOutcome:
        keys, parents, tenant, read, forgotten = blocks
        put = _OpenPut(next(self._ids), len(keys))
        channel = await self._stream.open(put.number, put)
        aborted = True
        sent: PendingPayload | None = None
        try:
            opening = kvstore_pb2.PutOpen(
                transfer=put.number,
                keys=pack_keys(keys),
                parent_keys=pack_keys(parents),
                layer_begin=0,
                layer_end=self._layout.layers,
                head_begin=0,
                head_end=self._layout.head_shares,
                tenant=tenant,
                forgotten=forgotten,
                traceparent=traceparent.get(),
            )
            sent = await self._open(channel, opening, keys, read, timeout_s)
            await put.opened.wait()
            await channel.done_with(sent, timeout_s)
            if not put.taken:
                slices = missing_slices(keys, put.missing, read, self._layout, self._frame_bytes)
                frames = frames_to_send(put.number, 0, slices, self._layout, self._frame_bytes)
                messages = ((kvstore_pb2.PutRequest(frame=header), pieces) for header, pieces in frames)
                await channel.send(messages, timeout_s=timeout_s)
                self._end(channel, put, aborted=False)
            aborted = False
            if put.missing and not put.taken:
                await put.visible.wait()
            return PutOutcome(put.present, len(keys) - put.present)
        finally:
            if aborted:
                self._end(channel, put, aborted=True)
            channel.close()
            await channel.abandon(sent)

    async def _open(
        self,
        channel: MuxChannel[kvstore_pb2.PutRequest, kvstore_pb2.PutResponse],
        opening: kvstore_pb2.PutOpen,
        keys: Sequence[bytes],
        read: ReadSlice,
        timeout_s: float,
    ) -> PendingPayload | None:
        """Open a transfer at the store.

        A put that fits one frame travels with the opening: a round trip costs more than bytes that the store has
        already. Returns the payload under way then.
        """
        if (
            len(keys) * self._layout.block_bytes > self._frame_bytes
            or len(keys) * self._layout.layers > MAX_FRAME_SLICES
        ):
            channel.post(kvstore_pb2.PutRequest(open=opening))
            return None
        layout = self._layout
        shape = frame_shape(range(layout.layers), len(keys), range(layout.head_shares), layout.block_size)
        slices = [read(layer, index) for layer, index in shape.cells]
        hashes = bind_all([value for _, value in slices], shape.bindings(keys))
        header, pieces = frame_to_send((shape.header(opening.transfer, 0, hashes), [data for data, _ in slices]))
        opening.frame.CopyFrom(header)
        return await channel.begin(kvstore_pb2.PutRequest(open=opening), pieces, timeout_s)

    @staticmethod
    def _end(
        channel: MuxChannel[kvstore_pb2.PutRequest, kvstore_pb2.PutResponse], put: _OpenPut, *, aborted: bool
    ) -> None:
        try:
            channel.post(kvstore_pb2.PutRequest(close=kvstore_pb2.PutClose(transfer=put.number, aborted=aborted)))
        except StreamBroken as error:
            put.on_broken(error)


def missing_slices(
    keys: Sequence[bytes],
    missing: set[int],
    read: ReadSlice,
    layout: KVLayout,
    frame_bytes: int,
) -> Iterator[Slice]:
    """The slices to send, in groups of blocks, each group layer by layer: a group's layer fills about one frame.

    A block no longer in `missing` is left out from then on, because another writer has finished the block.
    """
    group = max(1, frame_bytes // layout.largest_slice_bytes)
    wanted = sorted(missing)
    bindings = key_bindings(keys)
    for start in range(0, len(wanted), group):
        for layer in range(layout.layers):
            of_layer = layer_binding(layer)
            for index in wanted[start : start + group]:
                if index in missing:
                    data, value = read(layer, index)
                    yield Slice(layer, index, data, layout.block_size, value ^ bindings[index] ^ of_layer)
