"""Starts and runs an engine: one process per pipeline stage, or the emulated engine.

A step is sent to all stages at once and is over when every stage has reported; only then are the step's blocks free to
change. If one process dies, the engine has failed for good: the other processes are killed, and running and later steps
raise. Workers exit when their channel closes, so a killed I/O process leaves none behind.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import moonpool.base.errors
from moonpool.base.checkpoint import load_config
from moonpool.base.errors import DeadlineExceeded, Internal, MoonpoolError, Unavailable
from moonpool.base.fork_server import ChildProcess, Launcher, Program, engine_started, start_worker
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool, available_bytes, shared_memory
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import LayerDone, Step, StepResult, stage_ranges
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.calibration import TimedSizes, measure
from moonpool.engine.channel import AsyncChannel, ChannelClosed
from moonpool.engine.emulated.engine import start_emulated
from moonpool.engine.interface import Engine
from moonpool.engine.messages import (
    MAX_FETCHES,
    AbortStageStep,
    BlocksFetched,
    DropLora,
    DropSequence,
    EngineSpec,
    FetchBlocks,
    Footprint,
    KVLoaded,
    LayersLoaded,
    LoadKV,
    LoadLora,
    LoraAnswer,
    OpenKVGateMessage,
    Shutdown,
    StageDone,
    StageEvent,
    StageRoom,
    StageSpec,
    StageStarting,
    StopRunMessage,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.platforms.registry import HOST_COLLECTIVES, collectives_of, stage_devices
from moonpool.engine.sizes import choose_sizes

log = get_logger(__name__)


class StartListener(Protocol):
    """Is told how an engine's start goes on."""

    def starting(self, what: str) -> None:
        """What the start does now."""
        ...

    def loading(self, stage: int, layers: int, of: int) -> None:
        """A stage has loaded this many layers."""
        ...


class NoListener:
    """A start without a listener."""

    def starting(self, what: str) -> None:
        """Ignored."""

    def loading(self, stage: int, layers: int, of: int) -> None:
        """Ignored."""


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


NO_LISTENER = NoListener()
RUN_STEPS = 64
"""Steps for which a single stage is not asked."""
_SHUTDOWN_S = 5.0
StartMessage = TypeVar("StartMessage", StageRoom, WorkerReady)
_REAP_S = 2.0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One stage's process and this end of the channel."""

    stage: int
    process: ChildProcess
    channel: AsyncChannel

    def __str__(self) -> str:
        return f"engine stage {self.stage} (process {self.process.pid})"


@dataclass(slots=True, eq=False)
class _StepInFlight:
    """A step that is under way in some stage."""

    future: "asyncio.Future[StepResult]"
    on_layer: Callable[[LayerDone], None] | None
    on_step: Callable[[StepResult], None] | None
    deadline: asyncio.TimerHandle
    done: list[StageDone] = field(default_factory=list)
    error: Exception | None = None

    def report(self, event: LayerDone | StageDone) -> None:
        """Report a finished layer, or finished steps of a run that goes on."""
        try:
            if isinstance(event, LayerDone) and self.on_layer is not None and self.error is None:
                self.on_layer(event)
            elif isinstance(event, StageDone) and self.on_step is not None and self.error is None:
                self.on_step(_step_result([event]))
        except Exception as error:  # raised to the caller when the step is over
            self.error = error


def _step_result(stages: Sequence[StageDone]) -> StepResult:
    aborted = any(done.aborted for done in stages)
    last = max(stages, key=lambda done: done.stage)
    start_ns = min(done.start_ns for done in stages)
    end_ns = max(done.end_ns for done in stages)
    sampled = () if aborted else last.sampled
    rest = last.several, last.logprobs, last.scores, last.embeddings, last.failed
    share = sum(done.share for done in stages) / len(stages)
    earlier = tuple(_step_result([done]) for done in last.earlier)
    waited_ns = max(done.waited_ns for done in stages)
    return StepResult(sampled, aborted, start_ns, end_ns, *rest, share, waited_ns, earlier, late=last.late)


@dataclass(slots=True, eq=False)
class _PendingAnswers:
    """A fetch, a load or an adapter's order without the answers of some stages."""

    future: "asyncio.Future[None]"
    missing: set[int]
    nbytes: int = 0
    failure: MoonpoolError | None = None


