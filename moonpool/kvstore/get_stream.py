"""The server half of `Get` streams: reads a lease layer by layer and sends the layers."""

import asyncio
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor

from google.protobuf.message import Message

from moonpool.base import world
from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.kv.blocks import DramBlock
from moonpool.base.kv.frames import (
    FRAME_BYTES,
    MAX_FRAME_SLICES,
    DamagedSliceError,
    Slice,
    frame_shape,
)
from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.keys import BlockKey, bind, slice_hash, unpack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.values import check_owned
from moonpool.base.kv_transfer.read_server import FrameWriter, ReadServerStream
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.spans import CURRENT, OpenSpan
from moonpool.base.transport.flow_control import ByteCredits
from moonpool.base.transport.framing import (
    GET,
    ONE_SHOT_BYTES,
    OneShotAnswer,
    OneShotMessage,
    found_answers,
)
from moonpool.base.transport.listener import TransportListener
from moonpool.kvstore.core.put_transfer import MAX_TRANSFER_BLOCKS
from moonpool.kvstore.core.read_leases import ReadLease, ReadLeases
from moonpool.kvstore.kv_stream import KVStream
from moonpool.kvstore.layer_reader import LayerReader, LostBlock
from moonpool.v1 import kv_pb2, kvstore_pb2

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class GetResources:
    """What all Get streams of a store use."""

    reads: ReadLeases
    pool: Executor  # reads the SSD tier
    ahead: ByteCredits  # budget of the read-ahead
    instance: kv_pb2.Instance
    transfer_timeout_s: float  # longest wait for a reader's credits
    lease_timeout_s: float  # longest life of a transfer, during which the transfer's blocks cannot be evicted
    on_read: Callable[[bool, float], None]  # told of what ended well: whether blocks came from SSD, and the seconds
    carried_out: Container[str]  # names of deletions that were carried out here
    together_bytes: int = FRAME_BYTES  # largest read that is answered in one message


@dataclasses.dataclass(slots=True)
class _RequestedPart:
    """The part of each block that a transfer wants: layers, and shares of heads (None for all heads).

    The deletions `forgotten` of such blocks were carried out before.
    """

    layers: range
    heads: range | None
    forgotten: Sequence[str]

    def wanted_of(self, nbytes: int, layout: KVLayout) -> int:
        """Bytes that are wanted of slices with so many."""
        return nbytes if self.heads is None else nbytes * len(self.heads) // layout.head_shares

    def slices(self, whole: Iterable[Slice], keys: Sequence[BlockKey], layout: KVLayout) -> Iterable[Slice]:
        return whole if self.heads is None else (self._cut(part, keys[part.block], layout) for part in whole)

    def parts(self, cells: list[tuple[int, int]], blocks: Sequence[DramBlock]) -> tuple[list[memoryview], list[int]]:
        """The wanted bytes and hashes in some (layer, block) cells."""
        if self.heads is None:
            return [blocks[at].slice(layer) for layer, at in cells], [blocks[at].hashes[layer] for layer, at in cells]
        layout = blocks[0].info.format.layout
        tokens = layout.block_size
        whole = (Slice(layer, at, blocks[at].slice(layer), tokens, blocks[at].hashes[layer]) for layer, at in cells)
        cut = list(self.slices(whole, [block.info.key for block in blocks], layout))
        return [piece.data for piece in cut], [piece.hash for piece in cut]

    def _cut(self, whole: Slice, key: bytes, layout: KVLayout) -> Slice:
        """Some heads of a slice. Their hash is made here, so the slice is verified first; raises DamagedSliceError."""
        assert self.heads is not None
        if bind(slice_hash(whole.data), key, whole.layer) != whole.hash:
            raise DamagedSliceError(whole.layer, whole.block)
        share = layout.share_bytes(whole.layer)
        data = whole.data[self.heads.start * share : self.heads.stop * share]
        value = bind(slice_hash(data), key, whole.layer)
        return Slice(whole.layer, whole.block, data, layout.block_size, value, self.heads)


def _requested_part(message: kv_pb2.ReadOpen, layout: KVLayout) -> _RequestedPart:
    """The part of the blocks that a reader asks for; raises InvalidRequest when there is no such part."""
    layers, heads = range(message.layer_begin, message.layer_end), range(message.head_begin, message.head_end)
    layout.check_part(layers, heads)
    return _RequestedPart(layers, None if len(heads) == layout.head_shares else heads, message.forgotten)


