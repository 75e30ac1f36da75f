"""The leader's end of a stage on another host: a `Worker` whose KV lies here, too.

The leader's pool has all KV; the stage computes in a copy of one part. What lands in the leader's part goes to the
stage in the background, and before the order that needs it. What the stage computes comes before the stage's report.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.pool import TELL_DEVICE, PoolPart
from moonpool.base.scheduling.steps import LayerDone, Step
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.channel import ChannelClosed
from moonpool.engine.messages import FetchBlocks, LoadKV, OpenKVGateMessage, StageDone, StageTokens
from moonpool.engine.remote.link import StageLink
from moonpool.engine.remote.messages import KVSlice, SlotChanges

log = get_logger(__name__)
_TURN_SLICES: Final = 16
"""Slices that are sent between two looks at the connection's room."""


class LandedSlices:
    """What has landed in a part of the pool and is not sent yet, oldest first."""

    def __init__(self, part: PoolPart) -> None:
        self.part = part
        layers = part.layer_end - part.layer_begin
        self._written: NDArray[np.int64] = np.frombuffer(part.written, np.int64).reshape(layers, part.blocks)
        self._seen = self._written.copy()
        self._rows, self._all = [0] * layers, 0
        self._waiting: dict[tuple[int, int], None] = {}  # layer, block
        part.landed[-1] = TELL_DEVICE

    def __len__(self) -> int:
        return len(self._waiting)

    def look(self) -> None:
        """Note what has landed since the last look; from now on the part tells what lands next."""
        part = self.part
        part.landed[-1] = TELL_DEVICE
        landed = part.landed[-2]  # before the rows' counts, these before the slices' counts and bytes
        if landed == self._all:
            return
        for row, count in enumerate(self._rows):
            if part.landed[row] == count:
                continue
            self._rows[row] = part.landed[row]
            written = self._written[row].copy()
            blocks = (written != self._seen[row]).nonzero()[0].tolist()
            self._seen[row] = written
            layer = part.layer_begin + row
            self._waiting.update(((layer, block), None) for block in blocks)
        self._all = landed

    def take(self, most: int, wanted: Callable[[int, int], bool] | None = None) -> list[KVSlice]:
        """Return the next slices, at most so many, of those that are `wanted` by layer and block.

        A slice that is gone or changes meanwhile is left out: nobody needs the slice, or it lands again.
        """
        keys = self._waiting if wanted is None else filter(lambda key: wanted(*key), self._waiting)
        taken = [key for _, key in zip(range(most), keys, strict=False)]
        found = []
        for layer, block in taken:
            del self._waiting[layer, block]
            data, value = self.part.find(layer, block), self.part.hash_of(layer, block)
            copy = b"" if data is None else bytes(data)
            if copy and slice_hash(copy) == value:
                found.append(KVSlice(layer, block, value, True, copy))
        return found


