"""The decode scheduler, a state machine: events in, actions out. It owns requests, blocks, the batch and takeovers.

Requests that lose their conductor run on for a grace period and are then parked; another conductor can take them
over. docs/adr/0012-resuming.md has the rules.
"""

from collections.abc import Iterator
from dataclasses import replace

from moonpool.frozen import frozen
from moonpool.scheduling.block_manager import BlockLending, BlockManager, DeleteKV, LendBlocks, ReturnBlocks
from moonpool.scheduling.latency import SpeedTracker
from moonpool.scheduling.state_machine import IoEnded, PendingIo, Tick, Timers, digest_of, earliest
from services.decode.core import batch
from services.decode.core.actions import (
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
)
from services.decode.core.admission import DecodeAdmission
from services.decode.core.batch_planner import BatchPlanner, OutputLengths, observe_run
from services.decode.core.block_budget import (
    BlockBudget,
    BlockPin,
    LoadPin,
    ReceivePin,
    StorePin,
    SwapPin,
    delete_request_kv,
    stop_receiving,
)
from services.decode.core.events import (
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
from services.decode.core.preemption import PreemptedRequests, StoredBlocks
from services.decode.core.request import ACTIVE, NO_STREAM, DecodeRequest, RequestStatus, RequestTable
from services.decode.core.settings import DecodeSettings

LOG_BYTES = 512
"""Of a log beside its tokens and keys."""


TOKEN_BYTES = 4


KEY_BYTES = 32


@frozen
class RetainedOutput:
    """One request.

    Attributes:
        until: when it is forgotten.
        bytes: that it counts for.
        fence: of who had it last.
        request: itself, if it could go on; None when it has ended.
    """

    until: float
    bytes: int
    fence: int
    request: DecodeRequest | None = None


class OutputRetention:
    """All logs, oldest first.

    Args:
        ttl_s: seconds for which one is kept.
        max_bytes: of all; beyond it the oldest ones go.
    """

    def __init__(self, ttl_s: float, max_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._logs: dict[int, RetainedOutput] = {}
        self.bytes = 0
        """Of all logs."""

    def __len__(self) -> int:
        return len(self._logs)

    def __iter__(self) -> Iterator[tuple[int, RetainedOutput]]:
        return iter(self._logs.items())

    def get(self, number: int) -> RetainedOutput | None:
        """The log of a request."""
        return self._logs.get(number)

    def due(self) -> float | None:
        """When the oldest one is forgotten."""
        return next(iter(self._logs.values())).until if self._logs else None

    def ended(self, now: float, request: DecodeRequest, out: list[Action]) -> None:
        """Keeps the answers of a request that has ended."""
        size = LOG_BYTES + TOKEN_BYTES * request.answer_tokens + _logprob_bytes(request)
        self._keep(request.id, RetainedOutput(now + self._ttl_s, size, request.fence), out)

    @property
    def waiting(self) -> list[DecodeRequest]:
        """Sequences that could go on."""
        return [log.request for log in self._logs.values() if log.request is not None]

    def parked(self, now: float, request: DecodeRequest, out: list[Action]) -> None:
        """Keeps a request that could go on: its tokens (as they came, and as they are), its scores and its keys."""
        size = LOG_BYTES + TOKEN_BYTES * _retained_tokens(request) + _logprob_bytes(request)
        size += KEY_BYTES * sum(len(member.keys) for member in request.members)
        self._keep(request.id, RetainedOutput(now + self._ttl_s, size, request.fence, request), out)

    def read(self, number: int, fence: int) -> None:
        """Somebody with a higher fence reads one. It does not live longer for it."""
        self._logs[number] = replace(self._logs[number], fence=fence)

    def take(self, number: int) -> DecodeRequest:
        """Takes out a sequence that goes on."""
        log = self._remove(number)
        assert log.request is not None, "it has ended"
        return log.request

    def expire(self, now: float, out: list[Action]) -> None:
        """Forgets what is too old."""
        while self._logs and (first := next(iter(self._logs.items())))[1].until <= now:
            self._forget(first[0], out)

    def _keep(self, number: int, log: RetainedOutput, out: list[Action]) -> None:
        self._logs[number] = log
        self.bytes += log.bytes
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._logs)), out)

    def _forget(self, number: int, out: list[Action]) -> None:
        self._remove(number)
        out.append(DropOutputLog(number))

    def _remove(self, number: int) -> RetainedOutput:
        log = self._logs.pop(number)
        self.bytes -= log.bytes
        return log

    def check_invariants(self) -> None:
        """Asserts that the bytes are those of the logs, within the bound, and that the oldest is the first to go."""
        assert self.bytes == sum(log.bytes for log in self._logs.values()) <= self._max_bytes
        ends = [log.until for log in self._logs.values()]
        assert ends == sorted(ends)

    def digest(self) -> bytes:
        """Hash of all of it."""
        return digest_of(self._logs)


