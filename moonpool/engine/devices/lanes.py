"""What orders the work of a device: lanes and marks, which are streams and events on a GPU.

Work is given to a lane and done later, in the lane's order. Between lanes there is no order but by marks. Only who has
waited for a mark may look at what the work before it has written, or overwrite what it reads.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a lane."""

    def wait(self) -> None:
        """Blocks the calling thread until the lane has come here; raises what its work has raised."""


class Lane(Protocol):
    """Work in order. One thread gives work to it."""

    def run(self, work: Callable[[], None]) -> None:
        """Does some work after all that was given before. On a GPU `work` launches it."""

    def mark(self) -> Mark:
        """The place behind all work so far."""

    def after(self, mark: Mark) -> None:
        """What is given from now on is done after another lane has come to `mark`."""


class Graph(Protocol):
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
    def compute(self) -> Lane:
        """Of steps."""

    @property
    def up(self) -> Lane:
        """Of KV on its way in."""

    @property
    def down(self) -> Lane:
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

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """Captures what some work does, in the computing lane's work; it is not done before a replay.

        The same work was done before, so that nothing is compiled in it, and it does not look at the contents of
        tensors.

        Raises:
            RuntimeError: it cannot be captured, or there is no memory for it.
        """

    def close(self) -> None:
        """Ends its threads; work that nobody has waited for may not be done."""


class _Now:
    """A mark of what is done already."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Immediate:
    """The lane of a plain CPU: work is done when it is given."""

    _NOW = _Now()

    def run(self, work: Callable[[], None]) -> None:
        """Does it."""
        work()

    def mark(self) -> Mark:
        """Has come already."""
        return self._NOW

    def after(self, mark: Mark) -> None:
        """Is so."""
