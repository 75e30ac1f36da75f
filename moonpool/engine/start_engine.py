"""Starts an engine: a process for each rank of each pipeline stage, or the emulated engine.

Workers exit when their channel closes, so a killed I/O process leaves none behind. Stages on other hosts join before
the processes of this host are started.
"""

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.fork_server import Launcher, engine_started, start_worker
from moonpool.base.kv.memory import shared_memory
from moonpool.engine.calibration import TimedSizes, measure
from moonpool.engine.channel import AsyncChannel
from moonpool.engine.emulated.engine import start_emulated
from moonpool.engine.interface import Engine
from moonpool.engine.messages import (
    EngineSpec,
    StageSpec,
)
from moonpool.engine.parallel.page import page_bytes
from moonpool.engine.platforms.registry import HOST_COLLECTIVES, collectives_of, engine_devices, engine_platform
from moonpool.engine.pool_memory import PoolMemory
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_listener import NO_LISTENER, StartListener
from moonpool.engine.worker_process import Worker, WorkerProcess, is_stopped, spawn_worker, worker_environment

WORKER = "moonpool.engine.worker"
"""A worker's program."""


class RemoteStages(Protocol):
    """Stages on other hosts: the last ones of the pipeline."""

    @property
    def count(self) -> int: ...

    async def joined(self, spec: EngineSpec, listener: StartListener) -> Sequence[Worker]:
        """Wait, without a limit, until all stages have joined; return them in their order."""
        ...


def start_engine(
    spec: EngineSpec,
    *,
    start_timeout_s: float = 120.0,
    listener: StartListener = NO_LISTENER,
    remote: RemoteStages | None = None,
) -> AbstractAsyncContextManager[Engine]:
    """Start the engine's processes, or emulate them; leaving the context ends them and frees the pool.

    `listener` is told how the start goes on. `remote`: stages on other hosts; None = there are none.

    Raises:
        ConfigError: A value of `spec` is refused (stages, blocks, device, memory).
        CheckpointError: The checkpoint cannot be loaded.
        DeadlineExceeded: The start did not go on for `start_timeout_s`.
        Unavailable: A worker died while starting.
    """
    if spec.emulated is not None:
        return start_emulated(
            spec.emulated, spec.layout, spec.blocks, stages=spec.stages, gate_timeout_s=spec.gate_timeout_s
        )
    return start_processes(spec, start_timeout_s=start_timeout_s, listener=listener, remote=remote)