def _retained_tokens(request: DecodeRequest) -> int:
    """Those that are kept of one that could go on: of each sequence, and of each that has ended, the prompt's too."""
    tokens = sum(2 * member.tokens for member in request.members)
    if request.search is not None:
        search = request.search
        return tokens + len(search.kept) * (request.prompt_tokens + search.length)
    return tokens + (request.width - len(request.members)) * request.prompt_tokens + request.ended_tokens


def _logprob_bytes(request: DecodeRequest) -> int:
    """Of the log probabilities of its answers."""
    return request.logprob_bytes * request.answer_tokens


_PARKABLE = (*ACTIVE, RequestStatus.PARKED)


_BLOCKS_BUSY = (RequestStatus.SWAPPING_OUT, RequestStatus.SWAPPING_IN, RequestStatus.LOADING)


class OrphanedRequests:
    """The sequences whose conductor is lost, and what is kept of those that have ended.

    The sequences of a group stay together.

    Args:
        config: of the core.
        roster: all of the core's requests; a sequence that is kept here without blocks is not among them.
        planner: the batch and those who wait.
        parking: the preempted ones.
        room: counts blocks.
    """

    def __init__(
        self,
        config: DecodeSettings,
        roster: RequestTable,
        planner: BatchPlanner,
        parking: PreemptedRequests,
        room: BlockBudget,
    ) -> None:
        self.now = 0.0
        """Time of the event that is being handled."""
        self._config = config
        self._roster = roster
        self._requests = roster.requests
        self._planner = planner
        self._parking = parking
        self._room = room
        self._graces: Timers[int] = Timers()
        self._late: list[DecodeRequest] = []  # their grace is over; a step or a copy still uses their blocks
        self.logs = OutputRetention(config.log_ttl_s, config.log_bytes)

    def __len__(self) -> int:
        """Sequences that run without a conductor."""
        return len(self._graces) + len(self._late)

    @property
    def wait(self) -> bool:
        """Whether one whose grace is over waits for the running step's end."""
        return bool(self._late) and any(self._planner.in_flight(request) for request in self._late)

    def due(self) -> float | None:
        """When the next grace period is over, or a log is forgotten."""
        return earliest(self._graces.next(), self.logs.due())

    # --- losing a conductor ----------------------------------------------------------------------------------------

    def orphan(self, request: DecodeRequest) -> None:
        """A started sequence has lost its conductor."""
        request.stream = NO_STREAM
        self._graces.set(request.id, self.now + self._config.grace_s)

    def of(self, conductor: str) -> list[DecodeRequest]:
        """The orphans of a conductor that has said who it is."""
        if not conductor or not len(self):
            return []
        mine = (
            it for it in self._requests.values() if it.stream == NO_STREAM and it.state is not RequestStatus.LEAVING
        )
        return [request for request in mine if request.conductor == conductor]

    def ended(self, request: DecodeRequest, out: list[Action]) -> None:
        """A request has ended: what it has said is kept, if it may be asked for."""
        self._forget(request)
        logged = request.resumable and request.is_started
        out.append(RequestFreed(request.id, logged))
        if logged:
            self.logs.ended(self.now, request, out)

    def tick(self, out: list[Action]) -> None:
        """Time has passed."""
        while (number := self._graces.pop_due(self.now)) is not None:
            self._late.append(self._requests[number])
        self.logs.expire(self.now, out)

    def settle(self, out: list[Action]) -> list[DecodeRequest]:
        """Parks those whose grace is over and whose blocks are quiet.

        Returns:
            Those that are to be ended instead: their KV has not come whole.
        """
        if not self._late:
            return []
        waiting, never = [], []
        for request in self._late:
            if request.state in _BLOCKS_BUSY or self._planner.in_flight(request):
                waiting.append(request)
            elif request.state in _PARKABLE:
                self._park(request, out)
            elif request.state is not RequestStatus.LEAVING:
                never.append(request)
        self._late = waiting
        return never

    def _park(self, request: DecodeRequest, out: list[Action]) -> None:
        """Gives up all blocks. Full ones stay in the pool as cache as long as they are not needed."""
        self._planner.take_out(request)
        self._planner.seats_kept.pop(request.id, None)
        if request.state is not RequestStatus.PARKED:
            request.shape = batch.block_sharing_of(request, self._config)
        self._parking.forget(request, out)
        self._room.claim(request, 0)
        self._room.give_back(request)
        request.state, request.tbt_slo_s = RequestStatus.LOGGED, 0.0  # no place is kept for it any more
        self._roster.remove(request)
        out.append(RequestParked(request.id))
        self.logs.parked(self.now, request, out)

    # --- adopting --------------------------------------------------------------------------------------------------

    def adopt(self, event: AdoptRequest, conductor: str, out: list[Action]) -> None:
        """Gives a sequence, or what is kept of it, to a conductor with a higher fence than the one before."""
        request, log = self._requests.get(event.id), self.logs.get(event.id)
        if log is not None:
            fence = log.fence
        elif (
            request is not None
            and request.resumable
            and request.is_started
            and request.state is not RequestStatus.LEAVING
        ):
            fence = request.fence
        else:
            return
        if event.fence <= fence:
            out.append(FenceConductor(event.id, event.stream))
        elif log is not None and log.request is None:
            self.logs.read(event.id, event.fence)
            out.append(RequestAdopted(event.id, event.stream, event.positions))
        else:
            self._hand_over(request or self.logs.take(event.id), event, conductor, out)

    def _hand_over(self, request: DecodeRequest, event: AdoptRequest, conductor: str, out: list[Action]) -> None:
        assert request.stream is not None
        if request.stream != NO_STREAM:
            out.append(FenceConductor(request.id, request.stream))
        self._forget(request)
        request.stream, request.conductor, request.fence = event.stream, conductor, event.fence
        if request.state is RequestStatus.LOGGED:
            self._roster.add(request)
            self._parking.park(request)
        out.append(RequestAdopted(request.id, event.stream, event.positions))

    def _forget(self, request: DecodeRequest) -> None:
        self._graces.clear(request.id)
        self._late = [late for late in self._late if late is not request]

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Asserts that each orphan's time ends, and that those that are kept hold nothing."""
        self.logs.check_invariants()
        for request in self._requests.values():
            waits = self._graces.at(request.id) is not None or request in self._late
            assert waits <= (request.stream == NO_STREAM)
            assert waits or request.stream != NO_STREAM or request.state is RequestStatus.LEAVING, (
                "it would run for ever"
            )
            assert request.state is not RequestStatus.LOGGED
        for number, log in self.logs:
            assert number not in self._requests
            if log.request is not None:
                kept = log.request
                assert kept.state is RequestStatus.LOGGED
                assert (kept.blocks, kept.claim, kept.promised, kept.saved) == ([], 0, 0, 0), "it holds something"

    def digest(self) -> bytes:
        """Hash of what is kept, and of the times."""
        graces = [(number, at) for number in self._requests if (at := self._graces.at(number)) is not None]
        return digest_of(graces, [request.id for request in self._late], self.logs)


