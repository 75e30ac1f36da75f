"""A bounded number of buffers between the memory of the host and that of a device."""

from collections import deque

from torch import Tensor

from moonpool.engine.devices.lanes import Mark


class Ring:
    """Buffers, each used again when what used it last is done. For one thread.

    Args:
        buffers: [count, bytes].
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers = buffers
        self._free = deque(range(len(buffers)))
        self._busy: deque[tuple[int, Mark]] = deque()

    def take(self) -> tuple[int, Tensor]:
        """A buffer that nothing uses, and its number; waits for the one that was taken first where all are in use."""
        if not self._free:
            number, mark = self._busy.popleft()
            mark.wait()
            self._free.append(number)
        number = self._free.popleft()
        return number, self._buffers[number]

    def until(self, number: int, mark: Mark) -> None:
        """A buffer is in use until then."""
        self._busy.append((number, mark))
