"""A prefill instance in virtual time: the service's own core decides, this class carries the decisions out.

Steps take the time of the profile (`moonpool.simulator.cluster.engine`); loads, slices and write-back that of their
links. An instance with several stages is a pipeline over as many machines.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlocksLent
from moonpool.base.scheduling.latency import prefill_seconds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded, Tick
from moonpool.conductor.core.events import StalePlacement
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.instances import LoadFacts
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.engine.messages import WRITE_BACK_SHARE
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded
from moonpool.simulator.clock import PS, ps
from moonpool.simulator.cluster.config import ClusterConfig, prefill_core_settings
from moonpool.simulator.cluster.core_host import CoreHost
from moonpool.simulator.cluster.engine import Pipeline, SharedMachine
from moonpool.simulator.cluster.loads import PrefixLoader
from moonpool.simulator.cluster.requests import PlacedSequence
from moonpool.simulator.cluster.store import Readable, SimulatedPoolReads, Store
from moonpool.simulator.network import Calls, Flow, Link, SimulatedNetwork


class PromptClient(Protocol):
    """A prompt's owner, which hears how computing proceeds."""

    def accepted(self, number: int) -> None:
        """The prompt is in the queue, as the instance's so many-th."""

    def token(self, told: actions.ReportFirstToken) -> None:
        """The first token is there."""

    def delivered(self) -> None:
        """Decode has all the prompt's KV."""

    def over(self, result: Failure | StalePlacement | None) -> None:
        """No more news comes."""


