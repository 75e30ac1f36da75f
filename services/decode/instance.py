"""A decode instance: its parts put together, and its states open, draining and closing. Free of gRPC."""

import asyncio
import time

from moonpool.cluster.speeds import speeds_to_proto
from moonpool.engine.forgetting import CarriedOut, Forgetting
from moonpool.engine.instance import WRITE_BACK_GRACE_S, InstanceContext, first_error
from moonpool.engine.intake import Intake
from moonpool.engine.reading import pool_reads, read_gauges
from moonpool.errors import Unavailable
from moonpool.streams.block_reader import BlockReader
from moonpool.streams.store_writer import StoreWriter
from moonpool.streams.transfer import TransferState
from moonpool.streams.writeback import WriteBack, WriteBackLimits
from moonpool.telemetry.gauges import Gauges, process_entries
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2
from services.decode.config import DecodeConfig
from services.decode.core.config import CoreConfig, Preemption
from services.decode.core.machine import DecodeCore
from services.decode.core.request import State
from services.decode.receiver import Receiver
from services.decode.shell import DecodeShell
from services.decode.subscriber import Subscriber

log = get_logger(__name__)

PARKED = (State.PARKED, State.SWAPPING_OUT, State.SWAPPING_IN, State.LOADING)


class DecodeInstance:
    """One decode instance.

    Attributes:
        core: decides.
        manager: the pool's blocks.
        shell: does what the core decides; has the requests.
        write_back: stores the answers' full blocks.
        forgetting: deletes KV.
        carried_out: what it has deleted.
        reads: what other instances read here.
        intake: reads requests.
        beside: where what would keep the loop from dispatching steps is done.
        subscribers: conductors on a Steps stream.
        receivers: prefill processes on a ReceiveKV stream.
        closing: set when long-lived streams are to end.
        lanes: offers lanes to prefill processes.
    """

    def __init__(self, context: InstanceContext, config: DecodeConfig) -> None:
        layout, engine = context.setup.layout, context.engine
        self.setup, self.identity, self.layout, self.pool = context.setup, context.instance, layout, engine.pool
        self.beside, self.intake = context.beside, Intake(context.setup.incoming, context.beside)
        self.core = DecodeCore(core_config(context, config))
        self.manager = self.core.blocks
        self.carried_out = carried_out = CarriedOut(context.setup.namespace, time.monotonic)
        self.write_back = WriteBack(
            WriteBackLimits(config.write_back_limit(engine.blocks)),
            lambda address: StoreWriter(
                context.channels, address, context.hello(), layout, context.link, lanes=context.dialer
            ),
            engine.pool.read,
            time.monotonic,
            carried_out.concerning,
        )
        self.shell = DecodeShell(
            self.core,
            engine,
            context.setup.max_tokens,
            self.write_back,
            lambda address: BlockReader(
                context.channels,
                address,
                context.hello(),
                layout,
                lanes=context.dialer,
                forgotten=carried_out.demanded,
                beside=context.beside,
            ),
            context.spans,
            context.notify,
            config.journal(),
        )
        pool = self.shell.pool
        self.forgetting = Forgetting(layout.block_bytes, self.write_back, pool.forget, carried_out)
        self.subscribers: set[Subscriber] = set()
        self.receivers: set[Receiver] = set()
        self.closing = asyncio.Event()
        self.reads = pool_reads(context, pool, self.core.blocks, self.closing, carried_out)
        self.lanes = context.lanes
        self.draining = False
        self._notify = context.notify
        self._link = context.link
        self._further_gauges = [*context.dialer.gauges(), *context.lanes.gauges(), *context.engine_gauges()]
        self._received_bytes = 0
        self._stray_frames = 0

    # --- requests --------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises Unavailable when new requests are refused."""
        if self.shell.dead:
            raise Unavailable(self.shell.dead)
        if self.draining:
            raise Unavailable(f"{self.identity.id} is draining")

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
            Internal: the core has failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.shell.run())
                group.create_task(self.shell.failure())
                group.create_task(self.write_back.run())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.shell.die("the instance stops")
            self.closing.set()
            for subscriber in self.subscribers:
                subscriber.close()
            self.shell.close()

    def replicate(self, order: conductor_pb2.ReplicateOrder) -> None:
        """Prompts are computed at prefill: nobody would ask for a copy here, and no conductor orders one."""
        log.warning("order to copy blocks refused: decode keeps no copies", source=order.source.id)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True
        self._notify()

    async def drained(self) -> None:
        """Waits until no request is left and what can be written back has been."""
        await self.shell.empty.wait()
        await self.write_back.idle(WRITE_BACK_GRACE_S)

    # --- reports ---------------------------------------------------------------------------------------------------

    def load(self) -> conductor_pb2.LoadReport:
        """The load now."""
        core = self.core
        return conductor_pb2.LoadReport(
            running=len(core.planner.batch),
            waiting=core.sequences - len(core.planner.batch),
            free_blocks=self.manager.num_free,
            cached_blocks=self.manager.num_cached,
            promised_blocks=core.room.promised + core.room.claims,
            context_tokens=core.context_tokens,
            speed=speeds_to_proto(core.planner.speeds(time.monotonic())),
            draining=self.draining,
            taken=self.shell.taken,
            expected_answer_tokens=core.expected_answer_tokens,
        )

    def gauges(self) -> Gauges:
        """Everything the instance holds."""
        shell, core, manager = self.shell, self.core, self.manager
        return Gauges(
            [
                ("sequences_running", lambda: len(core.planner.batch), 0),
                ("sequences_waiting", lambda: len(core.planner.ready), 0),
                ("sequences_parked", lambda: core.count(*PARKED), 0),
                ("sequences_catching_up", lambda: len(core.planner.catching), 0),
                ("requests", lambda: len(shell), 0),
                ("sequences_orphaned", lambda: len(core.orphans), 0),
                ("sequences_adopted", lambda: shell.log.adopted, None),
                ("logs", lambda: len(core.orphans.logs), None),
                ("log_bytes", lambda: core.orphans.logs.bytes, None),
                ("steps_in_flight", lambda: shell.step_in_flight, 0),
                ("transfers_promised", lambda: shell.count(TransferState.PROMISED), 0),
                ("transfers_receiving", lambda: shell.count(TransferState.RECEIVING), 0),
                ("transfers_complete", lambda: shell.count(TransferState.COMPLETE), 0),
                ("promised_blocks", lambda: core.room.promised, 0),
                ("expected_blocks", lambda: core.room.claims, 0),
                ("swapped_blocks", lambda: core.parking.saved, 0),
                ("preemptions", lambda: core.parking.preemptions, None),
                ("swaps", lambda: core.parking.swaps, None),
                ("loads", lambda: shell.copies.loads.sessions, 0),
                ("loaded_blocks", lambda: core.shelf.loaded_blocks, None),
                ("load_failures", lambda: core.shelf.failures, None),
                ("load_credits_kept_bytes", lambda: shell.copies.loads.traffic.credits_kept, 0),
                ("recomputed_tokens", lambda: core.planner.recomputed_tokens, None),
                ("prompts_computed", lambda: core.planner.prompts, None),
                ("blocks_total", lambda: manager.num_blocks, None),
                ("blocks_used", lambda: manager.num_used, 0),
                ("blocks_cached", lambda: manager.num_cached, None),
                ("blocks_free", lambda: manager.num_free, None),
                ("context_tokens", lambda: core.context_tokens, 0),
                ("tokens_unsent", lambda: sum(subscriber.waiting for subscriber in self.subscribers), 0),
                *read_gauges(self.reads, core.lending),
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
                ("steps", lambda: shell.running.steps, None),
                *self._further_gauges,
                *process_entries(),
            ]
        )

    def _messages_unsent(self) -> int:
        stores = self.write_back.traffic + self.shell.copies.loads.traffic + self.reads.traffic
        return stores.unsent + sum(len(receiver.outbox) for receiver in self.receivers)

    def _all_received_bytes(self) -> float:
        return self._received_bytes + sum(receiver.received_bytes for receiver in self.receivers)

    def _all_stray_frames(self) -> float:
        return self._stray_frames + sum(receiver.stray_frames for receiver in self.receivers)


def core_config(context: InstanceContext, config: DecodeConfig) -> CoreConfig:
    """The core's settings, from the instance's."""
    layout, engine = context.setup.layout, context.engine
    return CoreConfig(
        num_blocks=engine.blocks,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        max_batch=config.max_batch,
        lease_s=config.lease_s,
        promise_s=config.promise_s,
        speeds=engine.speeds,
        preemption=Preemption(config.preemption),
        watermark_blocks=int(engine.blocks * config.watermark),
        load_timeout_s=config.load_timeout_s,
        step_tokens=config.step_tokens,
        swap_blocks=config.swap_bytes // layout.block_bytes,
        assumed_answer_tokens=config.assumed_answer_tokens,
        grace_s=config.grace_s,
        log_ttl_s=config.log_ttl_s,
        run_steps=engine.run_steps,
        ahead_steps=engine.run_steps if engine.run_steps > 1 else 0,
        log_bytes=config.log_bytes,
        preempt_every=config.preempt_every,
    )
