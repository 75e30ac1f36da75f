"""Starts an engine's processes (pool, processes, rendezvous, warm-up) and ends them.

The running engine is in `moonpool.engine.process`.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace

from moonpool.engine.channel import AsyncChannel
from moonpool.engine.devices.names import DeviceName
from moonpool.engine.handle import Engine
from moonpool.engine.messages import EngineSpec, StageSpec
from moonpool.engine.process import OnLoading, ProcessEngine, Worker
from moonpool.engine.warmup import measure
from moonpool.errors import DeadlineExceeded
from moonpool.kv.pool import KVPool
from moonpool.sched.stages import stage_ranges

WORKER = (sys.executable, "-m", "moonpool.engine.worker")


def _environment(spec: EngineSpec, threads: int) -> dict[str, str]:
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = str(threads)
    # Threads that spin while they wait would take the cores from the I/O process and the other stages.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # glibc hands every large buffer back to the kernel and pays its page faults again; ignored by other libraries.
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str((1 << 31) - 1))
    env.setdefault("MALLOC_TOP_PAD_", str(64 << 20))
    env.setdefault("MALLOC_ARENA_MAX", "2")  # each arena keeps the most that its threads ever had
    if spec.stages > 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all stages are on this host
    return env


def _spawn(command: Sequence[str], pool_fd: int, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts one worker; returns it and our end of its channel."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*command, "--channel", str(theirs.fileno()), "--pool", str(pool_fd)],
                pass_fds=(theirs.fileno(), pool_fd),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the process that started this one
                env=env,
                process_group=0,  # Ctrl-C is ours alone
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


@asynccontextmanager
async def start_processes(
    spec: EngineSpec,
    *,
    start_timeout_s: float,
    on_loading: OnLoading = lambda stage, layers, of: None,
    command: Sequence[str] = WORKER,
) -> AsyncIterator[Engine]:
    """See `moonpool.engine.start.start_engine`; `command` starts a worker (tests put their own in its place)."""
    ranges = stage_ranges(spec.layout.layers, spec.stages)
    cores = len(os.sched_getaffinity(0))
    threads = spec.threads or (cores if spec.core_page else max(1, cores // spec.stages))
    spec = replace(spec, threads=threads)
    async with AsyncExitStack() as stack:
        pool = KVPool.create(spec.layout, spec.blocks, ranges)
        stack.callback(pool.close)
        rendezvous = ""
        if spec.stages > 1:
            rendezvous = tempfile.mkdtemp(prefix="moonpool-engine-")  # readable by us alone
            stack.callback(shutil.rmtree, rendezvous, ignore_errors=True)
        env = _environment(spec, threads)
        workers: list[Worker] = []
        with ExitStack() as unwind:
            for stage, part in enumerate(pool.parts):
                process, sock = _spawn(command, part.fd, env)
                unwind.callback(process.wait)
                unwind.callback(process.kill)
                workers.append(Worker(stage, process, await AsyncChannel.open(sock)))
                unwind.callback(workers[-1].channel.close)
            unwind.pop_all()  # from here on it is the engine's
        engine = ProcessEngine(spec, pool, workers)
        stack.push_async_callback(engine.shutdown)
        for worker, (begin, end) in zip(workers, ranges, strict=True):
            worker.channel.send(StageSpec(spec, worker.stage, begin, end, rendezvous))
        try:
            async with asyncio.timeout(start_timeout_s):
                await engine.ready(on_loading)
                engine.listen()
                if rendezvous and DeviceName.parse(spec.device).kind != "cuda":  # NCCL looks there now and then
                    shutil.rmtree(rendezvous, ignore_errors=True)  # they have met
                if spec.measure:
                    engine.speeds = await measure(engine, max_tokens=spec.max_tokens)  # this warms it up, too
                if spec.speeds is not None:
                    engine.speeds = spec.speeds
        except TimeoutError:
            engine.kill()
            raise DeadlineExceeded(f"the engine was not ready after {start_timeout_s:g} s") from None
        except BaseException:
            engine.kill()
            raise
        yield engine
