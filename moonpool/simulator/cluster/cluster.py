"""A whole cluster in virtual time: wires the parts, feeds them with a trace, crashes some of them."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from moonpool.base.kv.blocks import KeyChanges
from moonpool.conductor.core.failures import Failure
from moonpool.conductor.core.request_spec import DecodeReservation
from moonpool.simulator.clock import PS, SimulatedWorld, ps
from moonpool.simulator.cluster.clients import Clients
from moonpool.simulator.cluster.conductor import Conductor, owner_of
from moonpool.simulator.cluster.config import LEAPS, ClusterConfig, Runs
from moonpool.simulator.cluster.decode import DecodeListener, SimulatedDecode
from moonpool.simulator.cluster.engine import SharedMachine
from moonpool.simulator.cluster.machines import EngineInstance, Instances, Machines
from moonpool.simulator.cluster.prefill import Peers, SimulatedPrefill
from moonpool.simulator.cluster.requests import Request, SequenceReport, keys_of, prompt_key_of
from moonpool.simulator.cluster.store import Readable, Store
from moonpool.simulator.network import Calls, Link, SimulatedNetwork
from moonpool.simulator.traces.closed_loop import ClosedLoop
from moonpool.simulator.traces.mooncake import TraceRequest

Placed = tuple[int, TraceRequest]
"""Place in the trace, from 1 on, and the request."""
DETECTION_S = 3.0
"""Until the conductor notices that an instance is lost."""


class Cluster:
    """All parts.

    Args:
        config: what there is.
        ended: called with each request that has ended.
        runs: decode steps.
    """

    def __init__(
        self,
        config: ClusterConfig,
        ended: Callable[[Request], None],
        *,
        runs: Runs = LEAPS,
    ) -> None:
        self.config = config
        self.world = SimulatedWorld()
        self.network = SimulatedNetwork(self.world)
        self.calls = Calls(self.world, config.delays, config.seed)
        self._machine = SharedMachine(config.host_slowdown)
        self.stores = [self._store(number) for number in range(config.kvstore)]
        self.prefills = [self._prefill(number) for number in config.prefill_numbers]
        self.decodes = [self._decode(number, runs) for number in config.decode_numbers]
        self._engines = Instances(
            {prefill.name: prefill for prefill in self.prefills}, {decode.name: decode for decode in self.decodes}
        )
        self.machines = Machines(self.world, self._engines, config.role_change_s, self._gone, self._there)
        self._loop = ClosedLoop()
        self._report = ended
        self.clients = Clients(self.world, config, self._ended)
        self.conductors: list[Conductor] = []
        for number in range(config.conductors):
            self.conductors.append(self._conductor(number))
        self.clients.conductors = self.conductors
        self._following = 0  # requests with ended predecessors that still wait for their delay
        self._coming = False

    def _conductor(self, number: int) -> Conductor:
        change = self.machines.change
        return Conductor(self.world, self.config, self.calls, self._engines, self.stores, self.clients, change, number)

    def _store(self, number: int) -> Store:
        name = f"s{number}"
        return Store(
            self.world, self.network, self.config, name, partial(self._keys, name), partial(self._changed, name)
        )

    def _prefill(self, number: int) -> SimulatedPrefill:
        name = f"p{number}"
        up = number < self.config.prefill
        peers = Peers(
            partial(self._keys, name), partial(self._changed, name), self._open, self._heard, self._whole, self._give_up
        )
        stores = self.stores, self._readable
        return SimulatedPrefill(self.network, self.config, name, *stores, self.calls, peers, self._machine, up=up)

    def _readable(self, name: str) -> Readable:
        return self.stores[int(name[1:])] if name[0] == "s" else self._engines[name].pool

    def _decode(self, number: int, runs: Runs) -> SimulatedDecode:
        name = f"d{number}"
        config = self.config
        up = number >= config.prefill if config.roles.swap else number < config.decode + config.both
        ears = DecodeListener(
            partial(self._tokens, name), partial(self._failed, name), partial(self._keys, name),
            partial(self._changed, name),
        )  # fmt: skip
        parts = self.stores, ears, runs, self._machine
        return SimulatedDecode(self.network, self.config, name, *parts, find=self._readable, up=up)

    # Requests

    def feed(self, requests: Iterable[TraceRequest]) -> None:
        """Let requests come at their times; the trace is read as time goes on."""
        self._next(iter(enumerate(requests, 1)))

    def _next(self, requests: Iterator[Placed]) -> None:
        """Read on to the next request with an arrival time; requests before wait for others."""
        coming = next(requests, None)
        while coming is not None and coming[1].wait_for:
            if not self._loop.keeps(*coming):
                self._follow(coming)
            coming = next(requests, None)
        self._coming = coming is not None
        if coming is not None:
            at = ps(coming[1].timestamp / 1000 / self.config.rate)
            self.world.at(max(at, self.world.now), self._arrive, (coming, requests))

    def _arrive(self, coming: tuple[Placed, Iterator[Placed]]) -> None:
        self._ask(coming[0])
        self._next(coming[1])

    def _follow(self, coming: Placed) -> None:
        """Start a request's delay once the requests before have ended. `rate` does not hurry tools and people."""
        self._following += 1
        self.world.after(ps(coming[1].delay / 1000), self._ask_next, coming)

    def _ask_next(self, coming: Placed) -> None:
        self._following -= 1
        self._ask(coming)

    def _ask(self, coming: Placed) -> None:
        place, trace = coming
        block_size = self.config.block_size
        lengths, keys = (trace.input_length, trace.output_length), keys_of(trace, block_size)
        wanted = Request(place, self.world.now, *lengths, keys, choices=trace.choices, tenant=trace.tenant)
        wanted.prompt_key = prompt_key_of(trace, block_size)
        wanted.name, wanted.session = trace.name, trace.session
        self.clients.arrive(wanted)

    def _ended(self, request: Request) -> None:
        self._report(request)
        for coming in self._loop.ended(request.name):
            self._follow(coming)

    @property
    def busy(self) -> bool:
        """Whether requests are there or to come."""
        return self._coming or self._following > 0 or len(self.clients) > 0

    # Messages between parts

    def _keys(self, name: str, changes: KeyChanges) -> None:
        for conductor in self.conductors:
            conductor.members.keys(name, changes)

    def _changed(self, name: str) -> None:
        for conductor in self.conductors:
            conductor.members.changed(name)

    def _tokens(self, name: str, stream: int, news: list[SequenceReport]) -> None:
        self._owner(stream).orders.streams.get(name).tell(stream, news)

    def _failed(self, name: str, stream: int, transfer: int, failure: Failure) -> None:
        self._owner(stream).orders.streams.get(name).refuse(stream, transfer, failure)

    def _owner(self, stream: int) -> Conductor:
        return self.conductors[owner_of(stream, len(self.conductors))]

    def _at(self, target: DecodeReservation) -> SimulatedDecode | None:
        """A promise's instance, if the instance is still there."""
        decode = self._engines.decodes[target.decode]
        return decode if decode.up and decode.epoch == target.epoch else None

    def _open(self, target: DecodeReservation) -> Link | None:
        decode = self._at(target)
        return decode.receives if decode is not None and decode.open(target.transfer_id) else None

    def _heard(self, target: DecodeReservation) -> None:
        if (decode := self._at(target)) is not None:
            decode.heard(target.transfer_id)

    def _whole(self, target: DecodeReservation) -> bool:
        decode = self._at(target)
        return decode is not None and decode.kv_whole(target.transfer_id)

    def _give_up(self, target: DecodeReservation) -> None:
        if (decode := self._at(target)) is not None:
            decode.give_up(target.transfer_id)

    # Faults

    def crash(self, name: str, down_s: float) -> None:
        """An instance, a store or a conductor ("c0") loses everything and comes back, empty, after some time."""
        kind, number = name[0], int(name[1:])
        if kind == "c":
            self._crash_conductor(self.conductors[number], down_s)
            return
        if kind == "s":
            self._replace_store(self.stores[number])
            return
        instance = self._engines[name]
        if instance.up:
            instance.crash()
            instance.up = False
            self._lose_source(name)
            for conductor in self.conductors:
                conductor.members.silence(name)
            self.world.after(ps(DETECTION_S), self._lost, name)
            self.world.after(ps(max(down_s, DETECTION_S) + 1.0), self._back, instance)

    def _lost(self, name: str) -> None:
        for conductor in self.conductors:
            conductor.lost(name)

    def _gone(self, instance: EngineInstance) -> None:
        """The instance has left, with no work under way."""
        self._lose_source(instance.name)
        for conductor in self.conductors:
            conductor.members.silence(instance.name)
        self._lost(instance.name)

    def _replace_store(self, store: Store) -> None:
        """Put an empty store in place; the conductor hears at once."""
        store.begin_anew()
        self._lose_source(store.name)
        for conductor in self.conductors:
            conductor.store_joins(store)

    def _lose_source(self, name: str) -> None:
        for instance in self._engines:
            instance.lose_source(name)

    def _crash_conductor(self, conductor: Conductor, down_s: float) -> None:
        if conductor.up:
            conductor.crash()
            self.world.after(ps(down_s + 1.0), lambda _: conductor.begin_anew())

    def _back(self, instance: EngineInstance) -> None:
        instance.up = True
        self._there(instance)

    def _there(self, instance: EngineInstance) -> None:
        for conductor in self.conductors:
            conductor.back(instance)

    # The end

    def run(self) -> None:
        """Run until no event is left."""
        self.world.run()

    def check_at_rest(self) -> None:
        """Assert that every request has ended and that everything came back."""
        assert not self.network.flows
        for prefill in self.prefills:
            prefill.check_at_rest()
        for decode in self.decodes:
            decode.check_at_rest()
        assert not len(self.clients)
        assert not len(self._loop)
        for conductor in self.conductors:
            conductor.check_at_rest()

    def use(self) -> dict[str, float]:
        """How busy the parts were: shares of the time, and means."""
        elapsed = max(1, self.clients.ended_at)
        decode = [instance.use for instance in self.decodes]
        steps = max(1, sum(use.steps for use in decode))
        pools = [prefill.pool for prefill in self.prefills] + [decode.pool for decode in self.decodes]
        return {
            "prefill_busy": sum(instance.use.busy for instance in self.prefills) / elapsed / max(1, len(self.prefills)),
            "decode_busy": sum(use.busy for use in decode) / elapsed / len(decode),
            "decode_batch": sum(use.sequence_steps for use in decode) / steps,
            "preempted": sum(instance.preempted for instance in self.decodes),
            "loaded_blocks": sum(store.read_blocks for store in self.stores),
            "loaded_from_disk_blocks": sum(store.disk_blocks for store in self.stores),
            "loaded_from_peers_blocks": sum(pool.read_blocks for pool in pools),
            "copied_blocks": sum(prefill.core.copies.copied_blocks for prefill in self.prefills),
            "virtual_s": elapsed / PS,
        }
