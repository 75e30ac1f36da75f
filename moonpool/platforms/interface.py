"""The interface of a platform: devices, streams and events.

Work is given to a stream and done later, in the stream's order. Only events order the work of two streams. Wait for
an event before you read what the work before it has written, or overwrite what that work reads.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A place in a lane."""

    def wait(self) -> None:
        """Blocks the calling thread until the lane has come here; raises what its work has raised."""


class DeviceStream(Protocol):
    """Work in order. One thread gives work to it."""

    def run(self, work: Callable[[], None]) -> None:
        """Does some work after all that was given before. On a GPU `work` launches it."""

    def mark(self) -> DeviceEvent:
        """The place behind all work so far."""

    def after(self, mark: DeviceEvent) -> None:
        """What is given from now on is done after another lane has come to `mark`."""


class CapturedGraph(Protocol):
    """Work that was captured, and is done again with what the memory that it reads holds then."""

    result: Tensor
    """What the work gives; written anew by each replay of this graph or another one of the device."""
    nbytes: int
    """Of the device's memory that it holds, beside what those captured before it do."""

    def replay(self) -> None:
        """Does the work. In the lane's work in which it was captured."""


class Device(Protocol):
    """Memory of its own, and three lanes: steps, KV on its way in, and KV on its way out."""

    @property
    def compute(self) -> DeviceStream:
        """Of steps."""

    @property
    def up(self) -> DeviceStream:
        """Of KV on its way in."""

    @property
    def down(self) -> DeviceStream:
        """Of KV on its way out."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie."""

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        """Memory of the device, uint8 of this shape, whatever it holds; so many bytes are left free `beside` it.

        Raises:
            ConfigError: there is not so much.
        """

    def buffers(self, count: int, nbytes: int) -> Tensor:
        """Memory of the host that copies use, [count, nbytes] of uint8; pinned on a GPU."""

    def capture(self, work: Callable[[], Tensor]) -> CapturedGraph:
        """Captures what some work does, in the computing lane's work; it is not done before a replay.

        The same work was done before, so that nothing is compiled in it, and it does not look at the contents of
        tensors.

        Raises:
            RuntimeError: it cannot be captured, or there is no memory for it.
        """

    def close(self) -> None:
        """Ends its threads; work that nobody has waited for may not be done."""
