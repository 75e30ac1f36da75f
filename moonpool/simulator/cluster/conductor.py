"""The conductor in virtual time: the service's own core decides, this module carries the decisions out.

A lost conductor's successor starts without knowledge. Instances join, and clients resume their requests. Several
conductors side by side do not know each other; all instances join all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.base.settings import complete
from moonpool.conductor.core.actions import (
    Action,
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CancelReservation,
    ChangeRole,
    CompleteRequest,
    DropRequest,
    EndpointPicked,
    FailRequest,
    Order,
    Rehash,
    RenewReservation,
    Resync,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.events import ClientGone, Event, Rehashed, RequestArrived
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.request_spec import RequestSpec, ResumeState
from moonpool.conductor.core.retention import TellSession
from moonpool.conductor.core.routing import RoutingConfig
from moonpool.conductor.placement.policies.registry import load_decode_policy, load_policy
from moonpool.engine.decode.core.actions import BeginPrompt
from moonpool.engine.prefill.core.actions import ReportFirstToken
from moonpool.simulator.clock import PS, SimulatedWorld, ps
from moonpool.simulator.cluster.admission import FOREVER_S, LateCheck, PoolGate, limits_of, slo_of
from moonpool.simulator.cluster.clients import RETRY_S, Clients, Serving
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.core_host import CoreHost
from moonpool.simulator.cluster.decode import SimulatedDecode
from moonpool.simulator.cluster.dispatcher import CallDispatcher, DecodeStreams
from moonpool.simulator.cluster.machines import Instances
from moonpool.simulator.cluster.members import Members
from moonpool.simulator.cluster.prefill import SimulatedPrefill
from moonpool.simulator.cluster.requests import (
    DONE,
    GIVEN_UP,
    REFUSED,
    TOO_LARGE,
    PlacedSequence,
    Request,
    TokenTimes,
    keys_of_chain,
)
from moonpool.simulator.cluster.store import Store
from moonpool.simulator.network import Calls

ROUTING_LEFT_OUT = {
    "kvstore_replicas": "simulated kvstores hold one copy of each prefix, as by default",
    "shadow_policy": "a trial beside a live policy, whereas runs compare policies",
}
"""Fields of `RoutingConfig` that keep their defaults, and why."""


class Conductor:
    """Owns one conductor's core.

    Args:
        world: the time.
        config: the cluster's.
        calls: carry messages.
        engines: the instances, also instances that are away now.
        stores: the kvstores.
        clients: the requests' clients.
        change_role: lets an instance change roles.
        number: this conductor's number, unique among conductors.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        config: ClusterConfig,
        calls: Calls,
        engines: Instances,
        stores: list[Store],
        clients: Clients,
        change_role: Callable[[ChangeRole], None],
        number: int = 0,
    ) -> None:
        self._world, self._config, self._calls, self._clients = world, config, calls, clients
        self._engines, self._stores, self._change_role, self._number = engines, stores, change_role, number
        self._slo, self._deadline_s = slo_of(config), config.deadline_s or FOREVER_S
        self._prompt_ps = ps(config.delays.prompt_s)
        self._asked = self._streams = self._lives = 0
        self.late = LateCheck(config)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start a conductor without knowledge; all present instances join."""
        config, calls = self._config, self._calls
        self._lives += 1
        name = f"conductor-{self._number}/{self._lives}"
        self.core = ConductorCore(limits_of(config), ClusterView(routing_of(config, self._number)), config.roles)
        self.host: CoreHost[Event, Action] = CoreHost(self._world, self.core, self._perform)
        self.members = Members(config, calls, self.host.post)
        streams = DecodeStreams(calls, self._engines.decodes, name, self._stream_number)
        self.orders = CallDispatcher(
            calls, self._engines, self.members, config, self.host.post, self._first_token, self._prompt_computed,
            streams, name,
        )  # fmt: skip
        self._serving: dict[int, Serving] = {}
        self.pool_gate = PoolGate(config)
        self.up = True
        for instance in self._engines:
            self.back(instance)
        for store in self._stores:
            self.store_joins(store)

    def crash(self) -> None:
        """Forget everything; clients resume their requests, again and again until a conductor answers."""
        self.up = False
        self.host.close()
        self.members.abandon()
        self.orders.abandon()
        self._clients.lost([serving.request for serving in self._serving.values()])
        self._serving = {}

    def _stream_number(self) -> int:
        """Unique among conductors; names the owner (`owner_of`)."""
        self._streams += 1
        return self._streams * self._config.conductors + self._number

    def check_at_rest(self) -> None:
        """Assert that no count and no work is left."""
        self.core.check_invariants()
        assert not self._serving
        assert not len(self.core.scheduler)
        assert not self.core.cluster.claims
        assert not len(self.orders)
        assert not len(self.orders.streams)

    # The life of a request

    def ask(self, request: Request) -> None:
        """See `Frontend.ask`."""
        if self.pool_gate.refuses(request, self.core.cluster, self._world.seconds):
            self._clients.end(request, REFUSED)
            return
        self._take(Serving(self._asks(request), request), request.keys)

    def resume(self, before: Serving) -> None:
        """See `Frontend.resume`."""
        request, fence = before.request, before.fence + before.rejoined + 1
        request.resumed += 1
        assert before.sequence is not None
        target = replace(before.target, held_blocks=0) if before.target is not None else None  # clients do not tell
        ask = self._asks(request, ResumeState(request.kept, fence, before.sequence.id, target))
        serving = Serving(ask, request, request.kept, before.sequence, before.plan, before.target, fence)
        self._take(serving, self._keys(request))

    def rejoin(self, before: Serving) -> bool:
        """See `Frontend.rejoin`; the core does not see the call."""
        return self._serving.get(before.ask.number) is before

    def leave(self, before: Serving) -> None:
        """See `Frontend.leave`."""
        if self.rejoin(before):
            before.away = True
            self.host.post(ClientGone(before.ask.number))

    def _take(self, serving: Serving, keys: tuple[BlockKey, ...]) -> None:
        self._serving[serving.ask.number] = serving
        self._clients.taken(serving)
        self.host.post(RequestArrived(serving.ask, keys))

    def _asks(self, request: Request, resumed: ResumeState | None = None) -> RequestSpec:
        """The arrival is now: if the request was elsewhere, or comes again, the first arrival is not known here."""
        self._asked += 1
        return RequestSpec(
            number=self._asked,
            id=f"r{request.number}",
            prompt_tokens=request.tokens,
            max_tokens=request.answer,
            prompt_key=request.prompt_key or request.number.to_bytes(32, "little"),
            slo=self._slo,
            arrived=(self._world.now - self._prompt_ps) / PS,
            deadline=request.arrived / PS + self._deadline_s,
            choices=request.choices,
            tenant=request.tenant,
            resumed=resumed,
            session=SessionTurn(id=request.session) if request.session else None,
        )

    def _keys(self, request: Request) -> tuple[BlockKey, ...]:
        """Of prompt and answer so far."""
        return keys_of_chain(request, (request.tokens + request.kept) // self._config.block_size)

    def _prompt_computed(self, number: int, told: ReportFirstToken | BeginPrompt) -> bool:
        """A prompt is computed; returns whether the request goes on."""
        serving = self._serving[number]
        request = serving.request
        assert serving.plan is not None
        decode = serving.target.decode if serving.target is not None else ""
        if self.late.refuses(self.core.cluster.forecasts, request, decode, serving.plan.prefill.prefill_s):
            self.host.post(ClientGone(number))
            return False
        self.pool_gate.load.began(number, self._world.seconds)
        request.reused = told.cached_tokens + told.loaded_tokens
        return True

    def _first_token(self, number: int, told: ReportFirstToken) -> bool:
        if not self._prompt_computed(number, told):
            return False
        serving = self._serving[number]
        request, now = serving.request, self._world.now
        for answer in request.answers:
            if answer.made == serving.continued:  # several that began again have theirs
                answer.take(TokenTimes(now, [], now))
        return True

    def _end(self, number: int, outcome: str) -> None:
        self.pool_gate.load.ended(number, self._world.seconds)
        self._clients.end(self._serving.pop(number).request, outcome)

    def _fail(self, action: FailRequest) -> None:
        request, failure = self._serving[action.request].request, action.failure
        nobody = action.refused and failure.kind is FailureKind.UNAVAILABLE and not request.made
        if nobody and self._world.seconds + RETRY_S < request.arrived / PS + self._deadline_s:
            del self._serving[action.request]
            self._clients.again(request)
        else:
            self._end(action.request, _outcome(failure))

    # The core's actions

    def _perform(self, action: Action) -> None:
        match action:
            case AnnouncePlacement() | Rehash():
                self._place(action, self._serving[action.request])
            case CompleteRequest(request):
                self._end(request, DONE)
            case FailRequest():
                self._fail(action)
            case DropRequest(request) if self._serving[request].away:
                self.pool_gate.load.ended(request, self._world.seconds)
                del self._serving[request]
            case DropRequest(request):
                self._end(request, REFUSED)  # by the late check
            case ReplicatePrefix():
                self.orders.replicate(action)
            case StopReplication():
                self.orders.stop_replication(action)
            case TellSession(instance, hint, prefetch):
                store = next(store for store in self._stores if store.name == instance)
                keys = list(map(BlockKey, prefetch))
                self._calls.send(lambda: store.tell(hint, keys))
            case Resync(instance):
                raise AssertionError(f"a message of {instance} is missing")
            case ChangeRole():
                self._calls.send(lambda: self._change_role(action))
            case EndpointPicked():
                raise AssertionError("no picker asks here")
            case _:
                self._order(action)

    def _order(self, action: Order) -> None:
        """Something is to be done at an instance."""
        match action:
            case CallReserve():
                self.orders.reserve(action, self._sequence(action))
            case CallPrefill():
                self.orders.prefill(action, self._sequence(action))
            case StartDecode():
                self.orders.start(action, self._sequence(action))
            case TakeOverSequence():
                self.orders.adopt(action, self._sequence(action))
            case RenewReservation():
                self.orders.renew(action)
            case CancelReservation():
                self.orders.undo(action)
            case CancelIo(io):
                self.orders.cancel(io)

    def _place(self, action: AnnouncePlacement | Rehash, serving: Serving) -> None:
        request = serving.request
        if isinstance(action, AnnouncePlacement):
            request.attempts += action.sequence != serving.announced
            serving.announced = action.sequence
            if request.attempts == 1:
                choice = action.plan.prefill
                request.prefill, request.predicted_queue_s = choice.id, choice.queue_s
                elsewhere_s = serving.ask.arrived - request.arrived / PS
                request.predicted_ttft_s = elsewhere_s + action.waited_s + choice.ttft_s
            serving.plan, serving.target = action.plan, action.target
            begins_at = self._world.seconds + action.plan.prefill.ttft_s
            self.pool_gate.load.placed(action.request, request.tokens, begins_at)
            return
        serving.continued = request.kept
        self.host.post(Rehashed(action.request, request.kept, self._keys(request)))

    def _sequence(self, action: CallReserve | CallPrefill | StartDecode | TakeOverSequence) -> PlacedSequence:
        """What engines are told under an order's id."""
        serving = self._serving[action.request]
        if serving.sequence is None or serving.sequence.id != action.sequence:
            request, made = serving.request, serving.continued
            tokens, left = request.tokens + made, request.answer - made
            serving.sequence = PlacedSequence(request, action.sequence, tokens, left, serving.fence, request.choices)
        return serving.sequence

    # Instances

    def lost(self, name: str) -> None:
        """An instance is lost."""
        self.members.leave(name, "is lost")
        self.orders.streams.lost(name)

    def back(self, instance: SimulatedPrefill | SimulatedDecode) -> None:
        """An instance is there (again)."""
        if self.up and instance.up:
            self.members.join(instance.name, instance.load, KeyChanges(instance.keys()), instance.epoch)

    def store_joins(self, store: Store) -> None:
        """A kvstore is there, perhaps instead of an earlier store."""
        if self.up:
            self.members.join(store.name, store.load, store.held(), store.epoch)


def owner_of(stream: int, conductors: int) -> int:
    """The number of the stream's conductor."""
    return stream % conductors


def routing_of(config: ClusterConfig, number: int) -> RoutingConfig:
    """How a conductor routes requests."""
    given = partial(
        RoutingConfig,
        balancing_threshold=config.threshold,
        policy=load_policy(config.policy),
        decode_policy=load_decode_policy(config.decode_policy),
        seed=config.seed + number,
        decode_prompt_tokens=config.decode_prompt_tokens,
        slow_factor=config.slow_factor,
        peers=config.peers,
        copy_share=config.copy_share,
        prefetch_share=config.prefetch_share,
    )
    return complete(given, ROUTING_LEFT_OUT)


def _outcome(failure: Failure) -> str:
    match failure.kind:
        case FailureKind.INVALID:
            return TOO_LARGE
        case FailureKind.OVERLOADED:
            return REFUSED
        case _:
            return GIVEN_UP
