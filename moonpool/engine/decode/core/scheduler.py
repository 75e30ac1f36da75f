"""The decode scheduler, a state machine: events in, actions out.

The scheduler owns requests, blocks, the batch and takeovers.

A request that loses the conductor continues for a grace period and is then parked. Another conductor can take the
request over. docs/adr/0012-resuming.md has the rules; docs/states.md draws a request's statuses.
"""

from collections.abc import Iterator
from dataclasses import replace

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.block_lending import BlockLending, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.kv_deletion import DeleteKV, delete_kv
from moonpool.base.scheduling.state_machine import IoEnded, Tick, Timers, digest_of, earliest
from moonpool.engine.decode.core import batch
from moonpool.engine.decode.core.actions import (
    Action,
    DropOutputLog,
    FenceConductor,
    FinishSequence,
    RequestAborted,
    RequestAdopted,
    RequestFreed,
    RequestParked,
    ReservationGranted,
    ReservationRefused,
    SetBlockTable,
    StartRun,
    StopReceiving,
)
from moonpool.engine.decode.core.admission import DecodeAdmission
from moonpool.engine.decode.core.batch_planner import BatchPlanner, OutputLengths, observe_run
from moonpool.engine.decode.core.block_budget import LoadPin, ReceivePin, StorePin, SwapPin
from moonpool.engine.decode.core.events import (
    AbortRequest,
    AdoptRequest,
    ComputePrompt,
    EngineDied,
    Event,
    IoEnd,
    LoadEnd,
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
from moonpool.engine.decode.core.preemption import PreemptedRequests, StoredBlocks
from moonpool.engine.decode.core.request import (
    COPYING,
    NO_STREAM,
    PREEMPTIBLE,
    DecodeRequest,
    RequestStatus,
    RequestTable,
)
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.decode.core.state import DecodeState

RETAINED_BYTES = 512
"""Bytes that retained output counts for beside the tokens and keys."""
TOKEN_BYTES = 4
KEY_BYTES = 32


@frozen
class RetainedOutput:
    """One request's output after the request has ended, or was parked.

    Attributes:
        until: time at which the output is dropped, seconds.
        bytes: size that counts in `log_bytes`.
        fence: fence of the last conductor that had the request.
        request: the parked request; None if the request has ended.
    """

    until: float
    bytes: int
    fence: int
    request: DecodeRequest | None = None


class OutputRetention:
    """Output of ended and parked requests, kept for takeovers; oldest first.

    Attributes:
        bytes: size of all output; beyond `DecodeSettings.log_bytes`, the oldest output is dropped.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self._outputs: dict[int, RetainedOutput] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[tuple[int, RetainedOutput]]:
        return iter(self._outputs.items())

    def get(self, number: int) -> RetainedOutput | None:
        """A request's output."""
        return self._outputs.get(number)

    def due(self) -> float | None:
        """When the oldest output is dropped."""
        return next(iter(self._outputs.values())).until if self._outputs else None

    @property
    def parked(self) -> list[DecodeRequest]:
        """The parked requests."""
        return [output.request for output in self._outputs.values() if output.request is not None]

    def keep_ended(self, request: DecodeRequest) -> None:
        """Keeps an ended request's answers."""
        self._keep(request, RETAINED_BYTES + TOKEN_BYTES * request.answer_tokens + _logprob_bytes(request), None)

    def keep_parked(self, request: DecodeRequest) -> None:
        """Keeps a parked request: tokens (as received, and as int32), log probabilities and keys."""
        size = RETAINED_BYTES + TOKEN_BYTES * _retained_tokens(request) + _logprob_bytes(request)
        size += KEY_BYTES * sum(len(sequence.keys) for sequence in request.sequences)
        self._keep(request, size, request)

    def set_fence(self, number: int, fence: int) -> None:
        """A conductor with a higher fence reads an ended request's output. The output is not kept longer."""
        self._outputs[number] = replace(self._outputs[number], fence=fence)

    def take(self, number: int) -> DecodeRequest:
        """Takes a parked request out."""
        output = self._remove(number)
        assert output.request is not None, "the request has ended"
        return output.request

    def expire(self) -> None:
        """Drops output that is too old."""
        while self._outputs and (first := next(iter(self._outputs.items())))[1].until <= self._state.now:
            self._drop(first[0])

    def _keep(self, request: DecodeRequest, size: int, parked: DecodeRequest | None) -> None:
        until = self._state.now + self._state.settings.log_ttl_s
        self._outputs[request.id] = RetainedOutput(until, size, request.takeover.fence, parked)
        self.bytes += size
        while self.bytes > self._state.settings.log_bytes:
            self._drop(next(iter(self._outputs)))

    def _drop(self, number: int) -> None:
        self._remove(number)
        self._state.act(DropOutputLog(number))

    def _remove(self, number: int) -> RetainedOutput:
        output = self._outputs.pop(number)
        self.bytes -= output.bytes
        return output

    def check_invariants(self) -> None:
        """Asserts that the bytes are right and within the limit, and that the oldest output is dropped first."""
        assert self.bytes == sum(output.bytes for output in self._outputs.values()) <= self._state.settings.log_bytes
        ends = [output.until for output in self._outputs.values()]
        assert ends == sorted(ends)

    def digest(self) -> bytes:
        """Hash of the outputs."""
        return digest_of(self._outputs)


def _retained_tokens(request: DecodeRequest) -> int:
    """Tokens kept from a parked request: from each sequence, running or ended, with the prompt's."""
    tokens = sum(2 * sequence.tokens for sequence in request.sequences)
    if request.search is not None:
        search = request.search
        return tokens + len(search.kept) * (request.spec.prompt_tokens + search.length)
    return tokens + (request.spec.width - len(request.sequences)) * request.spec.prompt_tokens + request.ended_tokens


def _logprob_bytes(request: DecodeRequest) -> int:
    """Bytes for the answers' log probabilities."""
    return request.spec.logprob_bytes * request.answer_tokens


class OrphanedRequests:
    """Requests without a conductor, and the output kept for takeovers.

    Args:
        state: shared state of the scheduler.
        table: all requests except parked requests.
        planner: the batch and the waiting requests.
        preempted: the preempted requests.

    Attributes:
        retained: output of ended and parked requests.
    """

    def __init__(
        self, state: DecodeState, table: RequestTable, planner: BatchPlanner, preempted: PreemptedRequests
    ) -> None:
        self._state = state
        self._table = table
        self._requests = table.requests
        self._planner = planner
        self._preempted = preempted
        self._graces: Timers[int] = Timers()
        self._late: list[DecodeRequest] = []  # their grace period is over; a step or a copy still uses their blocks
        self.retained = OutputRetention(state)

    def __len__(self) -> int:
        """Number of requests that run without a conductor."""
        return len(self._graces) + len(self._late)

    @property
    def waits_for_run(self) -> bool:
        """Whether a request after the grace period waits for the run in flight to end."""
        return any(self._planner.in_flight(request) for request in self._late)

    def due(self) -> float | None:
        """When the next grace period ends, or output is dropped."""
        return earliest(self._graces.next(), self.retained.due())

    # --- losing a conductor ----------------------------------------------------------------------------------------

    def orphan(self, request: DecodeRequest) -> None:
        """A started request has lost the conductor."""
        request.stream = NO_STREAM
        self._graces.set(request.id, self._state.now + self._state.settings.grace_s)

    def of(self, conductor: str) -> list[DecodeRequest]:
        """A conductor's orphans, by the conductor's identity."""
        if not conductor or not len(self):
            return []
        orphans = (
            it for it in self._requests.values() if it.stream == NO_STREAM and it.status is not RequestStatus.FINISHING
        )
        return [request for request in orphans if request.conductor == conductor]

    def request_ended(self, request: DecodeRequest) -> None:
        """A request has ended: the output is kept if a conductor may ask."""
        self._clear_grace(request)
        retained = request.asked.resumable and request.is_started
        self._state.act(RequestFreed(request.id, retained))
        if retained:
            self.retained.keep_ended(request)

    def tick(self) -> None:
        """Time has passed."""
        while (number := self._graces.pop_due(self._state.now)) is not None:
            self._late.append(self._requests[number])
        self.retained.expire()

    def park_late(self) -> list[DecodeRequest]:
        """Parks requests after the grace period, unless a step or copy uses their blocks.

        Returns:
            Requests to be aborted instead: their KV has not arrived whole.
        """
        if not self._late:
            return []
        still_late, aborted = [], []
        for request in self._late:
            if request.status in COPYING or self._planner.in_flight(request):
                still_late.append(request)
            elif request.status in PREEMPTIBLE or request.status is RequestStatus.PREEMPTED:
                self._park(request)
            elif request.status is not RequestStatus.FINISHING:
                aborted.append(request)
        self._late = still_late
        return aborted

    def _park(self, request: DecodeRequest) -> None:
        """Takes all of a request's blocks. Full blocks stay in the pool as cache until they are needed."""
        self._planner.take_out(request)
        self._planner.slots_kept.pop(request.id, None)
        if request.status is not RequestStatus.PREEMPTED:
            request.preemption.sharing = batch.block_sharing_of(request, self._state.settings)
        self._preempted.drop_swapped(request)
        self._state.budget.expect(request, 0)
        self._state.budget.release(request)
        request.set_status(RequestStatus.PARKED)
        request.tbt_slo_s = 0.0  # no slot is kept for the request any more
        self._table.remove(request)
        self._state.act(RequestParked(request.id))
        self.retained.keep_parked(request)

    # --- takeover --------------------------------------------------------------------------------------------------

    def adopt(self, event: AdoptRequest, conductor: str) -> None:
        """Gives a request, or the retained output, to a conductor with a higher fence than the last conductor's."""
        request, output = self._requests.get(event.id), self.retained.get(event.id)
        if output is not None:
            fence = output.fence
        elif request is not None and _may_be_adopted(request):
            fence = request.takeover.fence
        else:
            return
        if event.fence <= fence:
            self._state.act(FenceConductor(event.id, event.stream))
        elif output is not None and output.request is None:
            self.retained.set_fence(event.id, event.fence)
            self._state.act(RequestAdopted(event.id, event.stream, event.positions))
        else:
            self._hand_over(request or self.retained.take(event.id), event, conductor)

    def _hand_over(self, request: DecodeRequest, event: AdoptRequest, conductor: str) -> None:
        assert request.stream is not None
        if request.stream != NO_STREAM:
            self._state.act(FenceConductor(request.id, request.stream))
        self._clear_grace(request)
        request.stream, request.conductor, request.takeover.fence = event.stream, conductor, event.fence
        if request.status is RequestStatus.PARKED:
            self._table.add(request)
            self._preempted.enqueue(request)
        self._state.act(RequestAdopted(request.id, event.stream, event.positions))

    def _clear_grace(self, request: DecodeRequest) -> None:
        self._graces.clear(request.id)
        self._late = [late for late in self._late if late is not request]

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Asserts that each orphan's grace period ends, and that parked requests hold no blocks."""
        self.retained.check_invariants()
        for request in self._requests.values():
            waits = self._graces.at(request.id) is not None or request in self._late
            assert waits <= (request.stream == NO_STREAM)
            assert waits or request.stream != NO_STREAM or request.status is RequestStatus.FINISHING, "it never ends"
            assert request.status is not RequestStatus.PARKED
        for number, output in self.retained:
            assert number not in self._requests
            if (kept := output.request) is not None:
                assert kept.status is RequestStatus.PARKED
                held = kept.blocks, kept.expected_growth, kept.promised, kept.preemption.swapped_blocks
                assert held == ([], 0, 0, 0), "it holds something"

    def digest(self) -> bytes:
        """Hash of the grace periods and the retained output."""
        graces = [(number, at) for number in self._requests if (at := self._graces.at(number)) is not None]
        return digest_of(graces, [request.id for request in self._late], self.retained)


def _may_be_adopted(request: DecodeRequest) -> bool:
    return request.asked.resumable and request.is_started and request.status is not RequestStatus.FINISHING


_RequestEvent = TransferOpened | TransferProgress | TransferComplete | StartDecoding | ComputePrompt | AbortRequest
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
        stored_blocks: copies of blocks in kvstores.
        lending: blocks that other instances read.
        requests: all requests except parked requests, by id.
        orphans: requests without a conductor, and output kept for takeovers.
    """

    def __init__(self, settings: DecodeSettings) -> None:
        self._state = state = DecodeState(settings)
        self.settings, self.blocks, self.budget, self.tracker = settings, state.blocks, state.budget, state.tracker
        self.lending = BlockLending(self.blocks)
        self.stored_blocks = StoredBlocks(state)
        self.preempted = PreemptedRequests(state, self.stored_blocks)
        self._lengths = OutputLengths(settings.assumed_answer_tokens)
        self.planner = BatchPlanner(state, self.preempted, self._lengths)
        self._admission = DecodeAdmission(state, self.planner, self._lengths)
        self._table = RequestTable()
        self.requests = self._table.requests
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
        return sum(request.slots for request in self.requests.values())

    @property
    def expected_answer_tokens(self) -> int:
        """Expected tokens of a new answer, for which blocks are reserved."""
        return self._lengths.expected(0)

    def count(self, *statuses: RequestStatus) -> int:
        """Requests with any of these statuses."""
        return sum(request.status in statuses for request in self.requests.values())

    def due(self) -> float | None:
        """When the next lease or grace period ends, or output is dropped."""
        return earliest(self._leases.next(), self.orphans.due())

    def handle(self, now: float, event: Event, out: list[Action]) -> None:
        """Takes an event and adds the actions to `out`."""
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
        self._abort(self.orphans.park_late(), "its conductor was lost")
        if not self._dead:
            self.planner.plan()
            if not isinstance(event, RunProgress | RunDone):
                self.planner.stop_run(leaving=bool(self._finishing) or self.orphans.waits_for_run)
        out[:0] = self.blocks.take_slot_moves()
        self._state.out = []

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
        self.planner.keep_slots(request)
        self._leases.set(event.id, now + self._promise_s(event.conductor))
        self._state.act(ReservationGranted(event.id, len(request.blocks), tbt_s))

    def _promise_s(self, conductor: str) -> float:
        """Seconds for which a promise needs no news; fewer if the conductor was lost before the request was read."""
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
        if nothing_came and event.stream in self._streams and self.planner.compute_prompt(request):
            request.stream = event.stream
            request.patient = event.patient and not request.tbt_slo_s
            self._leases.clear(request.id)
            self._state.act(SetBlockTable(request.id, tuple(request.blocks)))
        else:
            began = "its KV has begun to come: the prompt is not computed here"
            self._abort([request], "the prompt cannot be computed here now" if nothing_came else began)

    def _join(self, request: DecodeRequest) -> None:
        """Lets a request wait for the first step once both the KV and the first token are there."""
        if request.status is not RequestStatus.RECEIVED or not request.is_started:
            return
        self._leases.clear(request.id)
        batch.fork_sequences(request, self.blocks)
        behind_first = batch.take_known_tokens(request)
        self._state.out += [SetBlockTable(it.id, tuple(it.table)) for it in request.sequences[1:]]
        ended = [(it, reason) for it, reason in zip(request.sequences, request.finishes, strict=False) if reason]
        self._state.out += [FinishSequence(sequence.id, reason) for sequence, reason in ended]
        search = request.search
        over = search is not None and batch.advance_search(self._state, request, [search.first_candidates])
        if over or len(ended) == request.spec.width:
            self._finish(request)
            return
        self.planner.add(request)
        for sequence, _ in ended:
            self.planner.end(request, sequence)
        if behind_first:
            self.planner.take_out(request)
            self.preempted.recompute_known(request)

    # --- leases and conductors -------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Aborts requests with an expired lease, except requests that only wait while their conductor is connected."""
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
        """Frees a request as soon as no step, copy or transfer uses the request's blocks."""
        self._leases.clear(request.id)
        self.budget.expect(request, 0)
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING):
            for sequence in request.sequences:
                self.stored_blocks.write_window(request, sequence)
        in_use = request.status in COPYING or self._stop_receiving(request)
        quiet = not in_use and self.planner.take_out(request)
        self.planner.slots_kept.pop(request.id, None)
        request.set_status(RequestStatus.FINISHING)
        if quiet:
            self._free(request)
        elif not in_use:
            self._finishing.append(request)

    def _stop_receiving(self, request: DecodeRequest) -> bool:
        """Stops an ending request's transfer; returns whether there is a transfer."""
        if request.status is not RequestStatus.RECEIVING:
            return False
        self._state.act(StopReceiving(self._state.ios.begin(ReceivePin(request)), request.id))
        return True

    def _step_over(self) -> None:
        """Frees requests that waited for the run's end."""
        for request in self._finishing:
            self.planner.step_over(request)
            self._free(request)
        self._finishing.clear()

    def _free(self, request: DecodeRequest) -> None:
        self.preempted.drop_swapped(request)
        self.budget.release(request)
        self._table.remove(request)
        self.orphans.request_ended(request)

    # --- the pool --------------------------------------------------------------------------------------------------

    def _pool_event(self, event: _PoolEvent) -> None:
        if isinstance(event, DeleteKV):
            self._delete_kv(event)
        elif isinstance(event, EngineDied):
            self._dead, self.planner.run_in_flight = True, None
            self._step_over()
            self._abort(list(self.requests.values()), event.why)
        else:
            self._state.out += self.lending.handle(event, self.budget.surplus, self.budget.promised_slots)

    def _delete_kv(self, event: DeleteKV) -> None:
        """Deletes KV; from now on, the requests concerned keep no block and look up no block in kvstores."""
        requests = [*self.requests.values(), *self.orphans.retained.parked]
        keys = ((it.owner, [key for sequence in it.sequences for key in sequence.keys]) for it in requests)
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
        self._step_over()
        for number, _ in event.ended:
            self._sequence_ended(number)
        for request, candidates in batch.group_by_search(event.candidates, self._table.get):
            if batch.advance_search(self._state, request, candidates):
                self._lengths.observe(self.planner.batch.tokens_of(request.sequences[0]) - request.spec.prompt_tokens)
                self._finish(request)
            else:
                self.planner.batch.forked(request)

    def _sequence_ended(self, number: int) -> None:
        """A sequence has ended with the step's token; so has the request after the last sequence."""
        sequence = self._table.find(number)
        if sequence is None:
            return
        request = self._table.of(number)
        self._lengths.observe(self.planner.batch.tokens_of(sequence) - request.spec.prompt_tokens)
        if len(request.sequences) > 1:
            self.stored_blocks.write_window(request, sequence)
            self.planner.end(request, sequence)
        else:
            self._finish(request)

    def _computed(self, run: StartRun, event: RunDone | RunProgress) -> None:
        for chunk in run.chunks:
            request = self._table.of(chunk.id)
            if request.status is not RequestStatus.FINISHING:
                self.planner.chunk_computed(chunk, request)
                self.stored_blocks.write_prompt(request)
        for number, key in event.filled:
            request, sequence = self._table.of(number), self._table.find(number)
            if request.status is not RequestStatus.FINISHING and sequence is not None:
                self.stored_blocks.block_filled(request, sequence, key)

    def _io_ended(self, event: IoEnded[IoEnd]) -> None:
        pin = self._state.ios.end(event.io)
        match pin, event.result:
            case StorePin(), _:
                self.stored_blocks.written(pin, event.result)
                return
            case LoadPin(), LoadEnd() as result:
                self.stored_blocks.load_ended(pin, result)
            case SwapPin(), SwapEnd() as result:
                self.preempted.swap_ended(pin, result)
            case _ if not isinstance(pin, ReceivePin):
                raise TypeError(f"{event.result} does not answer I/O {event.io}")
        if pin.request.status is RequestStatus.FINISHING:
            self._free(pin.request)
        else:
            self.planner.restored(pin.request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""
        requests = list(self.requests.values())
        self.budget.check_invariants(requests)
        self.preempted.check_invariants(requests)
        self.planner.check_invariants(requests)
        self.orphans.check_invariants()
        self._table.check_invariants()
        ios = [pin for _, pin in self._state.ios]
        held = [block for request in requests for block in request.refs]
        held += [*self.lending, *(pin.block for pin in ios if isinstance(pin, StorePin))]
        assert len(held) == sum(map(self.blocks.ref_count, range(self.blocks.num_blocks))), "a block is lost or leaked"
        copying = [pin.request for pin in ios if not isinstance(pin, StorePin)]
        self.stored_blocks.check_invariants(requests)
        for request in requests:
            request.check_invariants(leased=self._leases.at(request.id) is not None)
            assert request.status not in COPYING or request in copying
            assert request.status is not RequestStatus.FINISHING or request in copying or request in self._finishing

    def digest(self) -> bytes:
        """Hash of the whole state."""
        return digest_of(
            list(self.requests.values()),
            [(number, self._leases.at(number)) for number in self.requests],
            (self.blocks, self.budget.promised, self.budget.expected, self.planner),
            [request.id for request in self._finishing],
            (self.preempted, self._lengths),
            self.tracker.speeds,
            (self._streams, self.orphans),
            [(io, pin.request.id, pin.block if isinstance(pin, StorePin) else -1) for io, pin in self._state.ios],
            (self.stored_blocks, self.lending),
            self._dead,
        )
