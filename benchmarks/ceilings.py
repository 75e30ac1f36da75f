"""This machine's limits that kernels are compared with: memory read beyond the caches, matrix products, exponentials.

All are measured with torch's threads. A ceiling must not be beaten: memory is read over a working set of twice the last
level cache, in several streams a thread, on large pages where what is compared with it lies on such, the best pass
counts, and the matrix product is taken at the shape that is fastest here.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moonpool.engine.kernels.memory import mapped
from moonpool.engine.kernels.native import library

BEYOND = 2
"""Working sets are so many times the last level cache, so that at most a part of each pass comes from it."""
LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30
"""Of a working set; where MOST_BYTES is less than BEYOND caches, memory cannot be told from a cache."""
PASSES = 5
"""Over a working set, of each way to read it; the best one counts."""
UNKNOWN_CACHE_BYTES = 64 << 20
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIDES = (512, 1024, 2048, 4096)
"""Matrix products are tried at squares of these sides, and at the two shapes that attention has."""


def cache_bytes(folder: Path = CACHES) -> int:
    """Size of a core's largest cache, as reported by the kernel; a guess without a report."""
    texts = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((int(text[:-1]) * UNITS[text[-1]] for text in texts if text[-1:] in UNITS), default=UNKNOWN_CACHE_BYTES)


def working_set_bytes() -> int:
    """Bytes that a measurement of memory goes over before it comes back to the first one."""
    return min(MOST_BYTES, max(LEAST_BYTES, BEYOND * cache_bytes()))


def beyond_caches(nbytes: int) -> bool:
    """Whether a working set is larger than the caches, so that the rate is the memory's."""
    return nbytes >= BEYOND * cache_bytes()


def seconds(call: Callable[[], object], at_least: float = 0.02) -> float:
    """Seconds for one call, the mean over as many as take `at_least`."""
    # One thread's own time does not count what other processes take on a busy machine.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin, times = clock(), 0
    while True:
        call()
        times += 1
        passed = clock() - begin
        if passed >= at_least:
            return passed / times


def weights_memory() -> Tensor:
    """A working set as weights lie (`kernels.memory`): on large pages, from which memory is read a third faster."""
    memory = mapped(working_set_bytes()).view(torch.float32)
    return memory.fill_(1.0)


def read_bytes_per_s(memory: Tensor) -> float:
    """Bytes per second read once from memory by all threads: the best pass among our read and torch's sum."""
    native = library.get()
    reads: list[Callable[[], object]] = [memory.sum]
    if native is not None:
        reads.append(lambda: native.read(memory))
    return memory.nbytes / min(seconds(read, at_least=0.0) for read in reads for _ in range(PASSES))


Shape = tuple[int, int, int]
"""(rows, inner, columns) of a matrix product."""


def torch_flops(shape: Shape, dtype: torch.dtype) -> float:
    """Floating point operations per second in one torch matrix product."""
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    torch.mm(a, b, out=out)
    return 2 * rows * inner * columns / seconds(lambda: torch.mm(a, b, out=out))


@functools.cache
def multiplied_as(dtype: torch.dtype, flops: Callable[[Shape, torch.dtype], float] = torch_flops) -> torch.dtype:
    """`dtype` or float32, as a small product is faster: without instructions for `dtype` a large one takes minutes."""
    return max((dtype, torch.float32), key=lambda one: flops((256, 256, 256), one))


def product_flops(shape: Shape, dtype: torch.dtype) -> float:
    """Floating point operations per second in one matrix product, in the quicker of `dtype` and float32."""
    return torch_flops(shape, multiplied_as(dtype))


def best_shape(dtype: torch.dtype, head_dim: int = 128) -> Shape:
    """The shape at which this machine's matrix product is fastest."""
    shapes = [(side, side, side) for side in SIDES] + [(2048, head_dim, 2048), (2048, 2048, head_dim)]
    return max(shapes, key=lambda shape: product_flops(shape, dtype))


def exponential_seconds() -> float:
    """Seconds per exponential, all threads together: the best of ours and torch's, in the cache."""
    threads = torch.get_num_threads()
    x = -torch.rand(threads, 4096) * 10
    out = torch.empty_like(x)
    times = [seconds(lambda: torch.exp(x, out=out)) / x.numel()]
    native = library.get()
    if native is not None:
        times.append(seconds(lambda: native.exponentials(x, 100)) / x.numel() / 100)
    return min(times)
