"""Reads blocks from a kvstore or from an engine's pool, layer by layer: the client of `Get` and `ReadKV`.

Callbacks take what comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import NamedTuple

from moonpool.errors import FrameError, InvalidRequest, StreamBroken, TransferFailed
from moonpool.kv.frames import DamagedSliceError, FrameOpener, split_run
from moonpool.kv.hashes import bind
from moonpool.kv.keys import pack_keys
from moonpool.kv.layout import KVLayout
from moonpool.rpc.channels import Channels, Metadata, payload_stream
from moonpool.streams.credits import Traffic
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.ledger import SliceLedger
from moonpool.streams.mux import CONNECT_TIMEOUT_S, MuxSession, MuxStream
from moonpool.streams.once import Once
from moonpool.v1 import kv_pb2, kvstore_pb2

READ_WINDOW_BYTES = 32 << 20

Asked = kvstore_pb2.GetRequest | kv_pb2.ReadKVRequest
Answer = kvstore_pb2.GetResponse | kv_pb2.ReadKVResponse


class ReadMethod(NamedTuple):
    """How blocks are read from one kind of instance; the messages of all kinds have the same fields."""

    service: str
    method: str
    asked: type[Asked]
    answer: type[Answer]


FROM_STORE = ReadMethod("KVStoreService", "Get", kvstore_pb2.GetRequest, kvstore_pb2.GetResponse)
FROM_PREFILL = ReadMethod("PrefillService", "ReadKV", kv_pb2.ReadKVRequest, kv_pb2.ReadKVResponse)
FROM_DECODE = FROM_PREFILL._replace(service="DecodeService")


class PrefixLost(TransferFailed):
    """The source lost blocks of a prefix after whole layers of them had been handed out.

    Attributes:
        blocks: Leading blocks that are still good.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(f"the source lost blocks while they were being read; the first {blocks} are good")
        self.args = (blocks,)
        self.blocks = blocks


def _get_session(message: Answer) -> Hashable:
    match message.WhichOneof("message"):
        case "frame":
            return message.frame.session
        case "opened":
            return message.opened.session
        case "missing":
            return message.missing.session
        case "done":
            return message.done.session
    return None


class PrefixRead:
    """One reading session: hands slices out as they come, layers in order."""

    def __init__(
        self,
        layout: KVLayout,
        keys: Sequence[bytes],
        layers: range,
        heads: range,
        on_slice: Callable[[int, int, memoryview, int], None],
        on_layer: Callable[[int], None],
        forgotten: Sequence[str] = (),
    ) -> None:
        self.finished = Once()
        self.blocks = len(keys)
        self.damaged_key = b""
        self._keys = keys
        self._opener = FrameOpener(layout, heads, keys)
        self._layout = layout
        self._layers = layers
        self._heads = heads
        self._on_slice = on_slice
        self._on_layer = on_layer
        self.forgotten = forgotten
        self._ledger: SliceLedger | None = None
        self._next_layer = layers.start

    def on_message(self, message: Answer, payload: memoryview) -> None:
        match message.WhichOneof("message"):
            case "opened":
                if message.opened.blocks and not set(self.forgotten).issubset(message.opened.forgotten):
                    raise TransferFailed("the source may have blocks that are older than their deletion")
                self._opened(message.opened.blocks)
                if message.opened.HasField("frame"):
                    self._frame(message.opened.frame, payload)
                    self._check_finished()
            case "frame":
                self._frame(message.frame, payload)
            case "missing":
                self._missing(message.missing.block)
            case "done":
                self._check_finished()

    def on_broken(self, error: Exception) -> None:
        self.finished.done(error)

    def _check_finished(self) -> None:
        if not self.finished.is_done:
            raise TransferFailed(f"the source ended a read with {self._left()} slices missing")

    def _opened(self, blocks: int) -> None:
        if self._ledger is not None or blocks > self.blocks:
            raise FrameError(f"the source opened a read of {self.blocks} blocks with {blocks}, or twice")
        self.blocks = blocks
        self._ledger = SliceLedger(self._layers, blocks, self._heads)
        if not blocks:
            self.finished.done()

    def _frame(self, header: kv_pb2.FrameHeader, payload: memoryview) -> None:
        if self._ledger is None:
            raise FrameError("a frame came before its session was opened")
        try:
            opened = self._opener.open(header, payload)
        except DamagedSliceError as error:
            self.damaged_key = self._keys[error.block]
            raise
        for run, data, hashes in opened:
            if run.valid_tokens != self._layout.block_tokens:
                raise FrameError(f"{run}: stored blocks are full")
            self._ledger.accept(run)
            for (index, _, piece), value in zip(split_run(run, data, self._layout), hashes, strict=True):
                self._on_slice(run.layer, index, piece, bind(value, self._keys[index], run.layer))
        self._advance(self._ledger)

    def _missing(self, block: int) -> None:
        if self._ledger is None:
            raise FrameError("a block went missing before its session was opened")
        if block >= self.blocks:
            return
        self.blocks = block
        self._ledger.truncate(block)
        if self._next_layer > self._layers.start:
            raise PrefixLost(block)
        if not block:
            self.finished.done()
        else:
            self._advance(self._ledger)

    def _advance(self, ledger: SliceLedger) -> None:
        while self._next_layer < self._layers.stop and ledger.layer_complete(self._next_layer):
            self._on_layer(self._next_layer)
            self._next_layer += 1
        if ledger.complete:
            self.finished.done()

    def _left(self) -> int:
        return self._ledger.missing() if self._ledger is not None else self.blocks * len(self._layers)


