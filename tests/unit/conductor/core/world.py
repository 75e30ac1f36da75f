"""A cluster around the core of requests, in which a test decides what happens; every promise of the core is checked."""

from collections import Counter
from typing import Any, TypeVar

from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded, Tick
from moonpool.conductor.core.actions import (
    Action,
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CancelReservation,
    CompleteRequest,
    DropRequest,
    FailRequest,
    LeaveSequence,
    Rehash,
    RenewReservation,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.events import (
    CallResult,
    CompletionReason,
    Event,
    FirstToken,
    InstanceJoined,
    InstanceLeft,
    KeysChanged,
    LoadReported,
    PrefillMeasurements,
    PromptComputed,
    Rehashed,
    RequestArrived,
    ReserveGranted,
    TokensArrived,
)
from moonpool.conductor.core.failures import NO_DECODE_ROOM, Failure, FailureKind
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.instances import InstanceKind as EngineKind
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.request_spec import DecodeReservation, RequestSpec, ResumeState, SloLimits
from moonpool.conductor.core.routing import RoutingConfig, RoutingDecision, RoutingRequest
from moonpool.conductor.core.scheduler import SchedulerLimits

BLOCK = 16
SHAPE = KVShape(BLOCK, token_bytes=10, layers=1)
SPEEDS = Speeds(prefill_per_token_s=0.001, decode_per_sequence_s=0.001)
LIMITS = SchedulerLimits(retries=3, recovery_s=15.0, room_wait_s=30.0, reserve_timeout_s=5.0)
LEASE_S = 60.0
NO_ROOM = Failure(FailureKind.OVERLOADED, "full", reason=NO_DECODE_ROOM, retry_after_s=1.0)
GONE = Failure(FailureKind.UNAVAILABLE, "gone")
HOW = PrefillMeasurements(computed_tokens=16, there_s=0.1)

A = TypeVar("A", bound=Action)


class CountedView(ClusterView):
    """Counts its plans."""

    plans = 0

    def plan(self, request: RoutingRequest) -> RoutingDecision:
        self.plans += 1
        return super().plan(request)


class World:
    """The core, its cluster, and a shell that keeps count of what was ordered and what was answered."""

    def __init__(
        self,
        prefills: int = 2,
        decodes: int = 2,
        limits: SchedulerLimits = LIMITS,
        total: int = 64,
        decode_prompt_tokens: int = 0,
        slow_factor: float = 0.0,
        copy_share: float = 0.0,
        prefetch_share: float = 0.0,
        boths: int = 0,
    ) -> None:
        """`boths`: so many of the decode instances, the last ones, are in the role both."""
        routing = RoutingConfig(
            decode_prompt_tokens=decode_prompt_tokens,
            slow_factor=slow_factor,
            peers=bool(copy_share),
            copy_share=copy_share,
            prefetch_share=prefetch_share,
        )
        self.core = ConductorCore(limits, CountedView(routing))
        self.members: dict[str, InstanceFacts] = {}
        self.now = 0.0
        self.actions: list[Action] = []
        self.calls: dict[int, CallReserve | CallPrefill | StartDecode | TakeOverSequence] = {}
        self.cancelled: set[int] = set()
        self.tokens: Counter[int] = Counter()
        self.several: set[int] = set()  # of several answers, or deferred ones: they begin again at prefill
        self.deferred: set[int] = set()  # their first tokens are candidates
        self.ends: dict[int, CompleteRequest | FailRequest | DropRequest] = {}
        self.arrived: set[int] = set()
        self.promises: dict[int, DecodeReservation] = {}
        self.rehashes: list[int] = []
        self.placed_with: Counter[int] = Counter()
        self.given: set[int] = set()
        self.drained = False  # an instance was: a request that is moved runs at two for a while
        self._transfers = 0
        for number in range(prefills):
            self.join_prefill(f"prefill-{number}")
        for number in range(decodes):
            self.join_decode(f"decode-{number}", total=total, both=number >= decodes - boths)

    @property
    def cluster(self) -> CountedView:
        assert isinstance(self.core.cluster, CountedView)
        return self.core.cluster

    # --- events -----------------------------------------------------------------------------------------------------

    def post(self, event: Event | Tick) -> list[Action]:
        out: list[Action] = []
        self.core.handle(self.now, event, out)
        for action in out:
            self._note(action)
        self.actions += out
        self.check()
        return out

    def arrive(
        self,
        *,
        prompt: int = 40,
        answer: int = 8,
        limit_s: float = 600.0,
        slo: SloLimits = SloLimits(),  # noqa: B008
        keys: tuple[bytes, ...] = (),
        choices: int = 1,
        deferred: bool = False,
        tenant: str = "",
        priority: int = 0,
        weight: float = 1.0,
        session: SessionTurn | None = None,
        expected: int = 0,
    ) -> int:
        number = self._new(choices, deferred=deferred)
        whose: dict[str, Any] = {
            "tenant": tenant, "priority": priority, "weight": weight, "choices": choices, "deferred": deferred,
            "session": session, "expected_tokens": expected,
        }  # fmt: skip
        ask = RequestSpec(number, f"r{number}", prompt, answer, b"key", slo, self.now, self.now + limit_s, **whose)
        self.post(RequestArrived(ask, keys))
        return number

    def holds(self, name: str, keys: tuple[bytes, ...]) -> None:
        """An instance tells that these blocks are all that it holds."""
        self.post(KeysChanged(name, 1, keys, (), snapshot_begin=True, snapshot_end=True))

    def resume(
        self,
        decode: str = "decode-0",
        *,
        epoch: int = 1,
        tokens: int = 3,
        answer: int = 8,
        choices: int = 1,
        deferred: bool = False,
    ) -> int:
        """A request comes whose client has some tokens, of a sequence at this instance."""
        number = self._new(choices, deferred=deferred)
        self.tokens[number] = tokens
        self.placed_with[number] = self._kept(number)
        target = DecodeReservation(decode, epoch, "", 77, 1, 0) if decode else None
        resumed, until = ResumeState(self._kept(number), 1, f"r{number}", target), self.now + 600.0
        how: Any = {"resumed": resumed, "choices": choices, "deferred": deferred}
        self.post(
            RequestArrived(
                RequestSpec(number, f"r{number}", 40, answer, b"key", SloLimits(), self.now, until, **how), ()
            )
        )
        return number

    def _new(self, choices: int, *, deferred: bool) -> int:
        number = len(self.arrived) + 1
        self.arrived.add(number)
        if choices > 1 or deferred:
            self.several.add(number)
        if deferred:
            self.deferred.add(number)
        return number

    def _kept(self, request: int) -> int:
        """Tokens that are part of what prefill computes."""
        return 0 if request in self.several else self.tokens[request]

    def promise(
        self,
        call: CallReserve,
        *,
        epoch: int | None = None,
        lease_s: float = LEASE_S,
        held: int = 0,
        tbt_s: float = 0.0,
    ) -> list[Action]:
        self._transfers += 1
        actual = call.epoch if epoch is None else epoch
        target = DecodeReservation(call.decode, actual, "localhost:1", self._transfers, 1, held)
        self.promises[target.transfer_id] = target
        return self.end(call, ReserveGranted(target, lease_s, tbt_s=tbt_s))

    def end(
        self, call: CallReserve | CallPrefill | StartDecode | TakeOverSequence, result: CallResult = None
    ) -> list[Action]:
        del self.calls[call.io]
        if isinstance(call, StartDecode):
            self.promises.pop(call.target.transfer_id, None)
        return self.post(IoEnded(call.io, result))

    def first_token(self, call: CallPrefill, finish: CompletionReason | None = None) -> list[Action]:
        assert call.io not in self.given
        self.given.add(call.io)
        known = self.tokens[call.request] > self.placed_with[call.request]
        self.tokens[call.request] += not known and call.request not in self.deferred
        return self.post(FirstToken(call.io, HOW, finish, known))

    def prompt_computed(self, call: StartDecode) -> list[Action]:
        """An instance in the role both has computed a prompt."""
        self.given.add(call.io)
        return self.post(PromptComputed(call.io, HOW))

    def more(
        self,
        call: StartDecode | TakeOverSequence,
        count: int = 1,
        finish: CompletionReason | None = None,
        *,
        known: bool = False,
    ) -> list[Action]:
        self.tokens[call.request] += count
        return self.post(TokensArrived(call.io, count, finish, known))

    def rehash(self, request: int) -> list[Action]:
        self.rehashes.remove(request)
        self.placed_with[request] = self._kept(request)
        return self.post(Rehashed(request, self._kept(request), ()))

    def join_prefill(self, name: str, epoch: int = 1, max_num_batched_tokens: int = 0) -> None:
        how = {"max_num_batched_tokens": max_num_batched_tokens}
        self._join(InstanceFacts(name, epoch, EngineKind.PREFILL, 64, SHAPE, SPEEDS, **how))  # type: ignore[arg-type]

    def join_store(self, name: str) -> None:
        self._join(InstanceFacts(name, 1, EngineKind.KVSTORE, 64, None, SPEEDS, reports_ssd=True))

    def join_decode(self, name: str, epoch: int = 1, total: int = 64, *, both: bool = False) -> None:
        self._join(InstanceFacts(name, epoch, EngineKind.DECODE, total, SHAPE, SPEEDS, computes_prompts=both))

    def _join(self, facts: InstanceFacts) -> None:
        self.members[facts.id] = facts
        self.post(InstanceJoined(facts))

    def leave(self, name: str, lost: str = "is lost") -> list[Action]:
        epoch = self.members.pop(name).epoch
        for number, target in list(self.promises.items()):
            if lost and (target.decode, target.epoch) == (name, epoch):
                del self.promises[number]
        return self.post(InstanceLeft(name, epoch, lost))

    def report(self, name: str, free: int, answer_tokens: int = 0, **load: Any) -> list[Action]:
        return self.post(LoadReported(name, LoadFacts(free_blocks=free, answer_tokens=answer_tokens, **load)))

    def drain(self, name: str, *, draining: bool = True) -> list[Action]:
        self.drained = True
        return self.report(name, 64, draining=draining)

    def sleep(self, seconds: float) -> list[Action]:
        """Time passes; the core gets its ticks when they are due."""
        until, found = self.now + seconds, []
        while (due := self.core.due()) is not None and due <= until:
            self.now = max(self.now, due)
            found += self.post(Tick())
        self.now = until
        return found

    # --- what the core has ordered ----------------------------------------------------------------------------------

    def open(self, kind: type[A]) -> list[A]:
        """Calls of a kind that have not ended and were not given up."""
        return [call for call in self.calls.values() if isinstance(call, kind) and call.io not in self.cancelled]

    def one(self, kind: type[A]) -> A:
        (call,) = self.open(kind)
        return call

    def all(self, kind: type[A]) -> list[A]:
        """All actions of a kind so far."""
        return [action for action in self.actions if isinstance(action, kind)]

    def streaming(self, count: int = 2, **what: Any) -> tuple[int, StartDecode]:
        """A new request whose sequence runs at decode."""
        number, prefill, start = self.decoding(**what)
        self.more(start, count)
        self.end(prefill)
        return number, start

    def decoding(self, **what: Any) -> tuple[int, CallPrefill, StartDecode]:
        """A new request whose first token has come."""
        number = self.arrive(**what)
        self.promise(self._last(CallReserve, number))
        prefill = self._last(CallPrefill, number)
        self.first_token(prefill)
        return number, prefill, self._last(StartDecode, number)

    def _last(self, kind: type[A], request: int) -> A:
        return [call for call in self.open(kind) if getattr(call, "request", 0) == request][-1]

    def finish_all(self) -> None:
        """Every call ends at last, by a failure; then nothing may be left."""
        for _ in range(1000):
            for request in list(self.rehashes):
                self.rehash(request)
            for call in list(self.calls.values()):
                if call.io in self.calls:
                    self.end(call, GONE)
            due = self.core.due()
            if due is None and not self.calls and not self.rehashes:
                break
            self.sleep(max(0.0, (due or self.now) - self.now))
        assert set(self.ends) == self.arrived, "a request has no end"
        requests = self.core.scheduler
        assert (len(requests), requests.calls, len(requests.memory_queue), len(requests.slo_queue)) == (0, 0, 0, 0)
        assert self.cluster.claims == []
        assert self.promises == {}, "a promise was neither used nor given back"
        assert self.core.due() is None

    # --- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.core.check_invariants()
        assert len(self.core.scheduler) == len(self.arrived - set(self.ends))
        assert self.core.scheduler.calls == len(self.calls)
        sequences: list[StartDecode | TakeOverSequence] = [*self.open(StartDecode), *self.open(TakeOverSequence)]
        # Where a request was moved, the prefill call whose token it has may still be ending: it computes no more.
        computing = [call for call in self.open(CallPrefill) if not (self.drained and call.io in self.given)]
        for calls, most in ((computing, 1), (sequences, 2 if self.drained else 1)):
            busy = Counter(call.request for call in calls if call.request not in self.ends)
            assert all(count <= most for count in busy.values()), "a request is computed twice at once"

    def _note(self, action: Action) -> None:
        match action:
            case CallReserve() | CallPrefill() | StartDecode() | TakeOverSequence():
                assert action.request not in self.ends
                assert action.io not in self.calls
                self.calls[action.io] = action
            case CancelIo(io) | LeaveSequence(io):
                assert io in self.calls, "a call that has ended is given up"
                assert io not in self.cancelled
                self.cancelled.add(io)
            case CancelReservation(_, target):
                self.promises.pop(target.transfer_id, None)
            case RenewReservation(target):
                assert target.transfer_id in self.promises, "a promise that is over is renewed"
            case Rehash(request):
                assert request not in self.rehashes
                self.rehashes.append(request)
            case CompleteRequest(request=request) | FailRequest(request=request) | DropRequest(request=request):
                assert request not in self.ends, "a request has ended twice"
                self.ends[request] = action
                self.rehashes = [rehashe for rehashe in self.rehashes if rehashe != request]
            case AnnouncePlacement(request=request):
                assert request not in self.ends
