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

from moonpool.base.kv.pool import PoolPart
from moonpool.base.scheduling.steps import LayerDone, Step
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.channel import ChannelClosed
from moonpool.engine.messages import FetchBlocks, LoadKV, OpenKVGateMessage, StageDone, StageTokens
from moonpool.engine.remote.link import StageLink
from moonpool.engine.remote.messages import KVSlice, SlotChanges
from moonpool.engine.remote.slices import LandedSlices, write_slice

log = get_logger(__name__)
_TURN_SLICES: Final = 16
"""Slices that are sent between two looks at the connection's room."""
_UNREAD: Final = 256
"""Messages of a stage that wait for the engine at most; meanwhile nothing is read from the connection."""


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
        self._received: asyncio.Queue[Any] = asyncio.Queue()  # None: the connection has ended
        self._unread = asyncio.Semaphore(_UNREAD)
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
        self._unread.release()
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
                    await self._unread.acquire()
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
        part = write_slice(self._part, found, self.link.close)
        if part is not None and found.sealed:
            part.set_hash(found.layer, found.block, found.value)

    def _on_our_clock(self, message: Any) -> Any:
        if isinstance(message, StageTokens):
            return StageTokens(self._on_our_clock(message.done))
        if isinstance(message, LayerDone | StageDone):
            ahead = self.link.ahead_ns
            return replace(message, start_ns=message.start_ns - ahead, end_ns=message.end_ns - ahead)
        return message