class BlockReader:
    """One per pair of processes: everything this process reads from one kvstore or engine, on one stream."""

    def __init__(
        self,
        channels: Channels,
        address: str,
        hello: kv_pb2.StreamHello,
        layout: KVLayout,
        method: ReadMethod = FROM_STORE,
        *,
        window_bytes: int = READ_WINDOW_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        lanes: LaneDialer | None = None,
        metadata: Metadata = (),
        forgotten: Callable[[Sequence[bytes], str], Sequence[str]] = lambda keys, tenant: (),
    ) -> None:
        """Connects when the first read begins.

        Args:
            channels: Where the channel comes from.
            address: "host:port" of the instance.
            hello: This side, and the KV it speaks of.
            layout: Arrangement of that KV.
            method: How its kind is read.
            window_bytes: Payload bytes the source may be ahead.
            connect_timeout_s: Longest wait for the source's welcome.
            lanes: Opens lanes beside gRPC; None to stay on gRPC.
            metadata: Of the call, such as an API key.
            forgotten: `(keys, tenant)` -> the deletions that concern such blocks and were carried out on this side:
                nothing is taken from who has not carried out all of them.
        """
        self._layout = layout
        self._forgotten = forgotten
        self._asked = method.asked
        self._ids = count(1)
        self._stream: MuxStream[Asked, Answer] = MuxStream(
            f"KV from {address}",
            lambda: payload_stream(
                channels.get(address),
                f"moonpool.v1.{method.service}",
                method.method,
                method.asked,
                method.answer,
            )(metadata=metadata),
            method.asked(hello=hello),
            _get_session,
            method.answer,
            lanes=lanes,
            window_bytes=window_bytes,
            credit=lambda credit: method.asked(credit=credit),
            connect_timeout_s=connect_timeout_s,
        )

    @property
    def sessions(self) -> int:
        """Number of reads under way."""
        return self._stream.sessions

    @property
    def lane(self) -> str:
        """How messages travel: the name of a lane, or "grpc"; "" without a connection."""
        return self._stream.lane

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        return self._stream.traffic

    async def read(
        self,
        keys: Sequence[bytes],
        *,
        layers: range,
        heads: range | None = None,
        on_slice: Callable[[int, int, memoryview, int], None],
        on_layer: Callable[[int], None],
        timeout_s: float,
        tenant: str = "",
    ) -> int:
        """Reads the leading blocks of `keys` that the source has; returns how many that were (fewer is a miss).

        Args:
            keys: A chain's keys; their order numbers the blocks.
            layers: Consecutive layers wanted.
            heads: Consecutive heads wanted; None for all, as slices with scales must be read.
            on_slice: Called once with (layer, index into keys, bytes of the wanted heads in order, their hash) for each
                slice; must take them at once. A slice of a block at or past the returned count may come too.
            on_layer: Called for each layer, in order, when all its slices have been handed out.
            timeout_s: Longest time for all of it.
            tenant: Whose KV it is.

        Neither is called after `read` has returned or raised. What they raise ends the read.

        Raises:
            InvalidRequest: The layout has no such heads, or they cannot be read apart.
            PrefixLost: A block went missing after a layer had been handed out with it.
            TransferFailed: It took too long, or the source ended the session early, or may have deleted blocks.
            DamagedSliceError: A slice did not match its hash; the source was told and will look at its block.
            FrameError: What came was not intact, not asked for, or came twice.
            StreamBroken: The stream has ended, or the source cannot be reached.
            Mismatch: The source does not take this KV.
        """
        heads = range(self._layout.kv_heads) if heads is None else heads
        if not keys or not layers or not heads:
            return 0
        self._check_heads(heads)
        read = PrefixRead(self._layout, keys, layers, heads, on_slice, on_layer, self._forgotten(keys, tenant))
        number = next(self._ids)
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(number, read, keys, layers, heads)
        except TimeoutError:
            self._stream.suspect(began)
            raise TransferFailed(f"{self._stream.name}: a read of {len(keys)} blocks took {timeout_s:g} s") from None
        return read.blocks

    def _check_heads(self, heads: range) -> None:
        """Here, because the source would end the stream, and with it all other reads."""
        whole = range(self._layout.kv_heads)
        if heads.step != 1 or heads.start not in whole or heads.stop > whole.stop:
            raise InvalidRequest("heads", f"{heads} are not among the layout's {self._layout.kv_heads}")
        if self._layout.scale_bytes and heads != whole:
            raise InvalidRequest("heads", "slices with scales travel whole")

    async def _read(self, number: int, read: PrefixRead, keys: Sequence[bytes], layers: range, heads: range) -> None:
        session = await self._stream.open(number, read)
        finished = False
        try:
            opening = kv_pb2.ReadOpen(
                session=number,
                keys=pack_keys(keys),
                layer_begin=layers.start,
                layer_end=layers.stop,
                head_begin=heads.start,
                head_end=heads.stop,
                takes_frame=True,
                forgotten=read.forgotten,
            )
            session.post(self._asked(open=opening, credit_bytes=session.take_credit()))
            await read.finished.wait()
            finished = True
        finally:
            session.close()
            if not finished:
                self._tell_closed(session, number, read.damaged_key)

    def _tell_closed(self, session: MuxSession[Asked, Answer], number: int, damaged_key: bytes) -> None:
        close = kv_pb2.ReadClose(session=number, damaged_key=damaged_key)
        try:
            session.post(self._asked(close=close))
        except StreamBroken:
            return

    async def aclose(self) -> None:
        """Ends the stream; reads under way fail. Idempotent."""
        await self._stream.aclose()
