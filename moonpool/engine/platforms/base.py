"""The contract of a device: streams, events, memory and captured graphs. Platforms are listed in `registry`.

Work is given to a stream and done later, in the stream's order. Only events order the work of two streams. Wait for an
event before you read what the earlier work has written, or overwrite what that work reads.

A thread that gives work or waits for events first enters the device; the thread that opened the device has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A place in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until the stream has come here; raise the earlier work's error."""


class DeviceStream(Protocol):
    """Work in order. One thread gives work to a stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` after all that was given before. On a GPU `work` launches kernels."""

    def record(self) -> DeviceEvent:
        """Return the place behind all work given so far."""

    def wait_event(self, event: DeviceEvent) -> None:
        """Do all work given from now on after another stream has come to `event`."""


class CapturedGraph(Protocol):
    """Captured work. A replay reads the input tensors' contents at that time."""

    nbytes: int
    """This graph's device memory, beyond earlier graphs' memory."""

    def replay(self) -> None:
        """Do the work, within work on the stream of the capture."""


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """A device's current memory in bytes, and multiprocessors."""

    total: int
    free: int
    processors: int


class Device(Protocol):
    """Separate memory, and three streams: steps, KV on the way in, and KV on the way out."""

    @property
    def compute(self) -> DeviceStream:
        """Stream of steps."""

    @property
    def load_stream(self) -> DeviceStream:
        """Stream for KV on the way in."""

    @property
    def store_stream(self) -> DeviceStream:
        """Stream for KV on the way out."""

    @property
    def torch_device(self) -> torch.device:
        """Torch device for the device's tensors."""

    def enter_thread(self) -> None:
        """Make this the calling thread's device. On a GPU, a thread begins with GPU 0 and would take memory there."""

    def goes_on(self) -> None:
        """From now on, do work also if no thread waits for it: another rank's device does. A GPU always does."""

    def capacity(self) -> DeviceCapacity:
        """Return what the device has, and what is free."""

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        """Return device memory, uint8 of this shape, with any contents; `beside` bytes stay free.

        Raises:
            ConfigError: there is not enough memory.
        """

    def register(self, memory: Tensor) -> None:
        """Make host memory ready for `copy_slices`, until the device is closed: a GPU pins the memory.

        If the memory cannot be pinned, copies are slower, and a warning says why.
        """

    def copy_slices(self, target: Tensor, source: Tensor, slices: Tensor) -> None:
        """Copy slices between host and device, within work of a stream, in any order among each other.

        Args:
            target: uint8 [slices, bytes of a slice]; the device's memory, or registered. Between two slices there may
                be other bytes.
            source: alike, the other of both.
            slices: int64 on the host, rising: numbers of the slices in both.
        """

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Capture `work`, within work of the compute stream; no work is done before a replay.

        The same work has run before, so that no kernel is compiled. The work does not read tensors' contents on the
        host.

        Raises:
            RuntimeError: the work cannot be captured, or there is no memory for the graph.
        """

    def close(self) -> None:
        """End the threads. Work that was not waited for may not be done."""
