"""The conductor in virtual time: the service's own core decides, this does what it says and keeps the requests."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonpool.core.kernel import Cancel
from services.conductor.core.conductor import ConductorCore
from services.conductor.core.failures import Failure, Kind
from services.conductor.core.messages import (
    Action,
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
    Resync,
    Start,
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
    decode: str = ""
    """Where it was placed at last."""


class Conductor:
    """Owns the conductor's core.

    Args:
        world: the time.
        config: of the cluster.
        calls: carry messages.
        prefills, decodes: the instances.
        stores: names of the kvstores that are to join.
        ended: called with each request when it has ended.
    """

    def __init__(
        self,
        world: World,
        config: ClusterConfig,
        calls: Calls,
        prefills: list[PrefillInstance],
        decodes: list[DecodeInstance],
        stores: Iterable[str],
        ended: Callable[[Request], None],
    ) -> None:
        self.core = ConductorCore(limits_of(config), _picture(config))
        self.host: Host[Event, Action] = Host(world, self.core, self._perform)
        self.members = Members(config, calls, self.host.post)
        self.orders = Orders(calls, prefills, decodes, self.members, config, self.host.post, self._first_token)
        self.late = LateCheck(config, self.core.picture.forecasts)
        self._world, self._config, self._ended = world, config, ended
        self._slo, self._deadline_s = slo_of(config), config.deadline_s or FOREVER_S
        self._serving: dict[int, Serving] = {}
        self._open: dict[Request, Serving | None] = {}
        self._asked = 0
        self.ended_at = 0
        """When the last request ended."""
        instances: list[PrefillInstance | DecodeInstance] = [*prefills, *decodes]
        for instance in instances:
            self.members.join(instance.name, instance.load, instance.incarnation)
        for store in stores:
            self.members.join(store, None)

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
        self._asked += 1
        arrived = request.arrived / PS
        ask = Ask(
            number=self._asked,
            id=f"r{request.number}",
            prompt_tokens=request.tokens,
            max_tokens=request.answer,
            prompt_key=request.keys[0] if request.keys else request.number.to_bytes(32, "little"),
            slo=self._slo,
            arrived=arrived,
            deadline=arrived + self._deadline_s,
        )
        self._open[request] = self._serving[ask.number] = Serving(ask, request)
        self.host.post(Arrived(ask, request.keys))

    def _first_token(self, sequence: Sequence, told: TellToken) -> bool:
        request = sequence.request
        serving = self._open[request]
        assert serving is not None
        assert serving.plan is not None
        if self.late.refuses(request, serving.decode, serving.plan.prefill.prefill_s):
            self.host.post(ClientGone(serving.ask.number))
            return False
        request.reused = told.cached_tokens + told.loaded_tokens
        now = self._world.now
        request.take(Made(now, [], now))
        return True

    def _end(self, number: int, outcome: str) -> None:
        request = self._serving.pop(number).request
        del self._open[request]
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
            self._end(action.request, _outcome(failure))

    # The core's actions

    def _perform(self, action: Action) -> None:
        match action:
            case Announce() | Rehash():
                self._place(action, self._serving[action.request])
            case Complete(request):
                self._end(request, DONE)
            case Fail():
                self._fail(action)
            case Drop(request):
                self._end(request, REFUSED)  # the late check alone sends clients away
            case Reserve():
                self.orders.reserve(action, self._sequence(action))
            case Prefill():
                self.orders.prefill(action, self._sequence(action))
            case Start():
                self.orders.start(action, self._sequence(action))
            case Renew():
                self.orders.renew(action)
            case Undo():
                self.orders.undo(action)
            case Cancel(io):
                self.orders.cancel(io)
            case Resync(instance):
                raise AssertionError(f"a message of {instance} is missing")

    def _place(self, action: Announce | Rehash, serving: Serving) -> None:
        request = serving.request
        if isinstance(action, Announce):
            request.attempts += 1
            if request.attempts == 1:
                request.predicted_ttft_s = action.waited_s + action.plan.prefill.ttft_s
            serving.plan, serving.decode = action.plan, action.target.decode if action.target is not None else ""
            return
        serving.continued = request.made
        keys = keys_of_chain(request, (request.tokens + request.made) // self._config.block_tokens)
        self.host.post(Rehashed(action.request, request.made, keys))

    def _sequence(self, action: Reserve | Prefill | Start) -> Sequence:
        """What engines are told under the id of an order."""
        serving = self._serving[action.request]
        if serving.sequence is None or serving.sequence.id != action.sequence:
            request, made = serving.request, serving.continued
            serving.sequence = Sequence(request, action.sequence, request.tokens + made, request.answer - made)
        return serving.sequence

    # Instances

    def lost(self, name: str) -> None:
        """An instance is lost."""
        self.members.leave(name, "is lost")
        self.orders.streams.lost(name)

    def back(self, instance: PrefillInstance | DecodeInstance) -> None:
        """An instance is there again, empty."""
        self.members.join(instance.name, instance.load, instance.incarnation)


def _picture(config: ClusterConfig) -> Picture:
    return Picture(
        balancing_threshold=config.threshold,
        policy=load_policy(config.policy),
        seed=config.seed,
        rest_tokens=config.decode_prompt_tokens,
    )


def _outcome(failure: Failure) -> str:
    match failure.kind:
        case Kind.INVALID:
            return TOO_LARGE
        case Kind.OVERLOADED:
            return REFUSED
        case _:
            return GIVEN_UP