@dataclass(slots=True, frozen=True)
class Peers:
    """What an instance reports.

    Attributes:
        keys: keys that entered the pool, and keys that left.
        changed: load or keys have changed.
        open: a transfer begins; returns the link for sending, None if decode does not know the transfer.
        heard: a part of a transfer has come.
        whole: the whole transfer has come; returns whether decode wants the KV.
        give_up: ends a transfer early.
    """

    keys: Callable[[KeyChanges], None]
    changed: Callable[[], None]
    open: Callable[[DecodeReservation], Link | None]
    heard: Callable[[DecodeReservation], None]
    whole: Callable[[DecodeReservation], bool]
    give_up: Callable[[DecodeReservation], None]


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt at a prefill instance."""

    sequence: PlacedSequence
    keys: tuple[BlockKey, ...]
    target: DecodeReservation | None
    sources: tuple[KVSource, ...]
    copies: tuple[events.WriteBackTarget, ...]
    client: PromptClient
    begun: bool = False
    """Whether a part of the prompt is computed, or is being computed."""
    to: Link | None = None


Event = events.Event | IoEnded[events.IoResult] | Tick


@dataclass(slots=True)
class PrefillUse:
    """What an instance did."""

    steps: int = 0
    busy: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0


class SimulatedPrefill:
    """One instance.

    Args:
        stores: the cluster's; blocks are written there.
        find: gives a store or another instance by name, to load from.
        calls: to decode.
        peers: are told what happens.
        machine: engines that share cores; None = separate cores.
        up: whether the instance is there at the beginning.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        config: ClusterConfig,
        name: str,
        stores: Iterable[Store],
        find: Callable[[str], Readable],
        calls: Calls,
        peers: Peers,
        machine: SharedMachine | None = None,
        *,
        up: bool = True,
    ) -> None:
        self.name = name
        self.stages = config.stages_of(name)
        self.sends = Link(f"{name} out", self.stages * config.transfer_bytes_per_s)
        self._world, self._network, self._config = network.world, network, config
        self._stores = {store.name: store for store in stores}
        self._find, self._calls, self._peers = find, calls, peers
        self.pool = SimulatedPoolReads(self.sends, self._hear)
        self._settings = prefill_core_settings(config, self.stages)
        self._receives = Link(f"{name} in", self.stages * config.load_bytes_per_s)
        self._machine = machine or SharedMachine()
        self._came = self._copies_came = 0
        self.epoch = 0
        self.up = up
        self.use = PrefillUse()
        self.begin_anew()

    def begin_anew(self) -> None:
        """An empty instance, as after a crash; what was under way has no effect."""
        self.epoch += 1
        self.core = PrefillScheduler(self._settings, self._config.profile.speeds)
        self.host: CoreHost[Event, actions.Action] = CoreHost(self._world, self.core, self._perform)
        self._prompts: dict[int, Prompt] = {}
        self._copies: dict[int, tuple[tuple[BlockKey, ...], str]] = {}
        self._opened: dict[int, DecodeReservation] = {}
        self._moving: dict[int, Flow | None] = {}
        self._write_back_room = max(1, self._settings.num_blocks // WRITE_BACK_SHARE)
        self._pipeline = Pipeline(
            self._world, self._settings.layers, self._settings.stages, self._layer_done, self._over, self._machine
        )
        self._loading = PrefixLoader(
            self._world, self._network, self._find, self._receives, self._settings.slice_bytes,
            self._settings.layers, self._load_ended, self._layer_loaded,
        )  # fmt: skip

    def crash(self) -> None:
        """Lose everything."""
        self.host.close()
        self._loading.stop()
        self._pipeline.close()
        for flow in self._moving.values():
            if flow is not None:
                self._network.cancel(flow)
        self.begin_anew()

    # Incoming events

    def submit(
        self,
        sequence: PlacedSequence,
        target: DecodeReservation | None,
        client: PromptClient,
        sources: tuple[KVSource, ...] = (),
        copies: tuple[events.WriteBackTarget, ...] = (),
        max_queue_s: float | None = None,
        delay_s: float = 0.0,
    ) -> int:
        """Queue a prompt, to be computed and sent to the target if there is one; return the prompt's number."""
        self._came += 1
        keys = sequence.keys(self._config.block_size)
        self._prompts[self._came] = Prompt(sequence, keys, target, sources, copies, client)
        held = None if target is None else target.held_blocks
        spec = EngineRequest(keys, sequence.tokens, sequence.tokens, tenant=sequence.request.tenant)
        asked = events.AddRequest(self._came, spec, held, sources, copies, max_queue_s=max_queue_s, delay_s=delay_s)
        self._tell(asked)
        return self._came

    def replicate(self, keys: tuple[BlockKey, ...], source: KVSource) -> None:
        """Copy a chain's blocks here."""
        self._copies_came += 1
        self._copies[self._copies_came] = keys, source.name
        self._tell(events.ReplicateBlocks(self._copies_came, keys, source))

    def stop_replication(self, tail: BlockKey) -> None:
        """The chain that ends with this key need not be copied any more."""
        self._tell(events.StopReplicating(tail))

    def leave(self, number: int) -> None:
        """Give up a prompt that is not wanted any more; ended prompts are ignored."""
        if number in self._prompts:
            self._tell(events.CancelPrefill(number))

    def drain(self) -> None:
        """Take no new prompts."""
        self._tell(events.Drain())

    @property
    def draining(self) -> bool:
        """Whether the instance takes no new prompts."""
        return self.core.draining

    @property
    def empty(self) -> bool:
        """Whether no work is under way."""
        return not self._prompts and not len(self.core.state.ios)

    def keys(self) -> list[BlockKey]:
        """What the pool holds."""
        return self.core.state.manager.keys()

    def load(self) -> LoadFacts:
        """The load as reported by the service."""
        state = self.core.state
        return LoadFacts(
            running=len(state.requests) - len(state.waiting),
            waiting=len(state.waiting),
            free_blocks=state.manager.num_free,
            cached_blocks=state.manager.num_cached,
            drain_s=self.core.drain_seconds(self._world.seconds),
            queued_tokens=self.core.queued_tokens,
            speeds=state.tracker.speeds,
            draining=self.core.draining,
            taken=self.core.taken,
        )

    def lose_source(self, source: str) -> None:
        """A store or another instance is gone: loads from there fail."""
        self._loading.lose(source)

    def check_at_rest(self) -> None:
        """Assert that no resource is held."""
        self.core.check_invariants()
        assert not self._prompts
        assert not len(self.core.state.ios)
        assert self.core.state.manager.num_used == 0

    def _tell(self, event: Event) -> None:
        self._hear(event)
        self._peers.changed()

    def _hear(self, event: Event) -> None:
        """Of progress, which changes no load that is worth a report."""
        self.host.post(event)
        keys = self.core.state.manager.take_events()
        if keys.stored or keys.removed:
            self._peers.keys(keys)

    def _layer_loaded(self, io: int, layer: int) -> None:
        self._hear(events.LayerLoaded(io, layer))

    def _load_ended(self, io: int, result: LoadEnded) -> None:
        self._tell(IoEnded(io, result))

    # Steps

    def _begin(self, order: actions.RunStep) -> None:
        speeds = self._config.profile.speeds
        seconds = speeds.prefill_base_s
        for chunk in order.chunks:
            prompt = self._prompts[chunk.id]
            seconds += prefill_seconds(speeds, chunk.end - chunk.start, chunk.start, steps=0, begins=not prompt.begun)
            prompt.begun = True
            self.use.computed_tokens += chunk.end - chunk.start
        self.use.steps += 1
        self.use.busy += ps(seconds) // self._settings.stages
        self._pipeline.begin(order.io, ps(seconds), gated=order.gated)

    def _layer_done(self, io: int, layer: int) -> None:
        self._hear(events.LayerComputed(io, layer))

    def _over(self, io: int, aborted: bool, seconds: float) -> None:
        self._tell(IoEnded(io, events.StepEnded(aborted, seconds)))

    def _steer(self, order: actions.OpenKVGate | actions.GiveUpStep) -> None:
        if isinstance(order, actions.OpenKVGate):
            self._pipeline.open_gate(order.step, order.layer)
        else:
            self._pipeline.abort(order.step)

    # The core's actions

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.SendSlices():  # first, as most are these
                self._send(action)
            case actions.OpenTransfer() | actions.AwaitVerdict():
                self._transfer(action)
            case actions.RunStep():
                self._begin(action)
            case actions.OpenKVGate() | actions.GiveUpStep():
                self._steer(action)
            case CancelIo(io):
                self._pipeline.abort(io)
                self._loading.cancel(io)
                moving = self._moving
                self._world.after(0, lambda _: self._moved(moving, io, events.IoFailed()))
            case LoadBlocks() | actions.ReadReplica():
                self._load(action)
            case actions.EndReplication(number):
                del self._copies[number]
            case BlocksLent():
                self.pool.answered(action)
            case actions.WriteBackBlocks():
                self._put(action)
            case (
                actions.AcceptRequest()
                | actions.ReportFirstToken()
                | actions.EndRequest()
                | actions.RefuseRequest()
                | actions.RefuseStaleRequest()
            ):
                self._say(action)
            case actions.CloseTransfer(number, aborted=True) if (target := self._opened.pop(number, None)) is not None:
                self._calls.send(lambda: self._peers.give_up(target), reliable=True)

    def _say(self, action: actions.PrefillAnswer) -> None:
        prompt = self._prompts[action.id]
        match action:
            case actions.AcceptRequest(number):
                prompt.client.accepted(number)
            case actions.ReportFirstToken():
                self.use.reused_tokens += action.cached_tokens + action.loaded_tokens
                prompt.client.token(action)
            case actions.RefuseRequest():
                del self._prompts[action.id]
                prompt.client.over(_refusal(action))
            case actions.RefuseStaleRequest(number, drain_s, taken):
                del self._prompts[number]
                prompt.client.over(StalePlacement(drain_s, taken))
            case actions.EndRequest():
                del self._prompts[action.id]
                self._end(action, prompt)

    def _end(self, action: actions.EndRequest, prompt: Prompt) -> None:
        if action.outcome is actions.PrefillOutcome.DONE:
            prompt.client.delivered()
            prompt.client.over(None)
            return
        failed = action.outcome is actions.PrefillOutcome.IO_FAILED
        prompt.client.over(
            Failure(FailureKind.TRANSFER if failed else FailureKind.UNAVAILABLE, f"the prompt {action.outcome.value}")
        )

    def _load(self, action: LoadBlocks | actions.ReadReplica) -> None:
        if isinstance(action, actions.ReadReplica):
            keys, source = self._copies[action.number]
        else:
            prompt = self._prompts[action.id]
            keys, source = prompt.keys[: action.first + len(action.blocks)], prompt.sources[action.source].name
        by_layer = isinstance(action, LoadBlocks)  # a copy's single layers are not waited for
        self._loading.begin(action.io, source, keys, action.first, action.timeout_s, by_layer=by_layer)

    def _put(self, action: actions.WriteBackBlocks) -> None:
        prompt, host = self._prompts[action.id], self.host
        store = self._stores[prompt.copies[action.copy].store]
        blocks = min(len(action.blocks), self._write_back_room)
        self._write_back_room -= blocks

        def over() -> None:
            if not host.closed:
                self._write_back_room += blocks
                self._tell(IoEnded(action.io, events.IoDone()))

        if blocks:
            store.write(prompt.keys[: action.first + blocks], self.sends, over)
        else:
            self._world.after(0, lambda _: over())

    # Transfers

    def _transfer(self, action: actions.OpenTransfer | actions.AwaitVerdict) -> None:
        prompt, moving = self._prompts[action.id], self._moving
        moving[action.io] = None
        if isinstance(action, actions.OpenTransfer):
            self._calls.send(lambda: self._open(action, prompt, moving), reliable=True)
        else:
            self._whole(action, prompt.target, moving)

    def _whole(
        self, order: actions.AwaitVerdict, target: DecodeReservation | None, moving: dict[int, Flow | None]
    ) -> None:
        """Decode has the whole transfer, unless the transfer was given up before or the instance was lost."""
        if moving is not self._moving or order.io not in moving:
            return
        assert target is not None
        self._opened.pop(order.id, None)
        result = events.IoDone() if self._peers.whole(target) else events.IoFailed()
        self._calls.send(lambda: self._moved(moving, order.io, result), reliable=True)

    def _moved(self, moving: dict[int, Flow | None], io: int, result: events.IoResult) -> None:
        """End a transfer's I/O; ignored if the transfer was given up before, or the instance was lost."""
        if moving is self._moving and io in moving:
            flow = moving.pop(io)
            if flow is not None:
                self._network.cancel(flow)
            self._tell(IoEnded(io, result))

    def _open(self, order: actions.OpenTransfer, prompt: Prompt, moving: dict[int, Flow | None]) -> None:
        assert prompt.target is not None
        if moving is not self._moving or order.io not in moving:
            return
        prompt.to = self._peers.open(prompt.target)
        if prompt.to is not None:
            self._opened[order.id] = prompt.target
        self._moved(moving, order.io, events.IoFailed() if prompt.to is None else events.IoDone())

    def _send(self, action: actions.SendSlices) -> None:
        prompt, io, begun, moving = self._prompts[action.id], action.io, self._world.now, self._moving
        link, target = prompt.to, prompt.target
        assert link is not None
        assert target is not None
        nbytes = self._bytes(action.pieces, prompt.sequence.tokens)

        def sent() -> None:
            self._peers.heard(target)
            self._moved(moving, io, events.SlicesSent(nbytes, (self._world.now - begun) / PS))

        moving[io] = self._network.send((self.sends, link), nbytes, sent)

    def _bytes(self, pieces: Iterable[actions.LayerBlocks], tokens: int) -> int:
        """Bytes of the tokens in the blocks; a prompt's last block may be part-filled."""
        size, slice_bytes, nbytes = self._config.block_size, self._settings.slice_bytes, 0
        for piece in pieces:
            begin, end = piece.first * size, (piece.first + len(piece.blocks)) * size
            nbytes += (min(tokens, end) - begin) * slice_bytes // size
        return nbytes


def _refusal(refused: actions.RefuseRequest) -> Failure:
    if refused.why is actions.RefusalReason.QUEUE_FULL:
        return Failure(
            FailureKind.OVERLOADED, "too many prompts wait", reason="queue_full", retry_after_s=refused.retry_after_s
        )
    kind = FailureKind.INVALID if refused.why is actions.RefusalReason.TOO_LONG else FailureKind.UNAVAILABLE
    return Failure(kind, f"the prompt is not taken: {refused.why.value}")
