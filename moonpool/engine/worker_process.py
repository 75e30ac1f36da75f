"""The process of one rank of a pipeline stage: its start, its channel, and why it ended."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import moonpool.base.errors
from moonpool.base.errors import Internal, MoonpoolError
from moonpool.base.fork_server import ChildProcess, Launcher, Program
from moonpool.base.kv.pool import PoolPart
from moonpool.engine.channel import AsyncChannel
from moonpool.engine.messages import (
    EngineSpec,
    LoadKV,
    WorkerFailed,
)

_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU)
"""In all threads of a worker. Draining is the I/O process's decision: a signal to the whole group must not take the
engine away. Blocked, not ignored: Triton's compiler installs handlers that end the process. SIGTTOU: a terminal may
stop a writer of another process group."""


_REAP_S = 2.0
"""A killed process ends in milliseconds."""


class Channel(Protocol):
    """This end of a channel to a worker, as `AsyncChannel` has it."""

    def send(self, message: object) -> None:
        """Send a message without waiting; dropped when the other end has closed."""
        ...

    async def receive(self) -> Any:
        """Return the next message; raise `ChannelClosed` when the other end has closed."""
        ...

    def close(self) -> None:
        """Close this end at once."""
        ...

    async def wait_closed(self) -> None:
        """Wait until all is closed."""
        ...


class Worker(Protocol):
    """One rank of a stage on this host, or a whole stage on another."""

    @property
    def stage(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int:
        """The process; 0 = on another host."""
        ...

    @property
    def channel(self) -> Channel: ...

    def serve(self, part: PoolPart) -> None:
        """From now on, KV that lands in the stage's part of the pool is brought to the stage."""
        ...

    def kill(self) -> None:
        """End the worker at once."""
        ...

    def reap(self) -> None:
        """Wait for the end of a killed process."""
        ...

    def ended(self) -> str:
        """Return how the worker ended; "" while it runs."""
        ...

    async def death(self) -> str:
        """Return how the worker ended, after its channel has closed."""
        ...


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """The process of a stage's rank and this end of the channel. `alone`: the stage has no other ranks."""

    stage: int
    process: ChildProcess
    channel: AsyncChannel
    rank: int = 0
    alone: bool = True

    def __str__(self) -> str:
        rank = "" if self.alone else f" rank {self.rank}"
        return f"engine stage {self.stage}{rank} (process {self.process.pid})"

    @property
    def pid(self) -> int:
        return self.process.pid

    def serve(self, part: PoolPart) -> None:
        """See `Worker`. KV lands in any thread, and is reported if none is under way to a rank's device."""
        loop, others = asyncio.get_running_loop(), part.on_landed

        def landed() -> None:
            if others is not None:
                others()
            loop.call_soon_threadsafe(self.channel.send, LoadKV())

        part.on_landed = landed

    def kill(self) -> None:
        self.process.kill()

    def reap(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_S)

    def ended(self) -> str:
        code = self.process.poll()
        return "" if code is None else f"{self} {exit_reason(code)}"

    async def death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"{self} {exit_reason(await asyncio.to_thread(self.process.wait, _REAP_S))}"
        return f"{self} closed its channel"


def is_stopped(worker: Worker) -> bool:
    """Return whether a worker's process is stopped, as by SIGSTOP; False where the system does not say."""
    if not worker.pid:
        return False
    try:
        return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def worker_environment(spec: EngineSpec, threads: int) -> dict[str, str]:
    """Return the environment of a worker that computes with so many threads."""
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = str(threads)
    # Threads that spin while they wait would take the cores from the I/O process and the other stages.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # glibc hands every large buffer back to the kernel and pays the page faults again; ignored by other libraries.
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str((1 << 31) - 1))
    env.setdefault("MALLOC_TOP_PAD_", str(64 << 20))
    env.setdefault("MALLOC_ARENA_MAX", "2")  # each arena keeps its threads' most
    if spec.stages > 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # stages that meet are on this host
        # This process ends a stage that waits in vain for NCCL, with the reason: a channel closed, or a step took too
        # long. By default torch's watchdog aborts the stage; so does NCCL's monitor, if the watchdog must not.
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        env.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    return env


def spawn_worker(
    module: str, launcher: Launcher, pool_fd: int, page_fd: int, env: dict[str, str]
) -> tuple[ChildProcess, socket.socket]:
    """Start one worker; return the worker and our end of the channel. `page_fd`: -1 = the stage has one rank."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, _signals_blocked():
            descriptors = {"--channel": theirs.fileno(), "--pool": pool_fd}
            if page_fd >= 0:
                descriptors["--page"] = page_fd
            arguments = [word for name, number in descriptors.items() for word in (name, str(number))]
            # Standard output belongs to the process that started this one.
            program = Program(module, arguments, env, stdout=2, stderr=2, pass_fds=tuple(descriptors.values()))
            process = launcher(program)
    except BaseException:
        ours.close()
        raise
    return process, ours


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals: a process started within inherits the mask; what comes meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def error_of_worker(failure: WorkerFailed, who: str) -> MoonpoolError:
    """Return the error that a worker's `WorkerFailed` message describes."""
    kind = getattr(moonpool.base.errors, failure.kind, None) if failure.kind else None
    if not (isinstance(kind, type) and issubclass(kind, MoonpoolError)):
        return Internal(f"{who} failed: {failure.message}")
    make: Callable[..., MoonpoolError] = kind
    with contextlib.suppress(TypeError):
        return make(failure.field, failure.message) if failure.field else make(failure.message)
    return Internal(f"{who} failed: {failure.message}")


def exit_reason(code: int) -> str:
    """Return how a process ended, for people."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
