"""The conductor's state machine.

Requests are placed, reserved, prefilled and decoded; retried, moved and taken over; each ends exactly once.
docs/states.md draws the states of a request.

A retry continues from the prompt and the tokens so far: sampling depends on the position alone (docs/adr/0006).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import FairShares, QueueKey
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded, Tick, Timers, digest_of
from moonpool.base.settings import setting
from moonpool.conductor.core.actions import (
    Action,
    AnnouncePlacement,
    CompleteRequest,
    DropRequest,
    EndpointPicked,
    FailRequest,
    LeaveSequence,
    Rehash,
)
from moonpool.conductor.core.admission import TTFT_SLO, AdmissionGate, AdmissionMode, no_memory
from moonpool.conductor.core.attempt_calls import MAX_RESERVES, AttemptCalls
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.demand import MemoryNeed, expected_blocks
from moonpool.conductor.core.events import (
    CallResult,
    ClientGone,
    CompletionReason,
    EndpointAsked,
    EndpointDone,
    Event,
    FirstToken,
    InstanceJoined,
    InstanceLeft,
    KVDelivered,
    LoadReported,
    PrefillAccepted,
    PrefillMeasurements,
    PromptComputed,
    PromptsAnnounced,
    Rehashed,
    RequestArrived,
    ReserveGranted,
    SessionUpdated,
    StalePlacement,
    StopRequested,
    TokensArrived,
)
from moonpool.conductor.core.failures import (
    CONDUCTOR_DRAINING,
    FINAL_KINDS,
    NO_DECODE_ROOM,
    STALE,
    Failure,
    FailureKind,
    retries_exhausted,
)
from moonpool.conductor.core.instances import LoadFacts
from moonpool.conductor.core.latency_model import step_load_s
from moonpool.conductor.core.memory_queue import DecodeMemoryQueue, MemoryWaiter, blocks_left_free
from moonpool.conductor.core.open_calls import CallKind, OpenCall
from moonpool.conductor.core.prefetch import Prefetch
from moonpool.conductor.core.request import ScheduledAttempt, ScheduledRequest
from moonpool.conductor.core.request_spec import RequestSpec
from moonpool.conductor.core.request_states import (
    REQUEST_TIMERS,
    DecodePhase,
    PrefillPhase,
    RequestState,
    TimerKey,
    TimerKind,
)
from moonpool.conductor.core.retention import RetainedChains, TellSession
from moonpool.conductor.core.routing import RoutingDecision, RoutingRequest
from moonpool.conductor.core.sessions import SessionTable
from moonpool.conductor.core.slo_queue import SloQueue
from moonpool.conductor.core.tenant_activity import TenantBudget
from moonpool.conductor.core.tenant_counts import TenantCounts
from moonpool.conductor.core.tenant_ledger import TenantLedger
from moonpool.conductor.placement.base import DecodeChoice, PrefillChoice

USUAL_SHARE = 0.05
"""A request's share in the running mean of TTFT limits."""
MAX_LIMIT_S = 600.0
"""Longer TTFT limits, infinite ones too, count as this one: else one request decides the mean for hundreds."""
MAX_CANDIDATES = 4
"""Decode instances asked for memory for one placement."""
MAX_MOVING = 4
"""Requests moved away from an instance at once, so that each is prefilled soon."""
MOVE_RETRY_S = 1.0
"""Seconds from a move that failed to the next one."""
DELIVERY_TIMEOUT_S = 0.5
"""Seconds within which decode must say whether all KV has arrived after prefill was lost."""
FIRST_RETRY_PAUSE_S = 0.05
RETRY_PAUSE_FACTOR = 4.0
MAX_RETRY_PAUSE_S = 3.2
TOKEN_BYTES = 4