_RequestEvent = TransferOpened | TransferProgress | TransferComplete | StartDecoding | ComputePrompt | AbortRequest


_BLOCKS_IN_USE = (RequestStatus.SWAPPING_OUT, RequestStatus.SWAPPING_IN, RequestStatus.LOADING)


class DecodeScheduler:
    """One decode instance's decisions. A `moonpool.scheduling.state_machine.Core`.

    Attributes:
        blocks: of the pool.
        room: what of them is promised and expected to be needed.
        planner: the batch and those who wait.
        parking: the preempted ones.
        shelf: what is in kvstores.
        lending: blocks that other instances read.
        tracker: the engine's speeds, as measured.
        requests: all, by id.
        orphans: those without a conductor, and what is kept of those that have ended.
    """

    def __init__(self, config: DecodeSettings) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks)
        self.room = BlockBudget(self.blocks, config.watermark_blocks)
        self.lending = BlockLending(self.blocks)
        self.tracker = SpeedTracker(config.speeds)
        self._ios: PendingIo[BlockPin] = PendingIo()
        self.shelf = StoredBlocks(config, self.room, self.tracker, self._ios)
        self.parking = PreemptedRequests(config, self.room, self.tracker, self._ios, self.shelf)
        self._lengths = OutputLengths(config.assumed_answer_tokens)
        self.planner = BatchPlanner(config, self.room, self.parking, self._lengths, self.tracker)
        self._admission = DecodeAdmission(config, self.room, self.planner, self.tracker, self._lengths)
        self._roster = RequestTable()
        self.requests = self._roster.requests
        self.orphans = OrphanedRequests(config, self._roster, self.planner, self.parking, self.room)
        self._leases: Timers[int] = Timers()
        self._streams: dict[int, str] = {}
        self._leaving: list[DecodeRequest] = []  # until the running step is over
        self._dead = False

    @property
    def context_tokens(self) -> int:
        """Tokens of all started sequences."""
        return sum(self.planner.batch.context_of(request) for request in self.requests.values() if request.is_started)

    @property
    def sequences(self) -> int:
        """Sequences of all requests, also of those that have not begun."""
        return sum(request.places for request in self.requests.values())

    @property
    def expected_answer_tokens(self) -> int:
        """Tokens that a new answer is expected to have, and for which room is kept."""
        return self._lengths.expected(0)

    def count(self, *states: RequestStatus) -> int:
        """Requests in one of these states."""
        return sum(request.state in states for request in self.requests.values())

    def due(self) -> float | None:
        """When the next lease ends, or an orphan's time."""
        return earliest(self._leases.next(), self.orphans.due())

    def handle(self, now: float, event: Event, out: list[Action]) -> None:
        """Takes an event."""
        self.orphans.now = self.blocks.now = now
        match event:
            case RunDone() | RunProgress():
                self._took_steps(now, event, out)
            case ReserveBlocks():
                self._reserve(now, event, out)
            case IoEnded():
                self._ended(event, out)
            case Tick():
                self._expire(now, out)
                self.orphans.tick(out)
            case StreamOpened() | StreamClosed():
                self._stream(event, out)
            case AdoptRequest() if event.stream in self._streams:
                self.orphans.adopt(event, self._streams[event.stream], out)
            case EngineDied() | DeleteKV() | LendBlocks() | ReturnBlocks():
                self._at_once(event, out)
            case _:
                self._progress(now, event, out)
        self._end(self.orphans.settle(out), "its conductor was lost", out)
        if not self._dead:
            self.planner.plan(now, out)
            if not isinstance(event, RunProgress | RunDone):
                self.planner.cut(out, leaving=bool(self._leaving) or self.orphans.wait)

    def _reserve(self, now: float, event: ReserveBlocks, out: list[Action]) -> None:
        self._end(self.orphans.of(event.conductor), "the conductor's stream ended", out)  # it has placed them anew
        tbt_s = self._admission.predicted_tbt_s(event, self.requests.values(), now)
        request = DecodeRequest.of(event, now, now + self.config.promise_s)
        refused = self._admission.refuse(event, request, tbt_s, self.requests.values(), now)
        if refused is not None:
            out.append(ReservationRefused(event.id, *refused, tbt_s))
            return
        self._roster.add(request)
        self.planner.keep_seat(request)
        self._leases.set(event.id, now + self._promise_s(event.conductor))
        out.append(ReservationGranted(event.id, len(request.blocks), tbt_s))

    def _promise_s(self, conductor: str) -> float:
        """How long a promise to a conductor needs no news: less where it asked and was lost before that was read."""
        there = not conductor or conductor in self._streams.values()
        return self.config.lease_s if there else min(self.config.grace_s, self.config.lease_s)

    def _progress(self, now: float, event: Event, out: list[Action]) -> None:
        request = self.requests.get(event.id) if isinstance(event, _RequestEvent) else None
        if request is None or request.state is RequestStatus.LEAVING:
            return
        match event:
            case TransferOpened() if request.state is RequestStatus.PROMISED:
                self.room.bind(request)
                if event.older:
                    request.keep_nothing()
                request.state = RequestStatus.RECEIVING
                self._leases.set(request.id, now + self.config.lease_s)
                out.append(SetBlockTable(request.id, tuple(request.blocks)))
            case TransferProgress() if request.state is RequestStatus.RECEIVING:
                self._leases.set(request.id, now + self.config.lease_s)
            case TransferComplete() if request.state is RequestStatus.RECEIVING:
                self._arrived(now, request, out)
            case StartDecoding() if not request.is_started:
                self._start(request, event, out)
            case ComputePrompt() if not request.is_started:
                self._compute(request, event, out)
            case AbortRequest():
                if request.state is RequestStatus.RECEIVING:
                    self.room.keep(request, event.leading)
                self._end([request], event.why, out)

    def _arrived(self, now: float, request: DecodeRequest, out: list[Action]) -> None:
        request.state = RequestStatus.WHOLE
        self._leases.set(request.id, now + self.config.lease_s)
        self.room.keep(request, len(request.blocks))
        self._join(request, out)

    def _start(self, request: DecodeRequest, event: StartDecoding, out: list[Action]) -> None:
        if event.stream not in self._streams:
            self._end([request], "the conductor's stream ended", out)
            return
        request.stream, request.finishes = event.stream, (event.finish, *event.others)
        request.opening, request.known, request.known_keys = event.candidates, event.known, event.known_keys
        assert request.search or len(request.finishes) == request.width, "a first token for each sequence"
        request.patient = event.patient and not request.tbt_slo_s
        request.members[0].tokens += 1
        self._join(request, out)

    def _compute(self, request: DecodeRequest, event: ComputePrompt, out: list[Action]) -> None:
        nothing_came = request.state is RequestStatus.PROMISED
        if nothing_came and event.stream in self._streams and self.planner.compute(request):
            request.stream = event.stream
            request.patient = event.patient and not request.tbt_slo_s
            self._leases.clear(request.id)
            out.append(SetBlockTable(request.id, tuple(request.blocks)))
        else:
            began = "its KV has begun to come: the prompt is not computed here"
            self._end([request], "the prompt cannot be computed here now" if nothing_came else began, out)

    def _join(self, request: DecodeRequest, out: list[Action]) -> None:
        """Goes on when both the KV and the first token are there."""
        if request.state is not RequestStatus.WHOLE or not request.is_started:
            return
        self._leases.clear(request.id)
        batch.fork_sequences(request, self.blocks)
        goes_on = batch.take_known_tokens(request)
        out += [SetBlockTable(member.id, tuple(member.table)) for member in request.members[1:]]
        ended = [(member, why) for member, why in zip(request.members, request.finishes, strict=False) if why]
        out += [FinishSequence(member.id, why) for member, why in ended]
        over = request.search is not None and batch.advance_beams(request, [request.opening], self.blocks, out)
        if over or len(ended) == request.width:
            self._leave(request, out)
            return
        self.planner.add(request)
        for member, _ in ended:
            self.planner.end(request, member)
        if goes_on:
            self.planner.take_out(request)
            self.parking.go_on(request)

    # --- leases and conductors -------------------------------------------------------------------------------------

    def _expire(self, now: float, out: list[Action]) -> None:
        """Ends requests whose lease is over, but for those that only wait and whose conductor is there."""
        conductors = set(self._streams.values())
        while (number := self._leases.pop_due(now)) is not None:
            request = self.requests[number]
            waits = request.state is RequestStatus.PROMISED or (
                request.state is RequestStatus.WHOLE and not request.is_started
            )
            if waits and now < request.until and request.conductor in conductors:
                self._leases.set(number, min(now + self.config.lease_s, request.until))
            else:
                waited = f"the promise was not taken up for {self.config.promise_s:g} s"
                silent = "no frame of the transfer came while its lease ran"
                self._end([request], waited if waits and request.conductor in conductors else silent, out)

    def _stream(self, event: StreamOpened | StreamClosed, out: list[Action]) -> None:
        if isinstance(event, StreamOpened):
            self._end(self.orphans.of(event.conductor), "the conductor's stream ended", out)
            self._streams[event.stream] = event.conductor
            return
        conductor = self._streams.pop(event.stream, "")
        there = conductor in self._streams.values()
        for request in list(self.requests.values()):
            mine = request.stream == event.stream and request.state is not RequestStatus.LEAVING
            if mine and request.resumable and not there:
                self.orphans.orphan(request)
            elif mine or (conductor and not there and not request.is_started and request.conductor == conductor):
                self._end([request], "the conductor's stream ended", out)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end(self, requests: list[DecodeRequest], why: str, out: list[Action]) -> None:
        for request in requests:
            if request.state is not RequestStatus.LEAVING:
                out.append(RequestAborted(request.id, why))
                self._leave(request, out)

    def _leave(self, request: DecodeRequest, out: list[Action]) -> None:
        """Lets a request go as soon as nothing uses its blocks."""
        self._leases.clear(request.id)
        self.room.claim(request, 0)
        copying = request.state in _BLOCKS_IN_USE or stop_receiving(request, self._ios, out)
        quiet = not copying and self.planner.take_out(request)
        self.planner.seats_kept.pop(request.id, None)
        request.state = RequestStatus.LEAVING
        if quiet:
            self._gone(request, out)
        elif not copying:
            self._leaving.append(request)

    def _step_over(self, out: list[Action]) -> None:
        """Those who waited for the step's end leave."""
        for request in self._leaving:
            self.planner.step_over(request)
            self._gone(request, out)
        self._leaving.clear()

    def _gone(self, request: DecodeRequest, out: list[Action]) -> None:
        self.parking.forget(request, out)
        self.room.give_back(request)
        self._roster.remove(request)
        self.orphans.ended(request, out)

    def _at_once(self, event: EngineDied | DeleteKV | LendBlocks | ReturnBlocks, out: list[Action]) -> None:
        """Something that concerns the whole pool: the engine has died, KV is to be deleted, or others read it."""
        if isinstance(event, DeleteKV):
            out.append(delete_request_kv(self.blocks, event, [*self.requests.values(), *self.orphans.logs.waiting]))
        elif isinstance(event, EngineDied):
            self._dead, self.planner.flight = True, None
            self._step_over(out)
            self._end(list(self.requests.values()), event.why, out)
        else:
            out += self.lending.handle(event, self.room.unexpected)

    # --- steps and copies ------------------------------------------------------------------------------------------

    def _took_steps(self, now: float, event: RunDone | RunProgress, out: list[Action]) -> None:
        flight = self.planner.flight
        if flight is None or flight.run.step != event.step:
            return  # of an engine that has died
        if isinstance(event, RunDone) and event.aborted:
            self.planner.not_computed(flight, out)
        else:
            observe_run(self.tracker, now, flight, event)
            self.planner.advance(now, event.steps, over=isinstance(event, RunDone))
            self._computed(flight.run, event, out)
        if isinstance(event, RunDone):
            self._run_over(event, out)

    def _run_over(self, event: RunDone, out: list[Action]) -> None:
        self._step_over(out)
        for number, _ in event.ended:
            self._ended_itself(number, out)
        for request, candidates in batch.group_by_search(event.candidates, self._roster.get):
            if batch.advance_beams(request, candidates, self.blocks, out):
                self._lengths.observe(self.planner.batch.tokens_of(request.members[0]) - request.prompt_tokens)
                self._leave(request, out)
            else:
                self.planner.batch.forked(request)

    def _ended_itself(self, number: int, out: list[Action]) -> None:
        """A sequence has ended with the step's token; its request when it was the last."""
        member = self._roster.find(number)
        if member is None:
            return
        request = self._roster.of(number)
        self._lengths.observe(self.planner.batch.tokens_of(member) - request.prompt_tokens)
        if len(request.members) > 1:
            self.planner.end(request, member)
        else:
            self._leave(request, out)

    def _computed(self, run: StartRun, event: RunDone | RunProgress, out: list[Action]) -> None:
        for chunk in run.chunks:
            request = self._roster.of(chunk.id)
            if request.state is not RequestStatus.LEAVING:
                self.planner.caught(chunk, request)
                self.shelf.write_prompt(request, out)
        for number, key in event.filled:
            request, member = self._roster.of(number), self._roster.find(number)
            if request.state is not RequestStatus.LEAVING and member is not None:
                self.shelf.filled(request, member, key, out)

    def _ended(self, event: IoEnded[IoEnd], out: list[Action]) -> None:
        holds = self._ios.end(event.io)
        match holds, event.result:
            case StorePin(), _:
                self.shelf.written(holds, event.result)
                return
            case LoadPin(), LoadEnd() as result:
                self.shelf.loaded(holds, result)
            case SwapPin(), SwapEnd() as result:
                self.parking.copied(result, holds)
            case _ if not isinstance(holds, ReceivePin):
                raise TypeError(f"{event.result} does not answer I/O {event.io}")
        if holds.request.state is RequestStatus.LEAVING:
            self._gone(holds.request, out)
        else:
            self.planner.returned(holds.request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""
        requests = list(self.requests.values())
        self.room.check_invariants(requests)
        self.parking.check_invariants(requests)
        self.planner.check_invariants(requests)
        self.orphans.check_invariants()
        self._roster.check_invariants()
        held = [block for request in requests for block in request.refs]
        held += [*self.lending, *(holds.block for _, holds in self._ios if isinstance(holds, StorePin))]
        assert len(held) == sum(map(self.blocks.ref_count, range(self.blocks.num_blocks))), "a block is lost or leaked"
        copying = [holds.request for _, holds in self._ios if not isinstance(holds, StorePin)]
        self.shelf.check_invariants(requests)
        for request in requests:
            request.check_invariants(leased=self._leases.at(request.id) is not None)
            batch.check_beams(request)
            assert request.state not in _BLOCKS_IN_USE or request in copying
            assert request.state is not RequestStatus.LEAVING or request in copying or request in self._leaving

    def digest(self) -> bytes:
        """Hash of the whole state."""
        return digest_of(
            list(self.requests.values()),
            [(number, self._leases.at(number)) for number in self.requests],
            (self.blocks, self.room.promised, self.room.claims, self.planner),
            [request.id for request in self._leaving],
            (self.parking, self._lengths),
            self.tracker.speeds,
            (self._streams, self.orphans),
            [(io, holds.request.id, holds.block if isinstance(holds, StorePin) else -1) for io, holds in self._ios],
            (self.shelf, self.lending),
            self._dead,
        )
