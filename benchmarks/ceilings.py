"""This machine's limits that kernels and models are compared with: memory, matrix products, exponentials, a GPU's own.

A CPU's are measured with torch's threads. A ceiling must not be beaten: memory is read over a working set of twice
the last level cache, in several streams a thread, on large pages where what is compared with it lies on such, the best
pass counts, and the matrix product is taken at the shape that is fastest here.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.frame import Row
from moonpool.base.checkpoint import load_config
from moonpool.engine.kernels.int8_head import int8_head_bytes
from moonpool.engine.kernels.memory import mapped
from moonpool.engine.kernels.native import library
from moonpool.engine.models.loader import torch_dtype

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
Shape = tuple[int, int, int]
"""(rows, inner, columns) of a matrix product."""
COPY_BYTES = 4 << 30
MATRIX = 8192
_HEAD_START = 20_000_000
"""Cycles for which the device waits before it is timed, some 10 ms: the host launches calls meanwhile, so that short
kernels are timed and not their launches. Calls that read from the device wait each time.
"""
MARGIN = 1.1
"""A figure so far above a limit is impossible; less is the limit's own noise."""


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
    return max((dtype, torch.float32), key=lambda candidate: flops((256, 256, 256), candidate))


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


_WARM, _TIMES = 3, 10


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


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One request: when it began and ended, seconds of one clock, and its output tokens."""

    begin: float
    end: float
    tokens: int


def rate(spans: Sequence[Span]) -> float:
    """Output tokens per second, from the first request's start to the last one's end."""
    return sum(span.tokens for span in spans) / (max(span.end for span in spans) - min(span.begin for span in spans))


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do at most with a model.

    Attributes:
        parameters: that are multiplied for each token: all but the embedding's and the last layer's.
        head_parameters: of the last layer, multiplied for each token that is sampled.
        flops: of the best matrix product, per second.
        read_bytes_per_s: from memory.
        weight_bytes: of each parameter.
        int8_panels_bytes: that a greedy step of few sequences reads of the head instead; 0 where it reads the head.
        other_parameters: of experts that a token does not choose.
        chosen_share: of all experts, those that a token chooses.
    """

    parameters: int
    head_parameters: int
    flops: float
    read_bytes_per_s: float
    weight_bytes: float = 2
    int8_panels_bytes: int = 0
    other_parameters: int = 0
    chosen_share: float = 1.0

    @property
    def all_parameters(self) -> int:
        """Multiplied for each token that is sampled."""
        return self.parameters + self.head_parameters

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of a prompt per second: its products alone."""
        return self.flops / (2 * self.parameters)

    def read_parameters(self, batch: int) -> float:
        """Read by a step of so many sequences, each of which chooses its experts for itself, all as likely."""
        return self.all_parameters + self.other_parameters * (1 - (1 - self.chosen_share) ** (batch - 1))

    def decode_tokens_per_s(self, batch: int) -> float:
        """Tokens per second: products, and reading the weights once a step where they do not fit the caches."""
        limit, nbytes = self.flops / (2 * self.all_parameters), int(self.weight_bytes * self.read_parameters(batch))
        return min(limit, batch * self.read_bytes_per_s / nbytes) if beyond_caches(nbytes) else limit

    @property
    def int8_head_tokens_per_s(self) -> float:
        """Tokens of one sequence per second, by the bytes that its greedy steps read; 0 where they read all weights."""
        nbytes = int(self.weight_bytes * self.parameters) + self.int8_panels_bytes
        return self.read_bytes_per_s / nbytes if self.int8_panels_bytes and beyond_caches(nbytes) else 0.0

    def __str__(self) -> str:
        return (
            f"{self.all_parameters / 1e6:.1f} M parameters per token, "
            f"products {self.flops / 1e9:.0f} GFLOP/s, memory {self.read_bytes_per_s / 1e9:.1f} GB/s"
        )


def measured_limits(model: Path, dtype: str = "bfloat16", device: str = "cpu") -> Limits:
    """The limits of this machine for a checkpoint in an element type; on a GPU, where `device` is not the CPU."""
    config = load_config(model)
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    parameters = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    element = torch_dtype(dtype)
    head = config.vocab_size * config.hidden_size
    mixtures = [layer.feed_forward.experts for layer in config.decoder.layers if layer.feed_forward.experts is not None]
    others = sum(3 * config.hidden_size * mixture.inner * (mixture.count - mixture.chosen) for mixture in mixtures)
    share = mixtures[0].chosen / mixtures[0].count if mixtures else 1.0
    if device != "cpu":
        return Limits(parameters, head, *device_limits(element), element.itemsize, 0, others, share)
    flops = product_flops(best_shape(element), element)
    int8_head = int8_head_bytes(config.vocab_size, config.hidden_size, element)
    return Limits(parameters, head, flops, memory_now(), element.itemsize, int8_head, others, share)


def memory_now() -> float:
    """Bytes per second that this machine reads of weights. On a shared one it is another after a minute."""
    return read_bytes_per_s(weights_memory())


def with_limit(row: Row, limit: float, *, less_is_better: bool = False) -> Row:
    """The row, marked when the peer's figure beside it is beyond what this machine can do."""
    times = limit / row.limit_value if less_is_better else row.limit_value / limit
    if times <= MARGIN:
        return row
    return dataclasses.replace(
        row, limit_name=f"{row.limit_name} (impossible here: the limit is {limit:.3g} {row.unit})"
    )
