"""A decode instance in virtual time: the service's own core decides, this class carries the decisions out.

Steps take the profile's time (`moonpool.simulator.cluster.engine`), copies and write-back take their links' time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from moonpool.base.frozen import frozen
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlocksLent
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded
from moonpool.conductor.core.events import ReserveGranted
from moonpool.conductor.core.failures import FENCE_FIELD, Failure, FailureKind
from moonpool.conductor.core.instances import LoadFacts
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.engine.decode.core import actions
from moonpool.engine.decode.core.events import (
    AbortRequest,
    AdoptRequest,
    ComputePrompt,
    Event,
    IoEnd,
    QueuePrompt,
    ReceiveEnd,
    ReserveBlocks,
    RunDone,
    RunProgress,
    StartDecoding,
    StoreEnd,
    StreamClosed,
    StreamOpened,
    SwapEnd,
    TransferComplete,
    TransferOpened,
    TransferProgress,
)
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks
from moonpool.simulator.clock import PS, SimulatedWorld, ps
from moonpool.simulator.cluster.config import LEAPS, ClusterConfig, Runs, decode_core_settings
from moonpool.simulator.cluster.core_host import CoreHost
from moonpool.simulator.cluster.engine import STOPPED, DecodeEngine, RunListener, SharedMachine
from moonpool.simulator.cluster.loads import PrefixLoader
from moonpool.simulator.cluster.requests import (
    DecodeSequence,
    DecodeUse,
    PlacedSequence,
    PromptReport,
    Resume,
    SequenceReport,
)
from moonpool.simulator.cluster.store import Readable, SimulatedPoolReads, Store
from moonpool.simulator.network import Link, SimulatedNetwork

HEARD_PER_LEASE = 8
"""The core is told that a transfer lives so often in a lease, as in the service."""
_TELL = ps(1.0)
"""Reports to the conductor: an answer's first and last token, and at least this often while events happen.

The service reports tokens with each step. The conductor uses only the tokens' times, which are reported here too."""
RETRY_S = 1.0
"""After which a refused request may try again, as the service says."""


@frozen
class WholePrompt:
    """What a conductor says of a whole prompt that is computed here; see `QueuePrompt`."""

    delay_s: float = 0.0
    held: tuple[int | None, ...] = ()
    sources: tuple[KVSource, ...] = ()


WHOLE_PROMPT = WholePrompt()


class Copies:
    """One instance's copies, until the instance is lost. Each copy is answered by one `IoEnded`.

    Args:
        name: the instance's.
        sends: the instance's link for outgoing KV.
        tell: takes the ends.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        config: ClusterConfig,
        name: str,
        sends: Link,
        tell: Callable[[IoEnded[IoEnd]], None],
    ) -> None:
        self._world, self._network, self._config = world, network, config
        self._sends, self._tell = sends, tell
        self._bus = Link(f"{name} bus", config.load_bytes_per_s)
        self._open: set[int] = set()
        self._copied_at = 0

    def close(self) -> None:
        """The instance is lost: copies end unheard."""
        self._open.clear()

    def swap(self, io: int, blocks: int) -> None:
        """Between pool and DRAM."""
        begun = self._begin(io)

        def copied() -> None:
            first, self._copied_at = max(begun, self._copied_at), self._world.now
            self._end(io, SwapEnd(True, (self._world.now - first) / PS))

        self._network.send([self._bus], blocks * self._config.block_bytes, copied)

    def write(self, io: int, store: Store, chain: Sequence[BlockKey]) -> None:
        """Write a chain's last block to a store."""
        self._begin(io)
        store.write(chain, self._sends, lambda: self._end(io, StoreEnd(store.holds(chain) == len(chain))))

    def _begin(self, io: int) -> int:
        self._open.add(io)
        return self._world.now

    def _end(self, io: int, result: IoEnd) -> None:
        if io in self._open:
            self._open.remove(io)
            self._tell(IoEnded(io, result))


def _nowhere(name: str) -> Readable:
    raise KeyError(name)


def nothing_written(io: int) -> IoEnded[IoEnd]:
    """Answer `StopReceiving`: what comes is in the pool at once."""
    return IoEnded(io, ReceiveEnd())