class PoolMemory:
    """The memory that an engine's processes inherit, and the pool inside once the size is known."""

    def __init__(self, layer_ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = layer_ranges
        self.files = [shared_memory() for _ in layer_ranges]
        self.pool: KVPool | None = None

    def make(self, layout: KVLayout, blocks: int, slots: int) -> None:
        """Make the pool; raises as `KVPool.create`."""
        files, self.files = self.files, []
        self.pool = KVPool.create(layout, blocks, self._ranges, files=files, slots=slots)
        self.files = [part.fd for part in self.pool.parts]

    def close(self) -> None:
        """Give the memory back."""
        if self.pool is not None:
            self.pool.close()
        else:
            for file in self.files:
                os.close(file)


class ProcessEngine:
    """An `Engine` on one process per stage."""

    def __init__(self, spec: EngineSpec, memory: PoolMemory, workers: Sequence[WorkerProcess]) -> None:
        self._spec = spec
        self._memory = memory
        self._workers = list(workers)
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._flights: dict[int, _StepInFlight] = {}
        self._last_step_id: int | None = None
        self._closing = False
        self._one_pool = stage_devices(spec.device, spec.stages)[0].platform.in_host_pool
        self._numbers = itertools.count(1)
        self._asked: dict[int, _PendingAnswers] = {}
        self._may_fetch = asyncio.Semaphore(MAX_FETCHES)
        self._readers: list[asyncio.Task[None]] = []
        self.speeds = Speeds()
        self.footprints: dict[int, Footprint] = {}
        """What each stage's process holds in memory at most."""

    @property
    def spec(self) -> EngineSpec:
        """What the engine runs; sizes that the device decides are known once the engine is ready."""
        return self._spec

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""
        return self._spec.layout

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        return self._spec.blocks

    @property
    def max_num_batched_tokens(self) -> int:
        """See `Engine.max_num_batched_tokens`."""
        return self._spec.max_num_batched_tokens

    @property
    def stages(self) -> int:
        """Stages, and steps that may be in flight."""
        return len(self._workers)

    @property
    def pool(self) -> KVPool:
        """The paged memory."""
        assert self._memory.pool is not None, "the engine is not ready"
        return self._memory.pool

    @property
    def failed(self) -> "asyncio.Future[str]":
        """Done, with the reason, when the engine can run no more steps."""
        return self._failed

    @property
    def pids(self) -> list[int]:
        """The stages' processes."""
        return [worker.process.pid for worker in self._workers]

    @property
    def run_steps(self) -> int:
        """Of several stages the first does not know what the last has sampled."""
        return RUN_STEPS if self.stages == 1 else 1

    async def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> StepResult:
        """See `Engine.run`."""
        if self._failed.done():
            raise Unavailable(self._failed.result())
        if len(self._flights) >= self.stages:
            raise Internal(f"step {step.step_id} would be one more than the {self.stages} that may be in flight")
        if self._last_step_id is not None and step.step_id <= self._last_step_id:
            raise Internal(f"step {step.step_id} after step {self._last_step_id}")
        self._last_step_id = step.step_id
        flight = _StepInFlight(self._loop.create_future(), on_layer, on_step, self._deadline(step.step_id))
        # When the caller was cancelled, the loop must not report the future's exception as never retrieved.
        flight.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._flights[step.step_id] = flight
        self._send(step)
        # Shielded: the step of a cancelled caller is still writing.
        return await asyncio.shield(flight.future)

    def open_gate(self, step_id: int, layer: int) -> None:
        """See `Engine.open_gate`."""
        self._send(OpenKVGateMessage(step_id, layer))

    def drop(self, step_id: int, index: int) -> None:
        """See `Engine.drop`."""
        self._send(DropSequence(step_id, index))

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        """See `Engine.stop_run`."""
        self._send(StopRunMessage(step_id, urgent))

    def abort(self, step_id: int) -> None:
        """See `Engine.abort`."""
        self._send(AbortStageStep(step_id))

    def _send(
        self,
        message: Step
        | OpenKVGateMessage
        | DropSequence
        | StopRunMessage
        | AbortStageStep
        | FetchBlocks
        | LoadKV
        | LoadLora
        | DropLora
        | Shutdown,
    ) -> None:
        if self._failed.done():
            return
        for worker in self._workers:
            worker.channel.send(message)

    async def fetch(self, blocks: Sequence[int]) -> None:
        """See `Engine.fetch`."""
        if self._one_pool:
            return
        async with self._may_fetch:
            await self._ask(FetchBlocks(next(self._numbers), tuple(blocks)))

    def load(self) -> "asyncio.Future[None] | None":
        """See `Engine.load`."""
        return None if self._one_pool else self._ask(LoadKV(next(self._numbers)))

    async def load_lora(self, lora: bytes, folder: str) -> int:
        """See `Engine.load_lora`."""
        message = LoadLora(next(self._numbers), lora, folder)
        future = self._ask(message)
        answers = self._asked.get(message.number)
        await future
        assert answers is not None, "an engine that has failed raises"
        if answers.failure is not None:
            await self.drop_lora(lora)  # stages that could load the adapter forget it
            raise answers.failure
        return answers.nbytes

    async def drop_lora(self, lora: bytes) -> None:
        """See `Engine.drop_lora`."""
        await self._ask(DropLora(next(self._numbers), lora))

    def _ask(self, message: FetchBlocks | LoadKV | LoadLora | DropLora) -> "asyncio.Future[None]":
        """Sends a message; the future is done with the answers of all stages."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._failed.done():
            future.set_exception(Unavailable(self._failed.result()))
            return future
        self._asked[message.number] = _PendingAnswers(future, set(range(self.stages)))
        future.add_done_callback(lambda done: self._asked.pop(message.number))
        self._send(message)
        return future

    async def idle(self) -> None:
        """Waits until no step is in flight, those of cancelled callers included."""
        await asyncio.gather(*(flight.future for flight in self._flights.values()), return_exceptions=True)

    # --- answers of the stages -------------------------------------------------------------------------------------

    async def ready(self, listener: StartListener) -> None:
        """Waits until every stage has loaded.

        Args:
            listener: called for each layer that a stage has loaded, and for the start's progress.

        Raises:
            MoonpoolError: What a stage could not do; Unavailable when one died.
        """
        if not self._spec.sized:
            rooms = await self._of_all(StageRoom, listener)
            config = load_config(Path(self._spec.checkpoint), self._spec.model_impl)
            sizes = choose_sizes(config, self._spec, rooms, available_bytes())
            self._spec = replace(self._spec, blocks=sizes.blocks, max_num_batched_tokens=sizes.max_num_batched_tokens)
            self._memory.make(self._spec.layout, sizes.blocks, self._spec.slots)
            kv_mib = self._spec.layout.pool_bytes(sizes.blocks, self._spec.slots) >> 20
            log.info(
                "sizes",
                blocks=sizes.blocks,
                kv_mib=kv_mib,
                max_num_batched_tokens=sizes.max_num_batched_tokens,
                why=sizes.why,
            )
            for worker in self._workers:
                worker.channel.send(sizes)
        ready = await self._of_all(WorkerReady, listener)
        if not self._one_pool:  # stages have taken the memory; here each page is mapped, before KV comes
            for part in self.pool.parts:
                await asyncio.to_thread(part.populate)
        for worker, message in zip(self._workers, ready, strict=True):
            self._note(worker, message)
        by = " / ".join(dict.fromkeys(message.computing for message in ready))  # one line: stages hardly ever differ
        spec = self._spec
        log.info("computing", by=by, device=spec.device, weights=spec.dtype, kv=spec.layout.dtype)

    async def _of_all(self, kind: type[StartMessage], listener: StartListener) -> list[StartMessage]:
        """Each stage's next message of this kind; raises as `ready`."""
        try:
            async with asyncio.TaskGroup() as group:
                stages = [group.create_task(self._next(worker, listener)) for worker in self._workers]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        messages = [stage.result() for stage in stages]
        assert all(isinstance(message, kind) for message in messages)
        return messages

    async def _next(self, worker: WorkerProcess, listener: StartListener) -> Any:
        """A stage's next message that is not about the start's progress."""
        try:
            message = await worker.channel.receive()
            while isinstance(message, LayersLoaded | StageStarting):
                if isinstance(message, StageStarting):
                    listener.starting(message.what)
                else:
                    listener.loading(worker.stage, message.layers, message.all_layers)
                message = await worker.channel.receive()
        except ChannelClosed:
            raise Unavailable(await self._death_of(worker)) from None
        if isinstance(message, WorkerFailed):
            raise error_of_worker(message, str(worker))
        return message

    def _note(self, worker: WorkerProcess, message: WorkerReady) -> None:
        log.info(
            "loaded", stage=worker.stage, seconds=round(message.load_s, 2), peak_mib=message.peak_bytes >> 20,
            checkpoint=self._spec.checkpoint,
        )  # fmt: skip
        if message.changed_weights:
            log.warning("weights are not held as in the file", stage=worker.stage, tensors=message.changed_weights)
        if message.mapped_bytes:
            log.warning(
                "weights are mapped from a file: where memory is short, steps wait for the disk",
                stage=worker.stage, mib=message.mapped_bytes >> 20, folder=os.path.dirname(self._spec.weights_file),
            )  # fmt: skip
        self.footprints[worker.stage] = message.footprint
        log.info("memory", stage=worker.stage, pid=worker.process.pid, **message.footprint.mebibytes())

    def listen(self) -> None:
        """Starts to read the stages' messages, and reports landed KV."""
        for part, worker in zip(self.pool.parts, self._workers, strict=True):
            part.on_landed = partial(self._kv_landed, worker)
        self._readers = [asyncio.create_task(self._read(worker), name=str(worker)) for worker in self._workers]

    def _kv_landed(self, worker: WorkerProcess) -> None:
        """KV landed in the pool, and no KV is under way to the stage's device. Called by any thread."""
        self._loop.call_soon_threadsafe(worker.channel.send, LoadKV())

    async def _read(self, worker: WorkerProcess) -> None:
        try:
            while True:
                self._handle(worker, await worker.channel.receive())
        except ChannelClosed:
            if not self._closing:
                self._fail(await self._death_of(worker))
        except Exception as error:  # an unreadable message leaves the stages in an unknown state
            self._fail(f"{worker} sent an unreadable message: {type(error).__name__}: {error}")

    def _handle(
        self,
        worker: WorkerProcess,
        message: StageEvent | WorkerFailed,
    ) -> None:
        if isinstance(message, WorkerFailed):
            self._fail(f"{worker} failed: {message.message}{self._others(worker)}")
            return
        if isinstance(message, BlocksFetched | KVLoaded | LoraAnswer):
            self._answered(message, str(worker))
            return
        flight = self._flights.get(message.step_id)
        if flight is None:
            return
        if isinstance(message, LayerDone):
            flight.report(message)
        elif not message.over:
            flight.deadline.cancel()
            flight.deadline = self._deadline(message.step_id)
            flight.report(message)
        else:
            flight.done.append(message)
            if len(flight.done) == self.stages:
                self._finish(message.step_id)

    def _answered(self, message: BlocksFetched | KVLoaded | LoraAnswer, who: str) -> None:
        answer = self._asked.get(message.number)
        if answer is not None:
            answer.missing.discard(message.stage)
            if isinstance(message, LoraAnswer):
                answer.nbytes += message.nbytes
                if message.failure is not None:
                    answer.failure = error_of_worker(message.failure, who)
            if not answer.missing and not answer.future.done():
                answer.future.set_result(None)

    def _finish(self, step_id: int) -> None:
        flight = self._flights.pop(step_id)
        flight.deadline.cancel()
        if flight.error is not None:
            flight.future.set_exception(flight.error)
        else:
            flight.future.set_result(_step_result(flight.done))

    def _deadline(self, step_id: int) -> asyncio.TimerHandle:
        return self._loop.call_later(self._spec.step_timeout_s, self._hung, step_id)

    def _hung(self, step_id: int) -> None:
        self._fail(f"step {step_id} was not done after {self._spec.step_timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        """Fails the engine; no process runs any more when this returns."""
        if self._failed.done():
            return
        self._failed.set_result(reason)
        self.kill()
        for flight in self._flights.values():
            flight.deadline.cancel()
            flight.future.set_exception(Unavailable(reason))
        self._flights.clear()
        for answer in self._asked.values():
            if not answer.future.done():
                answer.future.set_exception(Unavailable(reason))

    async def _death_of(self, worker: WorkerProcess) -> str:
        """How a worker ended after the channel closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(worker.process.wait, _REAP_S)
            return f"{worker} {_exit_reason(code)}{self._others(worker)}"
        return f"{worker} closed its channel{self._others(worker)}"

    def _others(self, worker: WorkerProcess) -> str:
        """Other stages that have died: the first report is rarely from the stage that caused the failure."""
        dead = [(w, w.process.poll()) for w in self._workers if w is not worker]
        return "".join(f"; {w} {_exit_reason(code)}" for w, code in dead if code is not None)

    # --- shutdown --------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Aborts steps in flight and lets the stages exit; kills them after some seconds.

        Idempotent. Runs in flight return (aborted or not), or raise Unavailable when force was needed.
        """
        self._closing = True
        try:
            if not self._failed.done():
                for step_id in self._flights:
                    self.abort(step_id)
                self._send(Shutdown())
                async with asyncio.timeout(_SHUTDOWN_S):
                    await asyncio.gather(*self._readers)
        except TimeoutError:
            pass  # killed below
        finally:
            self._fail("the engine was shut down")
            for reader in self._readers:
                reader.cancel()
            for worker in self._workers:
                worker.channel.close()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for worker in self._workers:
            await worker.channel.wait_closed()

    def kill(self) -> None:
        """Ends all processes at once and reaps them."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_REAP_S)  # a killed process ends in milliseconds


def error_of_worker(failure: WorkerFailed, who: str) -> MoonpoolError:
    """The error that a worker's `WorkerFailed` message describes."""
    kind = getattr(moonpool.base.errors, failure.kind, None) if failure.kind else None
    if not (isinstance(kind, type) and issubclass(kind, MoonpoolError)):
        return Internal(f"{who} failed: {failure.message}")
    make: Callable[..., MoonpoolError] = kind
    with contextlib.suppress(TypeError):
        return make(failure.field, failure.message) if failure.field else make(failure.message)
    return Internal(f"{who} failed: {failure.message}")


def _exit_reason(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


WORKER = "moonpool.engine.worker"


def _worker_environment(spec: EngineSpec, threads: int) -> dict[str, str]:
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
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all stages are on this host
        # This process ends a stage that waits in vain for NCCL, with the reason: a channel closed, or a step took too
        # long. By default torch's watchdog aborts the stage; so does NCCL's monitor, if the watchdog must not.
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        env.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    return env


_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU)
"""In all threads of a worker. Draining is the I/O process's decision: a signal to the whole group must not take the
engine away. Blocked, not ignored: Triton's compiler installs handlers that end the process. SIGTTOU: a terminal may
stop a writer of another process group."""


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that is started within inherits the mask; what comes meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn_worker(
    module: str, launcher: Launcher, pool_fd: int, env: dict[str, str]
) -> tuple[ChildProcess, socket.socket]:
    """Starts one worker; returns the worker and our end of the channel."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, _signals_blocked():
            arguments = ["--channel", str(theirs.fileno()), "--pool", str(pool_fd)]
            # Standard output belongs to the process that started this one.
            program = Program(module, arguments, env, stdout=2, stderr=2, pass_fds=(theirs.fileno(), pool_fd))
            process = launcher(program)
    except BaseException:
        ours.close()
        raise
    return process, ours


@asynccontextmanager
async def start_processes(
    spec: EngineSpec,
    *,
    start_timeout_s: float,
    listener: StartListener = NO_LISTENER,
    worker_module: str = WORKER,
    launcher: Launcher = start_worker,
) -> AsyncIterator[Engine]:
    """See `moonpool.engine.executor.start_engine`; `worker_module` is a worker's program (tests use a substitute)."""
    ranges = stage_ranges(spec.layout.layers, spec.stages)
    cores = len(os.sched_getaffinity(0))
    threads = spec.threads or (cores if spec.core_page else max(1, cores // spec.stages))
    spec = replace(spec, threads=threads)
    async with AsyncExitStack() as stack:
        memory = PoolMemory(ranges)
        stack.callback(memory.close)
        if spec.sized:
            memory.make(spec.layout, spec.blocks, spec.slots)
        rendezvous = ""
        if spec.stages > 1:
            rendezvous = tempfile.mkdtemp(prefix="moonpool-engine-")  # readable by us alone
            stack.callback(shutil.rmtree, rendezvous, ignore_errors=True)
        env = _worker_environment(spec, threads)
        workers: list[WorkerProcess] = []
        with ExitStack() as unwind:
            for stage, file in enumerate(memory.files):
                process, sock = _spawn_worker(worker_module, launcher, file, env)
                unwind.callback(process.wait)
                unwind.callback(process.kill)
                workers.append(WorkerProcess(stage, process, await AsyncChannel.open(sock)))
                unwind.callback(workers[-1].channel.close)
            unwind.pop_all()  # from here on it is the engine's
        engine_started()
        engine = ProcessEngine(spec, memory, workers)
        stack.push_async_callback(engine.shutdown)
        for worker, (begin, end) in zip(workers, ranges, strict=True):
            worker.channel.send(StageSpec(spec, worker.stage, begin, end, rendezvous))
        try:
            async with asyncio.timeout(start_timeout_s) as limit:
                renewing = _Renewing(listener, limit, start_timeout_s)
                await engine.ready(renewing)
                engine.listen()
                # Stages have met. Backends other than the host's may read the folder later, too.
                if rendezvous and collectives_of(stage_devices(spec.device, spec.stages)) == HOST_COLLECTIVES:
                    shutil.rmtree(rendezvous, ignore_errors=True)
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


def start_engine(
    spec: EngineSpec,
    *,
    start_timeout_s: float = 120.0,
    listener: StartListener = NO_LISTENER,
) -> AbstractAsyncContextManager[Engine]:
    """Starts the engine's processes, or emulates them; leaving the context ends them and frees the pool.

    `listener` is told how the start goes on.

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
    return start_processes(spec, start_timeout_s=start_timeout_s, listener=listener)
