"""Reads a prefix from a kvstore or an engine's pool, layer by layer: the client for `Get` and `ReadKV`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from moonpool.base.errors import FrameError, InvalidRequest, StreamBroken, TransferFailed
from moonpool.base.kv.frames import (
    FRAME_BYTES,
    MAX_FRAME_SLICES,
    DamagedSliceError,
    FrameOpener,
    FrameShape,
    SliceRun,
    bind_all,
    frame_shape,
    shape_of,
    split_run,
    whole_runs,
)
from moonpool.base.kv.keys import bind, key_bindings, layer_binding, pack_keys
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv_transfer.endpoint import KVEndpoint, StreamMethod
from moonpool.base.kv_transfer.slice_bitmap import SliceBitmap
from moonpool.base.telemetry.trace_context import traceparent
from moonpool.base.transport.async_utils import OneTimeEvent, ThreadOffload
from moonpool.base.transport.mux_channel import MuxChannel
from moonpool.base.transport.mux_stream import MuxStream, StreamClient
from moonpool.base.transport.payloads import FilledBuffer, ReceiveBuffer, ReceivedPayload
from moonpool.v1 import kv_pb2, kvstore_pb2

ReadResponse = kvstore_pb2.GetResponse | kv_pb2.ReadKVResponse
OnSlice = Callable[[int, int, memoryview, int], None]
Into = Callable[[int, int], memoryview | None]
READ_WINDOW_BYTES = 32 << 20


class PrefixLost(TransferFailed):
    """The source lost some of a prefix's blocks after whole layers had been handed out.

    Attributes:
        blocks: leading blocks that are still good.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(f"the source lost blocks while they were being read; the first {blocks} are good")
        self.args = (blocks,)
        self.blocks = blocks


