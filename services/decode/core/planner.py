"""Plans the next step: which sequences are in the batch, get a block, give one up or catch up.

The members of a request do all of this together.
"""

from bisect import insort

from moonpool.core.digest import digest_of
from moonpool.cost import Speeds, SpeedTracker
from services.decode.core import groups
from services.decode.core.actions import Action, Chunk, Grew, Run
from services.decode.core.batch import Batch
from services.decode.core.config import CoreConfig
from services.decode.core.groups import Copied
from services.decode.core.lengths import AnswerLengths
from services.decode.core.pace import Pace
from services.decode.core.preemption import Parking, choose_victim
from services.decode.core.request import Member, Request, State
from services.decode.core.room import Room
from services.decode.core.runs import Flight, quiet_steps, short_ahead


class Planner:
    """Requests whose KV is, or was, whole.

    Args:
        config: of the core.
        room: counts blocks.
        parking: the preempted ones.
        lengths: says how long answers become.
        tracker: predicts the engine's times.
    """

    def __init__(
        self, config: CoreConfig, room: Room, parking: Parking, lengths: AnswerLengths, tracker: SpeedTracker
    ) -> None:
        self._config = config
        self._room = room
        self._parking = parking
        self._lengths = lengths
        self._tracker = tracker
        self.batch = Batch(config.block_tokens)
        self.pace = Pace(config, self.batch, tracker)
        self.ready: list[Request] = []
        """They wait for a place or a block; first come first, later by their priority."""
        self.catching: list[Request] = []
        """They compute what is gone; first come first."""
        self.flight: Flight | None = None
        self.copies: list[Copied] = []
        """To be made before the next step."""
        self.seats_kept: dict[int, int] = {}
        """Requests that were promised a time between tokens and are not in the batch, and the places kept for them."""
        self._waiting = 0  # blocks of those being copied that somebody waits for
        self.steps = 0
        self.recomputed_tokens = 0
        self.prompts = 0
        """Those computed here so far."""
        self._upset = False  # by this plan: who waits may fit into the next step

    # --- who is here -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A sequence has all its KV and its first token."""
        request.state = State.READY
        insort(self.ready, request, key=_turn)

    def take_out(self, request: Request) -> bool:
        """Takes a sequence out of the batch or of those that wait.

        Returns:
            Whether it is quiet; otherwise it stays until its step is done.
        """
        if self.in_flight(request):
            return False
        if request.state is State.RUNNING:
            self._unseat(request)
        elif request.state is State.READY:
            self.ready.remove(request)
        elif request.state is State.CATCHING_UP:
            self.catching.remove(request)
        elif request.state is State.PARKED:
            self._parking.parked.remove(request)
        return True

    def in_flight(self, request: Request) -> bool:
        """Whether the running step computes the sequence."""
        if self.flight is None:
            return False
        chunked = (request.member(chunk.id) is not None for chunk in self.flight.run.chunks)
        return request.state is State.RUNNING or (request.state is State.CATCHING_UP and any(chunked))

    def step_over(self, request: Request) -> None:
        """Takes out one that `take_out` had left in the step."""
        if request in self.batch:
            self.batch.leave(request)
        else:
            self.catching.remove(request)

    def speeds(self, now: float) -> Speeds:
        """The engine's speeds, as far as is known now: a step that takes too long tells before it is over."""
        speeds = self._tracker.speeds
        return speeds if self.flight is None else self.flight.overdue(now, speeds)

    # --- the next step ---------------------------------------------------------------------------------------------

    def plan(self, now: float, out: list[Action]) -> None:
        """Starts the next step if none is running and there is something to compute."""
        if self.flight is not None:
            return
        self._waiting, self._upset = 0, False
        self._diagnose(out)
        self._keep_tbt(out)
        self._seat(out)
        self._grow(out)
        gave_way = self._upset and not len(self.batch) and not self._waiting
        if self._bring_back(out) or gave_way:
            self._seat(out)
        chunks = self._chunks()
        if not len(self.batch) and not chunks:
            return
        self.steps += 1
        steps = 1 if chunks or self._unquiet else self._quiet_steps(out)
        patient, copies = self.batch.patient and not chunks, tuple((it.source, it.block) for it in self.copies)
        run = Run(self.steps, self.batch.ids, chunks, copies, steps, patient)
        self.flight, self.copies = Flight(run, self.batch.context, now, self.copies, steps), []
        out.append(run)

    def _quiet_steps(self, out: list[Action]) -> int:
        """Steps of the next run."""
        steps = quiet_steps(self.batch, self._config.run_steps, self.pace)
        for request, member in () if self._waiting else short_ahead(self.batch, self._room, self._config, steps):
            self._add_block(member, out)
            self.batch.grew(member)
            self.expect(request)
        return self.batch.covered(steps)

    @property
    def _unquiet(self) -> bool:
        return bool(self._upset or self.copies or self.catching or self._config.preempt_every)

    def advance(self, now: float, steps: int, *, over: bool) -> None:
        """So many steps of the run are over, or all of it."""
        assert self.flight is not None
        assert steps <= self.flight.left, "the engine went on without asking"
        self.batch.advance(steps)
        self.flight = None if over else self.flight.advanced(now, steps, self.batch.context)

    def cut(self, out: list[Action], *, leaving: bool) -> None:
        """Something has happened: a run ends with this step if somebody waits for its end."""
        if self.flight is not None and (leaving or self.ready or self.catching or self._parking.parked):
            self.flight = self.flight.cut(out, self.ready, self.catching, self._parking.parked)

    def not_computed(self, flight: Flight, out: list[Action]) -> None:
        """A step was given up, so its copies were not made."""
        self.flight = None
        for copied in flight.copies:
            groups.undo_copy(copied, self._room.blocks, out)
            if copied.request in self.batch:
                self.batch.forked(copied.request)

    def _diagnose(self, out: list[Action]) -> None:
        every = self._config.preempt_every
        if every and len(self.batch) and self.steps % every == 0:
            requests = self.batch.requests
            self._preempt(requests[self.steps // every % len(requests)], out)

    def _bring_back(self, out: list[Action]) -> int:
        """Brings preempted ones back, but not past those who wait for a block; returns how many."""
        count, parked = 0, self._parking.parked
        while parked and self._has_seats(parked[0]) and not self._waiting:
            request = self._parking.bring_back([*self.batch.requests, *self.ready, *self.catching], out)
            if request is None:
                break
            self.returned(request)
            count += 1
        return count

    def returned(self, request: Request) -> None:
        """A preempted sequence has its blocks again; with all KV it is ready."""
        if request.state is State.READY:
            insort(self.ready, request, key=_turn)
        elif request.state is State.CATCHING_UP:
            insort(self.catching, request, key=_turn)

    def _has_seats(self, request: Request) -> bool:
        return self.places_taken + len(request.members) <= self._config.max_batch

    @property
    def places_taken(self) -> int:
        """Places of a step that are taken, also by those who may have to catch up when they have been loaded."""
        return len(self.batch) + sum(len(request.members) for request in self.catching) + self._parking.loading

    # --- time between tokens ---------------------------------------------------------------------------------------

    @property
    def least_chunk_s(self) -> float:
        """Seconds of a token computed again beside a batch; 0 where nobody is to catch up.

        New promises leave room for it: beside batches that are as slow as they may be, nobody would come back.
        """
        return self.pace.chunk_s(self.catching or self._parking.parked)

    def _keep_tbt(self, out: list[Action]) -> None:
        """Lets go as many as make the step too long for a promise."""
        while (request := self.pace.leaves()) is not None:
            self._unready(request, out)

    def _may_join(self, request: Request) -> bool:
        """Whether a request leaves the others what they were promised."""
        if not self.places_taken:
            return True  # somebody must run, or nobody for whom places are kept would get room
        if not request.tbt_slo_s:
            count = len(request.members)
            if self.places_taken + sum(self.seats_kept.values()) + count > self._config.max_batch:
                return False
        return self.pace.may_join(request, self.catching)

    # --- the batch -------------------------------------------------------------------------------------------------

    def _seat(self, out: list[Action]) -> None:
        """Who finds too few places keeps those who came later from taking them; so does who is parked for that."""
        parked = self._parking.parked[:1]
        first = parked[0].turn if parked and not self._has_seats(parked[0]) else None
        for request in list(self.ready):
            if not self._has_seats(request) or (first is not None and first < request.turn):
                break
            if request.state is State.READY and self._may_join(request) and self._equip(request, out):
                self.ready.remove(request)
                self.join(request)
                self._upset |= bool(self._parking.parked)
        self._keep_tbt(out)  # one that was promised a time joins for those who leave for it

    def join(self, request: Request) -> None:
        """Takes a request into the batch."""
        request.state = State.RUNNING
        self.batch.join(request)
        self.seats_kept.pop(request.id, None)

    def end(self, request: Request, member: Member) -> None:
        """One sequence of a request has ended, between two steps; others go on."""
        if request in self.batch:
            self.batch.end(member)
        request.members.remove(member)
        request.ended_tokens += member.tokens - request.prompt_tokens
        self._room.blocks.release(member.table)
        if request.id in self.seats_kept:
            self.keep_seat(request)
        request.expected_blocks = 0
        self.expect(request)

    def _unseat(self, request: Request) -> None:
        self.batch.leave(request)
        self.keep_seat(request)

    def keep_seat(self, request: Request) -> None:
        """Keeps places for a request that was promised a time between tokens."""
        if request.tbt_slo_s:
            self.seats_kept[request.id] = request.places

    def _unready(self, request: Request, out: list[Action]) -> None:
        """Back among those who wait."""
        self._upset = True
        self._undo_copies(request, out)
        self._unseat(request)
        self.add(request)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _grow(self, out: list[Action]) -> None:
        for request in self.batch.due():
            if request.state is not State.RUNNING:
                continue
            if self._equip(request, out):
                for member in request.members:
                    self.batch.grew(member)
            elif request.state is State.RUNNING:
                self._unready(request, out)

    def _add_block(self, member: Member, out: list[Action]) -> None:
        [block] = self._room.blocks.allocate(1)
        member.table.append(block)
        out.append(Grew(member.id, block))

    def _equip(self, request: Request, out: list[Action]) -> bool:
        """Gives the members blocks of their own for their last tokens, by preempting others or itself if need be."""
        manager = self._room.blocks
        places = [(member, self._config.blocks_for(self.batch.tokens_of(member)) - 1) for member in request.members]
        while self._room.spare < (lacking := groups.lacking(places, manager)):
            if self._parking.coming > self._waiting:
                self._waiting += lacking
                return False
            victim = choose_victim([*self.batch.requests, *self.ready, *self.catching], request)
            if victim is None:
                return False
            self._preempt(victim, out)
            if victim is request:
                return False
        for member, index in places:
            if index == len(member.table):
                self._add_block(member, out)
            elif (copied := groups.copy_block(request, member, index, manager, out)) is not None:
                self.copies.append(copied)
        self.expect(request)
        return True

    def _preempt(self, victim: Request, out: list[Action]) -> None:
        self._upset = True
        self._undo_copies(victim, out)
        self.take_out(victim)
        self._parking.preempt(victim, out)

    def _undo_copies(self, request: Request, out: list[Action]) -> None:
        """It does not take part in the next step after all."""
        for copied in self.copies:
            if copied.request is request:
                groups.undo_copy(copied, self._room.blocks, out)
        self.copies = [copied for copied in self.copies if copied.request is not request]

    def expect(self, request: Request) -> None:
        """Claims what a request is expected to need; thinks anew when that was exceeded."""
        have = len(request.blocks) + request.promised
        if have > request.expected_blocks or not request.expected_blocks:
            tokens = max(self.batch.tokens_of(member) for member in request.members)
            answer = self._lengths.expected(max(0, tokens - request.prompt_tokens))
            total = max(tokens, min(request.total_tokens, request.prompt_tokens + answer))
            needed = groups.longest_blocks(self._config, request.prompt_tokens, total, request.places)
            request.expected_blocks = max(have, needed)
        self._room.claim(request, request.expected_blocks - have)

    # --- catching up -----------------------------------------------------------------------------------------------

    def compute(self, request: Request) -> bool:
        """Turns a promise into a sequence that computes what is not held of its prompt, as if it came back.

        Returns:
            False when that is not possible: there is no place in a step, or others wait for blocks.
        """
        held = len(request.blocks)
        kept = sum(self.seats_kept.values()) - self.seats_kept.get(request.id, 0)
        is_full = self.places_taken + kept >= self._config.max_batch
        if request.is_group or self._parking.parked or is_full:
            return False
        self._room.bind(request)
        groups.begins_here(request, held, self._config)
        self.returned(request)
        self.prompts += 1
        return True

    def _chunks(self) -> tuple[Chunk, ...]:
        """What is computed again beside the batch."""
        return groups.chunks(self.catching, self.pace.chunk_tokens(self.catching)) if self.catching else ()

    def caught(self, chunk: Chunk, request: Request) -> None:
        """A chunk was computed.

        With its last one a sequence alone has got a token and is in the batch again; a group is ready when all are.
        """
        self.recomputed_tokens += 0 if request.prompt_here else chunk.count
        member = groups.computed(request, chunk, self._config, self._room.blocks)
        if chunk.sample:
            self.catching.remove(request)
            member.tokens += 1
            self.join(request)
        elif request.is_group and groups.is_whole(request):
            self.catching.remove(request)
            self.add(request)

    def digest(self) -> bytes:
        """Hash of what is not the requests' own."""
        waiting = [[request.id for request in place] for place in (self.ready, self.catching)]
        counts = (self.batch.ids, self.batch.ticks, self.batch.context, self.steps, self.recomputed_tokens)
        return digest_of(counts, self.flight.run if self.flight is not None else None, waiting, list(self.seats_kept))

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self, requests: list[Request]) -> None:
        """Asserts that every request is where its state says, with blocks for its tokens."""
        self.batch.check_invariants()
        leaving = [request for request in requests if request.state is State.LEAVING]
        assert all(request.state is State.RUNNING or request in leaving for request in self.batch.requests)
        for state, place in ((State.READY, self.ready), (State.CATCHING_UP, self.catching)):
            there = sorted((r for r in requests if r.state is state), key=_turn)
            assert there == [request for request in place if request not in leaving]
        for request in self.ready:
            for member in request.members:
                assert len(member.table) >= self._config.blocks_for(member.tokens - 1)
        assert not self.copies, "a copy belongs to a step"
        if self.flight is not None:
            groups.check_writes(self.batch, self._room.blocks, self._config, self.flight.copies)
        kept = [r for r in requests if r.tbt_slo_s and r.state not in (State.RUNNING, State.LEAVING)]
        assert dict(sorted(self.seats_kept.items())) == {r.id: r.places for r in sorted(kept, key=_turn)}
        assert self.places_taken <= self._config.max_batch


def _turn(request: Request) -> tuple[float, int]:
    return request.turn
