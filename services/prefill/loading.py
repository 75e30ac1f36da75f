"""A job's prefix: from the store into the pool, through the gates of the step that follows it, and on to decode.

Owns the order in which scheduler, engine and delivery are told about a load, and its failure midway. Knows nothing of
steps beyond their ids, nor of stores beyond `PrefixLoader`.
"""

from collections.abc import Callable
from functools import partial

from moonpool.engine.handle import Engine
from moonpool.sched.prefill_scheduler import Load, PrefillScheduler
from moonpool.v1 import prefill_pb2
from services.prefill.jobs import Job
from services.prefill.prefix import PrefixLoader


class Loading:
    """The loads of one instance's jobs.

    Args:
        engine: opens gates and aborts steps.
        scheduler: plans gated steps.
        loader: reads from kvstores.
        on_change: more can be planned.
    """

    def __init__(
        self, engine: Engine, scheduler: PrefillScheduler, loader: PrefixLoader, on_change: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._loader = loader
        self._on_change = on_change
        self._layers = engine.layout.layers
        self._block_tokens = engine.layout.block_tokens

    def decide(self, job: Job) -> None:
        """A job has its blocks: decides whether a longer prefix is loaded into them, and where from."""
        reusable = self._scheduler.reusable_blocks(job.sequence)
        while job.sources and not job.load_blocks:
            blocks = self._loader.worth(job.sources[0], job.sequence, reusable)
            if blocks:
                job.load_blocks = self._scheduler.load_started(job.key, blocks)
            else:
                del job.sources[0]

    async def load(self, job: Job) -> None:
        """Loads the prefix; what does not come is computed. Writes no block once it has ended, whatever the end is."""
        cached = job.sequence.num_cached // self._block_tokens
        keys = job.sequence.keys[cached : cached + len(job.load_blocks)]
        loaded = 0
        for source in job.sources:
            if self._loader.left_alone(source.instance):
                continue
            loaded, missing = await self._loader.load(
                source.instance, job.request_id, keys, job.load_blocks, partial(self._layer_loaded, job)
            )
            if missing is not None:
                job.misses.append(prefill_pb2.StoreMiss(store=source.instance, block=cached + missing))
            # Once a layer has been handed on, its blocks may be on their way: another store's copy must not be written
            # over them, it may differ in the last bit.
            if loaded or job.layers_ready:
                break
        if loaded == len(keys):
            self._scheduler.load_complete(job.key)
        else:
            # Slices of the step that counts for nothing are not handed over any more; those that were must have left
            # before their blocks are computed anew, or a frame would be torn between two versions.
            self._abort(job, self._scheduler.load_broken(job.key))
            if job.delivery is not None:
                await job.delivery.quiet()
            self._scheduler.load_failed(job.key, cached + loaded)
        self.deliver(job, (cached + loaded) * self._block_tokens)
        self._on_change()

    def give_up(self, job: Job) -> None:
        """The job leaves; `load` has ended, perhaps cancelled midway."""
        if job.sequence.load is not Load.IDLE:
            self._abort(job, self._scheduler.load_failed(job.key, 0))

    def followed(self, job: Job, step_id: int) -> None:
        """A gated step has been planned for the job."""
        job.gated_step = step_id
        self._engine.open_gate(step_id, job.layers_ready - 1)

    def deliver(self, job: Job, tokens: int) -> None:
        """Leading blocks that are in the pool in all layers may leave."""
        if job.delivery is not None:
            for layer in range(self._layers):
                job.delivery.add(layer, 0, tokens // self._block_tokens)

    def _layer_loaded(self, job: Job, layer: int) -> None:
        """All prefix slices of a layer are in the pool."""
        job.layers_ready = layer + 1
        if layer == 0:
            self._scheduler.layer_ready(job.key)
            self._on_change()
        if job.gated_step is not None:
            self._engine.open_gate(job.gated_step, layer)
        if job.delivery is not None:
            cached = job.sequence.num_cached // self._block_tokens
            job.delivery.add(layer, cached, cached + len(job.load_blocks))

    def _abort(self, job: Job, step_id: int | None) -> None:
        """Gives up the step that followed a load which has failed."""
        if step_id is not None:
            job.stale_step = step_id
            self._engine.abort(step_id)
