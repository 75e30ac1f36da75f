"""Loads a job's stored prefix, layer by layer, ahead of the step that needs it.

A store that fails is not asked for a while: its failure delays one request by one deadline, not every request.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.cost import SpeedTracker, load_is_cheaper, load_seconds
from moonpool.engine.handle import Engine
from moonpool.errors import MoonpoolError
from moonpool.kv.frames import DamagedSliceError
from moonpool.kv.keys import BlockKey
from moonpool.sched.prefill_scheduler import Load, PrefillScheduler
from moonpool.streams.credits import Traffic
from moonpool.streams.peers import Peers
from moonpool.streams.store_reader import PrefixLost, StoreReader
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.jobs import Job

PAUSE_S = 2.0
SLACK = 4.0
"""A load may take so many times its predicted seconds, and the configured timeout on top."""

log = get_logger(__name__)


class PrefixLoader:
    """Loads prefixes from kvstores into the pool, and opens the gates of the steps that follow the loads.

    Args:
        engine: opens gates and aborts steps; the KV is written to its pool.
        scheduler: plans gated steps.
        open_reader: makes the client of a store at an address.
        tracker: predicts the times of computing and loading, and learns from measured loads.
        spans: where loading is recorded.
        timeout_s: longest time of a load beyond what is predicted.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: PrefillScheduler,
        open_reader: Callable[[str], StoreReader],
        tracker: SpeedTracker,
        spans: Recorder,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._stores = Peers(open_reader)
        self._layout = engine.layout
        self._tracker = tracker
        self._spans = spans
        self._timeout_s = timeout_s
        self.loaded_blocks = 0
        self.failures = 0

    @property
    def sessions(self) -> int:
        """Loads under way."""
        return self._stores.sessions

    @property
    def traffic(self) -> Traffic:
        """Credits and messages of the streams from all stores."""
        return self._stores.traffic

    async def aclose(self) -> None:
        """Closes all streams."""
        await self._stores.aclose()

    # --- a job's load -----------------------------------------------------------------------------------------------

    def decide(self, job: Job) -> None:
        """Decides whether a prefix is loaded into the job's blocks, and drops the sources that are not worth it."""
        reusable = self._scheduler.reusable_blocks(job.sequence)
        while job.sources and not job.load_blocks:
            blocks = self._worth(job, job.sources[0], reusable)
            if blocks:
                job.load_blocks = self._scheduler.load_started(job.key, blocks)
            else:
                del job.sources[0]

    async def load(self, job: Job, on_progress: Callable[[], None]) -> None:
        """Loads the prefix; blocks that do not come are computed. Writes no block once it has ended.

        Args:
            job: `decide` has chosen its blocks.
            on_progress: called when more can be planned.
        """
        cached = job.sequence.num_cached // self._layout.block_tokens
        keys = job.sequence.keys[cached : cached + len(job.load_blocks)]
        loaded = 0
        for source in job.sources:
            if self._paused(source.instance):
                continue
            loaded, missing = await self._read(
                source.instance, job, keys, partial(self._layer_loaded, job, on_progress)
            )
            if missing is not None:
                job.misses.append(prefill_pb2.StoreMiss(store=source.instance, block=cached + missing))
            # Once a layer is handed on, its blocks may be on their way to decode: another store's copy must not be
            # written over them, it may differ in the last bit.
            if loaded or job.layers_ready:
                break
        if loaded == len(keys):
            self._scheduler.load_complete(job.key)
        else:
            # Slices of the aborted step are not sent any more; those under way must have left before their blocks are
            # computed anew, or a frame would mix two versions.
            self._abort(job, self._scheduler.load_broken(job.key))
            if job.sender is not None:
                await job.sender.quiet()
            self._scheduler.load_failed(job.key, cached + loaded)
        self.send_leading(job, (cached + loaded) * self._layout.block_tokens)
        on_progress()

    def give_up(self, job: Job) -> None:
        """Ends the load of a job that leaves; `load` has returned or was cancelled."""
        if job.sequence.load is not Load.IDLE:
            self._abort(job, self._scheduler.load_failed(job.key, 0))

    def followed(self, job: Job, step_id: int) -> None:
        """A gated step was planned for the job."""
        job.gated_step = step_id
        self._engine.open_gate(step_id, job.layers_ready - 1)

    def send_leading(self, job: Job, tokens: int) -> None:
        """Sends the job's leading blocks, which are in the pool in all layers, to decode."""
        if job.sender is not None:
            for layer in range(self._layout.layers):
                job.sender.add(layer, 0, tokens // self._layout.block_tokens)

    def _layer_loaded(self, job: Job, on_progress: Callable[[], None], layer: int) -> None:
        """All prefix slices of a layer are in the pool."""
        job.layers_ready = layer + 1
        if layer == 0:
            self._scheduler.layer_ready(job.key)
            on_progress()
        if job.gated_step is not None:
            self._engine.open_gate(job.gated_step, layer)
        if job.sender is not None:
            cached = job.sequence.num_cached // self._layout.block_tokens
            job.sender.add(layer, cached, cached + len(job.load_blocks))

    def _abort(self, job: Job, step_id: int | None) -> None:
        """Aborts the step that followed a failed load."""
        if step_id is not None:
            job.stale_step = step_id
            self._engine.abort(step_id)

    # --- stores -----------------------------------------------------------------------------------------------------

    def _paused(self, store: kv_pb2.Instance) -> bool:
        return self._stores.paused(store, time.monotonic())

    def _worth(self, job: Job, source: prefill_pb2.PrefixSource, reusable_blocks: int) -> int:
        """Leading blocks that the prompt should have after a load; 0 when computing is cheaper."""
        if self._paused(source.instance):
            return 0
        layout = self._layout
        blocks = min(source.blocks, reusable_blocks)
        cheaper = load_is_cheaper(
            self._tracker.speeds,
            total_tokens=job.sequence.num_tokens,
            local_tokens=job.sequence.num_cached,
            stored_tokens=blocks * layout.block_tokens,
            token_bytes=layout.token_bytes,
            layers=layout.layers,
        )
        return blocks if cheaper else 0

    async def _read(
        self, store: kv_pb2.Instance, job: Job, keys: Sequence[BlockKey], on_layer: Callable[[int], None]
    ) -> tuple[int, int | None]:
        """Reads blocks from one store into `job.load_blocks`; nothing is written once it has returned or raised.

        Args:
            store: the kvstore.
            job: whose blocks they are.
            keys: of the blocks, in the order of `job.load_blocks`.
            on_layer: called in order for each layer whose blocks have all come.

        Returns:
            Leading blocks that are there in all layers, and the index of the first key that the store has lost; None
            when it has all, or when the load failed for another reason.
        """
        layers, began_ns = range(self._layout.layers), time.monotonic_ns()
        last_ns, counts = began_ns, [0] * len(layers)

        def take(layer: int, index: int, data: memoryview, value: int) -> None:
            self._engine.pool.write(layer, job.load_blocks[index], data, value)
            counts[layer] += 1

        def layer_done(layer: int) -> None:
            nonlocal last_ns
            now_ns = time.monotonic_ns()
            size = counts[layer] * self._layout.slice_bytes
            self._spans.add("kv.load", last_ns, now_ns, request=job.request_id, layer=layer, bytes=size)
            last_ns = now_ns
            if counts[layer] == len(keys):
                on_layer(layer)

        missing: int | None = None
        nbytes = len(keys) * self._layout.block_bytes
        timeout_s = self._timeout_s + SLACK * load_seconds(self._tracker.speeds, nbytes)
        try:
            reader = await self._stores.get(store)
            loaded = await reader.read(keys, layers=layers, on_slice=take, on_layer=layer_done, timeout_s=timeout_s)
            missing = loaded if loaded < len(keys) else None
        except PrefixLost as lost:
            log.info("prefix lost while loading", store=store.id, request=job.request_id, reason=str(lost))
            loaded, missing = 0, lost.blocks
        except DamagedSliceError as damaged:
            log.warning("damaged slice while loading", store=store.id, request=job.request_id, reason=str(damaged))
            loaded = 0
        except MoonpoolError as error:
            self.failures += 1
            self._stores.pause(store, time.monotonic() + PAUSE_S)
            log.warning("load failed", store=store.id, request=job.request_id, reason=str(error))
            loaded = 0
        if loaded == len(keys):
            self._tracker.observe_load(nbytes, (time.monotonic_ns() - began_ns) / 1e9)
        self.loaded_blocks += loaded
        return loaded, missing
