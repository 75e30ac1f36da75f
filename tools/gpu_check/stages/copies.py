"""KV between host and device, both ways: as services copy, and as fast as the hardware copies.

Figures are GB/s. "launching" counts the seconds of the thread that gives the work, which a step waits for. Services
bring KV beside steps: the report has the milliseconds of the first step that has the KV. What they bring to the
host is hashed there: the seconds count.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Event

import torch
from torch import Tensor

from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.platforms.base import Device, DeviceStream
from moonpool.engine.platforms.kv_memory import StageSlices, pool_bytes
from moonpool.engine.platforms.registry import DeviceName
from moonpool.engine.platforms.stage_platform import StagePlatform, open_device, stage_platform
from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 45
KV_HEADS = {"0.5B": 2, "SmolLM2": 3, "8B": 8}
HEAD_DIM = {"0.5B": 64, "SmolLM2": 64, "8B": 128}
TIMES = 3


@dataclass(frozen=True, slots=True)
class Size:
    """A pool, and which slices are copied."""

    layers: int
    blocks: int
    peak_bytes: int
    """Peak for one large copy."""


LARGE, TINY = Size(16, 64, 256 << 20), Size(2, 4, 1 << 16)


def check(where: Where, figures: Figures) -> None:
    """Measure every way for the slices of each shape."""
    size = TINY if where.tiny else LARGE
    with closing(_opened(where)) as device:
        _peak(device, size.peak_bytes, figures)
    for shape in list(KV_HEADS)[: 1 if where.tiny else None]:
        with closing(_opened(where)) as device:  # a separate device: a pool is registered until the device is closed
            layout = KVLayout.uniform(size.layers, KV_HEADS[shape], HEAD_DIM[shape], 64, "bfloat16")
            with closing(KVPool.create(layout, size.blocks, [(0, size.layers)])) as pool:
                _as_today(device, pool, f"{shape}, slices of {layout.largest_slice_bytes >> 10} KiB", figures)
                _straight(device, pool, f"{shape}, slices of {layout.largest_slice_bytes >> 10} KiB", figures)


def _opened(where: Where) -> Device:
    device = open_device(DeviceName.parse(where.device))
    assert device is not None
    return device


def _gb_per_s(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


def _best(work: Callable[[], object]) -> float:
    """Least seconds of some calls."""
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def _copy(device: Device, target: Tensor, source: Tensor) -> None:
    device.load_stream.run(partial(_give, target, source))
    device.load_stream.record().wait()


def _give(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _peak(device: Device, nbytes: int, figures: Figures) -> None:
    there, pageable = device.memory((nbytes,), 0), torch.zeros(nbytes, dtype=torch.uint8)
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=there.is_cuda)
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        figures[f"one copy, {name}, to the device"] = _gb_per_s(nbytes, _best(partial(_copy, device, there, host)))
        figures[f"one copy, {name}, to the host"] = _gb_per_s(nbytes, _best(partial(_copy, device, host, there)))


def _as_today(device: Device, pool: KVPool, shape: str, figures: Figures) -> None:
    """What services do: through the KV memory of a stage."""
    tokens, size = pool.blocks * pool.layout.block_size, pool.layout.block_size
    errors: list[BaseException] = []
    began = time.perf_counter()
    place = stage_platform(device, pool.parts[0], errors.append)
    figures[f"{shape}, populated and registered"] = _gb_per_s(pool.nbytes, time.perf_counter() - began)
    try:
        for block in range(pool.blocks):
            for layer in range(pool.layout.layers):
                pool.slice(layer, block)[:] = bytes([1 + (layer + block) % 250]) * pool.layout.slice_bytes(layer)
        table = tuple(range(pool.blocks))
        whole = bytes(4 * tokens)
        loads = [_load(place, pool, Step(number, (SequenceStep(bytes(4), tokens - 1, table),))) for number in range(3)]
        launched, arrived = min(load[0] for load in loads), min(load[1] for load in loads)
        figures[f"{shape}, as today, to the device"] = _gb_per_s(pool.nbytes, arrived)
        figures[f"{shape}, as today, launching the step that has it, ms"] = round(1e3 * launched, 3)
        expected = pool_bytes(pool.parts[0]).clone()
        pool_bytes(pool.parts[0]).zero_()
        stored = _store(place, pool, Step(9, (SequenceStep(whole, 0, table),)))
        figures[f"{shape}, as today, to the host"] = _gb_per_s(pool.nbytes, stored)
        expect(torch.equal(pool_bytes(pool.parts[0]), expected), f"{shape}: what came back is not what went there")
        expect(not errors, f"{shape}: {errors}")
        figures[f"{shape}, hashed by one thread"] = _gb_per_s(pool.nbytes, _best(partial(_hash, pool)))
        figures[f"{shape}, tokens of a block"] = size
    finally:
        place.memory.close()
        place.callbacks.close()


def _hash(pool: KVPool) -> None:
    for layer in range(pool.layout.layers):
        for block in range(pool.blocks):
            pool.seal(layer, block, pool.layout.block_size)


def _load(place: StagePlatform, pool: KVPool, step: Step) -> tuple[float, float]:
    """Seconds of the launching thread, once all is there, and until all is there."""
    there = Event()
    for block in range(pool.blocks):
        for layer in range(pool.layout.layers):
            pool.set_hash(layer, block, 1)
    began = time.perf_counter()
    place.memory.load(there.set)
    there.wait()
    arrived = time.perf_counter() - began
    began = time.perf_counter()
    place.memory.begin(step)
    for layer in range(pool.layout.layers):
        place.memory.prepare_layer(layer)
    return time.perf_counter() - began, arrived


def _store(place: StagePlatform, pool: KVPool, step: Step) -> float:
    """Seconds until all KV is in the pool, with hashes."""
    over: list[float] = []
    place.memory.begin(step)
    began = time.perf_counter()
    for layer in range(pool.layout.layers):
        place.memory.finish_layer(layer, None)
    place.memory.finish_step(lambda: over.append(time.perf_counter()), aborted=False)
    place.callbacks.send(lambda: None).wait()
    return over[0] - began


def _straight(device: Device, pool: KVPool, shape: str, figures: Figures) -> None:
    """Slices in a drawn order, by one device call, without the services' other work."""
    host = StageSlices.of_pool(pool.parts[0], pool_bytes(pool.parts[0])).parts[0].flatten(0, 1)
    there = device.memory(tuple(host.shape), 0)
    slices = torch.randperm(len(host))[: len(host) // 2].sort().values
    for way, target, source, stream in (
        ("to the device", there, host, device.load_stream),
        ("to the host", host, there, device.store_stream),
    ):
        launching: list[float] = []
        give = partial(device.copy_slices, target, source, slices)
        seconds = _best(partial(_give_and_wait, stream, give, launching))
        nbytes = len(slices) * host.shape[1]
        figures[f"{shape}, one call, {way}"] = _gb_per_s(nbytes, seconds)
        figures[f"{shape}, one call, {way}, launching"] = _gb_per_s(nbytes, min(launching))


def _give_and_wait(stream: DeviceStream, give: Callable[[], None], launching: list[float]) -> None:
    began = time.perf_counter()
    stream.run(give)
    launching.append(time.perf_counter() - began)
    stream.record().wait()


if __name__ == "__main__":
    stage_main("copies", check)
