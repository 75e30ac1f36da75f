"""A prefill instance: its parts put together, and its states open, draining and closing. Free of gRPC."""

import asyncio
import time
from collections.abc import Sequence

from moonpool.cluster.speeds import speeds_to_proto
from moonpool.cost import SpeedTracker
from moonpool.engine.instance import WRITE_BACK_GRACE_S, InstanceContext, first_error
from moonpool.errors import Overloaded, Unavailable
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.prefill_scheduler import PrefillScheduler
from moonpool.streams.peers import Peers
from moonpool.streams.store_reader import StoreReader
from moonpool.streams.store_writer import StoreWriter
from moonpool.streams.transfer_client import TransferSender
from moonpool.streams.writeback import WriteBack, WriteBackLimits
from moonpool.telemetry.gauges import Gauges, process_entries
from moonpool.v1 import conductor_pb2, prefill_pb2
from services.prefill.config import PrefillConfig
from services.prefill.jobs import Job
from services.prefill.kv_sender import KVSender
from services.prefill.prefix_loader import PrefixLoader
from services.prefill.runner import Runner

CONNECT_TIMEOUT_S = 2.0


class PrefillInstance:
    """One prefill instance.

    Attributes:
        tracker: predicts and learns the times of computing, loading and sending.
        manager: the pool's blocks.
        scheduler: prompts and their chunks.
        senders: streams to decode instances.
        loader: loads prefixes from kvstores.
        write_back: stores new full blocks.
        runner: runs the jobs.
        taken: prompts accepted so far.
    """

    def __init__(self, context: InstanceContext, config: PrefillConfig) -> None:
        layout, engine = context.setup.layout, context.engine
        self.identity, self.layout = context.instance, layout
        self._context, self._max_queue = context, config.max_queue
        self.tracker = SpeedTracker(engine.speeds)
        self.taken = 0
        self.draining = False
        self.manager = BlockManager(engine.blocks)
        self.scheduler = PrefillScheduler(
            self.manager,
            block_tokens=layout.block_tokens,
            step_tokens=config.step_tokens,
            stages=engine.stages,
            layer_events=True,
        )
        self.senders = Peers(
            lambda address: TransferSender(
                context.channels, address, context.hello(), layout, context.link, connect_timeout_s=CONNECT_TIMEOUT_S
            )
        )
        self.loader = PrefixLoader(
            engine,
            self.scheduler,
            lambda address: StoreReader(
                context.channels, address, context.hello(), layout, connect_timeout_s=CONNECT_TIMEOUT_S
            ),
            self.tracker,
            context.spans,
            config.load_timeout_s,
        )
        self.write_back = WriteBack(
            WriteBackLimits(config.write_back_limit(engine.blocks)),
            lambda address: StoreWriter(context.channels, address, context.hello(), layout, context.link),
            engine.pool.read,
            self._written_back,
            time.monotonic,
        )
        self.runner = Runner(
            engine,
            self.scheduler,
            self.loader,
            self.write_back,
            self.tracker,
            context.spans,
            context.notify,
            config.verdict_timeout_s,
        )

    def submit(self, request: prefill_pb2.PrefillRequest) -> Job:
        """Accepts a prompt.

        Raises:
            Unavailable: the instance drains, or its engine has died.
            Overloaded: the queue is full.
            InvalidRequest: the request is wrong, or can never fit.
        """
        if self.draining:
            raise Unavailable(f"{self.identity.id} is draining")
        if self.runner.jobs >= self._max_queue:
            predicted = self.runner.drain_s()
            raise Overloaded(f"{self.runner.jobs} prompts wait", reason="queue_full", retry_after_s=max(0.1, predicted))
        incoming = self._context.setup.incoming(request.sequence)
        job = Job.from_proto(request, incoming, str(self.taken + 1), time.monotonic())
        if job.target is not None:
            sequence = job.sequence
            job.sender = KVSender(
                job.request_id,
                job.target,
                sequence.num_tokens,
                self.layout,
                lambda: sequence.block_table,
                self._context.engine.pool.read,
                self.senders,
                self.tracker,
                self._context.spans,
            )
        self.runner.submit(job)
        self.taken += 1
        return job

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            Unavailable: the engine died.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.write_back.run())
                group.create_task(self.runner.run())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            await self.senders.aclose()
            await self.loader.aclose()

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True
        self._context.notify()

    async def drained(self) -> None:
        """Waits until no request is left and what can be written back has been."""
        await self.runner.empty.wait()
        await self.write_back.idle(WRITE_BACK_GRACE_S)

    def load(self) -> conductor_pb2.LoadReport:
        """The load now."""
        waiting = self.scheduler.num_waiting
        return conductor_pb2.LoadReport(
            running=self.runner.jobs - waiting,
            waiting=waiting,
            queued_tokens=self.scheduler.queued_tokens,
            free_blocks=self.manager.num_free,
            cached_blocks=self.manager.num_cached,
            speed=speeds_to_proto(self.tracker.speeds),
            draining=self.draining,
            drain_s=self.runner.drain_s(),
            taken=self.taken,
        )

    def gauges(self) -> Gauges:
        """Everything the instance holds."""
        manager, scheduler, runner = self.manager, self.scheduler, self.runner
        return Gauges(
            [
                ("requests", lambda: runner.jobs, 0),
                ("sequences_waiting", lambda: scheduler.num_waiting, 0),
                ("sequences_started", lambda: scheduler.num_started, 0),
                ("queued_tokens", lambda: scheduler.queued_tokens, 0),
                ("steps_in_flight", lambda: scheduler.steps_in_flight, 0),
                ("blocks_total", lambda: manager.num_blocks, None),
                ("blocks_used", lambda: manager.num_used, 0),
                ("blocks_cached", lambda: manager.num_cached, None),
                ("blocks_free", lambda: manager.num_free, None),
                ("transfers", lambda: self.senders.sessions, 0),
                ("loads", lambda: self.loader.sessions, 0),
                ("loaded_blocks", lambda: self.loader.loaded_blocks, None),
                ("load_failures", lambda: self.loader.failures, None),
                ("link_waiting", lambda: self._context.link.waiting, 0),
                ("transfer_credits_out_bytes", lambda: self.senders.traffic.credits_out, 0),
                ("load_credits_kept_bytes", lambda: self.loader.traffic.credits_kept, 0),
                ("write_back_puts", lambda: self.write_back.sessions, 0),
                ("write_back_credits_out_bytes", lambda: self.write_back.traffic.credits_out, 0),
                ("messages_unsent", lambda: self._messages_unsent(), 0),
                ("write_back_blocks", lambda: self.write_back.blocks_held, 0),
                ("write_back_stored_blocks", lambda: self.write_back.blocks_stored, None),
                ("write_back_present_blocks", lambda: self.write_back.blocks_present, None),
                ("write_back_dropped_blocks", lambda: self.write_back.blocks_dropped, None),
                ("steps", lambda: runner.steps, None),
                *self._context.engine_gauges(),
                *process_entries(),
            ]
        )

    def _messages_unsent(self) -> int:
        return (self.senders.traffic + self.loader.traffic + self.write_back.traffic).unsent

    def _written_back(self, blocks: Sequence[int]) -> None:
        self.manager.release(blocks)
        self.runner.wake()
