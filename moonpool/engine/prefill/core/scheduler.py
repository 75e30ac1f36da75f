"""The prefill scheduler, a state machine: events in, actions out; and the invariants."""

from collections import Counter

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.block_lending import LendBlocks, ReturnBlocks
from moonpool.base.scheduling.fair_share import may_admit
from moonpool.base.scheduling.kv_deletion import DeleteKV, delete_kv
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.state_machine import IoEnded, Tick, digest_of, earliest
from moonpool.engine.prefill.core.actions import (
    AcceptRequest,
    Action,
    EndReplication,
    EndRequest,
    PrefillOutcome,
    RefusalReason,
    RefuseRequest,
    RefuseStaleRequest,
    ReportFirstToken,
)
from moonpool.engine.prefill.core.events import (
    AddRequest,
    CancelPrefill,
    Drain,
    Event,
    IoDone,
    IoFailed,
    IoResult,
    LayerComputed,
    LayerLoaded,
    ReplicateBlocks,
    SlicesSent,
    StepEnded,
    StopAllRequests,
    StopReplicating,
    TokensSampled,
)
from moonpool.engine.prefill.core.forecast import queue_seconds, reassign_shared_prefix, shared_tokens, speeds_now
from moonpool.engine.prefill.core.in_flight import (
    LoadFlight,
    ReplicaFlight,
    SendFlight,
    StepFlight,
    TransferFlight,
    WriteBackFlight,
)
from moonpool.engine.prefill.core.invariants import check_prefill_state
from moonpool.engine.prefill.core.loads import (
    PrefixLoads,
)
from moonpool.engine.prefill.core.replication import Replication
from moonpool.engine.prefill.core.request import PrefillRequest, PrefillStatus
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.prefill.core.state import PrefillState
from moonpool.engine.prefill.core.step_planner import StepPlanner
from moonpool.engine.prefill.core.transfers import OutgoingTransfers
from moonpool.engine.prefill.core.write_back import PromptWriteBack
from moonpool.engine.scheduler.prefix_sources import LoadEnded

MIN_RETRY_S = 0.1