@asynccontextmanager
async def start_processes(
    spec: EngineSpec,
    *,
    start_timeout_s: float,
    listener: StartListener = NO_LISTENER,
    worker_module: str = WORKER,
    launcher: Launcher = start_worker,
    remote: RemoteStages | None = None,
) -> AsyncIterator[Engine]:
    """As `start_engine`; `worker_module` is a worker's program (tests use a substitute)."""
    ranges = spec.stage_layers
    here = spec.stages - (0 if remote is None else remote.count)
    cores = len(os.sched_getaffinity(0))
    threads = spec.threads or (cores if spec.core_page else max(1, cores // (here * spec.ranks)))
    spec = replace(spec, threads=threads)
    async with AsyncExitStack() as stack:
        memory = PoolMemory(ranges)
        stack.callback(memory.close)
        if spec.sized:
            memory.make(spec.layout, spec.blocks, spec.slots)
        chained = 1 < spec.stages == here
        meeting = meeting_folder(stack) if chained or meets_by_store(spec) else ""
        rendezvous = [_chain_folder(meeting if chained else "", rank) for rank in range(spec.ranks)]
        env = worker_environment(spec, threads)
        pages = [rank_page(spec.ranks, stack) for _ in range(here)]
        workers: list[Worker] = []
        with ExitStack() as unwind:
            others = [] if remote is None else await remote.joined(spec, listener)
            for other in others:
                unwind.callback(other.kill)
            for stage, rank in itertools.product(range(here), range(spec.ranks)):
                process, sock = spawn_worker(worker_module, launcher, memory.files[stage], pages[stage], env)
                unwind.callback(process.wait)
                unwind.callback(process.kill)
                channel = await AsyncChannel.open(sock)
                workers.append(WorkerProcess(stage, process, channel, rank, alone=spec.ranks == 1))
                unwind.callback(channel.close)
            workers += others
            unwind.pop_all()  # from here on it is the engine's
        engine_started()
        engine = ProcessEngine(spec, memory, workers, is_stopped)
        stack.push_async_callback(engine.shutdown)
        for worker in workers:
            begin, end = ranges[worker.stage]
            store = rank_store(meeting, worker.stage) if meets_by_store(spec) else ""
            worker.channel.send(StageSpec(spec, worker.stage, worker.rank, begin, end, rendezvous[worker.rank], store))
        try:
            async with asyncio.timeout(start_timeout_s) as limit:
                renewing = _Renewing(listener, limit, start_timeout_s)
                await engine.ready(renewing)
                engine.listen()
                # All have met. Backends other than the host's may read the folder later, too.
                if meeting and _collectives(spec) == {HOST_COLLECTIVES}:
                    shutil.rmtree(meeting, ignore_errors=True)
                if spec.measure:
                    renewing.starting("measuring the engine's speed")
                    engine.speeds = await measure(engine, max_tokens=spec.max_tokens, sizes=TimedSizes.of(engine.spec))
                if spec.speeds is not None:
                    engine.speeds = spec.speeds
        except TimeoutError:
            engine.kill()
            raise DeadlineExceeded(f"the engine's start did not go on for {start_timeout_s:g} s") from None
        except BaseException:
            engine.kill()
            raise
        yield engine


def rank_page(ranks: int, stack: AsyncExitStack | ExitStack) -> int:
    """Return the descriptor of the page by which a stage's ranks meet, closed with `stack`; -1 for one rank."""
    if ranks == 1:
        return -1
    page = shared_memory()
    stack.callback(os.close, page)
    os.truncate(page, page_bytes(ranks))
    return page


def meeting_folder(stack: AsyncExitStack | ExitStack) -> str:
    """Return a folder where an engine's processes find each other, readable by us alone, removed with `stack`."""
    folder = tempfile.mkdtemp(prefix="moonpool-engine-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def meets_by_store(spec: EngineSpec) -> bool:
    """Return whether the ranks of a stage need a `rank_store`: their sums are not those of the page."""
    return spec.ranks > 1 and not engine_platform(spec.device).in_host_pool


def rank_store(folder: str, stage: int) -> str:
    """Return the file by which a stage's ranks find each other."""
    return os.path.join(folder, f"ranks-{stage}")


def _collectives(spec: EngineSpec) -> set[str]:
    """Return the backends by which the processes of an engine send each other tensors."""
    stages = engine_devices(spec.device, spec.stages, spec.ranks)
    return {collectives_of(group) for group in (*stages, *zip(*stages, strict=True))}


def _chain_folder(meeting: str, rank: int) -> str:
    """Make and return the folder where the stages' processes of a rank find each other; "" where they need none."""
    if not meeting:
        return ""
    folder = os.path.join(meeting, str(rank))
    os.mkdir(folder)
    return folder


@dataclass(frozen=True, slots=True)
class _Renewing:
    """Extends the start's time limit on each sign of progress."""

    listener: StartListener
    limit: asyncio.Timeout
    start_timeout_s: float

    def starting(self, what: str) -> None:
        self._renew()
        self.listener.starting(what)

    def loading(self, stage: int, layers: int, of: int) -> None:
        self._renew()
        self.listener.loading(stage, layers, of)

    def _renew(self) -> None:
        self.limit.reschedule(asyncio.get_running_loop().time() + self.start_timeout_s)
