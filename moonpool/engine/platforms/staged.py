"""A CPU that behaves like a GPU, to find wrong order: separate memory, and streams in a hostile order.

A GPU does work at some later time, and streams overtake each other. A plain CPU hides both. Here a stream is lazy or
eager, by the seed. Lazy work is done only when a thread waits for an event, and then only the work before the event,
and the work that it was told to wait for. So work without a waiter has not happened, unless the devices of other ranks
wait for it (`goes_on`). Eager work is done as soon as
possible, ahead of what other streams were given before. With each wait, further work is done or not, as drawn. Memory
begins with bytes that are not a number in any type of KV. A thread that has not entered the device is refused, and so
are copies from or to unregistered host memory.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.engine.platforms.base import CapturedGraph, DeviceCapacity, DeviceEvent

_POISON = 0xFF
_MEMORY_BYTES = 3 << 30
_LAZINESS = (0.0, 0.0, 0.5, 1.0)
"""Shares of a stream's work that are done as soon as possible."""
_UNASKED = 0.3
"""Share of rounds in which work that was not waited for is done."""
_PAUSE_S = 0.002
"""After which a device that goes on by itself does work that nobody waits for."""


@dataclass(frozen=True, slots=True)
class _StagedEvent:
    """A place in a stream."""

    stream: "StagedStream"
    count: int

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.count

    def wait(self) -> None:
        self.stream.device.wait(self)


@dataclass(slots=True, eq=False)
class StagedStream:
    """See `DeviceStream`. The fields are guarded by the device's lock."""

    device: "StagedDevice"
    eager: float
    waiting: deque[Callable[[], None] | _StagedEvent] = field(default_factory=deque)
    done: int = 0

    def run(self, work: Callable[[], None]) -> None:
        self.device.give(self, work)

    def record(self) -> DeviceEvent:
        return self.device.record(self)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, _StagedEvent)
        self.device.give(self, event)

    @property
    def ready(self) -> bool:
        """Whether the stream's next work may be done."""
        first = self.waiting[0] if self.waiting else None
        return first is not None and (not isinstance(first, _StagedEvent) or first.reached)


class _StagedGraph:
    """See `CapturedGraph`. A replay does the work again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self.nbytes = work, 0

    def replay(self) -> None:
        self._work()


class StagedDevice:
    """See `Device`.

    Args:
        seed: for the order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._demanded: list[_StagedEvent] = []
        self._eager: StagedStream | None = None
        self._failed: BaseException | None = None
        self._closed = False
        self._pause_s: float | None = None
        self._registered = list[range]()  # addresses
        self._in_thread = threading.local()
        self.enter_thread()
        self.compute, self.load_stream, self.store_stream = (
            StagedStream(self, self._random.choice(_LAZINESS)) for _ in range(3)
        )
        self._streams = (self.compute, self.load_stream, self.store_stream)
        self._thread = threading.Thread(target=self._run, name="staged device", daemon=True)
        self._thread.start()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def enter_thread(self) -> None:
        self._in_thread.entered = True

    def goes_on(self) -> None:
        with self._changed:
            self._pause_s = _PAUSE_S
            self._changed.notify_all()

    def capacity(self) -> DeviceCapacity:
        """See `Device.capacity`: a small, empty GPU."""
        return DeviceCapacity(_MEMORY_BYTES, _MEMORY_BYTES, 4)

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        return torch.full(shape, _POISON, dtype=torch.uint8)

    def register(self, memory: Tensor) -> None:
        self._registered.append(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def copy_slices(self, target: Tensor, source: Tensor, slices: Tensor) -> None:
        """See `Device.copy_slices`. The last slice comes first."""
        ends = target.data_ptr(), source.data_ptr()
        assert any(end in memory for memory in self._registered for end in ends), "memory is not registered"
        for number in reversed(slices.tolist()):
            target[number].copy_(source[number])

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        return _StagedGraph(work)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def give(self, stream: StagedStream, work: Callable[[], None] | _StagedEvent) -> None:
        """Give a stream work. If the stream is eager, return after the work is done, as far as allowed."""
        with self._changed:
            self._check_entered()
            stream.waiting.append(work)
            if self._random.random() < stream.eager:
                self._eager = stream
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._eager is not stream or self._closed)

    def record(self, stream: StagedStream) -> _StagedEvent:
        """Return the place behind all work of a stream."""
        with self._changed:
            self._check_entered()
            return _StagedEvent(stream, stream.done + len(stream.waiting))

    def wait(self, event: _StagedEvent) -> None:
        """Wait until the work before an event is done."""
        with self._changed:
            self._check_entered()
            self._demanded.append(event)
            self._changed.notify_all()
            self._changed.wait_for(lambda: event.reached or self._failed is not None or self._closed)
            self._demanded.remove(event)
            if self._failed is not None:
                raise self._failed
            assert event.reached, "the device was closed"

    def _check_entered(self) -> None:
        entered = getattr(self._in_thread, "entered", False)
        assert entered, f"{threading.current_thread().name} has not entered the device"

    # --- the device's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode(), self._changed:
            while True:
                asked = self._asked()
                if self._closed:
                    return
                stream = self._next() if asked else self._any_ready()
                if stream is not None:
                    self._do(stream)
                elif asked:
                    self._eager = None
                    self._changed.notify_all()

    def _asked(self) -> bool:
        """Wait until a thread needs work done; return False if a device that goes on by itself is done waiting."""
        while not (self._closed or self._eager is not None or self._open()):
            if not self._changed.wait(self._pause_s):
                return False
        return True

    def _any_ready(self) -> StagedStream | None:
        """Return a stream whose next work may be done; None if none has such work."""
        ready = [stream for stream in self._streams if stream.ready] if self._failed is None else []
        return self._random.choice(ready) if ready else None

    def _open(self) -> list[_StagedEvent]:
        """Return what threads wait for."""
        return [] if self._failed is not None else [event for event in self._demanded if not event.reached]

    def _next(self) -> StagedStream | None:
        """Return the stream whose next work is done: eager, or needed by a waiter, or just drawn."""
        if self._eager is not None:
            return self._eager if self._eager.ready and self._failed is None else None
        if self._random.random() < _UNASKED:
            return self._random.choice([stream for stream in self._streams if stream.ready])
        return self._needed(self._random.choice(self._open()))

    def _needed(self, event: _StagedEvent) -> StagedStream:
        """Return the stream whose next work leads to an event."""
        stream = event.stream
        while not stream.ready:
            first = stream.waiting[0]
            assert isinstance(first, _StagedEvent)
            stream = first.stream
        return stream

    def _do(self, stream: StagedStream) -> None:
        """Do the next work of a stream, without the lock."""
        work = stream.waiting[0]
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
        stream.waiting.popleft()
        stream.done += 1
        self._changed.notify_all()
