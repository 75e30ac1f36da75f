"""The server half of one `Get` stream: each session reads a lease layer by layer and sends it."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.message import Message

from moonpool.errors import MoonpoolError, StreamBroken
from moonpool.kv.blocks import DramBlock
from moonpool.kv.frames import FRAME_BYTES, MAX_FRAME_SLICES, DamagedSliceError, Slice, part_bytes
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import BlockKey, unpack_keys
from moonpool.kv.layout import KVLayout
from moonpool.kv.scattered import Bytes
from moonpool.kv.shapes import frame_shape
from moonpool.kv.values import check_owned
from moonpool.streams.credits import ByteCredits
from moonpool.streams.lanes.brief import BRIEF_BYTES, GET, Answer, Brief, found
from moonpool.streams.lanes.listening import LaneServer
from moonpool.streams.read_sessions import ReadSessions
from moonpool.streams.receiving import FrameWriter
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS
from services.kvstore.core.reads import ReadLease, Reads
from services.kvstore.streams.kv_stream import KVStream
from services.kvstore.streams.layers import LayerReader, Lost

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class GetResources:
    """What all Get streams of a store use."""

    reads: Reads
    pool: ThreadPoolExecutor  # reads the SSD tier
    ahead: ByteCredits  # budget of the read-ahead
    instance: kv_pb2.Instance
    session_timeout_s: float  # longest wait for a reader's credits
    lease_timeout_s: float  # longest life of a session, whose blocks cannot be evicted
    on_read: Callable[[bool, float], None]  # told of what ended well: whether blocks came from SSD, and the seconds
    carried_out: Container[str]  # names of deletions that were carried out here
    together_bytes: int = FRAME_BYTES  # largest read that is answered in one message


@dataclasses.dataclass(slots=True)
class _Wanted:
    """What a session wants of each block: layers, and heads (None for all of them).

    The deletions `forgotten` of such blocks were carried out before.
    """

    layers: range
    heads: range | None
    forgotten: Sequence[str]

    def slices(self, whole: Iterable[Slice], keys: Sequence[BlockKey], layout: KVLayout) -> Iterable[Slice]:
        return whole if self.heads is None else (self._cut(one, keys[one.block], layout) for one in whole)

    def parts(self, cells: list[tuple[int, int]], blocks: Sequence[DramBlock]) -> tuple[list[memoryview], list[int]]:
        """The bytes and hashes of what is wanted of some (layer, block)."""
        if self.heads is None:
            return [blocks[at].slice(layer) for layer, at in cells], [blocks[at].hashes[layer] for layer, at in cells]
        layout = blocks[0].info.format.layout
        tokens = layout.block_tokens
        whole = (Slice(layer, at, blocks[at].slice(layer), tokens, blocks[at].hashes[layer]) for layer, at in cells)
        cut = list(self.slices(whole, [block.info.key for block in blocks], layout))
        return [piece.data for piece in cut], [piece.hash for piece in cut]

    def _cut(self, whole: Slice, key: bytes, layout: KVLayout) -> Slice:
        """Some heads of a slice. Their hash is made here, so the slice is verified first; raises DamagedSliceError."""
        assert self.heads is not None
        if bind(slice_hash(whole.data), key, whole.layer) != whole.hash:
            raise DamagedSliceError(whole.layer, whole.block)
        data = whole.data[self.heads.start * layout.head_bytes : self.heads.stop * layout.head_bytes]
        value = bind(slice_hash(data), key, whole.layer)
        return Slice(whole.layer, whole.block, data, layout.block_tokens, value, self.heads)


def _wanted(message: kv_pb2.ReadOpen, layout: KVLayout) -> _Wanted:
    """The part of the blocks that a reader asks for; raises InvalidRequest when there is no such part."""
    layers, heads = range(message.layer_begin, message.layer_end), range(message.head_begin, message.head_end)
    layout.check_part(layers, heads)
    return _Wanted(layers, None if len(heads) == layout.kv_heads else heads, message.forgotten)


class GetStream(ReadSessions[kvstore_pb2.GetRequest], KVStream[kvstore_pb2.GetRequest]):
    """One reader process' stream."""

    brief_kind = GET

    def __init__(self, resources: GetResources, closing: asyncio.Event, lanes: LaneServer | None = None) -> None:
        super().__init__(
            closing,
            lanes=lanes,
            response=kvstore_pb2.GetResponse,
            carried_out=resources.carried_out,
            suspect=self._suspect,
            max_keys=MAX_SESSION_BLOCKS,
        )
        self._resources = resources

    def welcome(self) -> Message:
        """The answer to hello. It gives no credits: on this stream the reader does."""
        self.writes(FrameWriter(self.outbox, self.format.layout, lambda header: kvstore_pb2.GetResponse(frame=header)))
        return kvstore_pb2.GetResponse(welcome=kv_pb2.StreamWelcome(receiver=self._resources.instance))

    def begin(self, message: kv_pb2.ReadOpen, keys: Sequence[BlockKey]) -> None:
        check_owned(keys, self.tenant)
        wanted = _wanted(message, self.format.layout)
        if message.takes_frame and self._sent_together(message.session, keys, wanted):
            return
        lease = ReadLease(self.format, keys, promote=len(wanted.layers) == self.format.layout.layers)
        self._begin(message.session, self._resources.reads.begin(lease), wanted)

    def _suspect(self, key: BlockKey) -> None:
        check_owned([key], self.tenant)
        self._resources.reads.suspect(key)

    def _begin(self, number: int, lease: ReadLease, wanted: _Wanted) -> None:
        resources, begin = self._resources, time.monotonic()
        try:
            more = resources.reads.extend(lease)
            sent_bytes = part_bytes(wanted.heads, self.format.layout)
            where = resources.reads, lease, wanted.layers, resources.pool, resources.ahead
            reader = LayerReader(*where, sent_bytes=sent_bytes)
            self.serve(number, self._serve(number, reader, wanted, begin, more), reader.close)
        except BaseException:
            resources.reads.close(lease)
            raise

    def _sent_together(self, number: int, keys: Sequence[BlockKey], wanted: _Wanted) -> bool:
        """Whether all of a small read in DRAM could be sent with its opening, without waiting and without a lease."""
        begin, layout = time.monotonic(), self.format.layout
        blocks = self._resident(keys, wanted, self._resources.together_bytes)
        if not blocks:
            return False
        shape = frame_shape(wanted.layers, len(blocks), wanted.heads or range(layout.kv_heads), layout.block_tokens)
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

    def on_brief(self, message: Brief, payload: Bytes) -> Iterator[Answer]:
        begin, keys, layout = time.monotonic(), unpack_keys(message.keys), self.format.layout
        check_owned(keys, self.tenant)
        wanted = _Wanted(range(layout.layers), None, ())
        blocks = self._resident(keys, wanted, BRIEF_BYTES) if self.outbox.is_clear else None
        if blocks is None:
            return
        shape = frame_shape(wanted.layers, len(blocks), range(layout.kv_heads), layout.block_tokens)
        pieces, hashes = wanted.parts(shape.cells, blocks)
        yield from found(message.number, len(blocks), pieces, hashes)
        self._used(keys, blocks, begin)

    def _resident(self, keys: Sequence[BlockKey], wanted: _Wanted, most_bytes: int) -> list[DramBlock] | None:
        most = min(MAX_FRAME_SLICES, most_bytes // part_bytes(wanted.heads, self.format.layout))
        return self._resources.reads.resident(keys, self.format, most // len(wanted.layers))

    def _used(self, keys: Sequence[BlockKey], blocks: Sequence[DramBlock], begin: float) -> None:
        self._resources.reads.used(keys, blocks)
        if blocks:
            self._resources.on_read(False, time.monotonic() - begin)

    async def _serve(self, number: int, reader: LayerReader, wanted: _Wanted, begin: float, more: bool) -> None:
        resources, lease = self._resources, reader.lease
        try:
            while more:
                await asyncio.sleep(0)
                more = resources.reads.extend(lease)
            self.opened(number, lease.blocks, wanted.forgotten)
            async with asyncio.timeout(resources.lease_timeout_s):
                async for group in reader.groups():
                    if isinstance(group, Lost):
                        missing = kv_pb2.ReadMissing(session=number, block=group.block)
                        self.post(kvstore_pb2.GetResponse(missing=missing))
                    else:
                        slices = wanted.slices(group, lease.keys, lease.format.layout)
                        await self.frames.send(number, 0, slices, timeout_s=resources.session_timeout_s)
            if lease.blocks:
                resources.on_read(lease.cold, time.monotonic() - begin)
        except StreamBroken:
            return  # the stream itself reports it
        except (MoonpoolError, TimeoutError) as error:
            log.warning("read ended early", blocks=lease.blocks, error=str(error))
            if isinstance(error, DamagedSliceError):  # its reader never sees it and cannot say so
                resources.reads.suspect(lease.keys[error.block])
        self.done(number)
