"""A decode instance: its parts put together, and its states open, draining and closing. Free of gRPC."""

import asyncio
import time
from collections.abc import Sequence

from moonpool.cluster.speeds import speeds_to_proto
from moonpool.engine.incoming import IncomingRequest
from moonpool.engine.instance import WRITE_BACK_GRACE_S, InstanceContext, first_error
from moonpool.errors import Overloaded, Unavailable
from moonpool.sched.batch_scheduler import BatchScheduler
from moonpool.sched.block_manager import BlockManager
from moonpool.streams.store_writer import StoreWriter
from moonpool.streams.transfer import TransferState
from moonpool.streams.writeback import WriteBack, WriteBackLimits
from moonpool.telemetry.gauges import Gauges, process_entries
from moonpool.v1 import conductor_pb2, kv_pb2
from services.decode.config import DecodeConfig
from services.decode.loop import DecodeLoop, watch_leases
from services.decode.receiver import Receiver
from services.decode.requests import DecodeRequest, RequestTable
from services.decode.subscriber import Subscriber


class DecodeInstance:
    """One decode instance.

    Attributes:
        manager: the pool's blocks.
        scheduler: the batch and the promised blocks.
        requests: all requests.
        loop: generates tokens.
        write_back: stores the answers' full blocks.
        subscribers: conductors on a Steps stream.
        receivers: prefill processes on a ReceiveKV stream.
        closing: set when long-lived streams are to end.
    """

    def __init__(self, context: InstanceContext, config: DecodeConfig) -> None:
        layout, engine = context.setup.layout, context.engine
        self.setup, self.identity, self.layout, self.pool = context.setup, context.instance, layout, engine.pool
        self.manager = BlockManager(engine.blocks)
        self.scheduler = BatchScheduler(
            self.manager,
            block_tokens=layout.block_tokens,
            max_batch=config.max_batch,
            max_tokens=context.setup.max_tokens,
        )
        self.requests = RequestTable(self.scheduler, layout, config.lease_s)
        self.write_back = WriteBack(
            WriteBackLimits(config.write_back_limit(engine.blocks)),
            lambda address: StoreWriter(context.channels, address, context.hello(), layout, context.link),
            engine.pool.read,
            self._written_back,
            time.monotonic,
        )
        self.loop = DecodeLoop(engine, self.scheduler, self.requests, self.write_back, context.spans, context.notify)
        self.subscribers: set[Subscriber] = set()
        self.receivers: set[Receiver] = set()
        self.closing = asyncio.Event()
        self.draining = False
        self.taken = 0
        """Promises given so far."""
        self._notify = context.notify
        self._link = context.link
        self._engine_gauges = context.engine_gauges()
        self._lease = asyncio.Event()
        self._received_bytes = 0
        self._stray_frames = 0

    # --- requests --------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises Unavailable when new requests are refused."""
        if self.loop.dead:
            raise Unavailable(self.loop.dead)
        if self.draining:
            raise Unavailable(f"{self.identity.id} is draining")

    def reserve(self, incoming: IncomingRequest, stores: Sequence[kv_pb2.Instance], now: float) -> DecodeRequest:
        """Promises room.

        Raises:
            Overloaded: there is none now.
            InvalidRequest: it could never fit.
        """
        try:
            request = self.requests.reserve(incoming, stores, now)
        except Overloaded:
            self._notify()
            raise
        self.taken += 1
        self._lease.set()
        self.loop.added()
        return request

    def retire(self, receiver: Receiver) -> None:
        """A prefill process's stream has ended."""
        receiver.broken()
        self._received_bytes += receiver.received_bytes
        self._stray_frames += receiver.stray_frames

    # --- lifecycle -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            Unavailable: the engine died.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.loop.run())
                group.create_task(watch_leases(self.requests, self.loop, self._lease))
                group.create_task(self.write_back.run())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.loop.die("the instance stops")
            self.closing.set()
            for subscriber in self.subscribers:
                subscriber.close()

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True
        self._notify()

    async def drained(self) -> None:
        """Waits until no request is left and what can be written back has been."""
        await self.loop.empty.wait()
        await self.write_back.idle(WRITE_BACK_GRACE_S)

    # --- reports ---------------------------------------------------------------------------------------------------

    def load(self) -> conductor_pb2.LoadReport:
        """The load now."""
        return conductor_pb2.LoadReport(
            running=self.scheduler.num_running,
            waiting=len(self.requests) - self.scheduler.num_running,
            free_blocks=self.manager.num_free,
            cached_blocks=self.manager.num_cached,
            promised_blocks=self.scheduler.promised_blocks,
            context_tokens=self.scheduler.context_tokens,
            speed=speeds_to_proto(self.loop.tracker.speeds),
            draining=self.draining,
            taken=self.taken,
        )

    def gauges(self) -> Gauges:
        """Everything the instance holds."""
        requests, manager, scheduler = self.requests, self.manager, self.scheduler
        return Gauges(
            [
                ("sequences_running", lambda: scheduler.num_running, 0),
                ("sequences_waiting", lambda: scheduler.num_waiting, 0),
                ("requests", lambda: len(requests), 0),
                ("steps_in_flight", lambda: scheduler.step_in_flight is not None, 0),
                ("transfers_promised", lambda: requests.count(TransferState.PROMISED), 0),
                ("transfers_receiving", lambda: requests.count(TransferState.RECEIVING), 0),
                ("transfers_complete", lambda: requests.count(TransferState.COMPLETE), 0),
                ("promised_blocks", lambda: scheduler.promised_blocks, 0),
                ("blocks_total", lambda: manager.num_blocks, None),
                ("blocks_used", lambda: manager.num_used, 0),
                ("blocks_cached", lambda: manager.num_cached, None),
                ("blocks_free", lambda: manager.num_free, None),
                ("context_tokens", lambda: scheduler.context_tokens, 0),
                ("tokens_unsent", lambda: sum(subscriber.waiting for subscriber in self.subscribers), 0),
                ("credits_kept_bytes", lambda: sum(receiver.credits_kept for receiver in self.receivers), 0),
                ("messages_unsent", lambda: self._messages_unsent(), 0),
                ("link_waiting", lambda: self._link.waiting, 0),
                ("write_back_blocks", lambda: self.write_back.blocks_held, 0),
                ("write_back_puts", lambda: self.write_back.sessions, 0),
                ("write_back_credits_out_bytes", lambda: self.write_back.traffic.credits_out, 0),
                ("write_back_stored_blocks", lambda: self.write_back.blocks_stored, None),
                ("write_back_present_blocks", lambda: self.write_back.blocks_present, None),
                ("write_back_dropped_blocks", lambda: self.write_back.blocks_dropped, None),
                ("conductor_streams", lambda: len(self.subscribers), None),
                ("prefill_streams", lambda: len(self.receivers), None),
                ("received_bytes", self._all_received_bytes, None),
                ("stray_frames", self._all_stray_frames, None),
                ("steps", lambda: self.loop.steps, None),
                *self._engine_gauges,
                *process_entries(),
            ]
        )

    def _messages_unsent(self) -> int:
        return self.write_back.traffic.unsent + sum(len(receiver.outbox) for receiver in self.receivers)

    def _all_received_bytes(self) -> float:
        return self._received_bytes + sum(receiver.received_bytes for receiver in self.receivers)

    def _all_stray_frames(self) -> float:
        return self._stray_frames + sum(receiver.stray_frames for receiver in self.receivers)

    def _written_back(self, blocks: Sequence[int]) -> None:
        self.manager.release(blocks)
        self._notify()