class GetStream(ReadServerStream[kvstore_pb2.GetRequest], KVStream[kvstore_pb2.GetRequest]):
    """One reader process' stream."""

    one_shot_kind = GET

    def __init__(
        self, resources: GetResources, closing: asyncio.Event, listener: TransportListener | None = None
    ) -> None:
        super().__init__(
            closing,
            listener=listener,
            response=kvstore_pb2.GetResponse,
            carried_out=resources.carried_out,
            suspect=self._suspect,
            max_keys=MAX_TRANSFER_BLOCKS,
        )
        self._resources = resources
        self._spans = CURRENT.get()

    def welcome(self) -> Message:
        """The answer to hello. The answer gives no credits: on this stream the reader does."""
        self.writes(
            FrameWriter(self.send_queue, self.format.layout, lambda header: kvstore_pb2.GetResponse(frame=header))
        )
        return kvstore_pb2.GetResponse(welcome=kv_pb2.StreamWelcome(receiver=self._resources.instance))

    def begin(self, message: kv_pb2.ReadOpen, keys: Sequence[BlockKey]) -> None:
        check_owned(keys, self.tenant)
        wanted = _requested_part(message, self.format.layout)
        span = self._spans.begin("kvstore.get", message.traceparent, asked_blocks=len(keys))
        if message.takes_frame and self._sent_together(message.transfer, keys, wanted):
            self._spans.end(span)
            return
        lease = ReadLease(self.format, keys, promote=len(wanted.layers) == self.format.layout.layers)
        self._begin(message.transfer, self._resources.reads.begin(lease), wanted, span)

    def _suspect(self, key: BlockKey) -> None:
        check_owned([key], self.tenant)
        self._resources.reads.suspect(key)

    def _begin(self, number: int, lease: ReadLease, wanted: _RequestedPart, span: OpenSpan) -> None:
        resources, layout, begin = self._resources, self.format.layout, world.monotonic()
        try:
            more = resources.reads.extend(lease)
            where = resources.reads, lease, wanted.layers, resources.pool, resources.ahead
            reader = LayerReader(*where, sent_bytes=wanted.wanted_of(layout.largest_slice_bytes, layout))
            self.serve(number, self._serve(number, reader, wanted, begin, more, span), reader.close)
        except BaseException:
            resources.reads.close(lease)
            raise

    def _sent_together(self, number: int, keys: Sequence[BlockKey], wanted: _RequestedPart) -> bool:
        """Whether a small read in DRAM could be sent whole with the opening, without waiting and without a lease."""
        begin, layout = world.monotonic(), self.format.layout
        blocks = self._resident(keys, wanted, self._resources.together_bytes)
        if not blocks:
            return False
        shape = frame_shape(wanted.layers, len(blocks), wanted.heads or range(layout.head_shares), layout.block_size)
        try:
            pieces, hashes = wanted.parts(shape.cells, blocks)
        except DamagedSliceError as error:
            self._resources.reads.suspect(keys[error.block])
            raise
        wrap = self.opened_with(number, len(blocks), wanted.forgotten)
        if not self.frames.offer(shape.header(number, 0, hashes), pieces, wrap):
            return False
        self._used(keys, blocks, begin)
        return True

    def on_one_shot(self, message: OneShotMessage, payload: BytesLike) -> Iterator[OneShotAnswer]:
        begin, keys, layout = world.monotonic(), unpack_keys(message.keys), self.format.layout
        check_owned(keys, self.tenant)
        wanted = _RequestedPart(range(layout.layers), None, ())
        blocks = self._resident(keys, wanted, ONE_SHOT_BYTES) if self.send_queue.is_clear else None
        if blocks is None:
            return
        shape = frame_shape(wanted.layers, len(blocks), range(layout.head_shares), layout.block_size)
        pieces, hashes = wanted.parts(shape.cells, blocks)
        yield from found_answers(message.number, len(blocks), pieces, hashes)
        self._used(keys, blocks, begin)

    def _resident(self, keys: Sequence[BlockKey], wanted: _RequestedPart, most_bytes: int) -> list[DramBlock] | None:
        layout = self.format.layout
        sent_bytes = wanted.wanted_of(layout.layers_bytes(wanted.layers), layout)
        most = min(MAX_FRAME_SLICES // len(wanted.layers), most_bytes // sent_bytes)
        return self._resources.reads.resident(keys, self.format, most)

    def _used(self, keys: Sequence[BlockKey], blocks: Sequence[DramBlock], begin: float) -> None:
        self._resources.reads.used(self.format, keys, blocks)
        if blocks:
            self._resources.on_read(False, world.monotonic() - begin)

    async def _serve(
        self, number: int, reader: LayerReader, wanted: _RequestedPart, begin: float, more: bool, span: OpenSpan
    ) -> None:
        resources, lease = self._resources, reader.lease
        try:
            while more:
                await asyncio.sleep(0)
                more = resources.reads.extend(lease)
            self.opened(number, lease.blocks, wanted.forgotten)
            async with asyncio.timeout(resources.lease_timeout_s):
                async for group in reader.groups():
                    if isinstance(group, LostBlock):
                        missing = kv_pb2.ReadMissing(transfer=number, block=group.block)
                        self.post(kvstore_pb2.GetResponse(missing=missing))
                    else:
                        slices = wanted.slices(group, lease.keys, lease.format.layout)
                        await self.frames.send(number, 0, slices, timeout_s=resources.transfer_timeout_s)
            if lease.blocks:
                resources.on_read(lease.cold, world.monotonic() - begin)
        except StreamBroken:
            return  # the stream reports the error
        except (MoonpoolError, TimeoutError) as error:
            log.warning("read ended early", blocks=lease.blocks, error=str(error))
            if isinstance(error, DamagedSliceError):  # the reader never sees the slice and cannot report damage
                resources.reads.suspect(lease.keys[error.block])
        finally:
            self._spans.end(span)
        self.done(number)
