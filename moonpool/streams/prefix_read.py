"""One reading session at its reader: which slices have come, where they land, and which layers are whole."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.errors import FrameError, TransferFailed
from moonpool.kv.frames import FRAME_BYTES, MAX_FRAME_SLICES, DamagedSliceError, FrameOpener, Run, split_run, whole_runs
from moonpool.kv.hashes import bind, key_bindings, layer_binding
from moonpool.kv.layout import KVLayout
from moonpool.kv.shapes import FrameShape, bound, frame_shape, shape_of
from moonpool.streams.lanes.beside import Beside
from moonpool.streams.lanes.inbound import Came
from moonpool.streams.lanes.landing import Landed, Landing
from moonpool.streams.ledger import SliceLedger
from moonpool.streams.once import Once
from moonpool.v1 import kv_pb2, kvstore_pb2

Answer = kvstore_pb2.GetResponse | kv_pb2.ReadKVResponse
OnSlice = Callable[[int, int, memoryview, int], None]
Into = Callable[[int, int], memoryview | None]


class PrefixLost(TransferFailed):
    """The source lost blocks of a prefix after whole layers of them had been handed out.

    Attributes:
        blocks: Leading blocks that are still good.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(f"the source lost blocks while they were being read; the first {blocks} are good")
        self.args = (blocks,)
        self.blocks = blocks


class _All(NamedTuple):
    """What takes all of a read: its shape, where its slices land, and what their hashes are bound with."""

    shape: FrameShape
    targets: list[memoryview]
    bindings: list[int]


