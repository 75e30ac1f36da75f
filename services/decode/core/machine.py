"""The decode core: takes events, keeps requests, blocks and the batch, gives actions."""

from moonpool.core.digest import digest_of
from moonpool.core.kernel import Ended, Outstanding, Tick
from moonpool.core.timers import Timers, earliest
from moonpool.cost import SpeedTracker
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.forgetting import ForgetKV
from moonpool.sched.lending import LendBlocks, Lending, TakeBack
from services.decode.core import beams, groups
from services.decode.core.actions import Action, Ending, Finish, Promised, Refused, Run, Table
from services.decode.core.admission import Admission
from services.decode.core.config import CoreConfig
from services.decode.core.events import (
    Adopt,
    Arrived,
    Compute,
    Died,
    Event,
    Heard,
    IoEnd,
    LoadEnd,
    Open,
    Reserve,
    Start,
    StepDone,
    Stepped,
    Stop,
    StreamClosed,
    StreamOpened,
    SwapEnd,
)
from services.decode.core.forgetting import forget_kv
from services.decode.core.holds import Copy, Holds, Loading, Receiving, Writing, stop_receiving
from services.decode.core.lengths import AnswerLengths
from services.decode.core.orphans import Orphans
from services.decode.core.planner import Planner
from services.decode.core.preemption import Parking
from services.decode.core.request import Request, State
from services.decode.core.room import Room
from services.decode.core.roster import Roster
from services.decode.core.runs import observe
from services.decode.core.shelf import Shelf

_OfOne = Open | Heard | Arrived | Start | Compute | Stop
_IN_USE = (State.SWAPPING_OUT, State.SWAPPING_IN, State.LOADING)