class RequestScheduler:
    """All requests at one conductor.

    `handle` takes an event and decides; everything below is a transition of a request, grouped by subject: clients,
    instances, placement, waiting, calls, failures, moves, timers, ends.

    Args:
        limits: how long requests may take.
        cluster: instances; takes each event before the scheduler does.

    Attributes:
        requests: those that have not ended, by number.
        tenants: number of requests per tenant.
        ledger: what tenants use at all conductors.
        sessions: conversations and agents' runs.
        prefetch: brings KV nearer before it is needed.
        memory_queue: requests that wait for decode memory.
        slo_queue: requests that wait for a placement within their SLO.
        waiting_for_instance: requests that wait for an instance to join.
        usual_ttft_s: running mean of the requests' TTFT limits; None = none has had a limit.
    """

    def __init__(self, limits: SchedulerLimits, cluster: ClusterView) -> None:
        self.requests: dict[int, ScheduledRequest] = {}
        self.tenants = TenantCounts()
        self.ledger = TenantLedger(limits.budgets, limits.heartbeat_s)
        self._retained = RetainedChains()
        self.sessions = SessionTable(self._retained)
        self.prefetch = Prefetch(cluster, self._retained, self.sessions, cluster.prefetch_share)
        self.waiting_for_instance: dict[int, None] = {}
        self._limits = limits
        self._cluster = cluster
        self._lengths = cluster.forecasts.lengths
        self._gate = AdmissionGate(limits.admission, cluster.forecasts)
        self._actions: list[Action] = []  # of the event that is handled
        self._timers: Timers[TimerKey] = Timers()
        self._shares = FairShares()
        self.memory_queue = DecodeMemoryQueue(self._shares, self.ledger)
        self.slo_queue = SloQueue(self._shares, self._timers, limits.max_queued, limits.max_queued_bytes)
        self.usual_ttft_s: float | None = None
        self._endpoint_claims: dict[int, int] = {}  # of proxies' requests, by number
        self._calls = AttemptCalls(cluster, self._timers, self._actions, limits.reserve_timeout_s, self._gate)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls.open)

    @property
    def stale(self) -> int:
        """Prompts that prefill instances did not take, as their queues were longer than predicted."""
        return self._calls.stale_check.answers

    @property
    def claims(self) -> list[int]:
        """Claims on the cluster that requests hold, ascending."""
        return sorted([*self._calls.claims(self.requests.values()), *self._endpoint_claims.values()])

    def due(self) -> float | None:
        """Return the time of the next timer, or of the next order for an expected prompt; None = there is neither."""
        timer, expected = self._timers.next(), self._retained.due()
        return timer if expected is None or (timer is not None and timer <= expected) else expected

    def handle(self, now: float, event: Event | Tick, out: list[Action]) -> None:
        if isinstance(event, TokensArrived):  # most are
            if event.finish is not None:  # else nobody begins or ends to wait
                self._rest_shares(now)
            self._from_call(now, event)
        else:
            self._rest_shares(now)
            self._take(now, event)
        while (timer := self._timers.pop_due(now)) is not None:
            self._timer_due(now, *timer)
        self._actions += self.prefetch.due(now)
        out += self._actions
        self._actions.clear()

    def _take(self, now: float, event: Event | Tick) -> None:
        match event:
            case LoadReported(instance, load):
                self._load_reported(now, instance, load)
            case InstanceJoined(facts):
                self._instance_joined(now, facts.id)
            case InstanceLeft():
                self._instance_left(now, event)
            case RequestArrived(spec, keys):
                self._arrived(now, spec, keys)
            case Rehashed() | StopRequested() | ClientGone():
                self._from_client(now, event)
            case EndpointAsked(spec, keys, others):
                self._pick_endpoint(now, ScheduledRequest(spec, keys, suspects=list(others)))
            case EndpointDone(number):
                self._cluster.release(self._endpoint_claims.pop(number, 0), now)
            case SessionUpdated() | PromptsAnnounced():
                self._foreseen(now, event)
            case PrefillAccepted() | FirstToken() | PromptComputed() | KVDelivered():
                self._from_call(now, event)
            case IoEnded():
                self._call_ended(now, event)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _arrived(self, now: float, spec: RequestSpec, keys: tuple[bytes, ...]) -> None:
        assert spec.number not in self.requests, f"request {spec.number} is there already"
        request = self.requests[spec.number] = ScheduledRequest(spec, keys)
        refusal = self.ledger.refusal(spec.tenant, spec.choices, now) if spec.resumed is None else None
        self.tenants.came(spec.queue_key)
        self.ledger.began(spec.tenant, spec.weight, spec.choices, now, charged=spec.resumed is None and refusal is None)
        if spec.session is not None:
            self.sessions.began(spec.tenant, spec.session, now)
        if spec.resumed is not None:
            request.tokens, request.recovering = spec.resumed.tokens, True
        self._timers.set((TimerKind.DEADLINE, spec.number), spec.deadline)
        if (limit_s := spec.slo.ttft_s) is not None:
            limit_s = min(limit_s, MAX_LIMIT_S)
            before_s = limit_s if self.usual_ttft_s is None else self.usual_ttft_s
            self.usual_ttft_s = before_s + USUAL_SHARE * (limit_s - before_s)
        if refusal is not None:
            self._fail(now, request, refusal, refused=True)
        elif not self._take_over(now, request):
            self._place(now, request)

    def _foreseen(self, now: float, event: SessionUpdated | PromptsAnnounced) -> None:
        """Clients say what will come, or will not."""
        if isinstance(event, PromptsAnnounced):
            self._actions += self.prefetch.announced(event, now)
            return
        self._actions += self.prefetch.changed((event.tenant, event.turn.id))
        self._actions += self.sessions.update(event.tenant, event.turn, now)

    def _from_client(self, now: float, event: Rehashed | StopRequested | ClientGone) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        match event:
            case ClientGone(tokens=tokens):
                self._grow(now, request, tokens)
                self._drop(now, request)
            case StopRequested(failure=failure):
                self._stop(now, request, failure)
            case Rehashed(tokens=tokens, keys=keys):
                assert request.state is RequestState.REHASHING, "keys that were not asked for"
                assert request.tokens <= tokens, f"{tokens} tokens, less than {request.tokens}"
                self._grow(now, request, tokens - request.tokens)  # those of which no call has told
                request.keys = keys
                self._place(now, request)

    def _pick_endpoint(self, now: float, request: ScheduledRequest) -> None:
        """Answer a proxy. The prompt counts at the chosen engine until `EndpointDone`."""
        number, (decision, decodes) = request.spec.number, self._admitted(now, request, at_decode=False)
        failure = next((answer for answer in (decision, decodes) if isinstance(answer, Failure)), None)
        if isinstance(decision, Failure) or failure is not None:
            self._actions.append(EndpointPicked(number, (), failure))
            return
        usable = [
            candidate.id
            for candidate in decision.candidates
            if not candidate.excluded and candidate.id not in request.suspects
        ]
        if decision.prefill.id not in usable:
            failure = Failure(FailureKind.UNAVAILABLE, "no engine that a proxy can reach takes requests now")
            self._actions.append(EndpointPicked(number, (), failure))
            return
        self._endpoint_claims[number] = self._calls.claim_prefill(request, decision, now)
        self._actions.append(EndpointPicked(number, tuple(usable), None, decision.prefill.ttft_s))

    def _stop(self, now: float, request: ScheduledRequest, failure: Failure | None) -> None:
        """Complete an answer as cancelled.

        A request without an answer fails, as does a request whose answer cannot be sent.
        """
        if failure is not None:
            self._fail(now, request, failure)
        elif request.begun:
            self._leave_sequences(request)
            self._complete(now, request, CompletionReason.CANCELLED)
        else:
            self._fail(now, request, request.refusal or CONDUCTOR_DRAINING, refused=True)

    def _leave_sequences(self, request: ScheduledRequest) -> None:
        """Leave the request's sequences running at decode: another conductor may take them over."""
        attempt = request.attempt
        if request.followed_call:
            self._actions.append(LeaveSequence(request.followed_call))
            request.followed_call = 0
        if attempt is not None and attempt.decode_phase in (DecodePhase.STARTED, DecodePhase.STREAMING):
            self._actions.append(LeaveSequence(attempt.sequence_io))
            attempt.enter_decode(DecodePhase.ENDED)

    # --- instances --------------------------------------------------------------------------------------------------

    def _load_reported(self, now: float, instance: str, load: LoadFacts) -> None:
        for served in self.ledger.heard(load.activities, now):
            self._shares.serve(served.tenant, served.work_s, served.weight)
        told = self.ledger.tells(instance, load.conductors, now)
        if told is not None:
            self._actions.append(told)
        self._memory_reported(now, instance)
        self._drain(now, instance)

    def _instance_joined(self, now: float, instance: str) -> None:
        """Requests that waited for the instance, for any instance, or for decode memory go on."""
        self.ledger.left(instance)
        waiting = [request for request in self.requests.values() if request.state is RequestState.WAITING_OWNER]
        owned = [request for request in waiting if request.owner is not None and request.owner.decode == instance]
        for request in owned:
            self._timers.clear((TimerKind.OWNER, request.spec.number))
        for request in [request for request in owned if not self._take_over(now, request)]:
            self._place(now, request)
        for number in sorted(self.waiting_for_instance):
            self._place(now, self.requests[number])
        self._memory_reported(now, instance)

    def _instance_left(self, now: float, event: InstanceLeft) -> None:
        """With `lost` all that requests have at the epoch is gone."""
        instance, epoch, lost = event.instance, event.epoch, event.lost
        self.memory_queue.forget(instance)
        self.ledger.left(instance)
        if not lost:
            return
        failure = Failure(FailureKind.STREAM, f"{instance} {lost}")
        for number in self._calls.requests_at(instance):
            request = self.requests[number]
            if request.attempt is not None:
                self._attempt_lost(now, request, request.attempt, event, failure)
        followed = [request for request in self.requests.values() if self._follows(request) == (instance, epoch)]
        for request in followed:
            self._calls.end_followed(request)
        for request in followed:
            if request.state is RequestState.TAKEN_OVER:  # others have a new placement
                self._attempt_failed(now, request, failure, [instance])

    def _follows(self, request: ScheduledRequest) -> tuple[str, int] | None:
        """Return the instance and epoch of the sequence that is followed without an attempt."""
        call = self._calls.open.get(request.followed_call)
        return (call.instance, call.epoch) if call is not None else None

    def _attempt_lost(
        self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt, left: InstanceLeft, failure: Failure
    ) -> None:
        """An instance is lost on which an attempt may have something."""
        instance, target = left.instance, attempt.reservation
        if target is not None and (target.decode, target.epoch) == (instance, left.epoch):
            if attempt.decode_phase is DecodePhase.RESERVED:
                self._calls.lose_reservation(attempt, now)
            self._attempt_failed(now, request, failure, [instance])
        elif (attempt.decision.prefill.id, attempt.epoch) == (instance, left.epoch):
            self._prefill_lost(now, request, attempt, failure)
        elif attempt.decode_phase is DecodePhase.RESERVING and self._calls.instance_lost(
            attempt, instance, left.epoch, failure
        ):
            request.suspect(instance)
            self._reserve(now, request, attempt)

    def _prefill_lost(self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt, failure: Failure) -> None:
        """Give the prefill call up. Decode continues if all KV is there."""
        if attempt.prefill_phase in (PrefillPhase.NOT_CALLED, PrefillPhase.CALLED):
            self._attempt_failed(now, request, failure, [attempt.decision.prefill.id])
        elif attempt.prefill_phase is PrefillPhase.FIRST_TOKEN:
            self._actions.append(CancelIo(attempt.prefill_io))
            attempt.enter_prefill(PrefillPhase.ENDED)
            if attempt.delivery_unknown:
                self._await_delivery(now, request)

    # --- placement --------------------------------------------------------------------------------------------------

    def _place(self, now: float, request: ScheduledRequest) -> None:
        """Route a request and begin an attempt; if there is no placement, the request waits or fails."""
        self.waiting_for_instance.pop(request.spec.number, None)
        spec = request.spec
        # Plain decode computes a prompt for one plain answer, and as a first try only: it may have no place for
        # prompts, and what is placed again has met a failure. Prompt scores come from prefill.
        # An instance in the role both computes prompts like prefill, and always may.
        at_decode = not request.attempts and spec.choices == 1 and not spec.deferred and not spec.scored
        decision, decodes = self._admitted(now, request, at_decode=at_decode)
        if (
            isinstance(decision, RoutingDecision)
            and decision.at_decode
            and (isinstance(decodes, Failure) or not self._candidates(request, decodes, now))
        ):
            # The decision has only the decode instance that holds the prefix: through prefill, others may serve.
            decision, decodes = self._admitted(now, request, at_decode=False)
        # The chosen instance in the role both has no place: another one may have.
        while isinstance(decision, RoutingDecision) and self._lacks_place(now, request, decision, decodes):
            request.full.append(decision.prefill.id)
            decision, decodes = self._admitted(now, request, at_decode=False)
        if isinstance(decision, Failure):
            self._no_instance(now, request, decision)
        elif isinstance(decodes, Failure):
            self._slo_missed(now, request, decodes, decision)
        else:
            attempt = self._calls.begin(request, decision, self._candidates(request, decodes, now), now)
            if decision.decodes:
                self._reserve(now, request, attempt)
            else:
                self._placed(now, request, attempt)

    def _lacks_place(
        self,
        now: float,
        request: ScheduledRequest,
        decision: RoutingDecision,
        decodes: Sequence[DecodeChoice] | Failure,
    ) -> bool:
        """Whether the chosen instance in the role both has no place for the answer, where another one may have."""
        if not decision.both or decision.prefill.id in request.full or len(request.full) >= MAX_CANDIDATES:
            return False
        if isinstance(decodes, Failure):
            return decodes.reason != TTFT_SLO  # the chosen one has the soonest first token
        return not self._candidates(request, decodes, now)

    def _admitted(
        self, now: float, request: ScheduledRequest, *, at_decode: bool
    ) -> tuple[RoutingDecision | Failure, Sequence[DecodeChoice] | Failure]:
        """A decision and the decode instances that may serve the request; a failure in place of either: refused."""
        decision, spec = self._routed(now, request, at_decode=at_decode), request.spec
        if isinstance(decision, Failure):
            return decision, decision
        if request.recovering:  # the client knows a placement, so that an early refusal would come too late
            return decision, decision.decodes
        return decision, self._gate.check(spec.slo, decision, spec.stratum, now, request.elapsed_s(now))

    def _routed(self, now: float, request: ScheduledRequest, *, at_decode: bool) -> RoutingDecision | Failure:
        spec, limit = request.spec, None
        if not request.recovering:
            limit = self._gate.ttft_limit(spec.slo, spec.queue_key, request.elapsed_s(now))
        routing = RoutingRequest(
            tokens=spec.prompt_tokens + request.tokens,
            answer_tokens=max(spec.max_tokens - request.tokens, 1 + spec.deferred),  # decode chooses an only token, too
            choices=spec.choices,
            keys=request.keys,
            prompt_key=spec.prompt_key,
            now=now,
            suspects=request.suspects,
            full=request.full,
            at_decode=at_decode,
            ttft_limit=limit,
            pictures=spec.pictures,
            row_keys=spec.row_keys,
            limit_s=None if spec.slo.ttft_s is None else spec.slo.ttft_s - request.elapsed_s(now),
            priority=spec.priority,
            queue_key=spec.queue_key,
            needs=spec.needs,
            session=None if spec.session is None else self.sessions.facts(spec.tenant, spec.session),
            expected_tokens=max(spec.expected_tokens - request.tokens, 0),
        )
        try:
            decision = self._cluster.plan(routing)
        except Unavailable as error:
            return Failure(FailureKind.UNAVAILABLE, error.message)
        except InvalidRequest as error:
            return Failure(FailureKind.INVALID, error.message, field=error.field)
        # Instances share out their time by tenant: what counts is the wait in the fair order, not that of arrival.
        queue_s = self._cluster.prefills.queue_s(decision.prefill, spec.queue_key)
        chosen = decision.prefill._replace(queue_s=queue_s)
        candidates = tuple([chosen if candidate.id == chosen.id else candidate for candidate in decision.candidates])
        return replace(decision, prefill=chosen, candidates=candidates)

    def _candidates(self, request: ScheduledRequest, decodes: Sequence[DecodeChoice], now: float) -> list[DecodeChoice]:
        """Return the decode instances to ask for memory, best first.

        A report may be stale: at first instances without free memory are asked, too. A tenant above the fair share must
        find memory, and leaves some to others.
        """
        key = request.spec.queue_key
        leaves = not request.recovering and self.tenants.above_share(key, self.ledger.elsewhere(now), now)
        new = request.waits_since is None
        first = new and not leaves
        ahead = self.memory_queue.blocks_ahead(key, 0.0, now) if new and leaves else 0

        def fits(choice: DecodeChoice) -> bool:
            available, total = self._cluster.decodes.available_of(choice.id)
            left = blocks_left_free(choice.blocks, total) if leaves else 0
            return available >= choice.blocks + left + ahead

        free = [choice for choice in decodes if self.memory_queue.is_free_to(choice.id, key)]
        return [choice for choice in free if first or fits(choice)][:MAX_CANDIDATES]

    def _reserve(self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """Ask the next decode instance for memory; after the last one the request waits or fails."""
        if self._calls.reserve(request, attempt, now):
            return
        decision, full, failed = attempt.decision, attempt.full, attempt.failed
        self._calls.end_attempt(request, now)
        if decision.at_decode or self._has_others(request, decision, full):
            self._place(now, request)  # others may have memory
        elif request.followed_call:  # the request is moved, and still runs at the old instance
            self._stay(request, now)
        elif full is not None or failed is None:
            self._no_memory(now, request, no_memory(full, decision), decision)
        elif failed.kind is FailureKind.INVALID:
            self._fail(now, request, failed)
        else:
            self._none_asked(now, request, failed)

    def _has_others(self, request: ScheduledRequest, decision: RoutingDecision, full: Failure | None) -> bool:
        """Whether instances are left to ask after one in the role both had no place; counts the one."""
        chosen = decision.prefill.id
        if not decision.both or chosen in request.full:
            return False
        request.full.append(chosen)
        if full is not None and full.reason == STALE:
            return True  # the next one asked, perhaps the same, must take the prompt if all are stale
        avoided = {*request.full, *request.suspects}
        return any(instance.facts.id not in avoided for instance in self._cluster.prefills)

    def _placed(self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """Carry out a placement, whose instances are all known now."""
        decision, target = attempt.decision, attempt.reservation
        # Decode computes what follows the blocks that it held when it reserved: if it lacks some of the expected
        # prefix, prefill may be better after all.
        if decision.at_decode and target is not None and target.held_blocks < decision.prefill.used_blocks:
            self._calls.end_attempt(request, now)
            self._place(now, request)
            return
        self._end_wait(request, attempt)
        self._charge(now, request, decision)
        self._calls.forecast_tpot(request, attempt)
        self._place_session(request, decision)
        self._warm(request, decision, decision.prefill.queue_s)
        self._announce(request, attempt)
        if decision.computed_at_decode:
            self._calls.compute_at_decode(request, attempt, now)
        else:
            self._calls.call_prefill(request, attempt, now)

    def _end_wait(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """The request looks for a placement no longer."""
        for kind in (TimerKind.WAIT, TimerKind.BACKOFF):
            self._timers.clear((kind, request.spec.number))
        if request.waits_since is not None:
            attempt.queued_s = attempt.begun - request.waits_since
            # A client that allows waiting sets the TTFT limit for the time after the queue.
            request.queued_s += attempt.queued_s if request.spec.slo.queue_s else 0.0
        request.waits_since = request.refusal = None
        request.unasked = request.stale_answers = 0
        request.full = []

    def _place_session(self, request: ScheduledRequest, decision: RoutingDecision) -> None:
        """Note where a session's turn runs, and which kvstores will hold the session's KV."""
        tenant, turn = request.spec.tenant, request.spec.session
        if turn is None:
            return
        sources = [holder.id for holder in decision.sources if not holder.peer]
        self.sessions.placed(tenant, turn, decision.prefill.id)
        self._actions += self.prefetch.changed((tenant, turn.id), decision.prefill.id)
        request.stores = tuple(dict.fromkeys([store.id for store in decision.write_back] + sources))

    def _announce(self, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        self._actions.append(
            AnnouncePlacement(
                request.spec.number,
                attempt.decision,
                attempt.sequence,
                attempt.reservation,
                attempt.begun - request.spec.arrived,
                attempt.queued_s,
                attempt.tpot,
            )
        )

    def _warm(self, request: ScheduledRequest, decision: RoutingDecision, wait_s: float) -> None:
        """The request waits: what the prompt would read from a kvstore's SSD is brought into memory meanwhile."""
        if request.warming is None:
            spec = request.spec
            request.warming = self.prefetch.waits(spec.tenant, spec.session, request.keys, decision, wait_s)
            if request.warming is not None:
                self._actions.append(request.warming)

    def _warmed(self, request: ScheduledRequest) -> None:
        """The request waits no longer: what has not been read from SSD by now is not wanted."""
        order, request.warming = request.warming, None
        if order is not None:
            self._actions.append(TellSession(order.instance, replace(order.hint, return_s=None)))

    def _replace_prefill(self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt) -> None:
        """Find another prefill instance, as the first one's queue was longer than predicted.

        The reservation at decode stays. The request can no longer be refused early: the client knows a placement.
        """
        request.recovering = True
        decision = self._routed(now, request, at_decode=False)
        if isinstance(decision, Failure):
            self._calls.end_attempt(request, now)
            self._no_instance(now, request, decision)
            return
        target = attempt.reservation
        there = target is None or self._cluster.paired(decision.prefill.id, target.decode)
        if decision.both or not there:  # other memory is needed: the KV stays, or would not get there
            self._calls.end_attempt(request, now)
            self._place(now, request)
            return
        self._calls.replace_decision(request, attempt, decision, now)
        self._placed(now, request, attempt)

    def _charge(self, now: float, request: ScheduledRequest, decision: RoutingDecision) -> None:
        """Charge a request to the tenant, once, and count the request for prefix replication."""
        # Retries and moves are the cluster's fault: neither the tenant nor the prefix pays twice.
        if request.counted:
            return
        request.counted = True
        cost_s, spec = self._cost_s(decision), request.spec
        self._shares.serve(spec.tenant, cost_s, spec.weight)
        # The budget of a resumed request's prompt was taken at the conductor that had the request first.
        self.ledger.placed(spec.tenant, cost_s, 0 if spec.resumed is not None else spec.prompt_tokens, now)
        hint = None if decision.at_decode else decision.hint
        copy = self._cluster.replication.placed(request.keys, hint, request.spec.tenant, now)
        if copy is not None:
            self._actions.append(copy)

    def _cost_s(self, decision: RoutingDecision) -> float:
        """Return the predicted instance seconds: of prefill, and those that the answer adds to decode's steps."""
        demand = decision.demand
        decode = self._cluster.decodes.get(decision.decodes[0].id) if decision.decodes else None
        if decode is None:
            return decision.prefill.busy_s
        step_s = step_load_s(decode.speeds, demand.choices, demand.prompt_tokens * demand.choices)
        return decision.prefill.busy_s + demand.decode_tokens * step_s

    def _rest_shares(self, now: float) -> None:
        """Forgive tenants what they used while no request waits for a placement, at any conductor."""
        # A tenant served alone takes nothing from anybody, so the use is forgiven; if somebody waits, it is not.
        waits = len(self.memory_queue) or len(self.slo_queue) or self.ledger.elsewhere(now).waiting
        self._shares.forgive_idle_until(now, 0 if waits else len(self._cluster.prefills.by_slot))

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _no_memory(self, now: float, request: ScheduledRequest, refusal: Failure, decision: RoutingDecision) -> None:
        """No decode instance has memory, or none keeps the TBT limit."""
        # Without memory only the end of an answer helps; a missed TBT limit is an SLO, which may be met any time.
        if refusal.reason != NO_DECODE_ROOM and not request.recovering:
            self._slo_missed(now, request, refusal, decision)
        elif self._wait(now, request, RequestState.WAITING_MEMORY, refusal):
            assert request.waits_since is not None
            demand = decision.demand
            need = MemoryNeed(demand.prompt_tokens, demand.total_blocks, demand.choices, demand.expected_tokens)
            blocks = decision.decodes[0].blocks if decision.decodes else need.longest
            cost_s = self._cost_s(decision)
            self.memory_queue.add(MemoryWaiter(request.spec.queue_key, need, request.waits_since, cost_s, blocks), now)
            self._warm(request, decision, refusal.retry_after_s)

    def _slo_missed(self, now: float, request: ScheduledRequest, refusal: Failure, decision: RoutingDecision) -> None:
        """No placement keeps the request's SLO: the request waits if the client allows waiting, or is refused."""
        if not request.spec.slo.queue_s:
            self._fail(now, request, refusal, refused=True, candidates=decision.candidates)
        elif self._wait(now, request, RequestState.WAITING_SLO, refusal):
            nbytes = TOKEN_BYTES * request.spec.prompt_tokens
            key, cost_s = request.spec.queue_key, self._cost_s(decision)
            self._warm(request, decision, refusal.retry_after_s)
            for number in self.slo_queue.add(now, key, nbytes, cost_s, refusal.retry_after_s):
                self._wait_over(now, self.requests[number])

    def _no_instance(self, now: float, request: ScheduledRequest, failure: Failure) -> None:
        """No instance takes the request now, or none ever can."""
        if request.followed_call:
            self._stay(request, now)
        elif failure.kind is FailureKind.UNAVAILABLE and request.recovering:
            # A request that has run has a client that waits for the rest; a new request is refused at once.
            if self._wait(now, request, RequestState.WAITING_INSTANCE, failure):
                self.waiting_for_instance[request.spec.number] = None
        else:
            self._fail(now, request, failure, refused=True)

    def _none_asked(self, now: float, request: ScheduledRequest, failure: Failure) -> None:
        """No decode instance could be asked for memory."""
        request.recovering = True  # the fault is the cluster's: no early refusal any more
        request.unasked += 1
        failure = Failure(FailureKind.UNAVAILABLE, f"no decode instance could be asked for room: {failure}")
        if self._wait(now, request, RequestState.BACKOFF, failure):
            self._set_backoff(now, request, request.unasked)

    def _wait(self, now: float, request: ScheduledRequest, state: RequestState, refusal: Failure) -> bool:
        """Let a request wait within the limit that began with the first refusal; fail the request after that limit.

        Returns:
            Whether the request waits.
        """
        request.enter(state)
        request.refusal, request.full, request.stale_answers = refusal, [], 0
        if request.waits_since is None:
            request.waits_since = now
        until = request.waits_since + self._wait_limit_s(request, request.waits_since)
        if until <= now:
            self._fail(now, request, refusal, refused=True)
            return False
        self._timers.set((TimerKind.WAIT, request.spec.number), until)
        return True

    def _wait_limit_s(self, request: ScheduledRequest, since: float) -> float:
        limits, slo = self._limits, request.spec.slo
        if request.recovering:
            return limits.recovery_s
        if slo.queue_s:
            return slo.queue_s - request.queued_s
        waited_s = since - request.spec.arrived
        return limits.room_wait_s if slo.ttft_s is None else min(limits.room_wait_s, slo.ttft_s - waited_s)

    def _wait_over(self, now: float, request: ScheduledRequest) -> None:
        """A request has waited as long as allowed, or the queue is too long for the request."""
        refusal, since = request.refusal, request.waits_since
        assert refusal is not None
        if request.spec.slo.queue_s and since is not None:
            refusal = replace(refusal, message=f"after {now - since:.3f} s in the queue: {refusal.message}")
        self._fail(now, request, refusal, refused=True)

    def _retry_slo_queue(self, now: float) -> None:
        """Some requests that wait for their SLO look for a placement."""
        for number in self.slo_queue.retrying(now):
            self.slo_queue.remove(number)
            self._place(now, self.requests[number])

    def _memory_reported(self, now: float, decode: str) -> None:
        """A decode instance has reported or joined: requests that fit there look for a placement."""
        if not len(self.memory_queue):
            return
        available, total = self._cluster.decodes.available_of(decode)
        elsewhere = self.ledger.elsewhere(now)

        def above_share(key: QueueKey) -> bool:
            return self.tenants.above_share(key, elsewhere, now)

        for number in self.memory_queue.woken(decode, available, total, self._needs_at(decode), above_share, now):
            self.memory_queue.remove(number, now)
            self._place(now, self.requests[number])

    def _needs_at(self, decode: str) -> Callable[[MemoryNeed], int]:
        """Return the blocks that a request is expected to need at a decode instance."""
        shape, answer = self._cluster.shape, self._cluster.decodes.answer_tokens(decode)
        return lambda need: expected_blocks(shape, need, answer) if shape is not None else need.longest

    def _set_backoff(self, now: float, request: ScheduledRequest, failures: int) -> None:
        pause_s = min(FIRST_RETRY_PAUSE_S * RETRY_PAUSE_FACTOR ** (failures - 1), MAX_RETRY_PAUSE_S)
        self._timers.set((TimerKind.BACKOFF, request.spec.number), now + pause_s)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _from_call(
        self, now: float, event: PrefillAccepted | FirstToken | PromptComputed | KVDelivered | TokensArrived
    ) -> None:
        call = self._calls.open.get(event.io)
        request = self.requests.get(call.request) if call is not None else None
        if call is None or request is None:
            return
        attempt = request.attempt_as(call.sequence)
        match event:
            case TokensArrived():
                if request.spec.choices == 1:  # of several answers none says how long all are
                    self._cluster.answer_grew(call.claim, request.tokens + event.count, now)
                self._tokens_arrived(now, request, attempt, event)
            case PrefillAccepted() if attempt is not None:
                self._calls.prefill_accepted(attempt, event.taken)
            case KVDelivered() if attempt is not None:
                attempt.delivered = True
            case FirstToken():
                self._first_token(now, request, attempt, event)
            case PromptComputed():
                self._prompt_computed(now, request, attempt, event.how)

    def _first_token(
        self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt | None, event: FirstToken
    ) -> None:
        """Start decode with the token. A token of an attempt that has ended counts, too."""
        self._warmed(request)
        self._grow(now, request, int(not event.known and not request.spec.deferred))
        if attempt is not None:
            self._learn_reads(now, attempt, event.how)
            self._calls.first_token(attempt, now)
            self._learn(now, request, attempt, event.how)
            self._cluster.answer_grew(attempt.decode_claim, max(request.tokens, 1), now)
        self._begin_length(request)
        if event.finish is not None:
            self._complete(now, request, event.finish)
        elif attempt is not None and attempt.decode_phase is DecodePhase.RESERVED:
            self._calls.start_sequence(request, attempt)

    def _prompt_computed(
        self,
        now: float,
        request: ScheduledRequest,
        attempt: ScheduledAttempt | None,
        how: PrefillMeasurements | None = None,
    ) -> None:
        """An instance in the role both has computed the prompt, or has sent tokens without a word about it."""
        if attempt is None or not attempt.decision.both or attempt.prefill_phase is not PrefillPhase.CALLED:
            return
        self._warmed(request)
        if how is not None:
            self._learn_reads(now, attempt, how)
        self._calls.prompt_computed(attempt, now)
        if how is not None:
            self._learn(now, request, attempt, how)
        self._begin_length(request)

    def _begin_length(self, request: ScheduledRequest) -> None:
        if request.spec.choices == 1:  # lengths are learnt of single answers
            self._lengths.begin(request.spec.number, request.spec.stratum)

    def _learn_reads(self, now: float, attempt: ScheduledAttempt, how: PrefillMeasurements) -> None:
        for read in how.loads:
            self._cluster.read_measured(attempt.prefill_claim, *read, now)

    def _grow(self, now: float, request: ScheduledRequest, tokens: int) -> None:
        """The answer has new tokens, which the tenant's budget pays for."""
        request.grow(tokens)
        if tokens:
            self.ledger.used(request.spec.tenant, tokens, now)

    def _learn(
        self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt, how: PrefillMeasurements
    ) -> None:
        overhead_s = now - attempt.begun - how.there_s
        self._cluster.first_token(
            attempt.decision, how.computed_tokens, how.there_s, overhead_s, now, overtaken=attempt.overtaken
        )
        if not attempt.decision.at_decode:  # hindsight compares prefill instances
            self._cluster.hindsight.first_token(request.spec.number, attempt.decision.candidates, attempt.begun, now)
        for store, key in how.misses:
            self._cluster.forget(store, [key], attempt.decision.index_version)

    def _tokens_arrived(
        self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt | None, event: TokensArrived
    ) -> None:
        self._grow(now, request, event.count)
        self._lengths.grew(request.spec.number, request.tokens)
        if attempt is not None:  # decode begins only with all KV there
            self._prompt_computed(now, request, attempt)
            if attempt.decode_phase is not DecodePhase.STREAMING:
                attempt.enter_decode(DecodePhase.STREAMING)
            self._timers.clear((TimerKind.DELIVERY, request.spec.number))
            self._moved(now, request)
        if event.finish is not None:
            self._complete(now, request, event.finish, known=event.io if event.known else 0)

    def _call_ended(self, now: float, event: IoEnded[CallResult]) -> None:
        call = self._calls.open.end(event.io)
        request = self.requests.get(call.request)
        attempt = request.attempt_as(call.sequence) if request is not None else None
        failure = event.result if isinstance(event.result, Failure) else None
        if call.kind is CallKind.RESERVE:
            self._reserve_ended(now, event.io, call, request, event.result)
            return
        if call.kind is CallKind.PREFILL:
            self._timers.clear((TimerKind.LINGER, event.io))
        else:  # the claim of a prompt is the attempt's: the first token releases it, while the call goes on
            self._cluster.release(call.claim, now)
        if request is not None and request.followed_call == event.io:
            failure = failure or Failure(FailureKind.STREAM, f"{call.instance} ended the sequence without a reason")
            self._followed_ended(now, request, failure)
        if request is None or attempt is None:
            return
        if isinstance(event.result, StalePlacement) and attempt.may_be_stale:
            self._calls.prefill_refused(attempt, call.instance, event.result, now)
            self._replace_prefill(now, request, attempt)
        elif call.kind is CallKind.PREFILL:
            self._prefill_ended(now, request, attempt, failure)
        else:
            self._sequence_ended(now, request, attempt, failure)

    def _reserve_ended(
        self, now: float, io: int, call: OpenCall, request: ScheduledRequest | None, result: CallResult
    ) -> None:
        self._timers.clear((TimerKind.RESERVE, io))
        reserved = self._calls.reserve_ended(request, io, call, result, now)
        if isinstance(result, ReserveGranted):
            self.memory_queue.granted(call.instance)
        if request is None:
            return
        request.reserves, attempt = request.reserves - 1, request.attempt
        if attempt is None:
            return
        if reserved:
            self._placed(now, request, attempt)
        elif attempt.decode_phase is DecodePhase.RESERVING:
            if attempt.sequence == call.sequence:
                self._reserve_refused(request, attempt, call, result)
            self._reserve(now, request, attempt)

    def _reserve_refused(
        self, request: ScheduledRequest, attempt: ScheduledAttempt, call: OpenCall, result: CallResult
    ) -> None:
        """Note why an instance reserved nothing: full, too slow, or unreachable."""
        if isinstance(result, Failure) and result.kind is FailureKind.OVERLOADED:
            attempt.full = result
            if result.reason == STALE:
                request.stale_answers += 1
                self._calls.stale_check.answers += 1
            available, total = self._cluster.decodes.available_of(call.instance)
            if result.reason == NO_DECODE_ROOM and total:  # the instance is still a member
                self.memory_queue.refused(call.instance, available)
            return
        restarted = Failure(FailureKind.UNAVAILABLE, f"{call.instance} was restarted")
        attempt.failed = result if isinstance(result, Failure) else restarted
        request.suspect(call.instance)

    def _prefill_ended(
        self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt, failure: Failure | None
    ) -> None:
        """A prefill call has ended, which matters only until decode has all KV."""
        before, prefill = attempt.prefill_phase, attempt.decision.prefill.id
        if before is PrefillPhase.ENDED:
            return
        attempt.enter_prefill(PrefillPhase.ENDED)
        if before is PrefillPhase.CALLED:
            failure = failure or Failure(FailureKind.STREAM, f"{prefill} ended without a token")
            self._attempt_failed(now, request, failure, [prefill])
        elif attempt.delivery_unknown:
            # Damage can be either end's fault, so both are blamed; and decode has not got all KV. After other failures
            # decode may have: it is asked.
            damaged = failure is not None and failure.kind in (FailureKind.TRANSFER, FailureKind.FRAME)
            if failure is not None and damaged and attempt.reservation is not None:
                self._attempt_failed(now, request, failure, [prefill, attempt.reservation.decode])
            else:
                self._await_delivery(now, request)

    def _await_delivery(self, now: float, request: ScheduledRequest) -> None:
        """Prefill is lost and may have sent all KV: decode begins, or says that decode cannot."""
        self._timers.set((TimerKind.DELIVERY, request.spec.number), now + DELIVERY_TIMEOUT_S)

    def _sequence_ended(
        self, now: float, request: ScheduledRequest, attempt: ScheduledAttempt, failure: Failure | None
    ) -> None:
        assert attempt.reservation is not None
        decode = attempt.reservation.decode
        # Decode ends a sequence whose KV did not come whole, too: then prefill is to blame.
        blamed = attempt.decision.prefill.id if attempt.delivery_unknown else decode
        attempt.enter_decode(DecodePhase.ENDED)
        failure = failure or Failure(FailureKind.STREAM, f"{decode} ended the sequence without a reason")
        self._attempt_failed(now, request, failure, [blamed])

    def _followed_ended(self, now: float, request: ScheduledRequest, failure: Failure) -> None:
        """A sequence without an attempt has ended. A request that is being moved continues at the new instance."""
        moving, request.followed_call = request.moving, 0
        if not moving:
            self._attempt_failed(now, request, failure, [])
        elif failure.kind in FINAL_KINDS:
            self._fail(now, request, failure)

    # --- failures ---------------------------------------------------------------------------------------------------

    def _attempt_failed(self, now: float, request: ScheduledRequest, failure: Failure, blamed: Sequence[str]) -> None:
        """End the attempt. The request is placed again unless too many attempts have failed."""
        for instance in blamed:
            request.suspect(instance)
        if request.moving:  # the old instance still runs the sequence: nothing is lost
            self._calls.end_attempt(request, now)
            self._stay(request, now)
            return
        self._calls.end(request, now, complete=failure.fenced)
        request.recovering = True
        if failure.kind in FINAL_KINDS:
            self._fail(now, request, failure)
        elif self._is_last_failure(now, request, failure):
            self._fail(now, request, retries_exhausted(failure, request.failures.count))
        else:
            self._retry(now, request, failure)

    def _is_last_failure(self, now: float, request: ScheduledRequest, failure: Failure) -> bool:
        """Count an attempt that has failed. Return whether no further attempt follows.

        `retries` attempts follow the first that failed. After damaged transfers, as many follow as there are pauses
        within `recovery_s`.
        """
        request.failures.add(now, failure, request.generated, self._limits.recovery_s)
        return request.failures.is_over(self._limits.retries, self._limits.recovery_s)

    def _retry(self, now: float, request: ScheduledRequest, failure: Failure) -> None:
        """Place a request again: at once after the first failure if other instances are there."""
        request.refusal = failure
        # Without another instance, and after several failures, time must pass before another try can do better.
        if request.failures.count == 1 and not self._cluster.all_suspected(request.suspects):
            self._rehash(request)
        else:
            request.enter(RequestState.BACKOFF)
            self._set_backoff(now, request, request.failures.count)

    def _rehash(self, request: ScheduledRequest) -> None:
        """Ask for the block keys of the prompt and the answer so far."""
        assert request.refusal is not None
        request.enter(RequestState.REHASHING)
        self._actions.append(Rehash(request.spec.number, request.failures.count, request.refusal))

    # --- moves and takeovers ----------------------------------------------------------------------------------------

    def _take_over(self, now: float, request: ScheduledRequest) -> bool:
        """Take over a resumed request's sequence, or wait for the sequence's instance to join.

        Returns:
            False if the request must be placed like a new one.
        """
        owner = request.owner
        if owner is None:
            return False
        epoch = self._cluster.epoch(owner.decode)
        if epoch and epoch != owner.epoch:
            return False  # restarted: the instance does not know the sequence
        if epoch:
            request.enter(RequestState.TAKEN_OVER)
            self._calls.take_over(request, now)
        else:
            request.enter(RequestState.WAITING_OWNER)
            self._timers.set((TimerKind.OWNER, request.spec.number), now + self._limits.adopt_wait_s)
        return True

    def _drain(self, now: float, instance: str) -> None:
        """Move requests away from an instance that drains or is slow, if another one can take them."""
        if not self._cluster.should_drain(instance):
            return
        # Each move is a prompt of its own at prefill: a few at once, so that each stalls for a short time only.
        here = list(self._streaming_at(instance))
        free = MAX_MOVING - sum(request.moving for request in here)
        movable = [request for request in here if not request.moving and request.stays_until <= now]
        for request in [*self._prompts_at(instance), *movable[: max(0, free)]]:
            self._move(now, request, instance)

    def _prompts_at(self, instance: str) -> Iterator[ScheduledRequest]:
        """Requests with a prompt that waits or is computed at a prefill instance."""
        for number in self._calls.requests_at(instance):
            attempt = self.requests[number].attempt
            if attempt is None or attempt.prefill_phase is not PrefillPhase.CALLED:
                continue
            if attempt.decision.prefill.id == instance:
                yield self.requests[number]

    def _streaming_at(self, instance: str) -> Iterator[ScheduledRequest]:
        """Return the requests whose client gets tokens from a sequence at an instance."""
        for call in self._calls.open.following(instance):
            request = self.requests.get(call.request)
            if request is None:
                continue
            attempt = request.attempt_as(call.sequence)
            own = attempt is not None and attempt.runs(deferred=request.spec.deferred) and not request.followed_call
            if own or self._calls.open.get(request.followed_call) is call:
                yield request

    def _move(self, now: float, request: ScheduledRequest, instance: str) -> None:
        """Place a request anew, away from an instance; the sequence there continues meanwhile."""
        self._calls.detach(request, now)
        request.suspect(instance)
        request.recovering = True
        request.refusal = Failure(FailureKind.UNAVAILABLE, f"{instance} drains, or is slow")
        self._rehash(request)

    def _moved(self, now: float, request: ScheduledRequest) -> None:
        """The request runs at the new instance: the old sequence ends, and another request may be moved."""
        old = self._calls.open.get(request.followed_call)
        self._calls.end_followed(request)
        if old is not None:
            self._drain(now, old.instance)

    def _stay(self, request: ScheduledRequest, now: float) -> None:
        """A request that was to be moved has no other instance: the sequence stays for a while."""
        request.enter(RequestState.TAKEN_OVER)
        request.refusal = request.waits_since = None
        request.stays_until = now + MOVE_RETRY_S

    # --- timers -----------------------------------------------------------------------------------------------------

    def _timer_due(self, now: float, kind: TimerKind, number: int) -> None:
        if kind is TimerKind.LINGER:
            self._actions.append(CancelIo(number))
            return
        if kind is TimerKind.SLO_QUEUE:
            self._retry_slo_queue(now)
            return
        call = self._calls.open.get(number) if kind is TimerKind.RESERVE else None
        request = self.requests.get(call.request if call is not None else number)
        if request is None:
            return
        match kind:
            case TimerKind.RESERVE:
                self._reserve_overdue(now, request, number)
            case TimerKind.DEADLINE:
                limit_s = request.spec.deadline - request.spec.arrived
                message = f"the request's {limit_s:.3g} s are over; the request waited for {request.waits_for}"
                self._fail(now, request, Failure(FailureKind.DEADLINE, message))
            case TimerKind.WAIT:
                self._wait_over(now, request)
            case TimerKind.BACKOFF:
                self._rehash(request)
            case TimerKind.OWNER:
                self._place(now, request)
            case TimerKind.RENEWAL:
                assert request.attempt is not None
                self._calls.renew(number, request.attempt, now)
            case TimerKind.DELIVERY:
                assert request.attempt is not None
                prefill = request.attempt.decision.prefill.id
                failure = Failure(FailureKind.STREAM, f"{prefill} was lost before decode had everything")
                self._attempt_failed(now, request, failure, [prefill])

    def _reserve_overdue(self, now: float, request: ScheduledRequest, io: int) -> None:
        attempt = request.attempt
        if attempt is not None and attempt.pending_reserve == io:
            self._calls.reserve_overdue(request, attempt)
            self._reserve(now, request, attempt)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _complete(self, now: float, request: ScheduledRequest, finish: CompletionReason, *, known: int = 0) -> None:
        """The answer is complete, or goes on at another conductor; `known` as for `AttemptCalls.end_attempt`."""
        if finish is not CompletionReason.CANCELLED:  # cancelled: the last token's time says nothing
            self._calls.observe_tpot(request, now)
        self._calls.end(request, now, complete=True, known=known)
        if finish is CompletionReason.STOP:  # an answer cut by its limit would have been longer
            self._lengths.ended(request.spec.number, request.tokens)
        self._remove(now, request)
        self._actions.append(CompleteRequest(request.spec.number, finish))

    def _fail(
        self,
        now: float,
        request: ScheduledRequest,
        failure: Failure,
        *,
        refused: bool = False,
        candidates: tuple[PrefillChoice, ...] = (),
    ) -> None:
        """The client gets an error; `refused` if no placement was found among `candidates`."""
        self._calls.end(request, now)
        self._remove(now, request)
        self._actions.append(FailRequest(request.spec.number, failure, refused, candidates))

    def _drop(self, now: float, request: ScheduledRequest) -> None:
        """The client is gone."""
        self._calls.end(request, now)
        self._remove(now, request)
        self._actions.append(DropRequest(request.spec.number))

    def _remove(self, now: float, request: ScheduledRequest) -> None:
        number = request.spec.number
        request.enter(RequestState.ENDED)
        self._warmed(request)
        del self.requests[number]
        self.tenants.left(request.spec.tenant, now)
        self.ledger.ended(request.spec.tenant, request.spec.choices, now)
        if request.spec.session is not None:
            self._actions += self.sessions.ended(
                request.spec.tenant, request.spec.session, request.keys, request.stores, now
            )
        self.waiting_for_instance.pop(number, None)
        self.memory_queue.remove(number, now)
        self.slo_queue.remove(number)
        self._lengths.removed(number)
        for kind in REQUEST_TIMERS:
            self._timers.clear((kind, number))

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert not self._actions
        self.memory_queue.check_invariants()
        self.slo_queue.check_invariants()
        self.sessions.check_invariants()
        self.prefetch.check_invariants()
        self.tenants.check_invariants(Counter([request.spec.tenant for request in self.requests.values()]))
        answers = Counter[str]()
        for request in self.requests.values():
            answers[request.spec.tenant] += request.spec.choices
        self.ledger.check_invariants(answers, self.memory_queue.count())
        self._calls.check_invariants(self.requests.values())
        reserves = Counter(call.request for _, call in self._calls.open if call.kind is CallKind.RESERVE)
        for number, request in self.requests.items():
            assert number == request.spec.number
            assert request.reserves == reserves[number] <= MAX_RESERVES
            self._check_state(number, request)
        claims = self.claims
        assert len(set(claims)) == len(claims), "a claim is held twice"
        timers = len(REQUEST_TIMERS) * len(self.requests) + len(self._calls.open) + bool(len(self.slo_queue))
        assert len(self._timers) <= timers

    def _check_state(self, number: int, request: ScheduledRequest) -> None:
        """Assert that a request has everything its state requires, and waits for something that will come."""
        state, timers = request.state, {kind for kind in REQUEST_TIMERS if self._timers.at((kind, number)) is not None}
        assert state not in (RequestState.ARRIVED, RequestState.ENDED)
        assert (state is RequestState.PLACED) == (request.attempt is not None)
        assert (state is RequestState.WAITING_MEMORY) == (number in self.memory_queue)
        assert (state is RequestState.WAITING_SLO) == (number in self.slo_queue)
        assert (state is RequestState.WAITING_INSTANCE) == (number in self.waiting_for_instance)
        assert (state is RequestState.BACKOFF) == (TimerKind.BACKOFF in timers)
        assert (state is RequestState.WAITING_OWNER) == (TimerKind.OWNER in timers)
        assert (state is RequestState.TAKEN_OVER) <= bool(request.followed_call)
        assert TimerKind.DEADLINE in timers
        if state in (RequestState.WAITING_MEMORY, RequestState.WAITING_INSTANCE, RequestState.WAITING_SLO):
            assert TimerKind.WAIT in timers, "it would wait for ever"

    def digest(self) -> bytes:
        """Return the hash of everything but the cluster view."""
        queues = self.memory_queue.state(), self.slo_queue
        state = self.requests, self._endpoint_claims, self.tenants, self.ledger, self.sessions, self.prefetch, *queues
        return digest_of(*state, self._shares, self._calls, self._timers)


@frozen
class SchedulerLimits:
    """How long requests may take, and how often they are retried.

    Attributes:
        recovery_s: seconds that a request waits for another instance after the request's instance failed (ADR 1).
        room_wait_s: seconds that a request waits for memory at decode, within the TTFT limit.
        max_queued_bytes: bytes that the tokens of prompts which wait for their limits may take, `TOKEN_BYTES` each.
        budgets: what tenants may use.
    """

    retries: int = setting(
        3,
        "times a request is placed again after an instance or a transfer has failed; where frames were damaged, any "
        "number of times within `recovery_s` of the first",
        ge=0,
    )
    recovery_s: float = 15.0
    room_wait_s: float = 30.0
    reserve_timeout_s: float = setting(5.0, "seconds a decode instance may take to promise room", gt=0)
    admission: AdmissionMode = setting(
        AdmissionMode.PREDICTIVE,
        "which requests are refused before anything is computed for them: predictive = those that will miss their TTFT "
        "or TBT limit under the load that decode is expected to have once their prompt is computed; early = the same "
        "under the load of now; none; docs/overload.md",
    )
    adopt_wait_s: float = setting(
        5.0,
        "seconds a resumed request waits for the former decode instance to join this conductor, before a new placement",
        ge=0,
    )
    max_queued: int = setting(
        1024, "requests that may wait for their limits at once; beyond this number some are refused", ge=1
    )
    max_queued_bytes: int = 64 << 20
    heartbeat_s: float = setting(
        1.0,
        "instances are probed after 0.4 times this many seconds of silence and lost after as long again without an "
        "answer; an instance silent for three times this is lost. Instances report their load four times in this time",
        gt=0,
        le=60,
    )
    budgets: Mapping[str, TenantBudget] = field(default_factory=dict)