class _WholeRead(NamedTuple):
    """A read that fits one frame: shape, memory for the slices, and the hashes' bindings."""

    shape: FrameShape
    targets: list[memoryview]
    bindings: list[int]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The arguments of `BlockReader.read`.

    Attributes:
        forgotten: deletions that the source must have carried out.
        windows_from: if all blocks come, slices of layers with a window come of the blocks from this index on.
        all_blocks: `on_layer` is called only while all blocks are to come.
    """

    keys: Sequence[bytes]
    layers: range
    heads: range
    on_slice: OnSlice
    on_layer: Callable[[int], None]
    into: Into | None = None
    forgotten: Sequence[str] = ()
    windows_from: int = 0
    all_blocks: bool = False


class PrefixRead:
    """A read under way: hands out slices on arrival, and layers in order."""

    def __init__(self, layout: KVLayout, plan: ReadPlan, offload: ThreadOffload | None = None) -> None:
        self.finished = OneTimeEvent()
        self.blocks = len(plan.keys)
        self.damaged_key = b""
        self._keys = plan.keys
        self._layout = layout
        self._layers = plan.layers
        self._heads = plan.heads
        self._on_slice = plan.on_slice
        self._on_layer = self._layer_of_all if plan.all_blocks else plan.on_layer
        self._plan = plan
        self._into = plan.into if len(plan.heads) == layout.head_shares else None
        self._offload = offload
        self._quiet = asyncio.Event()  # no thread writes to the reader's memory
        self._quiet.set()
        self._left = False
        self._began = False  # `receive_into` has taken the opening that `on_message` will get
        self._expected_all: _WholeRead | None = None
        self._received: SliceBitmap | None = None
        self._deletions = plan.forgotten
        self._next_layer = plan.layers.start

    def receive_into(self, message: ReadResponse, nbytes: int) -> ReceiveBuffer | None:
        """The memory for a frame of whole slices; None: the frame must be opened first."""
        kind = message.WhichOneof("message")
        if self._into is None or kind not in ("opened", "frame"):
            return None
        header = message.opened.frame if kind == "opened" else message.frame
        if kind == "opened" and (buffer := self._all(message.opened, nbytes)) is not None:
            return buffer
        runs = whole_runs(header, nbytes, self._layout)
        if runs is None or any(run.valid_tokens != self._layout.block_size for run, _ in runs):
            return None
        if kind == "opened" and not self._began:
            self._opened(message.opened)
            self._began = True
        return self._receive_buffer(runs)

    def expect(self) -> None:
        """Prepare for a small read in one frame; call this after the request is sent."""
        layout, blocks = self._layout, len(self._keys)
        slices, nbytes = blocks * len(self._layers), blocks * layout.layers_bytes(self._layers)
        small = slices <= MAX_FRAME_SLICES and nbytes <= FRAME_BYTES
        if self._into is not None and small and not self._plan.windows_from:
            self._expected_all = self._targets(
                frame_shape(self._layers, blocks, self._heads, layout.block_size), self._into
            )

    def _targets(self, shape: FrameShape, into: Into) -> _WholeRead | None:
        targets = [target for cell in shape.cells if (target := into(*cell)) is not None]
        if len(targets) < len(shape.cells):
            return None
        return _WholeRead(shape, targets, shape.bindings(self._keys[: len(targets) // len(self._layers)]))

    def _all(self, opened: kv_pb2.ReadOpened, nbytes: int) -> ReceiveBuffer | None:
        """The memory for the whole read; None if the frame is not the whole read in the usual order."""
        into, blocks, layout = self._into, opened.blocks, self._layout
        if nbytes != blocks * layout.layers_bytes(self._layers) or self._received is not None or into is None:
            return None
        if self._plan.windows_from:
            return None
        shape = shape_of(opened.frame, self._layers, blocks, self._heads, layout.block_size)
        if shape is None:
            return None
        self._check_opened(opened)
        expected = self._expected_all
        if expected is None or expected.shape is not shape:
            expected = self._targets(shape, into)
        if expected is None:
            return None
        _, targets, bindings = expected
        hashes = bind_all(opened.frame.slice_hashes, bindings)

        def on_filled(intact: int, error: Exception | None) -> None:
            _check_arguments(error)
            if intact < len(targets):
                self._damaged(*shape.cells[intact])
            for (layer, index), target, value in zip(shape.cells, targets, hashes, strict=True):
                self._on_slice(layer, index, target, value)
            self.blocks = blocks
            for layer in self._layers:
                self._on_layer(layer)
            self.finished.done()

        return ReceiveBuffer(targets, hashes, lambda: not self._left, on_filled, self._offload, self._on_writing)

    def _layer_of_all(self, layer: int) -> None:
        if self.blocks == len(self._keys):
            self._plan.on_layer(layer)

    def leave(self) -> None:
        """The reader leaves: after `quiet`, the reader's memory is not written."""
        self._left = True

    async def quiet(self) -> None:
        """Wait until no thread writes to the reader's memory, even if cancelled meanwhile."""
        cancelled = None
        while not self._quiet.is_set():
            try:
                await self._quiet.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _on_writing(self, writing: bool) -> None:
        (self._quiet.clear if writing else self._quiet.set)()

    def on_message(self, message: ReadResponse, payload: ReceivedPayload) -> None:
        match message.WhichOneof("message"):
            case "opened" if isinstance(payload, FilledBuffer):
                self._began = False
                payload.report()
                self._check_finished()
            case "opened":
                if not self._began:
                    self._opened(message.opened)
                self._began = False
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
            raise TransferFailed(f"the source ended a read with {self._missing_slices()} slices missing")

    def _check_opened(self, message: kv_pb2.ReadOpened) -> None:
        blocks = message.blocks
        if blocks and self._deletions and not set(self._deletions).issubset(message.forgotten):
            raise TransferFailed("the source may have blocks that are older than their deletion")
        if self._received is not None or self.finished.is_done or blocks > self.blocks:
            raise FrameError(f"the source opened a read of {self.blocks} blocks with {blocks}, or twice")

    def _opened(self, message: kv_pb2.ReadOpened) -> None:
        self._check_opened(message)
        blocks = message.blocks
        self.blocks = blocks
        skipped = self._plan.windows_from if blocks == len(self._keys) else 0
        unsent = dict.fromkeys(self._layout.windowed_layers, skipped)
        self._received = SliceBitmap(self._layers, blocks, self._heads, unsent=unsent)
        if not blocks:
            self.finished.done()

    @functools.cached_property
    def _opener(self) -> FrameOpener:
        return FrameOpener(self._layout, self._heads, self._keys)

    @functools.cached_property
    def _of_keys(self) -> list[int]:
        return key_bindings(self._keys)

    def _expected(self) -> SliceBitmap:
        if self._received is None:
            raise FrameError("a frame came before its transfer was opened")
        return self._received

    def _receive_buffer(self, runs: Sequence[tuple[SliceRun, Sequence[int]]]) -> ReceiveBuffer | None:
        bitmap, into = self._expected(), self._into
        assert into is not None, "nothing lands nowhere"
        targets: list[memoryview] = []
        hashes: list[int] = []
        for run, values in runs:
            bitmap.check(run)
            layer, of_layer = run.layer, layer_binding(run.layer)
            for index, value in enumerate(values, run.first_block):
                target = into(layer, index)
                if target is None:
                    return None
                targets.append(target)
                hashes.append(value ^ of_layer ^ self._of_keys[index])

        def on_filled(intact: int, error: Exception | None) -> None:
            _check_arguments(error)
            slices = iter(zip(targets, hashes, strict=True))
            for run, _ in runs:
                if intact < run.block_count:
                    self._damaged(run.layer, run.first_block + intact)
                intact -= run.block_count
                bitmap.accept(run)
                for index in range(run.first_block, run.first_block + run.block_count):
                    self._on_slice(run.layer, index, *next(slices))
            self._advance(bitmap)

        return ReceiveBuffer(targets, hashes, lambda: not self._left, on_filled, self._offload, self._on_writing)

    def _damaged(self, layer: int, block: int) -> None:
        self.damaged_key = self._keys[block]
        raise DamagedSliceError(layer, block)

    def _frame(self, header: kv_pb2.FrameHeader, payload: ReceivedPayload) -> None:
        bitmap = self._expected()
        if isinstance(payload, FilledBuffer):
            payload.report()
            return
        assert isinstance(payload, memoryview), "nothing is lent to a reader"
        try:
            opened = self._opener.open(header, payload)
        except DamagedSliceError as error:
            self.damaged_key = self._keys[error.block]
            raise
        for run, data, hashes in opened:
            if run.valid_tokens != self._layout.block_size:
                raise FrameError(f"{run}: stored blocks are full")
            bitmap.accept(run)
            for (index, _, piece), value in zip(split_run(run, data, self._layout), hashes, strict=True):
                self._on_slice(run.layer, index, piece, bind(value, self._keys[index], run.layer))
        self._advance(bitmap)

    def _missing(self, block: int) -> None:
        if self._received is None:
            raise FrameError("a block went missing before its transfer was opened")
        if block >= self.blocks:
            return
        self.blocks = block
        self._received.truncate(block)
        if self._next_layer > self._layers.start:
            raise PrefixLost(block)
        if not block:
            self.finished.done()
        else:
            self._advance(self._received)

    def _advance(self, bitmap: SliceBitmap) -> None:
        while self._next_layer < self._layers.stop and bitmap.layer_complete(self._next_layer):
            self._on_layer(self._next_layer)
            self._next_layer += 1
        if bitmap.complete:
            self.finished.done()

    def _missing_slices(self) -> int:
        return self._received.missing() if self._received is not None else self.blocks * len(self._layers)


