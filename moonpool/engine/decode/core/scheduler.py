"""The decode scheduler, a state machine: events in, actions out.

The scheduler owns requests, blocks, the batch and takeovers.

A request that loses the conductor continues for a grace period and is then parked. Another conductor can take the
request over. docs/adr/0012-resuming.md has the rules; docs/states.md draws a request's statuses.
"""

from moonpool.base.scheduling.block_lending import BlockLending, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.kv_deletion import DeleteKV, delete_kv
from moonpool.base.scheduling.state_machine import IoEnded, Tick, Timers, digest_of, earliest
from moonpool.engine.decode.core.actions import (
    Action,
    FinishSequence,
    RequestAborted,
    ReservationGranted,
    ReservationRefused,
    SetBlockTable,
    StartRun,
    StopReceiving,
)
from moonpool.engine.decode.core.admission import DecodeAdmission
from moonpool.engine.decode.core.batch_planner import BatchPlanner
from moonpool.engine.decode.core.beam_forks import advance_search, group_by_search
from moonpool.engine.decode.core.copy_on_write import fork_sequences
from moonpool.engine.decode.core.events import (
    AbortRequest,
    AdoptRequest,
    ComputePrompt,
    EngineDied,
    Event,
    FirstTokens,
    IoEnd,
    QueuePrompt,
    ReserveBlocks,
    RunDone,
    RunProgress,
    StartDecoding,
    StreamClosed,
    StreamOpened,
    SwapEnd,
    TransferComplete,
    TransferOpened,
    TransferProgress,
)
from moonpool.engine.decode.core.in_flight import BlockWriteFlight, PromptLoadFlight, ReceiveFlight, SwapFlight
from moonpool.engine.decode.core.orphans import OrphanedRequests
from moonpool.engine.decode.core.output_lengths import OutputLengths
from moonpool.engine.decode.core.preemption import PreemptedRequests
from moonpool.engine.decode.core.request import (
    MOVING,
    DecodeRequest,
    RequestStatus,
    RequestTable,
)
from moonpool.engine.decode.core.runs import observe_run
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.write_back import BlockWriteBack
from moonpool.engine.scheduler.block_table import check_pins
from moonpool.engine.scheduler.prefix_sources import LoadEnded

NO_PLACE = "the prompt cannot be computed here now"
_Transfer = TransferOpened | TransferProgress | TransferComplete
_RequestEvent = _Transfer | StartDecoding | ComputePrompt | QueuePrompt | AbortRequest
_PoolEvent = EngineDied | DeleteKV | LendBlocks | ReturnBlocks


