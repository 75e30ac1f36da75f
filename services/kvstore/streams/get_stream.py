"""The server half of one `Get` stream.

Owns its sessions: each is a task that walks a lease layer by layer and sends what it reads, as the reader's credits
allow. Must not know how the store keeps blocks.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.message import Message

from moonpool.errors import InvalidRequest, MoonpoolError, StreamBroken
from moonpool.kv.frames import FRAME_BYTES, DamagedSliceError, Slice, part_bytes
from moonpool.kv.hashes import bind, slice_hash
from moonpool.kv.keys import unpack_keys
from moonpool.kv.layout import KVLayout
from moonpool.streams.credits import ByteCredits, Traffic
from moonpool.streams.receiving import FrameWriter
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2, kvstore_pb2
from services.kvstore.core.assembly import MAX_SESSION_BLOCKS
from services.kvstore.core.reads import ReadLease, Reads
from services.kvstore.streams.layers import Cell, LayerReader, Lost, ReadAhead
from services.kvstore.streams.sessions import KVStream

_log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class GetParts:
    """What all Get streams share.

    Attributes:
        reads: where leases come from.
        pool: threads that read the durable tier.
        ahead: budget of the read-ahead.
        instance: who this store is.
        session_timeout_s: longest wait for a reader's credits.
        lease_timeout_s: longest life of a session, whose blocks cannot be evicted.
        on_session: called when a session was opened or closed.
        on_read: told of sessions that ended well: whether blocks came from the durable tier, and the seconds.
    """

    reads: Reads
    pool: ThreadPoolExecutor
    ahead: ReadAhead
    instance: kv_pb2.Instance
    session_timeout_s: float
    lease_timeout_s: float
    on_session: Callable[[], None]
    on_read: Callable[[bool, float], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What a session wants of each block: layers, and heads (None for all of them)."""

    layers: range
    heads: range | None

    def slices(self, cells: Iterable[Cell], lease: ReadLease) -> Iterator[Slice]:
        """What is to be sent of whole slices."""
        layout = lease.format.layout
        full = layout.block_tokens
        if self.heads is None:
            return (Slice(layer, block, data, full, value) for layer, block, data, value in cells)
        return (self._cut(cell, lease.keys[cell.block], layout) for cell in cells)

    def _cut(self, cell: Cell, key: bytes, layout: KVLayout) -> Slice:
        """Some heads of a slice. Their hash is made here, so the slice is verified first: else a miss.

        Raises:
            DamagedSliceError: The slice does not match its hash any more.
        """
        assert self.heads is not None
        if bind(slice_hash(cell.data), key, cell.layer) != cell.hash:
            raise DamagedSliceError(cell.layer, cell.block)
        data = cell.data[self.heads.start * layout.head_bytes : self.heads.stop * layout.head_bytes]
        value = bind(slice_hash(data), key, cell.layer)
        return Slice(cell.layer, cell.block, data, layout.block_tokens, value, self.heads)


def _part_of(message: kv_pb2.ReadOpen, layout: KVLayout) -> _Part:
    """The part of the blocks that a reader asks for.

    Raises:
        InvalidRequest: there is no such part.
    """
    if not message.layer_begin < message.layer_end <= layout.layers:
        raise InvalidRequest("layer_end", f"no such layers; the layout has {layout.layers}")
    if not message.head_begin < message.head_end <= layout.kv_heads:
        raise InvalidRequest("head_end", f"no such heads; the layout has {layout.kv_heads}")
    heads = None
    if message.head_end - message.head_begin < layout.kv_heads:
        if layout.scale_bytes:
            raise InvalidRequest("head_end", "slices with scales travel whole")
        heads = range(message.head_begin, message.head_end)
    return _Part(range(message.layer_begin, message.layer_end), heads)


