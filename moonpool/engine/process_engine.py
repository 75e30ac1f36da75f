"""An engine on one process for each rank of each pipeline stage.

A step is sent to all processes at once and is over when every one has reported; only then are the step's blocks free to
change. If one process dies, the engine has failed for good: the other processes are killed, and running and later steps
raise.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import Internal, MoonpoolError, Unavailable
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.memory import available_bytes
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import LayerDone, Step, StepResult, max_steps_in_flight, without_files
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.channel import ChannelClosed
from moonpool.engine.messages import (
    MAX_FETCHES,
    AbortStageStep,
    BlocksFetched,
    DropLora,
    DropSequence,
    EngineSpec,
    FetchBlocks,
    Footprint,
    HiddenStates,
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
    StageStarting,
    StageTokens,
    StopRunMessage,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.platforms.registry import engine_platform
from moonpool.engine.pool_memory import PoolMemory
from moonpool.engine.sizes import choose_sizes
from moonpool.engine.start_listener import StartListener
from moonpool.engine.worker_process import Worker, error_of_worker

RUN_STEPS = 64
"""Steps for which a single stage is not asked."""
_SHUTDOWN_S = 5.0
_LOOK_S, _LOOKS = 0.5, 3
"""Seconds between two looks at the processes, and looks after which a stopped process is lost."""
StartMessage = TypeVar("StartMessage", StageRoom, WorkerReady)

log = get_logger(__name__)


class ProcessEngine:
    """An `Engine` on one process for each rank of each stage on this host, and on stages of other hosts.

    `stopped` tells whether a worker's process is stopped; None: nobody looks.
    """

    def __init__(
        self,
        spec: EngineSpec,
        memory: PoolMemory,
        workers: Sequence[Worker],
        stopped: Callable[[Worker], bool] | None = None,
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._workers = list(workers)
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._flights: dict[int, _StepInFlight] = {}
        self._last_step_id: int | None = None
        self._closing = False
        self._pinned = not engine_platform(spec.device).in_host_pool
        self._one_pool = not self._pinned and all(worker.pid for worker in self._workers)
        self._numbers = itertools.count(1)
        self._asked: dict[int, _PendingAnswers] = {}
        self._may_fetch = asyncio.Semaphore(MAX_FETCHES)
        self._readers: list[asyncio.Task[None]] = []
        self._stopped, self._watch = stopped, asyncio.Future[None]()
        self.speeds = Speeds()
        self.footprints: dict[int, Footprint] = {}
        """What each stage's first process holds in memory at most."""

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
        return self._spec.blocks

    @property
    def max_num_batched_tokens(self) -> int:
        return self._spec.max_num_batched_tokens

    @property
    def stages(self) -> int:
        """Stages, and steps that may be in flight."""
        return self._spec.stages

    @property
    def pool(self) -> KVPool:
        assert self._memory.pool is not None, "the engine is not ready"
        return self._memory.pool

    @property
    def failed(self) -> "asyncio.Future[str]":
        """Done, with the reason, when the engine can run no more steps."""
        return self._failed

    @property
    def pids(self) -> list[int]:
        """The processes of this host, stage by stage and rank by rank."""
        return [worker.pid for worker in self._workers if worker.pid]

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
        on_tokens: Callable[[StepResult], None] | None = None,
    ) -> StepResult:
        if self._failed.done():
            raise Unavailable(self._failed.result())
        most = max_steps_in_flight(self.stages)
        if len(self._flights) >= most:  # workers' queues have places for so many
            raise Internal(f"step {step.step_id} would be one more than the {most} that may be in flight")
        # Gates forget all steps up to the last that is done.
        if self._last_step_id is not None and step.step_id <= self._last_step_id:
            raise Internal(f"step {step.step_id} after step {self._last_step_id}")
        self._last_step_id = step.step_id
        flight = _StepInFlight(self._loop.create_future(), on_layer, on_step, on_tokens, self._deadline(step.step_id))
        # When the caller was cancelled, the loop must not report the future's exception as never retrieved.
        flight.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._flights[step.step_id] = flight
        further = without_files(step)
        for worker in self._workers:
            worker.channel.send(further if worker.stage else step)
        # Shielded: the step of a cancelled caller is still writing.
        return await asyncio.shield(flight.future)

    def open_gate(self, step_id: int, layer: int) -> None:
        self._send(OpenKVGateMessage(step_id, layer))

    def drop(self, step_id: int, index: int) -> None:
        self._send(DropSequence(step_id, index))

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        self._send(StopRunMessage(step_id, urgent))

    def abort(self, step_id: int) -> None:
        self._send(AbortStageStep(step_id))

    def _send(
        self,
        message: OpenKVGateMessage
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
        if self._one_pool:  # steps compute in this host's pool: nothing lies elsewhere
            return
        async with self._may_fetch:  # workers' queues have places for so many
            await self._ask(FetchBlocks(next(self._numbers), tuple(blocks)))

    def load(self) -> "asyncio.Future[None] | None":
        return None if self._one_pool else self._ask(LoadKV(next(self._numbers)))

    async def load_lora(self, lora: bytes, folder: str) -> int:
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
        await self._ask(DropLora(next(self._numbers), lora))

    def _ask(self, message: FetchBlocks | LoadKV | LoadLora | DropLora) -> "asyncio.Future[None]":
        """Send a message; the future is done with the answers of all stages."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._failed.done():
            future.set_exception(Unavailable(self._failed.result()))
            return future
        self._asked[message.number] = _PendingAnswers(future, set(map(str, self._workers)))
        future.add_done_callback(lambda done: self._asked.pop(message.number))
        self._send(message)
        return future

    async def idle(self) -> None:
        """Wait until no step is in flight, those of cancelled callers included."""
        await asyncio.gather(*(flight.future for flight in self._flights.values()), return_exceptions=True)

    # --- answers of the stages -------------------------------------------------------------------------------------

    async def ready(self, listener: StartListener) -> None:
        """Wait until every process has loaded.

        Args:
            listener: called for each layer that a stage has loaded, and for the start's progress.

        Raises:
            MoonpoolError: What a stage could not do; Unavailable when one died or was stopped.
        """
        if self._stopped is not None:
            self._watch = asyncio.create_task(self._watch_workers(self._stopped), name="watch")
        if not self._spec.sized:  # only a stage's process sees how much room the device has beside the weights
            told = zip(self._workers, await self._of_all(StageRoom, listener), strict=True)
            by_stage = itertools.groupby(told, lambda both: both[0].stage)
            rooms = [[room for _, room in its] for _, its in by_stage]
            config = load_config(Path(self._spec.checkpoint), self._spec.model_impl, self._spec.max_tokens)
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
        if self._pinned:  # stages have taken the memory; here each page is mapped, before KV comes
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

    async def _next(self, worker: Worker, listener: StartListener) -> Any:
        """Return a stage's next message that is not about the start's progress."""
        try:
            message = await worker.channel.receive()
            while isinstance(message, LayersLoaded | StageStarting):
                if isinstance(message, StageStarting):
                    listener.starting(message.what)
                else:
                    listener.loading(worker.stage, message.layers, message.all_layers)
                message = await worker.channel.receive()
        except ChannelClosed:
            raise Unavailable(self._failed.result() if self._failed.done() else await self._death_of(worker)) from None
        if isinstance(message, WorkerFailed):
            raise error_of_worker(message, str(worker))
        return message

    def _note(self, worker: Worker, message: WorkerReady) -> None:
        log.info(
            "loaded", stage=worker.stage, rank=worker.rank, seconds=round(message.load_s, 2),
            peak_mib=message.peak_bytes >> 20, checkpoint=self._spec.checkpoint,
        )  # fmt: skip
        if message.changed_weights:
            log.warning("weights are not held as in the file", stage=worker.stage, tensors=message.changed_weights)
        if message.mapped_bytes:
            log.info(
                "weights are mapped from a file, which engines of this host share: where memory is short, steps wait "
                "for the disk",
                stage=worker.stage, mib=message.mapped_bytes >> 20, folder=os.path.dirname(self._spec.weights_file),
            )  # fmt: skip
        self.footprints.setdefault(worker.stage, message.footprint)
        log.info("memory", stage=worker.stage, rank=worker.rank, pid=worker.pid, **message.footprint.mebibytes())

    def listen(self) -> None:
        """Start to read the stages' messages, and report landed KV."""
        for worker in self._workers:
            worker.serve(self.pool.parts[worker.stage])
        self._readers = [asyncio.create_task(self._read(worker), name=str(worker)) for worker in self._workers]

    async def _watch_workers(self, stopped: Callable[[Worker], bool]) -> None:
        """Fail the engine if a process stays stopped: others wait for it, and its channel stays open."""
        looks = dict.fromkeys(map(str, self._workers), 0)
        while not self._failed.done():
            await asyncio.sleep(_LOOK_S)
            for worker in self._workers:
                looks[str(worker)] = looks[str(worker)] + 1 if stopped(worker) else 0
                if looks[str(worker)] >= _LOOKS:
                    self._fail(f"{worker} is stopped")
                    return

    async def _read(self, worker: Worker) -> None:
        try:
            while True:
                self._handle(worker, await worker.channel.receive())
        except ChannelClosed:
            if not self._closing:  # a stage that was told to end closes the channel, too
                self._fail(await self._death_of(worker))
        except Exception as error:  # an unreadable message leaves the stages in an unknown state
            self._fail(f"{worker} sent an unreadable message: {type(error).__name__}: {error}")

    def _handle(
        self,
        worker: Worker,
        message: StageEvent | HiddenStates | WorkerFailed,
    ) -> None:
        if isinstance(message, WorkerFailed):
            self._fail(f"{worker} failed: {message.message}{self._others(worker)}")
            return
        if isinstance(message, BlocksFetched | KVLoaded | LoraAnswer):
            self._answered(message, str(worker))
            return
        if isinstance(message, HiddenStates):
            for following in self._workers:
                if following.stage == worker.stage + 1:
                    following.channel.send(message)
            return
        flight = self._flights.get(message.done.step_id if isinstance(message, StageTokens) else message.step_id)
        if flight is None:  # the engine has failed meanwhile, and the caller has been told
            return
        if isinstance(message, LayerDone | StageTokens):
            flight.report(message)
        elif not message.over:  # the time limit is of a step, and the run goes on with another
            flight.deadline.cancel()
            flight.deadline = self._deadline(message.step_id)
            flight.report(message)
        else:
            flight.done.append(message)
            if len(flight.done) == len(self._workers):
                self._finish(message.step_id)

    def _answered(self, message: BlocksFetched | KVLoaded | LoraAnswer, who: str) -> None:
        answer = self._asked.get(message.number)
        if answer is not None:
            answer.missing.discard(who)
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
        """Fail the engine: when this returns, no process runs any more."""
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

    async def _death_of(self, worker: Worker) -> str:
        """Return how a worker ended after the channel closed."""
        return f"{await worker.death()}{self._others(worker)}"

    def _others(self, worker: Worker) -> str:
        """Other stages that have died: the first report is rarely from the stage that caused the failure."""
        return "".join(f"; {ended}" for other in self._workers if other is not worker and (ended := other.ended()))

    # --- shutdown --------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Abort steps in flight and let the stages exit; kill them after some seconds.

        Idempotent. Runs in flight return (aborted or not), or raise Unavailable when force was needed.
        """
        self._closing = True
        try:
            if not self._failed.done():
                for step_id in self._flights:  # a step may stand at a KV gate, for many seconds
                    self.abort(step_id)
                self._send(Shutdown())
                async with asyncio.timeout(_SHUTDOWN_S):
                    await asyncio.gather(*self._readers)
        except TimeoutError:
            pass  # killed below
        finally:
            self._fail("the engine was shut down")
            self._watch.cancel()
            for reader in self._readers:
                reader.cancel()
            for worker in self._workers:
                worker.channel.close()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for worker in self._workers:
            await worker.channel.wait_closed()

    def kill(self) -> None:
        """End all processes at once and reap them."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.reap()


@dataclass(slots=True, eq=False)
class _StepInFlight:
    """A step that is under way in some stage."""

    future: "asyncio.Future[StepResult]"
    on_layer: Callable[[LayerDone], None] | None
    on_step: Callable[[StepResult], None] | None
    on_tokens: Callable[[StepResult], None] | None
    deadline: asyncio.TimerHandle
    done: list[StageDone] = field(default_factory=list)
    error: Exception | None = None

    def report(self, event: LayerDone | StageTokens | StageDone) -> None:
        """Report a finished layer, tokens, or finished steps of a run that goes on."""
        if self.error is not None:
            return
        try:
            if isinstance(event, LayerDone):
                if self.on_layer is not None:
                    self.on_layer(event)
            elif isinstance(event, StageTokens):
                if self.on_tokens is not None:
                    self.on_tokens(_step_result([*self.done, event.done]))
            elif self.on_step is not None:
                self.on_step(_step_result([event]))
        except Exception as error:  # raised to the caller when the step is over
            self.error = error


def _step_result(stages: Sequence[StageDone]) -> StepResult:
    aborted = any(done.aborted for done in stages)
    last = max(stages, key=lambda done: (done.stage, len(done.sampled)))  # of a stage's ranks the first samples
    start_ns = min(done.start_ns for done in stages)
    end_ns = max(done.end_ns for done in stages)
    sampled = () if aborted else last.sampled
    rest = last.several, last.logprobs, last.scores, last.embeddings, last.failed
    share = sum(done.share for done in stages) / len(stages)
    earlier = tuple(_step_result([done]) for done in last.earlier)
    waited_ns = max(done.waited_ns for done in stages)
    pictures = min(stages, key=lambda done: done.stage).pictures
    return StepResult(
        sampled, aborted, start_ns, end_ns, *rest, share, waited_ns, earlier, late=last.late, pictures=pictures
    )


@dataclass(slots=True, eq=False)
class _PendingAnswers:
    """A fetch, a load or an adapter's order without the answers of some processes, `missing` by name."""

    future: "asyncio.Future[None]"
    missing: set[str]
    nbytes: int = 0
    failure: MoonpoolError | None = None
