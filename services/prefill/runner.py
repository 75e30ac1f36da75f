"""The step loop of a prefill instance, and every job's life around it.

Owns the order of things: blocks are bound, a prefix is loaded, steps run, slices leave, the first token is told, blocks
come back when nobody computes, loads or sends them any more. Knows nothing of gRPC.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from moonpool.cost import SpeedTracker, prefill_seconds
from moonpool.engine.handle import Engine, StepResult
from moonpool.engine.messages import LayerDone
from moonpool.errors import Internal, MoonpoolError, Unavailable
from moonpool.kv.layout import KVLayout
from moonpool.sched.prefill_scheduler import PlannedChunk, PrefillScheduler, PrefillSequence, StepPlan
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import prefill_pb2
from services.prefill.jobs import Job
from services.prefill.loading import Loading
from services.prefill.prefix import PrefixLoader

log = get_logger(__name__)


class Runner:
    """Runs all jobs of one instance.

    Args:
        engine: runs the steps.
        scheduler: plans them.
        loader: loads prefixes.
        write_back: takes new full blocks.
        tracker: learns what steps take.
        spans: where spans are recorded.
        on_change: load or keys have changed.
        verdict_timeout_s: longest wait for decode's confirmation after the last slice.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: PrefillScheduler,
        loader: PrefixLoader,
        write_back: WriteBack,
        tracker: SpeedTracker,
        spans: Recorder,
        on_change: Callable[[], None],
        verdict_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._loading = Loading(engine, scheduler, loader, self.wake)
        self._write_back = write_back
        self._tracker = tracker
        self._spans = spans
        self._on_change = on_change
        self._verdict_timeout_s = verdict_timeout_s
        self._layout: KVLayout = engine.layout
        self._jobs: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.empty = asyncio.Event()
        self.empty.set()
        self.dead = "the engine is not running"
        self.steps = 0

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def find(self, request_id: str) -> list[Job]:
        """Jobs of a request."""
        return [job for job in self._jobs.values() if job.request_id == request_id]

    def predicted_start_s(self) -> float:
        """Seconds until a job that comes now would begin."""
        return prefill_seconds(self._tracker.speeds, self._scheduler.queued_tokens, 0)

    def submit(self, job: Job) -> None:
        """Takes a job.

        Raises:
            Unavailable: the engine is dead, or not running yet.
            InvalidRequest: the prompt can never fit.
        """
        if self._group is None or self.dead:
            raise Unavailable(self.dead)
        self._scheduler.add(job.sequence)
        self._jobs[job.key] = job
        self.empty.clear()
        job.task = self._group.create_task(self._live(job))
        # Not a `finally` in the task: a task that is cancelled before its first step never reaches it.
        job.task.add_done_callback(lambda _: self._over(job))
        self.wake()

    def cancel(self, job: Job) -> None:
        """A job is wanted no more; everything it holds comes back. Without effect on one that has ended."""
        if job.task is not None and job.key in self._jobs:
            job.task.cancel()

    def wake(self) -> None:
        """Something has changed: perhaps more can be started or planned."""
        self._wake.set()
        self._on_change()

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs steps until cancelled.

        Raises:
            Unavailable: the engine died; every job has failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group, self.dead = group, ""
                while True:
                    self._plan(group)
                    self._wake.clear()
                    await self._wake.wait()
        except BaseExceptionGroup as errors:
            dead, _ = errors.split(Unavailable)
            if dead is not None:
                raise Unavailable(self.dead) from errors
            raise
        finally:
            self.dead = self.dead or "the instance stops"
            self._group = None

    def _plan(self, group: asyncio.TaskGroup) -> None:
        """Starts sequences and steps as far as there is room."""
        while not self.dead:
            now = time.monotonic()
            while (sequence := self._scheduler.start_next(now)) is not None:
                job = self._jobs[sequence.request_id]
                self._loading.decide(job)
                job.started.set()
            plan = self._scheduler.plan(now)
            if plan is None:
                return
            for chunk in plan.chunks:
                self._planned(plan, chunk)
            group.create_task(self._step(plan))

    def _planned(self, plan: StepPlan, chunk: PlannedChunk) -> None:
        job = self._jobs.get(chunk.sequence.request_id)
        if job is None:
            return
        if plan.step.gated:
            self._loading.followed(job, plan.step.step_id)
        if chunk.first:  # from here on what is cached does not change any more
            self._loading.deliver(job, job.sequence.num_cached)

    async def _step(self, plan: StepPlan) -> None:
        try:
            result = await self._engine.run(plan.step, on_layer=partial(self._on_layer, plan))
        except MoonpoolError as error:
            self._die(f"the engine died: {error}")
            raise Unavailable(self.dead) from error
        outcome = self._scheduler.step_done(plan.step.step_id, aborted=result.aborted)
        self.steps += 1
        self._record(plan, result)
        if result.aborted:
            self._aborted(plan)
        tokens = {id(chunk.sequence): result.sampled[i] for i, chunk in enumerate(plan.chunks) if result.sampled}
        for sequence in outcome.finished:
            job = self._jobs.get(sequence.request_id)
            token = tokens[id(sequence)]
            assert token is not None, "the last chunk samples"
            if job is not None:
                self._computed(job, token)
        self.wake()

    def _on_layer(self, plan: StepPlan, done: LayerDone) -> None:
        """A layer of a step is in the pool: its new slices may leave."""
        self._spans.add("engine.layer", done.start_ns, done.end_ns, step=done.step_id, layer=done.layer)
        size = self._layout.block_tokens
        for chunk in plan.chunks:
            job = self._jobs.get(chunk.sequence.request_id)
            if job is not None and job.delivery is not None and job.stale_step != done.step_id:
                job.delivery.add(done.layer, chunk.start // size, -(-chunk.end // size), done.step_id)

    def _aborted(self, plan: StepPlan) -> None:
        """The engine gave a step up. Where that was not our wish, its slices may be on their way: the jobs fail."""
        for chunk in plan.chunks:
            job = self._jobs.get(chunk.sequence.request_id)
            if job is not None and job.stale_step != plan.step.step_id:
                self._fail(job, Unavailable("the engine gave up a step"))

    def _computed(self, job: Job, token: int) -> None:
        """A prompt is computed and its next token known: the token goes out at once, it waits for no transfer."""
        sequence = job.sequence
        job.token_at = time.monotonic()
        assert sequence.first_step_at is not None
        first = prefill_pb2.FirstToken(
            token_id=token,
            local_tokens=sequence.num_cached,
            loaded_tokens=sequence.num_loaded,
            computed_tokens=sequence.num_tokens - sequence.num_cached - sequence.num_loaded,
            queue_s=sequence.first_step_at - sequence.added_at,
            prefill_s=job.token_at - sequence.first_step_at,
        )
        job.tell(prefill_pb2.PrefillResponse(first_token=first))
        self._store_new_blocks(job)
        if job.delivery is not None:
            job.delivery.finish()
        job.computed.set()

    def _store_new_blocks(self, job: Job) -> None:
        sequence, size = job.sequence, self._layout.block_tokens
        computed, full = (sequence.num_cached + sequence.num_loaded) // size, sequence.num_tokens // size
        for target in job.stores:
            first = target.first(computed)
            end = first + self._write_back.room(target.store, max(0, full - first))
            if end == first:
                continue
            blocks = sequence.block_table[first:end]
            self._scheduler.blocks.acquire(blocks)
            parents = job.arrival.parents()[first:end]
            self._write_back.submit(target.store, sequence.keys[first:end], parents, job.arrival.tenant, blocks)

    def _record(self, plan: StepPlan, result: StepResult) -> None:
        if len(plan.chunks) == 1 and not plan.step.gated and not result.aborted:
            chunk = plan.chunks[0]
            seconds = (result.end_ns - result.start_ns) / 1e9
            begins = chunk.start == chunk.sequence.num_cached + chunk.sequence.num_loaded
            self._tracker.observe_prefill(chunk.end - chunk.start, chunk.start, seconds, begins=begins)
        if self._spans.enabled:
            requests = [self._request_of(chunk.sequence) for chunk in plan.chunks]
            self._spans.add(
                "step",
                result.start_ns,
                result.end_ns,
                step=plan.step.step_id,
                requests=requests,
                tokens=plan.num_tokens,
                gated=plan.step.gated,
                aborted=result.aborted,
            )

    def _request_of(self, sequence: PrefillSequence) -> str:
        job = self._jobs.get(sequence.request_id)
        return job.request_id if job is not None else ""

    # --- a job's life ----------------------------------------------------------------------------------------------

    async def _live(self, job: Job) -> None:
        """From submission to the end. What follows from the end is `_over`'s, whichever way it comes."""
        try:
            await job.started.wait()
            async with asyncio.TaskGroup() as group:
                if job.load_blocks:
                    group.create_task(self._loading.load(job))
                if job.delivery is not None:
                    group.create_task(job.delivery.stream())
                await job.computed.wait()
            # Nobody reads or writes the blocks any more; the verdict does not need them.
            self._leave(job)
            if job.delivery is not None:
                await job.delivery.verdict(self._verdict_timeout_s)
            job.tell(self._finished(job))
            job.end()
        except MoonpoolError as failure:
            job.end(failure)
        except BaseExceptionGroup as failures:
            job.end(_reason(failures))

    def _over(self, job: Job) -> None:
        """A job's task has ended, and with it whoever loaded or sent for it."""
        if job.delivery is not None:
            job.delivery.abandon()
        self._leave(job)
        del self._jobs[job.key]
        job.end(Unavailable("the prefill was cancelled"))
        if not self._jobs:
            self.empty.set()
        self.wake()

    def _finished(self, job: Job) -> prefill_pb2.PrefillResponse:
        finished = prefill_pb2.PrefillFinished()
        if job.delivery is not None:
            finished.transfer_tail_s = time.monotonic() - job.token_at
            finished.sent_bytes = job.delivery.sent_bytes
        return prefill_pb2.PrefillResponse(finished=finished)

    def _leave(self, job: Job) -> None:
        """Gives the blocks back. Loader and sender have ended; a step in flight keeps the blocks until it is done."""
        self._loading.give_up(job)
        self._scheduler.remove(job.key)

    def _fail(self, job: Job, error: MoonpoolError) -> None:
        job.end(error)
        self.cancel(job)

    def _die(self, reason: str) -> None:
        if self.dead:
            return
        self.dead = reason
        log.error("engine dead", reason=reason)
        for job in list(self._jobs.values()):
            self._fail(job, Unavailable(reason))


def _reason(failures: BaseExceptionGroup[BaseException]) -> MoonpoolError:
    """What a job failed of: the first of our errors, or a defect."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [failures]
    while stack:
        failure = stack.pop()
        if isinstance(failure, BaseExceptionGroup):
            stack.extend(reversed(failure.exceptions))
        else:
            leaves.append(failure)
    ours = next((leaf for leaf in leaves if isinstance(leaf, MoonpoolError)), None)
    if ours is None:
        log.error("a job failed", exc_info=failures)
        return Internal(f"the prefill failed: {leaves[0]!r}")
    return ours