class DecodeCore:
    """One decode instance's decisions. A `moonpool.core.kernel.Core`.

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

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks)
        self.room = Room(self.blocks, config.watermark_blocks)
        self.lending = Lending(self.blocks)
        self.tracker = SpeedTracker(config.speeds)
        self._ios: Outstanding[Holds] = Outstanding()
        self.shelf = Shelf(config, self.room, self.tracker, self._ios)
        self.parking = Parking(config, self.room, self.tracker, self._ios, self.shelf)
        self._lengths = AnswerLengths(config.assumed_answer_tokens)
        self.planner = Planner(config, self.room, self.parking, self._lengths, self.tracker)
        self._admission = Admission(config, self.room, self.planner, self.tracker, self._lengths)
        self._roster = Roster()
        self.requests = self._roster.requests
        self.orphans = Orphans(config, self._roster, self.planner, self.parking, self.room)
        self._leases: Timers[int] = Timers()
        self._streams: dict[int, str] = {}
        self._leaving: list[Request] = []  # until the running step is over
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

    def count(self, *states: State) -> int:
        """Requests in one of these states."""
        return sum(request.state in states for request in self.requests.values())

    def due(self) -> float | None:
        """When the next lease ends, or an orphan's time."""
        return earliest(self._leases.next(), self.orphans.due())

    def handle(self, now: float, event: Event, out: list[Action]) -> None:
        """Takes an event."""
        self.orphans.now = self.blocks.now = now
        match event:
            case StepDone() | Stepped():
                self._took_steps(now, event, out)
            case Reserve():
                self._reserve(now, event, out)
            case Ended():
                self._ended(event, out)
            case Tick():
                self._expire(now, out)
                self.orphans.tick(out)
            case StreamOpened() | StreamClosed():
                self._stream(event, out)
            case Adopt() if event.stream in self._streams:
                self.orphans.adopt(event, self._streams[event.stream], out)
            case Died() | ForgetKV() | LendBlocks() | TakeBack():
                self._at_once(event, out)
            case _:
                self._progress(now, event, out)
        self._end(self.orphans.settle(out), "its conductor was lost", out)
        if not self._dead:
            self.planner.plan(now, out)
            if not isinstance(event, Stepped | StepDone):
                self.planner.cut(out, leaving=bool(self._leaving) or self.orphans.wait)

    def _reserve(self, now: float, event: Reserve, out: list[Action]) -> None:
        self._end(self.orphans.of(event.conductor), "the conductor's stream ended", out)  # it has placed them anew
        tbt_s = self._admission.predicted_tbt_s(event, self.requests.values(), now)
        request = Request.of(event, now, now + self.config.promise_s)
        refused = self._admission.refuse(event, request, tbt_s, self.requests.values(), now)
        if refused is not None:
            out.append(Refused(event.id, *refused, tbt_s))
            return
        self._roster.add(request)
        self.planner.keep_seat(request)
        self._leases.set(event.id, now + self._promise_s(event.conductor))
        out.append(Promised(event.id, len(request.blocks), tbt_s))

    def _promise_s(self, conductor: str) -> float:
        """How long a promise to a conductor needs no news: less where it asked and was lost before that was read."""
        there = not conductor or conductor in self._streams.values()
        return self.config.lease_s if there else min(self.config.grace_s, self.config.lease_s)

    def _progress(self, now: float, event: Event, out: list[Action]) -> None:
        request = self.requests.get(event.id) if isinstance(event, _OfOne) else None
        if request is None or request.state is State.LEAVING:
            return
        match event:
            case Open() if request.state is State.PROMISED:
                self.room.bind(request)
                if event.older:
                    request.keep_nothing()
                request.state = State.RECEIVING
                self._leases.set(request.id, now + self.config.lease_s)
                out.append(Table(request.id, tuple(request.blocks)))
            case Heard() if request.state is State.RECEIVING:
                self._leases.set(request.id, now + self.config.lease_s)
            case Arrived() if request.state is State.RECEIVING:
                self._arrived(now, request, out)
            case Start() if not request.is_started:
                self._start(request, event, out)
            case Compute() if not request.is_started:
                self._compute(request, event, out)
            case Stop():
                if request.state is State.RECEIVING:
                    self.room.keep(request, event.leading)
                self._end([request], event.why, out)

    def _arrived(self, now: float, request: Request, out: list[Action]) -> None:
        request.state = State.WHOLE
        self._leases.set(request.id, now + self.config.lease_s)
        self.room.keep(request, len(request.blocks))
        self._join(request, out)

    def _start(self, request: Request, event: Start, out: list[Action]) -> None:
        if event.stream not in self._streams:
            self._end([request], "the conductor's stream ended", out)
            return
        request.stream, request.finishes = event.stream, (event.finish, *event.others)
        request.opening, request.known, request.known_keys = event.candidates, event.known, event.known_keys
        assert request.search or len(request.finishes) == request.width, "a first token for each sequence"
        request.patient = event.patient and not request.tbt_slo_s
        request.members[0].tokens += 1
        self._join(request, out)

    def _compute(self, request: Request, event: Compute, out: list[Action]) -> None:
        nothing_came = request.state is State.PROMISED
        if nothing_came and event.stream in self._streams and self.planner.compute(request):
            request.stream = event.stream
            request.patient = event.patient and not request.tbt_slo_s
            self._leases.clear(request.id)
            out.append(Table(request.id, tuple(request.blocks)))
        else:
            began = "its KV has begun to come: the prompt is not computed here"
            self._end([request], "the prompt cannot be computed here now" if nothing_came else began, out)

    def _join(self, request: Request, out: list[Action]) -> None:
        """Goes on when both the KV and the first token are there."""
        if request.state is not State.WHOLE or not request.is_started:
            return
        self._leases.clear(request.id)
        groups.fork(request, self.blocks)
        goes_on = groups.take_known(request)
        out += [Table(member.id, tuple(member.table)) for member in request.members[1:]]
        ended = [(member, why) for member, why in zip(request.members, request.finishes, strict=False) if why]
        out += [Finish(member.id, why) for member, why in ended]
        over = request.search is not None and beams.advance(request, [request.opening], self.blocks, out)
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
            waits = request.state is State.PROMISED or (request.state is State.WHOLE and not request.is_started)
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
            mine = request.stream == event.stream and request.state is not State.LEAVING
            if mine and request.resumable and not there:
                self.orphans.orphan(request)
            elif mine or (conductor and not there and not request.is_started and request.conductor == conductor):
                self._end([request], "the conductor's stream ended", out)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end(self, requests: list[Request], why: str, out: list[Action]) -> None:
        for request in requests:
            if request.state is not State.LEAVING:
                out.append(Ending(request.id, why))
                self._leave(request, out)

    def _leave(self, request: Request, out: list[Action]) -> None:
        """Lets a request go as soon as nothing uses its blocks."""
        self._leases.clear(request.id)
        self.room.claim(request, 0)
        copying = request.state in _IN_USE or stop_receiving(request, self._ios, out)
        quiet = not copying and self.planner.take_out(request)
        self.planner.seats_kept.pop(request.id, None)
        request.state = State.LEAVING
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

    def _gone(self, request: Request, out: list[Action]) -> None:
        self.parking.forget(request, out)
        self.room.give_back(request)
        self._roster.remove(request)
        self.orphans.ended(request, out)

    def _at_once(self, event: Died | ForgetKV | LendBlocks | TakeBack, out: list[Action]) -> None:
        """Something that concerns the whole pool: the engine has died, KV is to be deleted, or others read it."""
        if isinstance(event, ForgetKV):
            out.append(forget_kv(self.blocks, event, [*self.requests.values(), *self.orphans.logs.waiting]))
        elif isinstance(event, Died):
            self._dead, self.planner.flight = True, None
            self._step_over(out)
            self._end(list(self.requests.values()), event.why, out)
        else:
            out += self.lending.handle(event, self.room.unexpected)

    # --- steps and copies ------------------------------------------------------------------------------------------

    def _took_steps(self, now: float, event: StepDone | Stepped, out: list[Action]) -> None:
        flight = self.planner.flight
        if flight is None or flight.run.step != event.step:
            return  # of an engine that has died
        if isinstance(event, StepDone) and event.aborted:
            self.planner.not_computed(flight, out)
        else:
            observe(self.tracker, now, flight, event)
            self.planner.advance(now, event.steps, over=isinstance(event, StepDone))
            self._computed(flight.run, event, out)
        if isinstance(event, StepDone):
            self._run_over(event, out)

    def _run_over(self, event: StepDone, out: list[Action]) -> None:
        self._step_over(out)
        for number, _ in event.ended:
            self._ended_itself(number, out)
        for request, candidates in beams.searches(event.candidates, self._roster.get):
            if beams.advance(request, candidates, self.blocks, out):
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

    def _computed(self, run: Run, event: StepDone | Stepped, out: list[Action]) -> None:
        for chunk in run.chunks:
            request = self._roster.of(chunk.id)
            if request.state is not State.LEAVING:
                self.planner.caught(chunk, request)
                self.shelf.write_prompt(request, out)
        for number, key in event.filled:
            request, member = self._roster.of(number), self._roster.find(number)
            if request.state is not State.LEAVING and member is not None:
                self.shelf.filled(request, member, key, out)

    def _ended(self, event: Ended[IoEnd], out: list[Action]) -> None:
        holds = self._ios.end(event.io)
        match holds, event.result:
            case Writing(), _:
                self.shelf.written(holds, event.result)
                return
            case Loading(), LoadEnd() as result:
                self.shelf.loaded(holds, result)
            case Copy(), SwapEnd() as result:
                self.parking.copied(result, holds)
            case _ if not isinstance(holds, Receiving):
                raise TypeError(f"{event.result} does not answer I/O {event.io}")
        if holds.request.state is State.LEAVING:
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
        held += [*self.lending, *(holds.block for _, holds in self._ios if isinstance(holds, Writing))]
        assert len(held) == sum(map(self.blocks.ref_count, range(self.blocks.num_blocks))), "a block is lost or leaked"
        copying = [holds.request for _, holds in self._ios if not isinstance(holds, Writing)]
        self.shelf.check_invariants(requests)
        for request in requests:
            request.check_invariants(leased=self._leases.at(request.id) is not None)
            beams.check_invariants(request)
            assert request.state not in _IN_USE or request in copying
            assert request.state is not State.LEAVING or request in copying or request in self._leaving

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
            [(io, holds.request.id, holds.block if isinstance(holds, Writing) else -1) for io, holds in self._ios],
            (self.shelf, self.lending),
            self._dead,
        )