class PrefillScheduler:
    """One prefill instance's decisions: which prompts start, load, compute and send, and when.

    A request is queued, gets blocks for the whole prompt, may load a prefix, and is computed in steps together with
    others. Meanwhile the request's KV is sent. The request ends when decode has confirmed the transfer. `PrefillStatus`
    has the states. Each user pins its blocks: a request that ends early drops the request's pin; a step, load or send
    keeps a pin until the end.

    Attributes:
        state: requests, blocks and I/O.
        steps: plans the engine's steps.
        loads: loads prefixes.
        copies: replicates hot blocks.
        taken: number of the last accepted request; numbers grow.

    Raises:
        ConfigError: `max_num_batched_tokens` is less than one block.
    """

    def __init__(self, settings: PrefillSettings, speeds: Speeds) -> None:
        if settings.max_num_batched_tokens < settings.block_size:
            reason = f"must be at least one block ({settings.block_size} tokens), not {settings.max_num_batched_tokens}"
            raise ConfigError("max_num_batched_tokens", reason)
        self.state = PrefillState(settings, speeds)
        self._sends = OutgoingTransfers(self.state)
        self.steps = StepPlanner(self.state, self._sends)
        self.loads = PrefixLoads(self.state, self.steps, self._sends)
        self.copies = Replication(self.state, self.loads)
        self._write_back = PromptWriteBack(self.state)
        self._draining = False
        self.taken = 0
        self._stopped = False

    def handle(self, now: float, event: Event | IoEnded[IoResult] | Tick, out: list[Action]) -> None:
        """See `moonpool.base.scheduling.state_machine.Core.handle`."""
        self.state.now, self.state.out = now, out
        self.state.manager.now = now
        match event:
            case LayerComputed() | TokensSampled() | LayerLoaded():  # most are these and the next
                self._progressed(event)
            case IoEnded():
                self._ended(event.io, event.result)
            case AddRequest():
                self._arrive(event)
            case CancelPrefill():
                self._end_early(event.id, PrefillOutcome.LEFT)
            case DeleteKV():
                requests = [(request.owner, request.spec.keys) for request in self.state.requests.values()]
                self.state.act(delete_kv(self.state.manager, event, [*requests, *self.copies.owners]))
            case ReplicateBlocks() | StopReplicating():
                self._copy(event)
            case LendBlocks() | ReturnBlocks():
                self.state.out += self.state.lending.handle(event, self.state.manager.num_available)
            case Drain():
                self._draining = True
            case StopAllRequests():
                self._stop()
        if not isinstance(event, LayerComputed | TokensSampled):  # free nothing, and come often
            self._go_on()
            out[:0] = self.state.manager.take_slot_moves()
        self.state.out = []

    def due(self) -> float | None:
        """See `moonpool.base.scheduling.state_machine.Core.due`."""
        return earliest(earliest(self.steps.plan_at, self.steps.stalled_at()), self.loads.overtake_at())

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        check_prefill_state(self.state, self.steps)

    def digest(self) -> bytes:
        """See `moonpool.base.scheduling.state_machine.Core.digest`."""
        state = self.state
        return digest_of(
            state.settings,
            list(state.requests.values()),
            (state.waiting, state.shares),
            list(state.started),
            list(state.ios),
            self.steps.in_flight,
            state.manager.keys(),
            (state.manager.num_free, state.manager.num_cached),
            state.lending,
            state.tracker.speeds,
            (self._draining, self._stopped, self.taken, self.steps.plan_at, self.steps.idle_since),
            (self.loads, self.copies),
        )

    # --- figures ---------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that have no KV yet."""
        return sum(request.spec.tokens - request.computed for request in self.state.requests.values())

    def drain_seconds(self, now: float | None = None) -> float:
        """Return predicted seconds until all requests queued now are computed.

        Args:
            now: seconds; None = time of the last event.
        """
        return queue_seconds(self.state, self.state.now if now is None else now)

    def speeds(self, now: float) -> Speeds:
        """Return the engine's speeds at `now`: a step that takes too long counts before the end."""
        return speeds_now(self.state, now)

    def started(self, request: int) -> bool:
        """Return whether a request has blocks, or had them."""
        found = self.state.requests.get(request)
        return found is not None and found.status is not PrefillStatus.WAITING

    # --- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, event: AddRequest) -> None:
        if event.rows_tokens:
            self.state.tracker.observe_rows(event.rows_tokens, event.rows_s)
        state = self.state
        why = self._refusal(event)
        if why is not None:
            retry_s = max(MIN_RETRY_S, self.drain_seconds()) if why is RefusalReason.QUEUE_FULL else 0.0
            state.act(RefuseRequest(event.id, why, retry_s))
            return
        # The conductor did not know of other conductors' prompts: it plans again with the real queue (ADR 35).
        if event.max_queue_s is not None and self.drain_seconds() > event.max_queue_s:
            state.act(RefuseStaleRequest(event.id, self.drain_seconds(), self.taken))
            return
        assert event.id not in state.requests, "a request's number is never used twice"
        assert len(event.request.keys) == event.request.tokens // state.settings.block_size, "one key per full block"
        state.act(AcceptRequest(event.id, self.drain_seconds()))
        request = PrefillRequest.of(event, state.settings, state.now)
        held = len(state.manager.match(request.spec.keys[: state.reusable_blocks(request)]))
        request.load_s = self.loads.expected_seconds(request, held)
        request.expected_tokens = max(request.expected_tokens, state.settings.reused_tokens(request.spec.tokens, held))
        request.shared_tokens = shared_tokens(state, request)
        state.requests[event.id] = request
        self.taken = event.id
        state.waiting.add(request.queue_key)

    def _refusal(self, event: AddRequest) -> RefusalReason | None:
        if self._stopped:
            return RefusalReason.STOPPED
        if self._draining:
            return RefusalReason.DRAINING
        if self.state.settings.blocks_for(event.request.tokens) > self.state.settings.num_blocks:
            return RefusalReason.TOO_LONG
        return None if self._may_enter(event) else RefusalReason.QUEUE_FULL

    def _may_enter(self, event: AddRequest) -> bool:
        """Return whether the queue takes a request; a full queue takes one from a tenant below its share (ADR 17)."""
        requests, limit = self.state.requests.values(), self.state.settings.max_queue
        if len(requests) < limit:
            return True
        weights = {request.queue_key.tenant: request.queue_key.weight for request in requests} | {
            event.request.tenant: event.request.weight
        }
        return may_admit(
            Counter(request.queue_key.tenant for request in requests), event.request.tenant, limit, weights.__getitem__
        )

    def _go_on(self) -> None:
        """Start requests and steps as far as possible, and drop stalled slices from the step in front."""
        if self._stopped:
            self.steps.plan_at = None
            return
        self.steps.drop_stalled()
        self.loads.overtake()
        if self.steps.are_full() and not self.loads.undecided and len(self.state.started) == len(self.state.requests):
            return  # nothing can start; most events come here
        self.steps.forgive_idle()
        self.loads.decide_again()
        going = True
        while going:
            while (request := self.steps.start_next()) is not None:
                self._sends.open(request)
                self.loads.decide(request)
            going = self.steps.plan()

    def _end_early(self, number: int, outcome: PrefillOutcome) -> None:
        """End a request early, without the request's pin on the blocks; steps and I/O in flight keep their pins."""
        request = self.state.requests.get(number)
        if request is None:
            return
        self._forget(request)
        if not request.finished:  # whoever was to find its blocks cached computes them now
            reassign_shared_prefix(self.state, request)
        self._sends.give_up(request)
        self.state.cancel(request.prefix.load.io if request.prefix.load is not None else None)
        self.loads.give_up(request)
        self.steps.drop_request(request)
        self.state.unbind(request)
        self.state.act(EndRequest(number, outcome))

    def _forget(self, request: PrefillRequest) -> None:
        request.set_status(PrefillStatus.ENDED)
        del self.state.requests[request.id]
        if self.state.started.pop(request.id, None) is None:
            self.state.waiting.remove(request.id)

    def _stop(self) -> None:
        self._stopped = True
        for number in list(self.state.requests):
            self._end_early(number, PrefillOutcome.STOPPED)
        for io in self.steps.in_flight:
            self.state.cancel(io)
        self.copies.stop()

    def _copy(self, event: ReplicateBlocks | StopReplicating) -> None:
        if isinstance(event, StopReplicating):
            self.copies.call_off(event.tail)
        elif self._draining or self._stopped:
            self.state.act(EndReplication(event.number, 0))
        else:
            self.copies.begin(event)

    # --- ends of I/O -----------------------------------------------------------------------------------------------

    def _ended(self, io: int, result: IoResult) -> None:
        flight = self.state.end(io)
        match flight:
            case SendFlight():  # most are these
                assert isinstance(result, SlicesSent | IoFailed)
                self._batch_ended(flight, result)
            case StepFlight():
                assert isinstance(result, StepEnded)
                self._step_ended(io, flight, result)
            case LoadFlight():
                assert isinstance(result, LoadEnded)
                self.loads.ended(io, flight, result)
            case ReplicaFlight():
                assert isinstance(result, LoadEnded)
                self.copies.ended(flight, result)
            case TransferFlight():
                assert isinstance(result, IoDone | IoFailed)
                self._transfer_ended(flight, result)
            case WriteBackFlight():
                self.state.writes.ended(flight.table)

    def _step_ended(self, io: int, flight: StepFlight, result: StepEnded) -> None:
        news = self.steps.ended(io, flight, result)
        for request in news.counted:
            self.loads.computed(request)
            self._write_back.write(request)
            self.state.pass_windows(request)
            if request.finished:
                self._computed(request)
        for request in news.given_up:
            self._end_early(request.id, PrefillOutcome.STEP_GIVEN_UP)

    def _transfer_ended(self, flight: TransferFlight, result: IoDone | IoFailed) -> None:
        if isinstance(result, IoFailed):
            self._io_failed(flight.request, result)
        elif flight.opens:
            self._sends.opened(flight.request)
        elif (request := self.state.requests.get(flight.request)) is not None:
            self._done(request)

    def _batch_ended(self, flight: SendFlight, result: SlicesSent | IoFailed) -> None:
        if isinstance(result, IoFailed):
            self._io_failed(flight.request, result)
        elif (request := self.state.requests.get(flight.request)) is not None:
            self._sends.sent(request, result.nbytes, result.seconds)

    def _io_failed(self, number: int, result: IoFailed) -> None:
        """Fail a request. A damaged block, and the blocks behind, are not found by key any more."""
        request = self.state.requests.get(number)
        if request is not None and request.outgoing is not None:
            request.outgoing.io = None
            if result.damaged_block is not None:
                self.state.manager.forget(request.spec.keys[result.damaged_block :])
        self._end_early(number, PrefillOutcome.IO_FAILED)

    def _progressed(self, event: LayerComputed | TokensSampled | LayerLoaded) -> None:
        match event:
            case LayerComputed():
                self.steps.layer_computed(event.step, event.layer)
            case LayerLoaded():
                self.loads.layer_loaded(event.io, event.layer)
            case TokensSampled():
                self._sampled(event.step)

    def _sampled(self, step: int) -> None:
        """Report first tokens before the step is over: what follows in the step is hashing."""
        for request in self.steps.sampled(step):
            loading = request.prefix.load is not None or request.prefix.overtaken is not None
            if request.token_at is None and not loading:  # a load's figures are known when the step is over
                self._tell_first_token(request)

    def _computed(self, request: PrefillRequest) -> None:
        """Report a computed prompt's first token at once, without waiting for the transfer."""
        request.set_status(PrefillStatus.COMPUTED)
        if request.token_at is None:
            self._tell_first_token(request)
        if self._sends.finish(request):
            self._done(request)

    def _tell_first_token(self, request: PrefillRequest) -> None:
        now = self.state.now
        request.token_at = now
        began = request.first_step_at if request.first_step_at is not None else now
        computed = request.spec.tokens - request.prefix.cached - request.prefix.loaded
        told = (request.prefix.cached, request.prefix.loaded, computed, began - request.added_at, now - began)
        prefix = request.prefix
        reads = tuple(prefix.misses), tuple(prefix.loads), prefix.overtaken_tokens
        self.state.act(ReportFirstToken(request.id, *told, *reads))

    def _done(self, request: PrefillRequest) -> None:
        tail_s, sent_bytes = 0.0, 0
        if request.outgoing is not None and request.token_at is not None:
            tail_s, sent_bytes = self.state.now - request.token_at, request.outgoing.sent_bytes
        self._forget(request)
        self.state.act(EndRequest(request.id, PrefillOutcome.DONE, tail_s, sent_bytes))