@frozen
class DecodeListener:
    """Listeners to an instance.

    Attributes:
        tokens: a conductor's stream, and news for the stream's sequences.
        failed: a conductor's stream, a failed transfer on the stream, and the reason.
        keys: keys that entered the pool, and keys that left.
        changed: load or keys have changed.
    """

    tokens: Callable[[int, list[SequenceReport]], None]
    failed: Callable[[int, int, Failure], None]
    keys: Callable[[KeyChanges], None]
    changed: Callable[[], None]


class SimulatedDecode:
    """One instance. A transfer has the core's number for the first sequence as a name; numbers are never used twice.

    Args:
        stores: the cluster's; the answers' blocks are written there.
        ears: are told what happens.
        runs: steps per run.
        machine: engines that share cores; None = separate cores.
        find: gives a store or another instance by name, to load prefixes from; None = there are none.
        up: whether the instance is there at the beginning.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        config: ClusterConfig,
        name: str,
        stores: Iterable[Store],
        ears: DecodeListener,
        runs: Runs = LEAPS,
        machine: SharedMachine | None = None,
        *,
        find: Callable[[str], Readable] | None = None,
        up: bool = True,
    ) -> None:
        self.name, self._find = name, find or _nowhere
        self.receives = Link(f"{name} in", config.transfer_bytes_per_s)
        self.pool = SimulatedPoolReads(Link(f"{name} out", config.transfer_bytes_per_s), self._tell)
        self._world, self._network, self._config, self._ears = network.world, network, config, ears
        self._stores = {store.name: store for store in stores}
        self._loads_link = Link(f"{name} loads", config.load_bytes_per_s)
        self._settings = decode_core_settings(config, runs, both=config.is_both(name))
        self._machine = machine or SharedMachine()
        self._heard_gap = ps(config.memory.lease_s) // HEARD_PER_LEASE
        self._came = self._preempted = 0
        self.epoch, self.up = 0, up
        self.use = DecodeUse()
        self.begin_anew()

    def begin_anew(self) -> None:
        """An empty instance, as after a crash; what was under way has no effect."""
        self.epoch += 1
        self.core = DecodeScheduler(self._settings)
        self.host: CoreHost[Event, actions.Action] = CoreHost(
            self._world, self.core, self._perform, before_tick=self._settle
        )
        self._copies = Copies(self._world, self._network, self._config, self.name, self.pool.sends, self._tell)
        layers = self._config.profile.layers
        self._loading = PrefixLoader(
            self._world, self._network, self._find, self._loads_link, self._config.block_bytes // layers, layers,
            lambda io, result: self._tell(IoEnded(io, result)),
        )  # fmt: skip
        self._sources: dict[int, tuple[KVSource, ...]] = {}
        self._sequences: dict[int, DecodeSequence] = {}
        self._logged: dict[int, list[DecodeSequence]] = {}
        self._answers: dict[int, ReserveGranted | Failure] = {}
        self._taken, self._told_at, self.draining = 0, self._world.now, False
        self._engine = DecodeEngine(
            self._world, self._config, self.core, self._sequences, self.use,
            RunListener(self._stepped, self._run_ended, self._say), self._machine, int(self.name[1:]),
        )  # fmt: skip

    def crash(self) -> None:
        """Lose everything; what was generated by now has been sent."""
        self._settle()
        self._say(self._sequences.values())
        self.host.close()
        self._engine.close()
        self._copies.close()
        self._loading.stop()
        self._preempted = self.preempted
        self.begin_anew()

    # Incoming events

    def reserve(
        self,
        sequence: PlacedSequence,
        conductor: str,
        tbt_slo_s: float = 0.0,
        starts_in_s: float = 0.0,
        stores: tuple[str, ...] = (),
        *,
        whole: bool = False,
        max_queue_s: float | None = None,
    ) -> ReserveGranted | Failure:
        """Reserve room for a conductor: for a sequence, or for several with one prompt.

        `whole`: the prompt is computed here, unless the prompts here take longer than `max_queue_s`.
        """
        if self.draining:
            return Failure(FailureKind.UNAVAILABLE, f"{self.name} is draining")
        number, request = self._came + 1, sequence.request
        self._came += sequence.width
        keys = sequence.keys(self._config.block_size)
        counts = sequence.tokens + 1, sequence.left - 1, len(keys), self._world.now
        for choice in range(sequence.width):
            self._sequences[number + choice] = DecodeSequence(sequence, number + choice, stores, *counts, choice)
        spec = EngineRequest(keys, sequence.tokens, request.tokens, sequence.width, tenant=request.tenant)
        asked = spec, request.longest, tbt_slo_s, conductor, len(stores), starts_in_s
        prompt = {"computes_prompt": whole, "max_queue_s": max_queue_s}
        self._tell(ReserveBlocks(number, *asked, resumable=True, fence=sequence.fence, **prompt))  # type: ignore[arg-type]
        return self._answers.pop(number)

    def open(self, transfer: int) -> bool:
        """The prompt's KV begins to come; returns whether the KV is wanted."""
        if self._wanted(transfer) is None:
            return False
        self._tell(TransferOpened(transfer))
        return self._wanted(transfer) is not None

    def heard(self, transfer: int) -> None:
        """Note that a part of the prompt's KV has come."""
        member, now = self._sequences.get(transfer), self._world.now
        if member is not None and now - member.heard_at >= self._heard_gap and not member.why:
            member.heard_at = now
            self._tell(TransferProgress(transfer))

    def kv_whole(self, transfer: int) -> bool:
        """Note that all the prompt's KV has come; return whether the KV is wanted."""
        member = self._wanted(transfer)
        if member is None:
            return False
        member.whole = True
        self._tell(TransferComplete(transfer))
        return True

    def give_up(self, transfer: int) -> None:
        """The prompt's KV does not come (any more)."""
        if self._wanted(transfer) is not None:
            self._tell(AbortRequest(transfer, "the sender gave up"))

    def stream_opened(self, stream: int, conductor: str) -> None:
        """A conductor has opened a stream."""
        self._tell(StreamOpened(stream, conductor))

    def stream_closed(self, stream: int) -> None:
        """A stream has ended."""
        for member in self._sequences.values():
            member.stream = 0 if member.stream == stream else member.stream
        self._tell(StreamClosed(stream))

    def start(
        self,
        stream: int,
        transfer: int,
        known: tuple[int, ...] = (),
        *,
        compute: bool = False,
        prompt: WholePrompt = WHOLE_PROMPT,
    ) -> None:
        """First tokens are known, and so many behind each.

        With `compute`, the prompt's rest is computed here, or the whole prompt where room was reserved for it.
        """
        member = self._wanted(transfer)
        if member is None:
            self._ears.failed(
                stream, transfer, Failure(FailureKind.TRANSFER, "there is no such transfer here (any more)")
            )
            return
        members = self._members(transfer)
        for member in members:
            member.stream, member.started = stream, True
        if compute and self.core.requests[transfer].asked.computes_prompt:
            for other in members:
                other.begin_with_prompt(self._config.block_size)
            member.queued_at, self._sources[transfer] = self._world.now, prompt.sources
            waits = QueuePrompt(transfer, stream, delay_s=prompt.delay_s, held=prompt.held, sources=prompt.sources)
            self._tell(waits)
        elif compute:
            member.begin_with_prompt(self._config.block_size)
            self._tell(ComputePrompt(transfer, stream))
        else:
            size = self._config.block_size
            keys = tuple([members[choice].begin_behind(count, size) for choice, count in enumerate(known)])
            first, *others = [0 if member.left else STOPPED for member in members]
            self._tell(StartDecoding(transfer, stream, first, tuple(others), (), known, keys))

    def resume(self, stream: int, order: Resume) -> None:
        """A conductor wants another conductor's request, or the kept output."""
        member = self._wanted(order.transfer) or self._logged.get(order.transfer, (None,))[0]
        if member is not None and member.started and member.sequence.id == order.sequence:
            self._tell(AdoptRequest(order.transfer, stream, order.fence, order.positions))
        else:
            self._ears.failed(
                stream, order.transfer, Failure(FailureKind.STREAM, "there is no such sequence here (any more)")
            )

    def cancel(self, transfer: int) -> None:
        """End a sequence that is not wanted any more; unknown sequences are ignored."""
        if self._wanted(transfer) is not None:
            for member in self._members(transfer):
                member.stream = 0
            self._tell(AbortRequest(transfer, "cancelled"))

    def _members(self, transfer: int) -> list[DecodeSequence]:
        width = self._sequences[transfer].sequence.width
        return [self._sequences[number] for number in range(transfer, transfer + width)]

    def _wanted(self, transfer: int) -> DecodeSequence | None:
        member = self._sequences.get(transfer)
        return member if member is not None and not member.why else None

    # Outgoing reports

    @property
    def preempted(self) -> int:
        """Preemptions so far."""
        return self._preempted + self.core.preempted.preemptions

    def drain(self) -> None:
        """Take no new requests; running sequences go on until they end or are moved."""
        self.draining = True
        self._ears.changed()

    @property
    def empty(self) -> bool:
        """Whether no request runs or is expected."""
        return not self.core.requests

    def keys(self) -> list[BlockKey]:
        """What the pool holds."""
        return self.core.blocks.keys()

    def load(self) -> LoadFacts:
        """The load as reported by the service."""
        self._settle()
        core, requests = self.core, self.core.requests.values()
        prompts = core.planner.prompts
        return LoadFacts(
            queued_tokens=prompts.tokens_left(requests) if self._settings.computes_prompts else 0,
            drain_s=prompts.drain_s(requests) if self._settings.computes_prompts else None,
            running=len(core.planner.batch),
            waiting=core.sequences - len(core.planner.batch),
            free_blocks=core.blocks.num_free,
            cached_blocks=core.blocks.num_cached,
            promised_blocks=core.budget.promised + core.budget.expected,
            context_tokens=core.context_tokens,
            speeds=core.tracker.speeds,
            draining=self.draining,
            taken=self._taken,
            answer_tokens=core.expected_answer_tokens,
        )

    def lose_source(self, source: str) -> None:
        """A store or another instance is gone: loads from there fail."""
        self._loading.lose(source)

    def check_at_rest(self) -> None:
        """Assert that no resource is held."""
        self.core.check_invariants()
        assert not [*self._sequences, *self._logged, *self.core.requests, *self._sources]
        assert self._engine.idle
        assert self.core.blocks.num_used == 0

    def _tell(self, event: Event) -> None:
        self._settle()
        self.host.post(event)
        if self._world.now - self._told_at >= _TELL:
            self._told_at = self._world.now
            self._say(self._sequences.values())
        self._note_keys()
        self._ears.changed()

    def _settle(self) -> None:
        self._engine.settle()

    def _stepped(self, event: RunProgress | RunDone) -> None:
        self.host.post(event)
        if event.filled or isinstance(event, RunDone):
            self._note_keys()

    def _run_ended(self, news: list[DecodeSequence], changed: bool) -> None:
        self._say(news)
        if changed:
            self._ears.changed()

    def _say(self, members: Iterable[DecodeSequence]) -> None:
        """Tell the conductor about new tokens."""
        told: dict[int, list[SequenceReport]] = {}
        for member in members:
            if member.made is None:
                continue
            how = member.prompt
            if how is not None:
                how = replace(how, there_s=(member.made.first - member.queued_at) / PS)
            if member.stream:
                report = SequenceReport(member.number, member.made, not member.left, how)
                told.setdefault(member.stream, []).append(report)
            member.prompt = None
            member.told, member.made = member.told or member.made is not None, None
        for stream, news in told.items():
            self._ears.tokens(stream, news)

    # The core's actions

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.StartRun():
                self._engine.begin(action)
            case actions.StopRun():
                self._engine.cut()
            case actions.ReservationGranted() | actions.ReservationRefused():
                self._answer(action)
            case actions.SetBlockTable() | actions.AppendBlock() | actions.BeginPrompt():
                self._note(action)
            case actions.FinishSequence(number):
                self._ears.tokens(self._sequences[number].stream, [SequenceReport(number, None, over=True)])
            case actions.RequestAborted(number, why):
                self._ending(number, why)
            case BlocksLent():
                self.pool.answered(action)
            case actions.RequestFreed() | actions.RequestAdopted() | actions.FenceConductor() | actions.DropOutputLog():
                self._change_hands(action)
            case actions.SwapOut() | actions.SwapIn() | actions.StoreBlock():
                self._io(action)
            case LoadBlocks() | CancelIo():
                self._load(action)
            case actions.StopReceiving(io):
                self.host.post(nothing_written(io))

    def _note(self, action: actions.SetBlockTable | actions.AppendBlock | actions.BeginPrompt) -> None:
        """Note what a sequence has now."""
        sequence = self._sequences[action.id]
        match action:
            case actions.SetBlockTable(_, blocks):
                sequence.blocks = len(blocks)
            case actions.AppendBlock():
                sequence.blocks += 1
            case actions.BeginPrompt():
                sequence.prompt = PromptReport(action)

    def _load(self, action: LoadBlocks | CancelIo) -> None:
        """Load a prompt's prefix, or stop loading."""
        if isinstance(action, CancelIo):
            self._loading.cancel(action.io)
            return
        source, end = self._sources[action.id][action.source], action.first + len(action.blocks)
        keys = self._sequences[action.id].chain(end)
        self._loading.begin(action.io, source.name, keys, action.first, action.timeout_s, by_layer=False)

    def _answer(self, action: actions.ReservationGranted | actions.ReservationRefused) -> None:
        if isinstance(action, actions.ReservationGranted):
            self._taken += 1
            target = DecodeReservation(self.name, self.epoch, "", action.id, 0, action.held)
            self._answers[action.id] = ReserveGranted(target, self._settings.lease_s, self._taken)
            return
        self._leave(action.id)
        self._answers[action.id] = Failure(
            FailureKind.OVERLOADED,
            action.why,
            reason=action.reason,
            predicted_tbt_s=action.tbt_s,
            retry_after_s=RETRY_S,
        )

    def _change_hands(
        self, action: actions.RequestFreed | actions.RequestAdopted | actions.FenceConductor | actions.DropOutputLog
    ) -> None:
        """Sequences end, are kept for a while, and go from one conductor to another."""
        match action:
            case actions.RequestFreed(number, logged):
                if logged:
                    self._logged[number] = self._members(number)
                self._leave(number)
            case actions.DropOutputLog(number):
                if self._logged.pop(number, None) is None:
                    self._leave(number)
            case actions.FenceConductor(number, stream):
                self._ears.failed(
                    stream, number, Failure(FailureKind.INVALID, "another conductor has it", field=FENCE_FIELD)
                )
            case actions.RequestAdopted(number, stream, positions):
                members = self._members(number) if number in self._sequences else self._logged[number]
                now, pairs = self._world.now, zip(members, positions, strict=True)
                news = [
                    SequenceReport(member.number, member.again(at, stream, now), not member.left)
                    for member, at in pairs
                ]
                self._ears.tokens(stream, [report for report in news if report.made is not None or report.over])
                if members[0].why:
                    self._ears.failed(stream, number, Failure(FailureKind.STREAM, members[0].why))

    def _leave(self, transfer: int) -> None:
        self._sources.pop(transfer, None)
        for member in self._members(transfer):
            del self._sequences[member.number]

    def _ending(self, transfer: int, why: str) -> None:
        first = self._sequences[transfer]
        stream, kind = first.stream, FailureKind.STREAM if first.whole else FailureKind.TRANSFER
        for member in self._members(transfer):
            member.why, member.stream = why, 0
        if stream:
            self._ears.failed(stream, transfer, Failure(kind, why))

    def _io(self, action: actions.SwapOut | actions.SwapIn | actions.StoreBlock) -> None:
        if isinstance(action, actions.SwapOut | actions.SwapIn):
            self._copies.swap(action.io, len(action.blocks))
            return
        member = self._sequences[action.id]
        store = self._stores[member.stores[action.store]]
        self._copies.write(action.io, store, member.chain(action.index + 1))

    def _note_keys(self) -> None:
        events = self.core.blocks.take_events()
        if events.stored or events.removed:
            self._ears.keys(events)
