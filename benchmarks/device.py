"""Seconds for calls on a GPU, by events, and the limits for products and memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = 4 << 30
MATRIX = 8192
_WARM, _TIMES = 3, 10
_HEAD_START = 20_000_000
"""Cycles for which the device waits before it is timed, some 10 ms: the host launches calls meanwhile, so that short
kernels are timed and not their launches. Calls that read from the device wait each time.
"""


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds for one call on the device, after warming up."""
    for _ in range(_WARM):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TIMES):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _TIMES


@dataclass(frozen=True, slots=True)
class On:
    """Where kernels are measured, and how.

    Attributes:
        device: device for all tensors.
        runs: measured pairs of each figure.
        seconds: per call on the device.
        copy_bytes: bytes that a copy reads, for the copy limit.
        matrix: rows and columns in a product, for the product limit.
    """

    device: torch.device
    runs: int
    seconds: Callable[[Callable[[], object]], float] = device_seconds
    copy_bytes: int = COPY_BYTES
    matrix: int = MATRIX

    def per_second(self, call: Callable[[], object]) -> float:
        """Calls per second."""
        return 1.0 / self.seconds(call)

    def copied(self) -> float:
        """Bytes per second that a large copy reads and writes."""
        source = torch.ones(self.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    def multiplied(self, dtype: torch.dtype) -> float:
        """Floating point operations per second of a large matrix product."""
        a, b = (torch.randn(self.matrix, self.matrix, device=self.device).to(dtype) for _ in range(2))
        return 2 * self.matrix**3 / self.seconds(lambda: a @ b)

    def pairs(self, work: float, call: Callable[[], object], limit: Callable[[], float]) -> list[tuple[float, float]]:
        """For each run `work` per second of a call, and the limit; the call was made once before."""
        call()
        return [(work * self.per_second(call), limit()) for _ in range(self.runs)]


def device_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Floating point operations per second of a large matrix product, and bytes per second read from memory."""
    memory = torch.ones(COPY_BYTES // 4, device="cuda")
    return On(torch.device("cuda"), 1).multiplied(dtype), memory.nbytes / device_seconds(memory.sum)
