"""A stage's host: joins a leader, runs the stage's processes for the leader's engine, and joins again.

The stage computes in a part of a pool that lies here, a copy of the leader's. KV that a step finishes goes to the
leader before the report that the KV is there.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from moonpool.base import world
from moonpool.base.config import parse_address
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.fork_server import Launcher, start_worker
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.memory import shared_memory
from moonpool.base.kv.pool import PoolPart
from moonpool.base.rpc.tls import NAME, Security
from moonpool.base.scheduling.steps import LayerDone, Step, finished_blocks, written_blocks
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.version import installed_version
from moonpool.engine.channel import AsyncChannel, ChannelClosed
from moonpool.engine.messages import (
    BlocksFetched,
    EngineSizes,
    EngineSpec,
    FetchBlocks,
    KVLoaded,
    LoraAnswer,
    Shutdown,
    StageDone,
    StageRoom,
    StageSpec,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.platforms.registry import engine_devices
from moonpool.engine.remote.link import SILENCE_S, StageLink
from moonpool.engine.remote.messages import (
    ANSWER,
    HELLO,
    SCHEMA,
    TO_LEADER,
    TO_STAGE,
    KVSlice,
    SlotChanges,
    StageHello,
    StageRefusal,
    StageWelcome,
)
from moonpool.engine.remote.peer_check import check_peer
from moonpool.engine.remote.schema import SchemaError
from moonpool.engine.remote.slices import write_slice
from moonpool.engine.start_engine import WORKER, meeting_folder, meets_by_store, rank_page, rank_store
from moonpool.engine.worker_process import WorkerProcess, is_stopped, spawn_worker, worker_environment

log = get_logger(__name__)
JOIN_S: Final = 5.0
"""In which a leader must answer."""
MAX_ANSWER_BYTES: Final = 4096
_TURN_BYTES: Final = 1 << 20
"""KV that is sent between two looks at the connection's room."""
_LOOK_S, _LOOKS = 0.5, 3
"""As in `moonpool.engine.process_engine`: a stopped process is lost."""
_FROM_ALL = StageRoom | WorkerReady | StageDone | BlocksFetched | KVLoaded | LoraAnswer
"""What each rank says; the leader hears it once, when all ranks have said so."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Which stage a host runs, and how.

    Attributes:
        leader: "host:port" where stages join.
        node_rank: 1 = the first stage that is not on the leader's host.
        checkpoint: folder of the checkpoint on this host.
        weights: the checkpoint's `weights_fingerprint`.
        device: where the stage computes, as in `EngineSpec`.
        threads: compute threads of each process at most; 0 = an equal part of the cores for each.
    """

    leader: str
    node_rank: int
    checkpoint: Path
    weights: bytes
    device: str = "cpu"
    threads: int = 0


@dataclass(slots=True)
class StageProcesses:
    """How the processes of a stage are started, and seen.

    Attributes:
        worker_module: their program.
        launcher: starts them.
    """

    worker_module: str = WORKER
    launcher: Launcher = start_worker

    async def start(self, spec: StageSpec, memory: int, page: int) -> WorkerProcess:
        """Start the process of a rank.

        Args:
            spec: the stage's, of this rank.
            memory: descriptor for the stage's part of the pool.
            page: descriptor for the page of the stage's ranks; -1 for one rank.

        Raises:
            OSError: there is no process.
        """
        environment = worker_environment(spec.engine, spec.engine.threads)
        process, sock = spawn_worker(self.worker_module, self.launcher, memory, page, environment)
        channel = await AsyncChannel.open(sock)
        return WorkerProcess(spec.stage, process, channel, spec.rank, spec.engine.ranks == 1)

    def stopped(self, worker: WorkerProcess) -> bool:
        """Return whether a process is stopped."""
        return is_stopped(worker)


PROCESSES: Final = StageProcesses()
"""Those of a real host."""


