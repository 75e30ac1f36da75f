"""What KV on a device costs the thread that launches steps: `python -m benchmarks.kv_device`.

Without a GPU: the device's copies are left out, as the copy engines of a GPU make them. What remains is time of the
host's threads: the launching thread's for each decode token and for a step in which a prompt joins, and how long it
takes until the prompt's KV is on its way to the device. Slices of the decode rows are short: the launching thread does
not read them.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event

import torch

from benchmarks.frame import Progress, Row, bounded, paired, run
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.platforms.base import CapturedGraph, DeviceCapacity
from moonpool.engine.platforms.callback_thread import CallbackThread
from moonpool.engine.platforms.cpu import CpuStream
from moonpool.engine.platforms.kv_memory import TieredKVMemory

BLOCK_SIZE = 64
TOKENS = 200
"""Decode tokens of a run that is measured."""
LAUNCH_S = 100e-6
"""Most of the launching thread's time for a token: a tenth of a step of a 0.5B on an H100, which takes about 1 ms."""
JOIN_TOKENS = 8192


class UnpaidStream(CpuStream):
    """A copy stream that costs the host nothing."""

    def run(self, work: Callable[[], None]) -> None:
        """Leaves the work out."""


class UnpaidDevice:
    """See `Device`. The memory is the host's, and the streams' work is not done."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.compute, self.load_stream, self.store_stream = UnpaidStream(), UnpaidStream(), UnpaidStream()

    def enter_thread(self) -> None:
        """Any thread may."""

    def capacity(self) -> DeviceCapacity:
        """See `Device.capacity`."""
        return DeviceCapacity(1 << 30, 1 << 30, 1)

    def memory(self, shape: tuple[int, ...], beside: int) -> torch.Tensor:
        """See `Device.memory`."""
        return torch.empty(shape, dtype=torch.uint8)

    def register(self, memory: torch.Tensor) -> None:
        """All memory is the host's."""

    def copy_slices(self, target: torch.Tensor, source: torch.Tensor, slices: torch.Tensor) -> None:
        """Never called: streams leave work out."""

    def capture(self, work: Callable[[], torch.Tensor]) -> CapturedGraph:
        """See `Device.capture`."""
        raise RuntimeError("nothing is captured here")

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, sequences with tokens each, and bytes of a token's KV in a layer.

    Attributes:
        name: in the rows.
    """

    name: str
    layers: int
    sequences: int
    tokens: int
    token_bytes: int = 4

    @property
    def tables(self) -> list[tuple[int, ...]]:
        """Block tables of the sequences."""
        width = -(-self.tokens // BLOCK_SIZE) + 1
        return [tuple(range(at * width, (at + 1) * width)) for at in range(self.sequences)]


DECODE = (Shape("30 layers, batch 1 of 1k", 30, 1, 1024), Shape("32 layers, batch 64 of 4k", 32, 64, 4096))
JOIN = (
    Shape("30 layers, 48 KiB a slice", 30, 1, JOIN_TOKENS, 768),
    Shape("4 layers, 256 KiB a slice", 4, 1, JOIN_TOKENS, 4096),
)


@dataclass
class Stage:
    """KV of a stage on an `UnpaidDevice`."""

    pool: KVPool
    memory: TieredKVMemory
    callbacks: CallbackThread
    layers: range

    def step(self, written: list[int], full: list[int]) -> None:
        """Gives one step in a run to the device, as the runner does."""
        self.memory.advance(written, full)
        self.launch()

    def launch(self) -> None:
        """Gives the step's layers to the device, and ends the step."""
        for layer in self.layers:
            self.memory.prepare_layer(layer)
        for layer in self.layers:
            self.memory.finish_layer(layer, None)
        self.memory.finish_step(lambda: None, aborted=False)

    def begin(self, number: int, *tables: tuple[int, ...], tokens: int) -> None:
        """Begins a run of sequences with so many tokens each."""
        sequences = [SequenceStep(bytes(4), tokens - 1, table, SampleSpec()) for table in tables]
        self.memory.begin(Step(number, tuple(sequences), steps=TOKENS))

    def land(self, table: tuple[int, ...]) -> None:
        """A prompt's KV has come into the pool."""
        for layer in self.layers:
            for block in table:
                self.pool.set_hash(layer, block, 1)


@contextlib.contextmanager
def opened(shape: Shape) -> Iterator[Stage]:
    """A stage with a pool for the shape's sequences."""
    layout = KVLayout.uniform(shape.layers, 1, shape.token_bytes // 4, BLOCK_SIZE, "float16")
    pool = KVPool.create(layout, sum(map(len, shape.tables)), [(0, shape.layers)])
    callbacks = CallbackThread(lambda error: None)
    memory = TieredKVMemory(pool.parts[0], UnpaidDevice(), callbacks)
    try:
        yield Stage(pool, memory, callbacks, range(shape.layers))
    finally:
        memory.close()
        callbacks.close()
        pool.close()


def decode_seconds(shape: Shape) -> float:
    """Seconds of the launching thread for a decode token."""
    last = [table[-2] for table in shape.tables]
    with opened(shape) as stage:
        stage.begin(1, *shape.tables, tokens=shape.tokens)
        stage.launch()
        seconds = 0.0
        for token in range(TOKENS):
            begin = time.thread_time()
            at = token % BLOCK_SIZE  # sequences fill a block at different tokens
            stage.step(last, last[at : at + 1])
            seconds += time.thread_time() - begin
            stage.callbacks.send(lambda: None).wait()  # a device computes longer than that
        return seconds / TOKENS


@dataclass(frozen=True, slots=True)
class Joined:
    """Seconds of a join: of the launching thread, until the KV is there, and of a copy of as many bytes."""

    launching: float
    bringing: float
    copying: float


def join(shape: Shape) -> Joined:
    """Lets a prompt join."""
    [table] = shape.tables
    with opened(shape) as stage:
        part = torch.frombuffer(stage.pool.parts[0].map, dtype=torch.uint8, count=stage.pool.nbytes)
        part.fill_(1)
        target = torch.zeros_like(part)
        begin = time.perf_counter()
        target.copy_(part)
        copying, there = time.perf_counter() - begin, Event()
        stage.land(table)
        begin = time.perf_counter()
        stage.memory.load(there.set)
        there.wait()
        bringing = time.perf_counter() - begin
        begin = time.thread_time()
        stage.begin(1, table, tokens=shape.tokens)
        stage.launch()
        return Joined(time.thread_time() - begin, bringing, copying)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """The rows."""
    rows = []
    for shape in DECODE:
        progress(shape.name)
        times = [1e6 * decode_seconds(shape) for _ in range(options.runs)]
        rows.append(bounded(f"launching thread, a token: {shape.name}", "us", times, "limit", 1e6 * LAUNCH_S))
    for shape in JOIN:
        progress(shape.name)
        joins = [join(shape) for _ in range(options.runs)]
        name = f"an 8k prompt joins: {shape.name}"
        times = [1e6 * it.launching for it in joins]
        rows.append(bounded(f"launching thread, {name}", "us", times, "limit", 5 * 1e6 * LAUNCH_S))
        pairs = [(1e3 * it.bringing, 1e3 * it.copying) for it in joins]
        rows.append(paired(f"KV is brought, {name}", "ms", pairs, "one copy of as many bytes", less_is_better=True))
    return rows


if __name__ == "__main__":
    raise SystemExit(not run("kv_device", measure))
