"""Seconds of calls on a GPU, by its events, and the limits of its products and memory. Never run so far."""

from collections.abc import Callable

import torch

COPY_BYTES = 4 << 30
MATRIX = 8192
_WARM, _TIMES = 3, 10


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds of one call on the device, after warming up."""
    for _ in range(_WARM):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TIMES):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _TIMES


def device_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Floating point operations per second of a large matrix product, and bytes per second read from memory."""
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
    memory = torch.ones(COPY_BYTES // 4, device="cuda")
    return 2 * MATRIX**3 / device_seconds(lambda: a @ b), memory.nbytes / device_seconds(memory.sum)