async def join(place: StagePlace, security: Security | None, *, silence_s: float = SILENCE_S) -> tuple[StageLink, int]:
    """Join the leader; return the connection and the stage's number.

    Raises:
        Unavailable: the leader is not there, or refuses the stage; says why.
    """
    link: StageLink | None = None
    try:
        async with asyncio.timeout(JOIN_S):
            sock = await _connect(*parse_address(place.leader))
            try:
                tls = None if security is None else security.tls.socket_context(server=False)
                link = await StageLink.open(sock, tls, server=False, name=NAME, limit_s=JOIN_S)
            except BaseException:
                sock.close()
                raise
            check_peer(link, None if security is None else security.gate)
            link.tell(HELLO, StageHello(SCHEMA, installed_version(), place.node_rank, place.weights))
            answer: StageWelcome | StageRefusal = await link.ask(ANSWER, MAX_ANSWER_BYTES)
    except (MoonpoolError, SchemaError, OSError, TimeoutError, ChannelClosed) as error:
        why = (link.reason if link is not None else "") or str(error) or f"it did not answer in {JOIN_S:g} s"
        if link is not None:
            link.close(why)
        raise Unavailable(f"no leader at {place.leader}: {why}") from error
    except asyncio.CancelledError:
        if link is not None:
            link.close("the stage has ended")
        raise
    if isinstance(answer, StageRefusal):
        link.close(answer.reason)
        raise Unavailable(f"the leader at {place.leader} refuses this stage: {answer.reason}")
    link.begin(TO_STAGE, TO_LEADER, pings=False, silence_s=silence_s)
    return link, answer.stage