def _check_arguments(error: Exception | None) -> None:
    if error is not None:
        raise TransferFailed(f"a payload could not be taken: {error!r}") from error


ReadRequest = kvstore_pb2.GetRequest | kv_pb2.ReadKVRequest


ReadMethod = StreamMethod[ReadRequest, ReadResponse]
"""How blocks are read from one kind of instance; the messages of all kinds have the same fields."""
FROM_STORE: ReadMethod = StreamMethod("KVStoreService", "Get", kvstore_pb2.GetRequest, kvstore_pb2.GetResponse)
FROM_PREFILL: ReadMethod = StreamMethod("PrefillService", "ReadKV", kv_pb2.ReadKVRequest, kv_pb2.ReadKVResponse)
FROM_DECODE: ReadMethod = StreamMethod("DecodeService", "ReadKV", kv_pb2.ReadKVRequest, kv_pb2.ReadKVResponse)


def _get_transfer(message: ReadResponse) -> Hashable:
    match message.WhichOneof("message"):
        case "frame":
            return message.frame.transfer
        case "opened":
            return message.opened.transfer
        case "missing":
            return message.missing.transfer
        case "done":
            return message.done.transfer
    return None


class BlockReader(StreamClient[ReadRequest, ReadResponse]):
    """This process's reads from one kvstore or engine instance, all on one stream."""

    def __init__(
        self,
        source: KVEndpoint,
        *,
        method: ReadMethod = FROM_STORE,
        window_bytes: int = READ_WINDOW_BYTES,
        forgotten: Callable[[Sequence[bytes], str], Sequence[str]] = lambda keys, tenant: (),
        offload: ThreadOffload | None = None,
    ) -> None:
        """Connect when the first read begins.

        Args:
            source: the kvstore or engine instance.
            method: how this kind of instance is read.
            window_bytes: payload bytes that the source may be ahead.
            forgotten: `(keys, tenant)` -> the deletions that concern such blocks and were carried out on this side. A
                source that has not carried out all of them is not read.
            offload: copies slices `into` memory on threads; None: the loop copies.
        """
        self._layout = source.layout
        self._forgotten = forgotten
        self._offload = offload
        self._asked = method.request
        self._ids = count(1)
        spec = source.spec(
            f"KV from {source.address}",
            method,
            _get_transfer,
            window_bytes=window_bytes,
            credit=lambda credit: method.request(credit=credit),
        )
        super().__init__(MuxStream(spec))

    async def read(
        self,
        keys: Sequence[bytes],
        *,
        layers: range,
        heads: range | None = None,
        on_slice: OnSlice,
        on_layer: Callable[[int], None],
        timeout_s: float,
        tenant: str = "",
        into: Into | None = None,
    ) -> int:
        """Read the leading blocks of `keys` that the source has; return their number (fewer is a miss).

        Args:
            keys: keys of a chain; their order numbers the blocks.
            layers: consecutive layers to read.
            heads: consecutive heads to read; None: all heads.
            on_slice: called once per slice with (layer, index into keys, bytes of the heads in order, their hash). Take
                the bytes at once. Slices of blocks at or past the returned number may be handed out, too.
            on_layer: called for each layer, in order, after all the layer's slices were handed out.
            timeout_s: longest time for the whole read.
            tenant: the KV's owner.
            into: gives memory for the slice at (layer, index into keys), which saves a copy: `on_slice` gets this
                memory then. None: no memory for this slice. If the read fails or has fewer blocks, the content is
                undefined. No write follows after `read` has returned or raised.

        No function is called after `read` has returned or raised. Their exceptions end the read.

        Raises:
            InvalidRequest: the layout has no such heads.
            PrefixLost: a block went missing after a layer with this block had been handed out.
            TransferFailed: the read took too long; or the source ended the transfer, or may have deleted blocks.
            DamagedSliceError: a slice did not match the hash. The source was told, and checks the source's block.
            FrameError: a frame was damaged, was not asked for, or came twice.
            StreamBroken: the stream has ended, or the source cannot be reached.
            Mismatch: the source does not take this KV.
        """
        heads = range(self._layout.head_shares) if heads is None else heads
        if not keys or not layers or not heads:
            return 0
        self._check_heads(heads)
        plan = ReadPlan(keys, layers, heads, on_slice, on_layer, into, self._forgotten(keys, tenant))
        return await self._run(plan, timeout_s)

    async def read_prefix(
        self,
        keys: Sequence[bytes],
        *,
        on_slice: OnSlice,
        on_layer: Callable[[int], None],
        timeout_s: float,
        tenant: str = "",
        into: Into | None = None,
    ) -> int:
        """As `read`, of all layers, with windowed slices of the last blocks only (`KVLayout.unread_windows`).

        If the source has fewer blocks, all their slices come. `on_layer` is called only if the source has all blocks.
        """
        if not keys:
            return 0
        layers, heads = range(self._layout.layers), range(self._layout.head_shares)
        plan = ReadPlan(
            keys,
            layers,
            heads,
            on_slice,
            on_layer,
            into,
            self._forgotten(keys, tenant),
            self._layout.unread_windows(len(keys)),
            all_blocks=True,
        )
        return await self._run(plan, timeout_s)

    async def _run(self, plan: ReadPlan, timeout_s: float) -> int:
        keys = plan.keys
        read = PrefixRead(self._layout, plan, self._offload)
        number = next(self._ids)
        began = asyncio.get_running_loop().time()
        try:
            with self._stream.deadlines.within(timeout_s):
                await self._read(number, read, plan)
        except TimeoutError:
            self._stream.suspect(began)
            raise TransferFailed(f"{self._stream.name}: a read of {len(keys)} blocks took {timeout_s:g} s") from None
        return read.blocks

    def _check_heads(self, heads: range) -> None:
        """Check heads here: the source would end the stream, and with the stream all other reads."""
        whole = range(self._layout.head_shares)
        if heads.step != 1 or heads.start not in whole or heads.stop > whole.stop:
            raise InvalidRequest("heads", f"{heads} are not among the layout's {self._layout.head_shares}")

    async def _read(self, number: int, read: PrefixRead, plan: ReadPlan) -> None:
        channel = await self._stream.open(number, read, read.receive_into)
        finished = False
        try:
            opening = kv_pb2.ReadOpen(
                transfer=number,
                keys=pack_keys(plan.keys),
                layer_begin=plan.layers.start,
                layer_end=plan.layers.stop,
                head_begin=plan.heads.start,
                head_end=plan.heads.stop,
                takes_frame=True,
                forgotten=plan.forgotten,
                windows_from=plan.windows_from,
                traceparent=traceparent.get(),
            )
            channel.post(self._asked(open=opening, credit_bytes=channel.take_credit()))
            read.expect()
            await read.finished.wait()
            finished = True
        finally:
            read.leave()
            channel.close()
            if not finished:
                self._report_closed(channel, number, read.damaged_key)
            await read.quiet()

    def _report_closed(self, channel: MuxChannel[ReadRequest, ReadResponse], number: int, damaged_key: bytes) -> None:
        close = kv_pb2.ReadClose(transfer=number, damaged_key=damaged_key)
        try:
            channel.post(self._asked(close=close))
        except StreamBroken:
            return
