"""The conductor in virtual time: the service's own core decides, this does what it says and keeps the requests.

When it is lost, another one takes its place, who knows nothing. Instances join it, and clients resume their requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.kernel import Cancel
from moonpool.kv.keys import BlockKey
from services.conductor.core.conductor import ConductorCore
from services.conductor.core.failures import Failure, Kind
from services.conductor.core.hot import Replicate
from services.conductor.core.messages import (
    Action,
    Adopt,
    Announce,
    Arrived,
    Ask,
    ClientGone,
    Complete,
    Drop,
    Event,
    Fail,
    Prefill,
    Rehash,
    Rehashed,
    Renew,
    Reserve,
    Resumed,
    Resync,
    Start,
    Target,
    Undo,
)
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan
from services.conductor.policy import load_policy
from services.prefill.core.actions import TellToken
from simulator.cluster.config import ClusterConfig
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.entrance import FOREVER_S, LateCheck, limits_of, slo_of
from simulator.cluster.host import Host
from simulator.cluster.members import Members
from simulator.cluster.orders import Orders
from simulator.cluster.prefill import PrefillInstance
from simulator.cluster.requests import DONE, GIVEN_UP, REFUSED, TOO_LARGE, Made, Request, Sequence, keys_of_chain
from simulator.cluster.store import Store
from simulator.cluster.streams import DecodeStreams
from simulator.kernel.calls import Calls
from simulator.kernel.clock import PS, World, ps

RETRY_S = 1.0
"""Pause after which a client tries again when nobody can take its request."""


@dataclass(slots=True, eq=False)
class Serving:
    """A request that the core has not ended."""

    ask: Ask
    request: Request
    continued: int = 0
    """Tokens of the answer that are not made again, as at the last placement."""
    sequence: Sequence | None = None
    """The last one that engines have heard of."""
    plan: Plan | None = None
    target: Target | None = None
    """The promise of the last placement."""
    fence: int = 0
    """How often its client has resumed it."""


class Conductor:
    """Owns the conductor's core.

    Args:
        world: the time.
        config: of the cluster.
        calls: carry messages.
        prefills, decodes: the instances.
        stores: the kvstores.
        ended: called with each request when it has ended.
    """

    def __init__(
        self,
        world: World,
        config: ClusterConfig,
        calls: Calls,
        prefills: list[PrefillInstance],
        decodes: list[DecodeInstance],
        stores: list[Store],
        ended: Callable[[Request], None],
    ) -> None:
        self._world, self._config, self._calls, self._ended = world, config, calls, ended
        self._prefills, self._decodes, self._stores = prefills, decodes, stores
        self._slo, self._deadline_s = slo_of(config), config.deadline_s or FOREVER_S
        self._open: dict[Request, Serving | None] = {}
        self._asked = self._streams = self._lives = 0
        self.ended_at = 0
        """When the last request ended."""
        self.late = LateCheck(config)
        self.begin_anew()

    def begin_anew(self) -> None:
        """A conductor that knows nothing; all instances that are there join it."""
        config, calls = self._config, self._calls
        self._lives += 1
        name = f"conductor/{self._lives}"
        self.core = ConductorCore(limits_of(config), _picture(config))
        self.host: Host[Event, Action] = Host(self._world, self.core, self._perform)
        self.members = Members(config, calls, self.host.post)
        streams = DecodeStreams(calls, self._decodes, name, self._stream_number)
        self.orders = Orders(
            calls, self._prefills, self._decodes, self.members, config, self.host.post, self._first_token, streams, name
        )
        self._serving: dict[int, Serving] = {}
        self.up = True
        instances: list[PrefillInstance | DecodeInstance] = [*self._prefills, *self._decodes]
        for instance in instances:
            self.back(instance)
        for store in self._stores:
            self.store_joins(store)

    def crash(self) -> None:
        """Forgets everything; clients resume what they had, again and again until somebody answers."""
        self.up = False
        self.host.close()
        self.members.abandon()
        self.orders.abandon()
        for request in [serving.request for serving in self._serving.values()]:
            self._world.after(ps(RETRY_S), self._resume, request)
        self._serving = {}

    def _stream_number(self) -> int:
        self._streams += 1
        return self._streams

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def check_at_rest(self) -> None:
        """Asserts that nothing is counted or under way."""
        self.core.check_invariants()
        assert not len(self)
        assert not len(self.core.requests)
        assert not self.core.picture.claims
        assert not len(self.orders)
        assert not len(self.orders.streams)

    # The life of a request

    def arrive(self, request: Request) -> None:
        """A request has come; the core hears of it when it is tokenised and hashed."""
        self._open[request] = None
        self._world.after(ps(self._config.delays.prompt_s), self._ask, request)

    def _ask(self, request: Request) -> None:
        if not self.up:
            self._world.after(ps(RETRY_S), self._ask, request)
            return
        serving = self._open[request] = Serving(self._asks(request), request)
        self._serving[serving.ask.number] = serving
        self.host.post(Arrived(serving.ask, request.keys))

    def _asks(self, request: Request, resumed: Resumed | None = None) -> Ask:
        self._asked += 1
        arrived = request.arrived / PS
        return Ask(
            number=self._asked,
            id=f"r{request.number}",
            prompt_tokens=request.tokens,
            max_tokens=request.answer,
            prompt_key=request.keys[0] if request.keys else request.number.to_bytes(32, "little"),
            slo=self._slo,
            arrived=arrived,
            deadline=arrived + self._deadline_s,
            resumed=resumed,
        )

    def _resume(self, request: Request) -> None:
        """A client comes with what it has of an answer, and with where its conductor had placed it."""
        if not self.up:
            self._world.after(ps(RETRY_S), self._resume, request)
            return
        before = self._open[request]
        if before is None or before.sequence is None or before.plan is None:
            self._ask(request)  # it was never placed: it is new
            return
        if request.made == request.answer:
            self._end(request, DONE)
            return
        fence = before.fence + 1
        ask = self._asks(request, Resumed(request.made, fence, before.sequence.id, before.target))
        serving = Serving(ask, request, request.made, before.sequence, before.plan, before.target, fence)
        self._open[request] = self._serving[ask.number] = serving
        self.host.post(Arrived(ask, self._keys(request)))

    def _keys(self, request: Request) -> tuple[BlockKey, ...]:
        """Of prompt and answer so far."""
        return keys_of_chain(request, (request.tokens + request.made) // self._config.block_tokens)

    def _first_token(self, sequence: Sequence, told: TellToken) -> bool:
        request = sequence.request
        serving = self._open[request]
        assert serving is not None
        assert serving.plan is not None
        decode = serving.target.decode if serving.target is not None else ""
        if self.late.refuses(self.core.picture.forecasts, request, decode, serving.plan.prefill.prefill_s):
            self.host.post(ClientGone(serving.ask.number))
            return False
        request.reused = told.cached_tokens + told.loaded_tokens
        now = self._world.now
        request.take(Made(now, [], now))
        return True

    def _end(self, request: Request, outcome: str) -> None:
        serving = self._open.pop(request)
        if serving is not None:
            self._serving.pop(serving.ask.number, None)
        request.outcome, request.ended_at = outcome, self._world.now
        self.ended_at = self._world.now
        self._ended(request)

    def _fail(self, action: Fail) -> None:
        request, failure = self._serving[action.request].request, action.failure
        nobody = action.refused and failure.kind is Kind.UNAVAILABLE and not request.made
        if nobody and self._world.seconds + RETRY_S < request.arrived / PS + self._deadline_s:
            del self._serving[action.request]
            self._world.after(ps(RETRY_S), self._ask, request)
        else:
            self._end(request, _outcome(failure))

    # The core's actions

    def _perform(self, action: Action) -> None:
        match action:
            case Announce() | Rehash():
                self._place(action, self._serving[action.request])
            case Complete(request):
                self._end(self._serving[request].request, DONE)
            case Fail():
                self._fail(action)
            case Drop(request):
                self._end(self._serving[request].request, REFUSED)  # the late check alone sends clients away
            case Replicate():
                self.orders.replicate(action)
            case Resync(instance):
                raise AssertionError(f"a message of {instance} is missing")
            case _:
                self._order(action)

    def _order(self, action: Reserve | Prefill | Start | Adopt | Renew | Undo | Cancel) -> None:
        """Something is to be done at an instance."""
        match action:
            case Reserve():
                self.orders.reserve(action, self._sequence(action))
            case Prefill():
                self.orders.prefill(action, self._sequence(action))
            case Start():
                self.orders.start(action, self._sequence(action))
            case Adopt():
                self.orders.adopt(action, self._sequence(action))
            case Renew():
                self.orders.renew(action)
            case Undo():
                self.orders.undo(action)
            case Cancel(io):
                self.orders.cancel(io)

    def _place(self, action: Announce | Rehash, serving: Serving) -> None:
        request = serving.request
        if isinstance(action, Announce):
            request.attempts += 1
            if request.attempts == 1:
                request.predicted_ttft_s = action.waited_s + action.plan.prefill.ttft_s
            serving.plan, serving.target = action.plan, action.target
            return
        serving.continued = request.made
        self.host.post(Rehashed(action.request, request.made, self._keys(request)))

    def _sequence(self, action: Reserve | Prefill | Start | Adopt) -> Sequence:
        """What engines are told under the id of an order."""
        serving = self._serving[action.request]
        if serving.sequence is None or serving.sequence.id != action.sequence:
            request, made = serving.request, serving.continued
            tokens, left = request.tokens + made, request.answer - made
            serving.sequence = Sequence(request, action.sequence, tokens, left, serving.fence)
        return serving.sequence

    # Instances

    def lost(self, name: str) -> None:
        """An instance is lost."""
        self.members.leave(name, "is lost")
        self.orders.streams.lost(name)

    def back(self, instance: PrefillInstance | DecodeInstance) -> None:
        """An instance is there (again)."""
        if self.up and instance.up:
            self.members.join(instance.name, instance.load, instance.keys(), instance.incarnation)

    def store_joins(self, store: Store) -> None:
        """A kvstore is there, perhaps instead of another one."""
        if self.up:
            self.members.join(store.name, None, store.keys(), store.incarnation)


def _picture(config: ClusterConfig) -> Picture:
    return Picture(
        balancing_threshold=config.threshold,
        policy=load_policy(config.policy),
        seed=config.seed,
        rest_tokens=config.decode_prompt_tokens,
        slow_factor=config.slow_factor,
        peers=config.peers,
        copy_share=config.copy_share,
    )


def _outcome(failure: Failure) -> str:
    match failure.kind:
        case Kind.INVALID:
            return TOO_LARGE
        case Kind.OVERLOADED:
            return REFUSED
        case _:
            return GIVEN_UP