async def _connect(host: str, port: int) -> socket.socket:
    """Return a socket connected to the first address of the name that answers, in the resolver's order.

    Raises:
        OSError: none does; the last one's error.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left, (family, _, _, _, target) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        sock = world.tcp_socket(family)
        try:
            async with asyncio.timeout(JOIN_S / (len(addresses) + 1)):  # the answer takes some of the time, too
                await loop.sock_connect(sock, target)
        except (OSError, TimeoutError):
            sock.close()
            if left == 1:
                raise
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise OSError(f"{host} has no address")


async def serve_leader(place: StagePlace, link: StageLink, processes: StageProcesses = PROCESSES) -> str:
    """Run the stage for the leader's engine until either ends; return why.

    Whatever ends: no process runs afterwards.
    """
    try:
        spec: StageSpec = await link.receive()
        if not isinstance(spec, StageSpec):
            link.close(f"sent {type(spec).__name__} before the stage's work")
            return link.reason
        async with _StageHost(place, link, spec, processes) as host:
            await host.start()
            await host.run()
    except ChannelClosed:
        pass
    except (MoonpoolError, OSError) as error:  # no memory for the pool, or no process
        why = getattr(error, "message", str(error))
        link.send(WorkerFailed(why, type(error).__name__, getattr(error, "field", "")))
        await link.finish(why)
    return link.reason or "the leader has ended the engine"


def _own(engine: EngineSpec, place: StagePlace) -> EngineSpec:
    """Return the leader's specification as this host carries it out."""
    threads = place.threads or max(1, len(os.sched_getaffinity(0)) // engine.ranks)
    own = ",".join(map(str, *engine_devices(place.device, 1, engine.ranks)))
    device = ",".join([own] * engine.stages)
    return replace(
        engine, checkpoint=str(place.checkpoint), device=device, threads=threads, core_page="", weights_file=""
    )


class _StageHost:
    """One engine's stage on this host; a context manager, which ends the stage's processes."""

    def __init__(self, place: StagePlace, link: StageLink, spec: StageSpec, processes: StageProcesses) -> None:
        self._processes = processes
        self._link, self._spec = link, replace(spec, engine=_own(spec.engine, place))
        self._engine = self._spec.engine
        self._stack = ExitStack()
        self._workers: list[WorkerProcess] = []
        self._part: PoolPart | None = None
        self._memory = -1
        self._steps: dict[int, Step] = {}
        self._reported: dict[int, int] = {}  # by step: layers whose KV is on the way
        self._fetches: dict[int, tuple[int, ...]] = {}
        self._unstored: set[int] = set()
        """Blocks whose KV is here alone."""
        self._said: dict[tuple[type, int], dict[int, Any]] = {}  # by rank, until all have
        self._bulk: deque[Callable[[], object]] = deque()
        self._more = asyncio.Event()
        self._ending = False
        self._ended: list[WorkerProcess] = []

    async def __aenter__(self) -> "_StageHost":
        return self

    async def __aexit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.channel.close()
        for worker in self._workers:
            worker.reap()
        if self._part is not None:
            self._part.close()
        elif self._memory >= 0:
            os.close(self._memory)
        self._stack.close()
        for worker in self._workers:  # last: only here may this be cancelled
            await worker.channel.wait_closed()

    async def start(self) -> None:
        """Start the stage's processes."""
        self._memory = shared_memory()
        if self._engine.sized:
            self._make_part()
        page = rank_page(self._engine.ranks, self._stack)
        grouped = meets_by_store(self._engine)
        store = rank_store(meeting_folder(self._stack), self._spec.stage) if grouped else ""
        for rank in range(self._engine.ranks):
            spec = replace(self._spec, rank=rank, rank_store=store)
            worker = await self._processes.start(spec, self._memory, page)
            self._workers.append(worker)
            if self._part is not None:
                worker.serve(self._part)
            worker.channel.send(spec)

    async def run(self) -> None:
        """Carry messages until either side ends.

        Raises:
            ChannelClosed: the connection has ended.
        """
        works = [self._from_leader(), self._pump(), self._watch(), *map(self._from_worker, self._workers)]
        tasks = [asyncio.create_task(work, name=f"stage {self._spec.stage}") for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _make_part(self) -> None:
        engine, spec = self._engine, self._spec
        self._part = PoolPart.create(
            self._memory, engine.layout, engine.blocks, spec.layer_begin, spec.layer_end, engine.slots
        )
        for worker in self._workers:  # whose devices will have copies
            worker.serve(self._part)

    async def _fail(self, why: str) -> None:
        log.warning("the stage has failed", reason=why)
        self._link.send(WorkerFailed(why))
        await self._link.finish(why)
        raise ChannelClosed

    # --- from the leader -------------------------------------------------------------------------------------------

    async def _from_leader(self) -> None:
        while True:
            message = await self._link.receive()
            if isinstance(message, KVSlice):
                self._land(message)
            elif isinstance(message, SlotChanges):
                self._move_slots(message)
            else:
                self._note(message)
                for worker in self._workers:
                    worker.channel.send(message)
            if isinstance(message, Shutdown):
                self._ending = True

    def _note(self, order: Any) -> None:
        """Note what an order means for this host."""
        if isinstance(order, EngineSizes) and self._part is None:
            blocks, tokens = order.blocks, order.max_num_batched_tokens
            self._engine = replace(self._engine, blocks=blocks, max_num_batched_tokens=tokens)
            self._make_part()
        elif isinstance(order, Step):
            self._steps[order.step_id] = order
        elif isinstance(order, FetchBlocks):
            self._fetches[order.number] = order.blocks

    def _land(self, found: KVSlice) -> None:
        part = write_slice(self._part, found, self._link.close)
        if part is not None:
            part.land(found.layer, found.block, found.value)
            self._unstored.discard(found.block)

    def _move_slots(self, message: SlotChanges) -> None:
        part = self._part
        for block, slot in message.changes:
            if part is None or not (0 <= block < part.blocks and -1 <= slot < part.slots):
                self._link.close(f"sent slot {slot} of block {block}, which this stage does not have")
                return
            part.slot_of[block] = slot

    # --- from the stage's processes --------------------------------------------------------------------------------

    async def _from_worker(self, worker: WorkerProcess) -> None:
        try:
            while True:
                self._handle(worker, await worker.channel.receive())
        except ChannelClosed:
            if not self._ending:
                await self._fail(await worker.death())
        self._ended.append(worker)
        if len(self._ended) == len(self._workers):
            await self._link.finish("the leader has ended the engine")
            raise ChannelClosed
        await asyncio.Future()

    def _handle(self, worker: WorkerProcess, message: Any) -> None:
        if isinstance(message, _FROM_ALL):
            key = type(message), getattr(message, "step_id", getattr(message, "number", 0))
            said = self._said.setdefault(key, {})
            said[worker.rank] = message
            if len(said) < len(self._workers):
                return
            message = _together(self._said.pop(key))
        elif worker.rank and not isinstance(message, WorkerFailed):
            return
        if isinstance(message, LayerDone):
            self._store(message.step_id, message.layer + 1)
            self._behind_kv(message)
        elif isinstance(message, StageDone):
            self._end_step(message)
        elif isinstance(message, BlocksFetched):
            self._store_fetched(self._fetches.pop(message.number))
            self._behind_kv(message)
        else:
            self._link.send(message)

    def _end_step(self, done: StageDone) -> None:
        step = self._steps.pop(done.step_id)
        size = self._engine.layout.block_size
        if not done.aborted:
            self._steps[done.step_id] = step
            self._store(done.step_id, self._spec.layer_end)
            del self._steps[done.step_id]
        self._reported.pop(done.step_id, None)
        self._unstored.update(block for part in step.sequences for block in written_blocks(part, size))
        if not done.aborted:
            self._unstored.difference_update(block for block, _ in finished_blocks(step, size))
        self._behind_kv(done)

    def _store(self, step_id: int, end: int) -> None:
        """Send the KV that a step has finished in the layers before `end`."""
        step, begin = self._steps[step_id], self._reported.get(step_id, self._spec.layer_begin)
        self._reported[step_id] = max(begin, end)
        for layer in range(begin, end):
            for block, valid_tokens in finished_blocks(step, self._engine.layout.block_size):
                self._bulk.append(partial(self._send_slice, layer, block, valid_tokens))

    def _store_fetched(self, blocks: Sequence[int]) -> None:
        """Send KV that is here alone, of part-filled blocks."""
        size = self._engine.layout.block_size
        for block in sorted(self._unstored.intersection(blocks)):
            for layer in range(self._spec.layer_begin, self._spec.layer_end):
                self._bulk.append(partial(self._send_slice, layer, block, size, sealed=False))
        self._unstored.difference_update(blocks)
        self._more.set()

    def _behind_kv(self, message: object) -> None:
        """Send a message behind the KV that is on the way."""
        self._bulk.append(partial(self._link.send, message))
        self._more.set()

    def _send_slice(self, layer: int, block: int, valid_tokens: int, *, sealed: bool = True) -> None:
        part = self._part
        data = None if part is None else part.find(layer, block)
        if part is None or data is None:
            return
        copy = bytearray(data)
        part.layout.zero_invalid(layer, memoryview(copy), valid_tokens)
        value = part.hash_of(layer, block) if sealed else slice_hash(copy)
        self._link.send(KVSlice(layer, block, value, sealed, bytes(copy)))

    async def _pump(self) -> None:
        """Send KV, and what is behind, as the connection has room."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._bulk:
                before = self._link.sent_bytes
                while self._bulk and self._link.sent_bytes - before < _TURN_BYTES:
                    self._bulk.popleft()()
                await self._link.room()

    async def _watch(self) -> None:
        """Fail if a process of this stage stays stopped."""
        looks = [0] * len(self._workers)
        while True:
            await asyncio.sleep(_LOOK_S)
            for worker in self._workers:
                looks[worker.rank] = looks[worker.rank] + 1 if self._processes.stopped(worker) else 0
                if looks[worker.rank] >= _LOOKS:
                    await self._fail(f"{worker} is stopped")


def _together(said: Mapping[int, Any]) -> Any:
    """Return what all ranks have said as one message: the first rank's, with what another could not do."""
    first = said[0]
    if isinstance(first, StageDone):
        return replace(first, aborted=any(done.aborted for done in said.values()))
    if isinstance(first, LoraAnswer):
        failure = next((answer.failure for answer in said.values() if answer.failure is not None), None)
        return replace(first, nbytes=sum(answer.nbytes for answer in said.values()), failure=failure)
    if isinstance(first, StageRoom):
        return StageRoom.least(said.values())
    return first


async def keep_serving(
    place: StagePlace,
    security: Security | None,
    on_change: Callable[[bool], object],
    *,
    pause_s: float = 0.5,
    silence_s: float = SILENCE_S,
    processes: StageProcesses = PROCESSES,
) -> None:
    """Serve the leader, and each leader that follows at the address, until cancelled.

    Args:
        place: the stage's.
        security: certificates; None = plaintext.
        on_change: called with whether the stage has joined.
        pause_s: between two attempts to join, seconds.
        silence_s: a leader that is silent for so long is lost, seconds.
        processes: starts the stage's processes.
    """
    told = ""
    while True:
        try:
            link, stage = await join(place, security, silence_s=silence_s)
        except Unavailable as error:
            if str(error) != told:
                told = str(error)
                log.warning("waiting for the leader", reason=told)
            await asyncio.sleep(pause_s)
            continue
        told = ""
        log.info("joined", leader=link.peer, stage=stage)
        on_change(True)
        try:
            why = await serve_leader(place, link, processes)
        finally:
            link.close("the stage has ended")
            on_change(False)
            await link.wait_closed()
        log.warning("left", leader=link.peer, stage=stage, reason=why)
        await asyncio.sleep(pause_s)