class RemoteWorker:
    """A stage that has joined; see `moonpool.engine.worker_process.Worker`. Is its own channel, too.

    Args:
        stage: the stage in the pipeline.
        link: to the stage's host.
        on_end: called once the connection has ended.
    """

    rank = pid = 0

    def __init__(self, stage: int, link: StageLink, on_end: Callable[[], None]) -> None:
        self.stage, self.link = stage, link
        self._part: PoolPart | None = None
        self._landed: LandedSlices | None = None
        self._slots: NDArray[np.int64] | None = None
        self._loads: list[LoadKV] = []
        self._done: int | None = None  # latest step that the stage has reported
        self._wake = asyncio.Event()
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = [asyncio.create_task(work, name=str(self)) for work in (self._read(on_end), self._pump())]

    def __str__(self) -> str:
        return f"engine stage {self.stage} at {self.link.peer}"

    @property
    def channel(self) -> "RemoteWorker":
        """The channel to the stage."""
        return self

    # --- Worker ----------------------------------------------------------------------------------------------------

    def serve(self, part: PoolPart) -> None:
        """See `Worker`."""
        loop = asyncio.get_running_loop()
        self._bind(part)
        self._landed = LandedSlices(part)

        def landed() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        part.on_landed = landed

    def _bind(self, part: PoolPart) -> None:
        self._part = part
        if part.slots:
            self._slots = np.frombuffer(part.slot_of, np.int64).copy()

    def kill(self) -> None:
        self.link.close("the leader has ended this engine")

    def reap(self) -> None:
        """The stage's host ends its processes itself."""

    def ended(self) -> str:
        return self.link.reason and f"{self}: {self.link.reason}"

    async def death(self) -> str:
        return self.ended()

    # --- Channel ---------------------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """Send an order, behind what the order needs."""
        if isinstance(message, LoadKV):
            self._loads.append(message)
            self._wake.set()
            return
        if self._landed is not None and isinstance(message, Step | OpenKVGateMessage | FetchBlocks):
            self._send_needed(self._landed, message)
        self.link.send(message)

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            ChannelClosed: the connection has ended.
        """
        message = await self._received.get()
        if message is None:
            self._received.put_nowait(None)
            raise ChannelClosed
        return message

    def close(self) -> None:
        self.link.close("the leader has closed the connection")
        self._landed = None  # refers to the pool
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.wait_closed()

    # --- KV --------------------------------------------------------------------------------------------------------

    def _send_needed(self, landed: LandedSlices, order: Step | OpenKVGateMessage | FetchBlocks) -> None:
        """Send the KV without which the order must not be carried out."""
        self._send_slots()
        landed.look()
        if not landed:
            return
        if isinstance(order, FetchBlocks):  # else the stage gives back what an earlier sequence had in these blocks
            self._send_slices(landed.take(len(landed), lambda layer, block: block in order.blocks))
        elif isinstance(order, Step):
            blocks = {block for sequence in order.sequences for block in sequence.block_table}
            blocks.update(source for source, _ in order.copies)
            self._send_slices(landed.take(len(landed), lambda layer, block: block in blocks))
        else:
            self._send_slices(landed.take(len(landed), lambda layer, block: layer <= order.layer))

    def _send_slices(self, slices: Iterable[KVSlice]) -> None:
        for found in slices:
            self.link.send(found)

    def _send_slots(self) -> None:
        """Send which blocks have other window slots by now."""
        if self._slots is None or self._part is None:
            return
        now = np.frombuffer(self._part.slot_of, np.int64)
        blocks = (now != self._slots).nonzero()[0].tolist()
        if blocks:
            self._slots[:] = now
            self.link.send(SlotChanges(tuple((block, int(self._slots[block])) for block in blocks)))

    async def _pump(self) -> None:
        """Send KV as it lands, and orders to load once all that had landed before is sent."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._landed is None:
                    continue
                self._landed.look()
                loads, self._loads = self._loads, []
                before = len(self._landed)  # what lands meanwhile comes behind these
                while before > 0:
                    await self.link.room()
                    self._send_slots()
                    self._send_slices(self._landed.take(min(before, _TURN_SLICES)))
                    before = min(before - _TURN_SLICES, len(self._landed))
                for order in loads:
                    self.link.send(order)
        except ChannelClosed:
            return

    async def _read(self, on_end: Callable[[], None]) -> None:
        try:
            while True:
                message = await self.link.receive()
                if isinstance(message, KVSlice):
                    self._store(message)
                elif self._is_ours(message):
                    self._received.put_nowait(self._on_our_clock(message))
        except ChannelClosed:
            pass
        finally:
            self._received.put_nowait(None)
            on_end()

    def _is_ours(self, message: Any) -> bool:
        """Whether a report is of this stage, once for each step; else the connection is ended."""
        part = self._part
        if isinstance(message, StageDone):
            again = self._done is not None and message.step_id <= self._done
            if again or message.stage != self.stage:
                self.link.close(f"reported step {message.step_id} of stage {message.stage}, after step {self._done}")
                return False
            self._done = message.step_id
        elif isinstance(message, LayerDone) and not (
            part is not None and part.layer_begin <= message.layer < part.layer_end
        ):
            self.link.close(f"reported layer {message.layer}, which it does not have")
            return False
        return True

    def _store(self, found: KVSlice) -> None:
        """Take KV that the stage has computed."""
        part = self._part
        if part is None or not (part.layer_begin <= found.layer < part.layer_end and 0 <= found.block < part.blocks):
            self.link.close(f"sent KV of layer {found.layer} and block {found.block}, which it does not have")
            return
        target = part.find(found.layer, found.block)
        if target is None:  # the window has passed the block
            return
        if len(found.data) != target.nbytes or slice_hash(found.data) != found.value:
            self.link.close(f"sent damaged KV of layer {found.layer}")
            return
        target[:] = found.data
        if found.sealed:
            part.set_hash(found.layer, found.block, found.value)

    def _on_our_clock(self, message: Any) -> Any:
        if isinstance(message, StageTokens):
            return StageTokens(self._on_our_clock(message.done))
        if isinstance(message, LayerDone | StageDone):
            ahead = self.link.ahead_ns
            return replace(message, start_ns=message.start_ns - ahead, end_ns=message.end_ns - ahead)
        return message