class GetStream(KVStream[kvstore_pb2.GetRequest]):
    """One reader process' stream."""

    def __init__(self, parts: GetParts, closing: asyncio.Event) -> None:
        super().__init__(closing)
        self._parts = parts
        self._frames: FrameWriter
        self._credits = ByteCredits()  # those of `_frames`, once there are some
        self._sessions: dict[int, asyncio.Task[None]] = {}

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        return super().traffic + Traffic(credits_out=self._credits.out)

    def welcome(self) -> Message:
        """The answer to hello. Credits on this stream are the reader's to give."""
        self._frames = FrameWriter(
            self.outbox, self.format.layout, lambda header: kvstore_pb2.GetResponse(frame=header)
        )
        self._credits = self._frames.credits
        welcome = kv_pb2.StreamWelcome(receiver=self._parts.instance, credit_bytes=0)
        return kvstore_pb2.GetResponse(welcome=welcome)

    def on_message(self, message: kvstore_pb2.GetRequest, payload: memoryview) -> None:
        """One message of the reader."""
        if message.credit_bytes:
            self._frames.grant(kv_pb2.Credit(bytes=message.credit_bytes))
        match message.WhichOneof("message"):
            case "open":
                self._open(message.open)
            case "credit":
                self._frames.grant(message.credit)
            case "close":
                for key in unpack_keys(message.close.damaged_key, "damaged_key", max_keys=1):
                    self._parts.reads.suspect(key)
                task = self._sessions.pop(message.close.session, None)
                if task is not None:
                    task.cancel()
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    def _open(self, message: kv_pb2.ReadOpen) -> None:
        """Begins a session.

        Raises:
            InvalidRequest: it can never be served; the contract has no refusal of a single read.
        """
        layout = self.format.layout
        if message.session in self._sessions:
            raise InvalidRequest("session", f"{message.session} is open already")
        keys = unpack_keys(message.keys, max_keys=MAX_SESSION_BLOCKS)
        part = _part_of(message, layout)
        try:
            lease = self._parts.reads.open(keys, self.format, promote=len(part.layers) == layout.layers)
        except MoonpoolError as error:
            self._miss(message.session, error)
            return
        self._begin(message, lease, part)

    def _begin(self, message: kv_pb2.ReadOpen, lease: ReadLease, part: _Part) -> None:
        """Serves a lease, at once or by a task; it is closed in any case."""
        parts, number, begin = self._parts, message.session, time.monotonic()
        parts.on_session()
        reader = LayerReader(
            parts.reads,
            lease,
            part.layers,
            parts.pool,
            parts.ahead,
            on_closed=parts.on_session,
            sent_bytes=part_bytes(part.heads, self.format.layout),
        )
        task = None
        try:
            if message.takes_frame and self._sent_together(number, lease, part):
                parts.on_read(False, time.monotonic() - begin)
            else:
                task = self.spawn(self._serve(number, lease, reader, part, begin))
        except MoonpoolError as error:
            self._miss(number, error)
        finally:
            if task is None:
                reader.close()
        if task is not None:
            self._sessions[number] = task
            task.add_done_callback(lambda task: self._ended(number, task, reader))

    def _ended(self, number: int, task: "asyncio.Task[None]", reader: LayerReader) -> None:
        reader.close()  # here, because a task that is cancelled before it has begun cannot do it
        if self._sessions.get(number) is task:
            del self._sessions[number]

    def _sent_together(self, number: int, lease: ReadLease, part: _Part) -> bool:
        """Whether all of a small read could be sent with its opening: it lies in DRAM, and nothing was to wait for."""
        layout = self.format.layout
        if not 0 < lease.blocks * len(part.layers) * part_bytes(part.heads, layout) <= FRAME_BYTES or lease.cold:
            return False
        cells = (
            Cell(layer, block, source.take(layer, layout), source.hash_of(layer))
            for layer in part.layers
            for block, source in enumerate(lease.sources)
        )
        slices = list(part.slices(cells, lease))
        opened = kv_pb2.ReadOpened(session=number, blocks=lease.blocks)

        def wrap(frame: kv_pb2.FrameHeader) -> Message:
            opened.frame.CopyFrom(frame)
            return kvstore_pb2.GetResponse(opened=opened)

        return self._frames.offer(number, slices, wrap)

    async def _serve(self, number: int, lease: ReadLease, reader: LayerReader, part: _Part, begin: float) -> None:
        """One session from its opening to its end: layer by layer, each as soon as it is read."""
        parts = self._parts
        try:
            self.post(kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(session=number, blocks=lease.blocks)))
            async with asyncio.timeout(parts.lease_timeout_s):
                await self._send(number, lease, reader, part)
            if lease.blocks:
                parts.on_read(lease.cold, time.monotonic() - begin)
            self.post(kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(session=number)))
        except StreamBroken:
            return  # the stream itself says so to whoever must know
        except (MoonpoolError, TimeoutError) as error:
            _log.warning("a read was given up", blocks=lease.blocks, error=str(error))
            self.post(kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(session=number)))

    def _miss(self, number: int, error: MoonpoolError) -> None:
        _log.debug("a read is answered as a miss", error=str(error))  # whoever asks too much must not fill the log too
        self.post(kvstore_pb2.GetResponse(opened=kv_pb2.ReadOpened(session=number, blocks=0)))
        self.post(kvstore_pb2.GetResponse(done=kv_pb2.ReadDone(session=number)))

    async def _send(self, number: int, lease: ReadLease, reader: LayerReader, part: _Part) -> None:
        async for group in reader.groups():
            if isinstance(group, Lost):
                self.post(kvstore_pb2.GetResponse(missing=kv_pb2.ReadMissing(session=number, block=group.block)))
                continue
            await self._frames.send(number, 0, part.slices(group, lease), timeout_s=self._parts.session_timeout_s)

    def end(self) -> None:
        """The stream is over."""
        for task in list(self._sessions.values()):
            task.cancel()
