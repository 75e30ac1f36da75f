"""A CPU that behaves like a GPU, to find wrong order: memory of its own, and streams in a hostile order.

A GPU does what it was told at some later time, and its streams overtake each other. A plain CPU hides both. Here a
stream is lazy or eager, by the seed. Lazy work is done only when a thread waits for an event, and then only the work
that the event stands behind, and what that work was told to wait for. So anything nobody waits for has not happened.
Eager work is done as soon as possible, ahead of what other streams were given before. With each wait, further work is
done or not, as drawn. Memory and buffers begin with bytes that are not a number in any type of KV.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.platforms.interface import CapturedGraph, DeviceEvent

_POISON = 0xFF


_LAZINESS = (0.0, 0.0, 0.5, 1.0)
"""How eager a lane is: the share of work that is done as soon as it may be."""


_JUST_SO = 0.3
"""Share of work that is done because another one is waited for."""


@dataclass(frozen=True, slots=True)
class _StagedEvent:
    """A place in a lane."""

    lane: "StagedStream"
    count: int

    @property
    def reached(self) -> bool:
        return self.lane.done >= self.count

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.lane.device.wait(self)


@dataclass(slots=True, eq=False)
class StagedStream:
    """See `Lane`. Its fields are guarded by the device's lock."""

    device: "StagedDevice"
    eager: float
    waiting: deque[Callable[[], None] | _StagedEvent] = field(default_factory=deque)
    done: int = 0

    def run(self, work: Callable[[], None]) -> None:
        """See `Lane.run`."""
        self.device.give(self, work)

    def mark(self) -> DeviceEvent:
        """See `Lane.mark`."""
        return self.device.mark(self)

    def after(self, mark: DeviceEvent) -> None:
        """See `Lane.after`."""
        assert isinstance(mark, _StagedEvent)
        self.device.give(self, mark)

    @property
    def ready(self) -> bool:
        """Whether its next work may be done."""
        first = self.waiting[0] if self.waiting else None
        return first is not None and (not isinstance(first, _StagedEvent) or first.reached)


class _StagedGraph:
    """See `Graph`. The work is done again; its result lies in the same memory each time. It holds nothing else."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self.result, self.nbytes = torch.empty(0), 0

    def replay(self) -> None:
        """See `Graph.replay`."""
        result = self._work()
        self.result = self.result.copy_(result) if self.result.numel() else result.clone()


class StagedDevice:
    """See `Device`.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._demanded: list[_StagedEvent] = []
        self._eager: StagedStream | None = None
        self._failed: BaseException | None = None
        self._closed = False
        self.compute, self.up, self.down = (StagedStream(self, self._random.choice(_LAZINESS)) for _ in range(3))
        self._lanes = (self.compute, self.up, self.down)
        self._thread = threading.Thread(target=self._run, name="staged device", daemon=True)
        self._thread.start()

    @property
    def torch_device(self) -> torch.device:
        """See `Device.torch_device`."""
        return torch.device("cpu")

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        """See `Device.memory`."""
        return torch.full(shape, _POISON, dtype=torch.uint8)

    def buffers(self, count: int, nbytes: int) -> Tensor:
        """See `Device.buffers`."""
        return torch.full((count, nbytes), _POISON, dtype=torch.uint8)

    def capture(self, work: Callable[[], Tensor]) -> CapturedGraph:
        """See `Device.capture`."""
        return _StagedGraph(work)

    def close(self) -> None:
        """See `Device.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def give(self, lane: StagedStream, work: Callable[[], None] | _StagedEvent) -> None:
        """More for a lane. Where the lane is eager, returns when it is done, as far as it may be."""
        with self._changed:
            lane.waiting.append(work)
            if self._random.random() < lane.eager:
                self._eager = lane
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._eager is not lane or self._closed)

    def mark(self, lane: StagedStream) -> _StagedEvent:
        """The place behind all that a lane was given."""
        with self._changed:
            return _StagedEvent(lane, lane.done + len(lane.waiting))

    def wait(self, mark: _StagedEvent) -> None:
        """Has done what a mark stands behind."""
        with self._changed:
            self._demanded.append(mark)
            self._changed.notify_all()
            self._changed.wait_for(lambda: mark.reached or self._failed is not None or self._closed)
            self._demanded.remove(mark)
            if self._failed is not None:
                raise self._failed
            assert mark.reached, "the device was closed"

    # --- the device's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode(), self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._eager is not None or self._open())
                if self._closed:
                    return
                lane = self._next()
                if lane is None:
                    self._eager = None
                    self._changed.notify_all()
                else:
                    self._do(lane)

    def _open(self) -> list[_StagedEvent]:
        """What threads wait for."""
        return [] if self._failed is not None else [mark for mark in self._demanded if not mark.reached]

    def _next(self) -> StagedStream | None:
        """Whose next work is done: it is eager, or what is waited for needs it, or it is just drawn."""
        if self._eager is not None:
            return self._eager if self._eager.ready and self._failed is None else None
        if self._random.random() < _JUST_SO:
            return self._random.choice([lane for lane in self._lanes if lane.ready])
        return self._needed(self._random.choice(self._open()))

    def _needed(self, mark: _StagedEvent) -> StagedStream:
        """The lane whose next work leads to a mark."""
        lane = mark.lane
        while not lane.ready:
            first = lane.waiting[0]
            assert isinstance(first, _StagedEvent)
            lane = first.lane
        return lane

    def _do(self, lane: StagedStream) -> None:
        """Does the next work of a lane, without the lock."""
        work = lane.waiting[0]
        if not isinstance(work, _StagedEvent):
            self._changed.release()
            failed: BaseException | None = None
            try:
                work()
            except BaseException as error:
                failed = error
            finally:
                self._changed.acquire()
            self._failed = failed
        lane.waiting.popleft()
        lane.done += 1
        self._changed.notify_all()