class PrefixRead:
    """One reading session: hands slices out as they come, layers in order. Arguments as for `BlockReader.read`."""

    def __init__(
        self,
        layout: KVLayout,
        keys: Sequence[bytes],
        layers: range,
        heads: range,
        on_slice: OnSlice,
        on_layer: Callable[[int], None],
        forgotten: Sequence[str] = (),
        into: Into | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.finished = Once()
        self.blocks = len(keys)
        self.damaged_key = b""
        self._keys = keys
        self._layout = layout
        self._layers = layers
        self._heads = heads
        self._on_slice = on_slice
        self._on_layer = on_layer
        self.forgotten = forgotten
        self._into = into if len(heads) == layout.kv_heads else None
        self._beside = beside
        self._quiet = asyncio.Event()  # no thread writes to the reader's memory
        self._quiet.set()
        self._left = False
        self._began = False  # `place` has taken the opening that `on_message` will get
        self._expected_all: _All | None = None
        self._ledger: SliceLedger | None = None
        self._next_layer = layers.start

    def place(self, message: Answer, nbytes: int) -> Landing | None:
        """Where a frame of whole slices lands; None for one that must be opened."""
        kind = message.WhichOneof("message")
        if self._into is None or kind not in ("opened", "frame"):
            return None
        header = message.opened.frame if kind == "opened" else message.frame
        if kind == "opened" and (landing := self._all(message.opened, nbytes)) is not None:
            return landing
        runs = whole_runs(header, nbytes, self._layout)
        if runs is None or any(run.valid_tokens != self._layout.block_tokens for run, _ in runs):
            return None
        if kind == "opened" and not self._began:
            self._opened(message.opened)
            self._began = True
        return self._landing(runs)

    def expect(self) -> None:
        """To be called when the source has been asked: does beforehand what all of a small read in one frame needs."""
        layout, blocks = self._layout, len(self._keys)
        slices = blocks * len(self._layers)
        if self._into is not None and slices <= MAX_FRAME_SLICES and slices * layout.slice_bytes <= FRAME_BYTES:
            self._expected_all = self._targets(
                frame_shape(self._layers, blocks, self._heads, layout.block_tokens), self._into
            )

    def _targets(self, shape: FrameShape, into: Into) -> _All | None:
        targets = [target for cell in shape.cells if (target := into(*cell)) is not None]
        if len(targets) < len(shape.cells):
            return None
        return _All(shape, targets, shape.bindings(self._keys[: len(targets) // len(self._layers)]))

    def _all(self, opened: kv_pb2.ReadOpened, nbytes: int) -> Landing | None:
        """Where all of the read lands; None when this is not all of it, in the usual order."""
        into, blocks, layout = self._into, opened.blocks, self._layout
        if nbytes != blocks * len(self._layers) * layout.slice_bytes or self._ledger is not None or into is None:
            return None
        shape = shape_of(opened.frame, self._layers, blocks, self._heads, layout.block_tokens)
        if shape is None:
            return None
        self._check_opened(opened)
        expected = self._expected_all
        if expected is None or expected.shape is not shape:
            expected = self._targets(shape, into)
        if expected is None:
            return None
        _, targets, bindings = expected
        hashes = bound(opened.frame.slice_hashes, bindings)

        def landed(intact: int, error: Exception | None) -> None:
            _check(error)
            if intact < len(targets):
                self._damaged(*shape.cells[intact])
            for (layer, index), target, value in zip(shape.cells, targets, hashes, strict=True):
                self._on_slice(layer, index, target, value)
            self.blocks = blocks
            for layer in self._layers:
                self._on_layer(layer)
            self.finished.done()

        return Landing(targets, hashes, lambda: not self._left, landed, self._beside, self._writing)

    def leave(self) -> None:
        """The reader has gone: nothing is written to its memory any more, once it is `quiet`."""
        self._left = True

    async def quiet(self) -> None:
        """Waits until no thread writes to the reader's memory; not even being cancelled ends that before."""
        cancelled = None
        while not self._quiet.is_set():
            try:
                await self._quiet.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _writing(self, writing: bool) -> None:
        (self._quiet.clear if writing else self._quiet.set)()

    def on_message(self, message: Answer, payload: Came) -> None:
        match message.WhichOneof("message"):
            case "opened" if isinstance(payload, Landed):
                self._began = False
                payload.tell()
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
        if blocks and self.forgotten and not set(self.forgotten).issubset(message.forgotten):
            raise TransferFailed("the source may have blocks that are older than their deletion")
        if self._ledger is not None or self.finished.is_done or blocks > self.blocks:
            raise FrameError(f"the source opened a read of {self.blocks} blocks with {blocks}, or twice")

    def _opened(self, message: kv_pb2.ReadOpened) -> None:
        self._check_opened(message)
        blocks = message.blocks
        self.blocks = blocks
        self._ledger = SliceLedger(self._layers, blocks, self._heads)
        if not blocks:
            self.finished.done()

    @functools.cached_property
    def _opener(self) -> FrameOpener:
        return FrameOpener(self._layout, self._heads, self._keys)

    @functools.cached_property
    def _of_keys(self) -> list[int]:
        return key_bindings(self._keys)

    def _expected(self) -> SliceLedger:
        if self._ledger is None:
            raise FrameError("a frame came before its session was opened")
        return self._ledger

    def _landing(self, runs: Sequence[tuple[Run, Sequence[int]]]) -> Landing | None:
        ledger, into = self._expected(), self._into
        assert into is not None, "nothing lands nowhere"
        targets: list[memoryview] = []
        hashes: list[int] = []
        for run, values in runs:
            ledger.check(run)
            layer, of_layer = run.layer, layer_binding(run.layer)
            for index, value in enumerate(values, run.first_block):
                target = into(layer, index)
                if target is None:
                    return None
                targets.append(target)
                hashes.append(value ^ of_layer ^ self._of_keys[index])

        def landed(intact: int, error: Exception | None) -> None:
            _check(error)
            slices = iter(zip(targets, hashes, strict=True))
            for run, _ in runs:
                if intact < run.block_count:
                    self._damaged(run.layer, run.first_block + intact)
                intact -= run.block_count
                ledger.accept(run)
                for index in range(run.first_block, run.first_block + run.block_count):
                    self._on_slice(run.layer, index, *next(slices))
            self._advance(ledger)

        return Landing(targets, hashes, lambda: not self._left, landed, self._beside, self._writing)

    def _damaged(self, layer: int, block: int) -> None:
        self.damaged_key = self._keys[block]
        raise DamagedSliceError(layer, block)

    def _frame(self, header: kv_pb2.FrameHeader, payload: Came) -> None:
        ledger = self._expected()
        if isinstance(payload, Landed):
            payload.tell()
            return
        assert isinstance(payload, memoryview), "nothing is lent to a reader"
        try:
            opened = self._opener.open(header, payload)
        except DamagedSliceError as error:
            self.damaged_key = self._keys[error.block]
            raise
        for run, data, hashes in opened:
            if run.valid_tokens != self._layout.block_tokens:
                raise FrameError(f"{run}: stored blocks are full")
            ledger.accept(run)
            for (index, _, piece), value in zip(split_run(run, data, self._layout), hashes, strict=True):
                self._on_slice(run.layer, index, piece, bind(value, self._keys[index], run.layer))
        self._advance(ledger)

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

    def _missing_slices(self) -> int:
        return self._ledger.missing() if self._ledger is not None else self.blocks * len(self._layers)


def _check(error: Exception | None) -> None:
    if error is not None:
        raise TransferFailed(f"a payload could not be taken: {error!r}") from error