class DecodeScheduler:
    """One decode instance's decisions. A `moonpool.base.scheduling.state_machine.Core`.

    Attributes:
        settings: the instance's settings.
        blocks: the pool's block manager.
        budget: available, promised and expected blocks.
        tracker: the engine's measured speeds.
        planner: the batch, and the waiting and recomputing requests.
        preempted: the preempted requests.
        write_back: copies of blocks in kvstores.
        lending: blocks that other instances read.
        requests: all requests except parked requests, by id.
        orphans: requests without a conductor, and output kept for takeovers.
    """

    def __init__(self, settings: DecodeSettings) -> None:
        self._state = state = DecodeState(settings)
        self.settings, self.blocks, self.budget, self.tracker = settings, state.blocks, state.budget, state.tracker
        self.lending = BlockLending(self.blocks)
        self.write_back = BlockWriteBack(state)
        self.preempted = PreemptedRequests(state)
        self._lengths = OutputLengths(settings.assumed_answer_tokens)
        self._table = RequestTable()
        self.requests = self._table.requests
        self.planner = BatchPlanner(state, self.preempted, self._lengths, self._table.tenants)
        self._admission = DecodeAdmission(state, self.planner, self._lengths)
        self.orphans = OrphanedRequests(state, self._table, self.planner, self.preempted)
        self._leases: Timers[int] = Timers()
        self._streams: dict[int, str] = {}
        self._finishing: list[DecodeRequest] = []  # until the run in flight is over
        self._dead = False

    @property
    def context_tokens(self) -> int:
        """All started sequences' tokens."""
        return sum(self.planner.batch.context_of(request) for request in self.requests.values() if request.is_started)

    @property
    def sequences(self) -> int:
        """Sequences in all requests, also in requests that have not started."""
        return sum(request.num_seqs for request in self.requests.values())

    @property
    def expected_answer_tokens(self) -> int:
        """Expected tokens of a new answer, for which blocks are reserved."""
        return self._lengths.expected(0)

    def count(self, *statuses: RequestStatus) -> int:
        """Return requests with any of these statuses."""
        return sum(request.status in statuses for request in self.requests.values())

    def due(self) -> float | None:
        """Return when the next lease or grace period ends, or output is dropped."""
        return earliest(self._leases.next(), self.orphans.due())

    def handle(self, now: float, event: Event, out: list[Action]) -> None:
        """Take an event and add the actions to `out`."""
        self._state.now = self.blocks.now = now
        self._state.out = out
        match event:
            case RunDone() | RunProgress():
                self._run_reported(event)
            case ReserveBlocks():
                self._reserve(event)
            case IoEnded():
                self._io_ended(event)
            case Tick():
                self._expire()
                self.orphans.tick()
            case StreamOpened() | StreamClosed():
                self._stream(event)
            case AdoptRequest() if event.stream in self._streams:
                self.orphans.adopt(event, self._streams[event.stream])
            case EngineDied() | DeleteKV() | LendBlocks() | ReturnBlocks():
                self._pool_event(event)
            case _:
                self._request_event(event)
        # After each event: a run or copy that has ended may have been what a late orphan waited for.
        self._abort(self.orphans.park_late(), "its conductor was lost")
        if not self._dead:
            self._plan()
            if not isinstance(event, RunProgress | RunDone):  # what the run itself reports is no reason to end it
                self.planner.stop_run(leaving=bool(self._finishing) or self.orphans.waits_for_run)
        out[:0] = self.blocks.take_slot_moves()
        self._state.out = []

    def _plan(self) -> None:
        self.planner.plan()
        while (unbound := self.planner.starts.unbound) is not None:
            self.planner.starts.unbound = None
            self._abort([unbound], NO_PLACE)
            self.planner.plan()

    # --- before a request starts -----------------------------------------------------------------------------------

    def _reserve(self, event: ReserveBlocks) -> None:
        # A conductor that asks has placed the conductor's orphans anew.
        self._abort(self.orphans.of(event.conductor), "the conductor's stream ended")
        now = self._state.now
        tbt_s = self._admission.predicted_tbt_s(event, self.requests.values())
        request = DecodeRequest.of(event, now, now + self.settings.promise_s)
        refused = self._admission.refuse(event, request, tbt_s, self.requests.values())
        if refused is not None:
            self._state.act(ReservationRefused(event.id, *refused, tbt_s))
            return
        self._table.add(request)
        self.planner.slots.keep(request)
        self._leases.set(event.id, now + self._promise_s(event.conductor))
        self._state.act(ReservationGranted(event.id, len(request.blocks), tbt_s))

    def _promise_s(self, conductor: str) -> float:
        """Return how long a promise needs no news; less if the conductor was lost before the request was read."""
        there = not conductor or conductor in self._streams.values()
        return self.settings.lease_s if there else min(self.settings.grace_s, self.settings.lease_s)

    def _renew_lease(self, request: DecodeRequest) -> None:
        self._leases.set(request.id, self._state.now + self.settings.lease_s)

    def _request_event(self, event: Event) -> None:
        request = self.requests.get(event.id) if isinstance(event, _RequestEvent) else None
        if request is None or request.status is RequestStatus.FINISHING:
            return
        match event:
            case TransferOpened() if request.status is RequestStatus.PROMISED:
                self.budget.bind_to_receive(request, self.settings.first_windowed_block(request.spec.tokens))
                if event.older:
                    request.keep_nothing()
                request.set_status(RequestStatus.RECEIVING)
                self._renew_lease(request)
                self._state.act(SetBlockTable(request.id, tuple(request.blocks)))
            case TransferProgress() if request.status is RequestStatus.RECEIVING:
                self._renew_lease(request)
            case TransferComplete() if request.status is RequestStatus.RECEIVING:
                request.set_status(RequestStatus.RECEIVED)
                self._renew_lease(request)
                self.budget.register_leading(request, len(request.blocks))
                self._join(request)
            case StartDecoding() if not request.is_started:
                self._start(request, event)
            case ComputePrompt() if not request.is_started:
                self._compute_prompt(request, event)
            case QueuePrompt() if request.status is RequestStatus.PROMISED:
                self._queue_prompt(request, event)
            case AbortRequest():
                if request.status is RequestStatus.RECEIVING:
                    self.budget.register_leading(request, event.leading)
                self._abort([request], event.why)

    def _start(self, request: DecodeRequest, event: StartDecoding) -> None:
        if event.stream not in self._streams:
            self._abort([request], "the conductor's stream ended")
            return
        request.stream, request.finishes = event.stream, (event.finish, *event.others)
        request.takeover.known_tokens, request.takeover.known_keys = event.known, event.known_keys
        if request.search is not None:
            request.search.first_candidates = event.candidates
        else:
            assert len(request.finishes) == request.spec.width, "a first token for each sequence"
        request.patient = event.patient and not request.tbt_slo_s
        request.sequences[0].tokens += 1
        self._join(request)

    def _compute_prompt(self, request: DecodeRequest, event: ComputePrompt) -> None:
        nothing_came = request.status is RequestStatus.PROMISED
        if nothing_came and event.stream in self._streams and self.planner.starts.compute_at_once(request):
            request.stream = event.stream
            request.patient = event.patient and not request.tbt_slo_s
            self._leases.clear(request.id)
            self._state.act(SetBlockTable(request.id, tuple(request.blocks)))
        else:
            began = "its KV has begun to come: the prompt is not computed here"
            self._abort([request], NO_PLACE if nothing_came else began)

    def _queue_prompt(self, request: DecodeRequest, event: QueuePrompt) -> None:
        if event.stream not in self._streams:
            self._abort([request], "the conductor's stream ended")
            return
        request.stream, request.held_by_stores = event.stream, event.held
        request.sources = event.sources if request.asked.reuse else ()
        request.patient = event.patient and not request.tbt_slo_s
        self._leases.clear(request.id)
        self.planner.prompts.add(request, event.delay_s)

    def _join(self, request: DecodeRequest) -> None:
        """Let a request wait for the first step once both the KV and the first token are there."""
        if request.status is RequestStatus.RECEIVED and request.is_started:
            self._leases.clear(request.id)
            self._begin_answers(request)

    def _take_first_tokens(self, first: FirstTokens) -> None:
        """Let the answers to a prompt computed here begin."""
        request = self._table.get(first.id)
        if request is None or request.status is RequestStatus.FINISHING:
            return
        [sequence] = request.sequences
        assert sequence.computed == sequence.tokens, "the prompt is not computed"
        request.finishes = first.finishes
        request.takeover.known_tokens, request.takeover.known_keys = first.known, first.known_keys
        if request.search is not None:
            request.search.first_candidates = first.candidates
        if all(first.finishes):
            self.write_back.write_window(request, sequence)
        self.planner.starts.answers_begin(request)
        request.set_status(RequestStatus.RECEIVED)
        sequence.tokens += 1
        self._begin_answers(request)

    def _begin_answers(self, request: DecodeRequest) -> None:
        """Let the answers wait for their first step: the KV and the first tokens are there."""
        fork_sequences(request, self.blocks)
        behind_first = request.take_known_tokens()
        self._state.out += [
            SetBlockTable(sequence.id, tuple(sequence.table.blocks)) for sequence in request.sequences[1:]
        ]
        reasons = zip(request.sequences, request.finishes, strict=False)
        ended = [(sequence, reason) for sequence, reason in reasons if reason]
        self._state.out += [FinishSequence(sequence.id, reason) for sequence, reason in ended]
        search = request.search
        over = search is not None and advance_search(self._state, request, [search.first_candidates])
        if over or len(ended) == request.spec.width:
            self._finish(request)
            return
        self.planner.add(request)
        for sequence, _ in ended:
            self.planner.end(request, sequence)
        if behind_first:  # tokens known from an earlier attempt have no KV here: computed as after preemption
            self.planner.try_remove(request)
            self.preempted.recompute_known(request)

    # --- leases and conductors -------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Abort requests with an expired lease, except requests that only wait while their conductor is connected."""
        now, conductors = self._state.now, set(self._streams.values())
        while (number := self._leases.pop_due(now)) is not None:
            request = self.requests[number]
            waits = request.status is RequestStatus.PROMISED or (
                request.status is RequestStatus.RECEIVED and not request.is_started
            )
            if waits and now < request.until and request.conductor in conductors:
                self._leases.set(number, min(now + self.settings.lease_s, request.until))
            else:
                waited = f"the promise was not taken up for {self.settings.promise_s:g} s"
                silent = "no frame of the transfer came while its lease ran"
                self._abort([request], waited if waits and request.conductor in conductors else silent)

    def _stream(self, event: StreamOpened | StreamClosed) -> None:
        if isinstance(event, StreamOpened):
            self._abort(self.orphans.of(event.conductor), "the conductor's stream ended")
            self._streams[event.stream] = event.conductor
            return
        conductor = self._streams.pop(event.stream, "")
        there = conductor in self._streams.values()
        for request in list(self.requests.values()):
            on_stream = request.stream == event.stream and request.status is not RequestStatus.FINISHING
            if on_stream and request.asked.resumable and not there:
                self.orphans.orphan(request)
            elif on_stream or (conductor and not there and not request.is_started and request.conductor == conductor):
                self._abort([request], "the conductor's stream ended")

    # --- ends ------------------------------------------------------------------------------------------------------

    def _abort(self, requests: list[DecodeRequest], why: str) -> None:
        for request in requests:
            if request.status is not RequestStatus.FINISHING:
                self._state.act(RequestAborted(request.id, why))
                self._finish(request)

    def _finish(self, request: DecodeRequest) -> None:
        """Free a request as soon as no step, copy or transfer uses the request's blocks."""
        self._leases.clear(request.id)
        self.budget.expect(request, 0)
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING):
            for sequence in request.sequences:
                self.write_back.write_window(request, sequence)
        # Blocks stay until whoever reads or writes them has ended; else their next owner would be damaged.
        if request.status is RequestStatus.LOADING:
            self.planner.loads.give_up(request)
        in_use = request.status in MOVING or self._stop_receiving(request)
        quiet = not in_use and self.planner.try_remove(request)
        self.planner.slots.kept.pop(request.id, None)
        request.set_status(RequestStatus.FINISHING)
        if quiet:
            self._free(request)
        elif not in_use:
            self._finishing.append(request)

    def _stop_receiving(self, request: DecodeRequest) -> bool:
        """Stop an ending request's transfer; return whether there is a transfer."""
        if request.status is not RequestStatus.RECEIVING:
            return False
        self._state.act(StopReceiving(self._state.ios.begin(ReceiveFlight(request, request.tables)), request.id))
        return True

    def _finish_step(self) -> None:
        """Free requests that waited for the run's end."""
        for request in self._finishing:
            self.planner.finish_step(request)
            self._free(request)
        self._finishing.clear()

    def _free(self, request: DecodeRequest) -> None:
        self.preempted.drop_swapped(request)
        self.budget.release(request)
        self._table.remove(request, self._state.now)
        self.orphans.request_ended(request)

    # --- the pool --------------------------------------------------------------------------------------------------

    def _pool_event(self, event: _PoolEvent) -> None:
        if isinstance(event, DeleteKV):
            self._delete_kv(event)
        elif isinstance(event, EngineDied):
            self._dead, self.planner.run_in_flight = True, None
            self._finish_step()
            self._abort(list(self.requests.values()), event.why)
        else:
            self._state.out += self.lending.handle(event, self.budget.surplus, self.budget.promised_window_blocks)

    def _delete_kv(self, event: DeleteKV) -> None:
        """Delete KV; from now on, the requests concerned keep no block and look up no block in kvstores."""
        requests = [*self.requests.values(), *self.orphans.retained.parked]
        keys = ((other.owner, [key for sequence in other.sequences for key in sequence.keys]) for other in requests)
        self._state.act(delete_kv(self.blocks, event, keys))
        for request in requests:
            if request.owner.transient:
                request.keep_nothing()

    # --- runs and I/O ----------------------------------------------------------------------------------------------

    def _run_reported(self, event: RunDone | RunProgress) -> None:
        flight = self.planner.run_in_flight
        if flight is None or flight.run.step != event.step:
            return  # of an engine that has died
        if isinstance(event, RunDone) and event.aborted:
            self.planner.not_computed(flight)
        else:
            observe_run(self.tracker, self._state.now, flight, event)
            self.planner.advance(event.steps, over=isinstance(event, RunDone))
            if isinstance(event, RunDone):
                self._take_accepted(event)
            self._computed(flight.run, event)
        if isinstance(event, RunDone):
            self._run_over(event)

    def _take_accepted(self, event: RunDone) -> None:
        for draft in event.drafts:
            self.planner.drafted_tokens += draft.tokens
            self.planner.accepted_tokens += draft.accepted
            if (sequence := self._table.find(draft.id)) is not None:
                self.planner.batch.gained(sequence, draft.accepted)

    def _run_over(self, event: RunDone) -> None:
        for number in event.late:
            if (sequence := self._table.find(number)) is not None:
                self.planner.batch.gained(sequence, -1)
        self._finish_step()
        for first in event.first_tokens:
            self._take_first_tokens(first)
        for number, _ in event.ended:
            self._sequence_ended(number)
        for request, candidates in group_by_search(event.candidates, self._table.get):
            if advance_search(self._state, request, candidates):
                self._lengths.observe(self.planner.batch.tokens_of(request.sequences[0]) - request.spec.prompt_tokens)
                self._finish(request)
            else:
                self.planner.batch.forked(request)

    def _sequence_ended(self, number: int) -> None:
        """End a sequence with the step's token, and the request with its last sequence."""
        sequence = self._table.find(number)
        if sequence is None:
            return
        request = self._table.of(number)
        self._lengths.observe(self.planner.batch.tokens_of(sequence) - request.spec.prompt_tokens)
        if len(request.sequences) > 1:
            self.write_back.write_window(request, sequence)
            self.planner.end(request, sequence)
        else:
            self._finish(request)

    def _computed(self, run: StartRun, event: RunDone | RunProgress) -> None:
        for chunk in run.chunks:
            request = self._table.of(chunk.id)
            if request.status is not RequestStatus.FINISHING:
                self.planner.chunk_computed(chunk, request)
                self.write_back.write_prompt(request)
        for number, key in event.filled:
            request, sequence = self._table.of(number), self._table.find(number)
            if request.status is not RequestStatus.FINISHING and sequence is not None:
                self.write_back.block_filled(request, sequence, key)

    def _io_ended(self, event: IoEnded[IoEnd]) -> None:
        pin = self._state.ios.end(event.io)
        match pin, event.result:
            case BlockWriteFlight(), _:
                self.write_back.written(pin, event.result)
                return
            case SwapFlight(), SwapEnd() as result:
                self.preempted.swap_ended(pin, result)
            case PromptLoadFlight(), LoadEnded() as result:
                self.planner.loads.ended(pin, result)
            case _ if not isinstance(pin, ReceiveFlight):
                raise TypeError(f"{event.result} does not answer I/O {event.io}")
        if pin.request.status is RequestStatus.FINISHING:
            self._free(pin.request)
        else:
            self.planner.add_restored(pin.request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        requests = list(self.requests.values())
        self.budget.check_invariants(requests)
        self.preempted.check_invariants(requests)
        self.planner.check_invariants(requests)
        self.orphans.check_invariants()
        self._table.check_invariants()
        ios = [pin for _, pin in self._state.ios]
        owned = [table for request in requests for table in request.tables]
        check_pins(self.blocks, owned, self._state.ios, list(self.lending))
        copying = [pin.request for pin in ios if not isinstance(pin, BlockWriteFlight)]
        self.write_back.check_invariants(requests)
        for request in requests:
            request.check_invariants(leased=self._leases.at(request.id) is not None)
            assert request.status not in MOVING or request in copying
            assert request.status is not RequestStatus.FINISHING or request in copying or request in self._finishing

    def digest(self) -> bytes:
        """Return a hash of the whole state."""
        return digest_of(
            list(self.requests.values()),
            [(number, self._leases.at(number)) for number in self.requests],
            (self.blocks, self.budget.promised, self.budget.expected, self.planner),
            [request.id for request in self._finishing],
            (self.preempted, self._lengths),
            self.tracker.speeds,
            (self._streams, self.orphans),
            [(io, pin.request.id, pin.tables) for io, pin in self._state.ios],
            self.lending,
            self._table.tenants,
            self._dead,
        )
