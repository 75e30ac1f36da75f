"""The step loop of a prefill instance, and every job's way through it.

Blocks are bound, a prefix is loaded, steps run, slices leave, the first token is reported, and the blocks are freed
when nothing computes, loads or sends them any more.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from moonpool.cost import SpeedTracker, prefill_seconds
from moonpool.engine.handle import Engine
from moonpool.errors import Internal, MoonpoolError, Unavailable
from moonpool.kv.layout import KVLayout
from moonpool.sched.prefill_scheduler import PlannedChunk, PrefillScheduler, PrefillSequence, PrefillStep
from moonpool.sched.steps import LayerDone, StepResult
from moonpool.streams.writeback import WriteBack
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import prefill_pb2
from services.prefill.jobs import Job
from services.prefill.prefix_loader import PrefixLoader

log = get_logger(__name__)


class Runner:
    """Runs all jobs of one instance.

    Args:
        engine: runs the steps.
        scheduler: plans them.
        loader: loads prefixes.
        write_back: stores new full blocks.
        tracker: learns the times of steps.
        spans: where spans are recorded.
        notify: called when load or keys have changed.
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
        notify: Callable[[], None],
        verdict_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._loader = loader
        self._write_back = write_back
        self._tracker = tracker
        self._spans = spans
        self._notify = notify
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

    def drain_s(self) -> float:
        """Predicted seconds until all prompts that are here now are computed: when one that comes now would begin."""
        waiting = [job for job in self._jobs.values() if not job.computed.is_set()]
        return sum([self._remaining_s(job) for job in waiting]) / self._scheduler.stages

    def _remaining_s(self, job: Job) -> float:
        """Seconds of a prompt's steps that are left, without those of what it finds in the pool or loads."""
        sequence, begins = job.sequence, not job.started.is_set()
        done = max(sequence.num_computed, job.expected_tokens)
        new = sequence.num_tokens - done
        steps = -(-new // self._scheduler.step_tokens)
        return prefill_seconds(self._tracker.speeds, new, done, steps=steps, begins=begins)

    def submit(self, job: Job) -> None:
        """Takes a job.

        Raises:
            Unavailable: the engine has died or is not running yet.
            InvalidRequest: the prompt can never fit.
        """
        if self._group is None or self.dead:
            raise Unavailable(self.dead)
        self._scheduler.add(job.sequence)
        job.expected_tokens = self._expected_blocks(job) * self._layout.block_tokens
        self._jobs[job.key] = job
        self.empty.clear()
        job.task = self._group.create_task(self._run_job(job))
        # Not a `finally` in the task: a task that is cancelled before its first step never reaches it.
        job.task.add_done_callback(lambda _: self._ended(job))
        self.wake()

    def _expected_blocks(self, job: Job) -> int:
        """Leading blocks that the pool has now, or a kvstore by what the conductor says."""
        reusable = self._scheduler.reusable_blocks(job.sequence)
        held = len(self._scheduler.blocks.match(job.sequence.keys[:reusable]))
        return min(max([held, *(source.blocks for source in job.sources[:1])]), reusable)

    def cancel(self, job: Job) -> None:
        """Cancels a job and frees all it holds. Without effect on one that has ended."""
        if job.task is not None and job.key in self._jobs:
            job.task.cancel()

    def wake(self) -> None:
        """Plans again and notifies: more may be startable now."""
        self._wake.set()
        self._notify()

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
                self._loader.decide(job)
                job.started.set()
            plan = self._scheduler.plan(now)
            if plan is None:
                return
            for chunk in plan.chunks:
                self._planned(plan, chunk)
            group.create_task(self._step(plan))

    def _planned(self, plan: PrefillStep, chunk: PlannedChunk) -> None:
        job = self._jobs.get(chunk.sequence.request_id)
        if job is None:
            return
        if plan.step.gated:
            self._loader.followed(job, plan.step.step_id)
        if chunk.first:  # the number of cached tokens is final now
            self._loader.send_leading(job, job.sequence.num_cached)

    async def _step(self, plan: PrefillStep) -> None:
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

    def _on_layer(self, plan: PrefillStep, done: LayerDone) -> None:
        """A layer of a step is in the pool: its new slices may leave."""
        self._spans.add("engine.layer", done.start_ns, done.end_ns, step=done.step_id, layer=done.layer)
        size = self._layout.block_tokens
        for chunk in plan.chunks:
            job = self._jobs.get(chunk.sequence.request_id)
            if job is not None and job.sender is not None and job.stale_step != done.step_id:
                job.sender.add(done.layer, chunk.start // size, -(-chunk.end // size), done.step_id)

    def _aborted(self, plan: PrefillStep) -> None:
        """Fails the jobs of a step that the engine gave up by itself: some of its slices may have left already."""
        for chunk in plan.chunks:
            job = self._jobs.get(chunk.sequence.request_id)
            if job is not None and job.stale_step != plan.step.step_id:
                self._fail(job, Unavailable("the engine gave up a step"))

    def _computed(self, job: Job, token: int) -> None:
        """A prompt is computed: reports its first token at once, without waiting for the transfer."""
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
            misses=job.misses,
        )
        job.report(prefill_pb2.PrefillResponse(first_token=first))
        self._store_new_blocks(job)
        if job.sender is not None:
            job.sender.finish()
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
            parents = job.incoming.parents()[first:end]
            self._write_back.submit(target.store, sequence.keys[first:end], parents, job.incoming.tenant, blocks)

    def _record(self, plan: PrefillStep, result: StepResult) -> None:
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

    # --- jobs ------------------------------------------------------------------------------------------------------

    async def _run_job(self, job: Job) -> None:
        """A job from submission to its end; `_ended` cleans up, however it ends."""
        try:
            await job.started.wait()
            async with asyncio.TaskGroup() as group:
                if job.load_blocks:
                    group.create_task(self._loader.load(job, self.wake))
                if job.sender is not None:
                    group.create_task(job.sender.stream())
                await job.computed.wait()
            # Loading and sending have ended; the verdict does not need the blocks.
            self._free(job)
            if job.sender is not None:
                await job.sender.verdict(self._verdict_timeout_s)
            job.report(self._finished(job))
            job.end()
        except MoonpoolError as failure:
            job.end(failure)
        except BaseExceptionGroup as failures:
            job.end(_reason(failures))

    def _ended(self, job: Job) -> None:
        """A job's task has ended, and with it its load and its sending."""
        if job.sender is not None:
            job.sender.abandon()
        self._free(job)
        del self._jobs[job.key]
        job.end(Unavailable("the prefill was cancelled"))
        if not self._jobs:
            self.empty.set()
        self.wake()

    def _finished(self, job: Job) -> prefill_pb2.PrefillResponse:
        finished = prefill_pb2.PrefillFinished()
        if job.sender is not None:
            finished.transfer_tail_s = time.monotonic() - job.token_at
            finished.sent_bytes = job.sender.sent_bytes
        return prefill_pb2.PrefillResponse(finished=finished)

    def _free(self, job: Job) -> None:
        """Frees the blocks; a step in flight keeps them until it is done. Loading and sending must have ended."""
        self._loader.give_up(job)
        self._scheduler.remove(job.key)

    def _fail(self, job: Job, error: MoonpoolError) -> None:
        job.end(error)
        self.cancel(job)

    def _die(self, reason: str) -> None:
        if self.dead:
            return
        self.dead = reason
        log.error("engine died", reason=reason)
        for job in list(self._jobs.values()):
            self._fail(job, Unavailable(reason))


def _reason(failures: BaseExceptionGroup[BaseException]) -> MoonpoolError:
    """The first MoonpoolError of a failure, or an Internal error."""
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
