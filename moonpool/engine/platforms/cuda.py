"""A GPU over CUDA streams and events; docs/gpu_check.md tells what GPUs showed."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from moonpool.base.errors import ConfigError
from moonpool.engine.platforms.base import CapturedGraph, DeviceCapacity, DeviceEvent
from moonpool.engine.platforms.cuda_calls import CallRefused, CudaRuntime, runs_of

log = logging.getLogger(__name__)


def check_free_memory(needed: int, beside: int, free: int) -> None:
    """Check that a pool fits a GPU's free memory, with the memory that steps need beside; all in bytes.

    Raises:
        ConfigError: the pool does not fit; names the field `kv_cache_memory_bytes`.
    """
    if needed + beside > free:
        room = f"{free} are free, of which steps need up to {beside}"
        raise ConfigError("kv_cache_memory_bytes", f"{needed} bytes of KV do not fit the GPU: {room}")


class _CudaEvent:
    """See `DeviceEvent`."""

    def __init__(self, stream: torch.cuda.Stream, *, sleeps: bool) -> None:
        self.event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """See `DeviceStream`.

    Args:
        stream: torch's stream.
        sleeps: threads that wait for the stream's events sleep. Else they spin: they go on some 10 us earlier, and take
            a core.
    """

    def __init__(self, stream: torch.cuda.Stream, *, sleeps: bool) -> None:
        self._stream, self._sleeps = stream, sleeps

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> DeviceEvent:
        return _CudaEvent(self._stream, sleeps=self._sleeps)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage within: a graph or event that is destroyed meanwhile would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _CudaGraph:
    """See `CapturedGraph`.

    Args:
        graph: is empty so far.
        capturing: fills the graph with the work that the body gives to the stream.
        work: is captured.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, capturing: AbstractContextManager[None], work: Callable[[], None]
    ) -> None:
        self._graph = graph
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as capturing does: what is reserved more afterwards is the graph's
        before = torch.cuda.memory_reserved()
        with _no_collection(), capturing:
            work()
        self.nbytes = max(0, torch.cuda.memory_reserved() - before)

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """See `Device`.

    Args:
        number: the GPU's number.

    Raises:
        ConfigError: there is no such GPU here.
    """

    def __init__(self, number: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device", "no CUDA device can be used here")
        if number >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError("device", f"there is no GPU {number}, only {count}; stages may share one: cuda:0,cuda:0")
        self._device = torch.device("cuda", number)
        torch.cuda.set_device(self._device)
        compute, load, store = (torch.cuda.Stream(self._device) for _ in range(3))  # type: ignore[no-untyped-call]
        # Weights and batches, which this thread brings, come in the order of the steps.
        torch.cuda.set_stream(compute)
        # The wait for a step is part of each token's time. Whether spinning earns a core there is not measured.
        self.compute = CudaStream(compute, sleeps=False)
        self.load_stream, self.store_stream = (CudaStream(stream, sleeps=True) for stream in (load, store))
        self._graphs = torch.cuda.graph_pool_handle()  # their memory, which they share
        self._registered: list[tuple[CudaRuntime, Tensor]] = []
        self._spacing: CudaRuntime | None = None
        self._batching: CudaRuntime | None = None

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def goes_on(self) -> None:
        """See `Device.goes_on`."""

    def capacity(self) -> DeviceCapacity:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what loading left behind is free
        free, total = torch.cuda.mem_get_info(self._device)
        properties = torch.cuda.get_device_properties(self._device)
        return DeviceCapacity(int(total), int(free), int(properties.multi_processor_count))

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        torch.cuda.empty_cache()  # what loading weights has left over
        free, _ = torch.cuda.mem_get_info(self._device)
        nbytes = torch.Size(shape).numel()
        check_free_memory(nbytes, beside, free)
        try:
            found = torch.empty(shape, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:  # another process on this GPU was quicker
            raise ConfigError("kv_cache_memory_bytes", f"{nbytes} bytes of KV do not fit the GPU: {error}") from error
        torch.cuda.synchronize(self._device)
        return found

    def register(self, memory: Tensor) -> None:
        try:
            runtime = CudaRuntime.load()
            runtime.register(memory)
        except CallRefused as refused:
            log.warning("the KV pool is not registered, so KV comes and leaves several times slower: %s", refused)
            return
        self._registered.append((runtime, memory))
        self._spacing, self._batching = runtime, runtime if runtime.batches else None

    def copy_slices(self, target: Tensor, source: Tensor, slices: Tensor) -> None:
        """See `Device.copy_slices`. Without registered memory the calling thread waits for copies to the host."""
        runs, stream = runs_of(slices), torch.cuda.current_stream().cuda_stream
        spaced = not (target.is_contiguous() and source.is_contiguous())
        calls = self._spacing if spaced else self._batching
        if calls is not None:
            try:
                (calls.copy_spaced_rows if spaced else calls.copy_rows)(target, source, runs, stream)
            except CallRefused as refused:
                log.warning("KV is copied slice by slice: %s", refused)
                self._spacing = self._batching = None
            else:
                return
        for first, count in runs.tolist():
            target[first : first + count].copy_(source[first : first + count], non_blocking=True)

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Other threads wait for events and copy meanwhile, which must not end the capture.
        capturing = torch.cuda.graph(graph, pool=self._graphs, stream=stream, capture_error_mode="thread_local")
        return _CudaGraph(graph, capturing, work)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._spacing = self._batching = None
        while self._registered:
            runtime, memory = self._registered.pop()
            runtime.unregister(memory)
