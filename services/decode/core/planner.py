"""What the next step is: who is in the batch, who gets a block, who gives one up, who catches up."""

from bisect import insort
from dataclasses import dataclass

from moonpool.cost import SpeedTracker, decode_step_seconds, prefill_seconds
from services.decode.core.batch import Batch
from services.decode.core.config import CoreConfig
from services.decode.core.lengths import AnswerLengths
from services.decode.core.messages import Action, Chunk, Grew, Run
from services.decode.core.preemption import Parking, choose_victim
from services.decode.core.request import Request, State
from services.decode.core.room import Room


@dataclass(frozen=True, slots=True)
class Flight:
    """The step that is running."""

    run: Run
    context: int
    """Tokens attended to by the batch."""


class Planner:
    """Sequences whose KV is, or was, whole.

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
        self.ready: list[Request] = []
        """They wait for a place or a block; first come first."""
        self.catching: list[Request] = []
        """They compute what is gone; first come first."""
        self.flight: Flight | None = None
        self.seats_kept: dict[int, None] = {}
        """Requests that were promised a time between tokens and are not in the batch: places are kept for them."""
        self._waiting = 0  # requests that get one of the blocks which are being copied
        self.steps = 0
        self.recomputed_tokens = 0

    # --- who is here -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A sequence has all its KV and its first token."""
        request.state = State.READY
        insort(self.ready, request, key=_age)

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
        chunked = (chunk.id == request.id for chunk in self.flight.run.chunks)
        return request.state is State.RUNNING or (request.state is State.CATCHING_UP and any(chunked))

    def step_over(self, request: Request) -> None:
        """Takes out one that `take_out` had left in the step."""
        if request in self.batch:
            self.batch.leave(request)
        else:
            self.catching.remove(request)

    # --- the next step ---------------------------------------------------------------------------------------------

    def plan(self, out: list[Action]) -> None:
        """Starts the next step if none is running and there is something to compute."""
        if self.flight is not None:
            return
        self._waiting = 0
        self._diagnose(out)
        self._keep_tbt()
        self._seat(out)
        self._grow(out)
        if self._bring_back(out):
            self._seat(out)
        chunks = self._chunks()
        if not len(self.batch) and not chunks:
            return
        self.steps += 1
        run = Run(self.steps, self.batch.ids, chunks)
        self.flight = Flight(run, self.batch.context)
        out.append(run)

    def _diagnose(self, out: list[Action]) -> None:
        every = self._config.preempt_every
        if every and len(self.batch) and self.steps % every == 0:
            members = self.batch.members
            self._preempt(members[self.steps // every % len(members)], out)

    def _bring_back(self, out: list[Action]) -> int:
        """Brings preempted ones back, but not past those who wait for a block; returns how many."""
        count = 0
        while self._has_seat() and not self._waiting:
            request = self._parking.bring_back([*self.batch.members, *self.ready, *self.catching], out)
            if request is None:
                break
            self.returned(request)
            count += 1
        return count

    def returned(self, request: Request) -> None:
        """A preempted sequence has its blocks again; with all KV it is ready."""
        if request.state is State.READY:
            insort(self.ready, request, key=_age)
        elif request.state is State.CATCHING_UP:
            insort(self.catching, request, key=_age)

    def _has_seat(self) -> bool:
        return self.places_taken < self._config.max_batch

    @property
    def places_taken(self) -> int:
        """Places of a step that are taken, also by those who may have to catch up when they have been loaded."""
        return len(self.batch) + len(self.catching) + self._parking.loading

    # --- time between tokens ---------------------------------------------------------------------------------------

    def _tbt_s(self, sequences: int, context: int) -> float:
        return decode_step_seconds(self._tracker.speeds, sequences, context)

    def _keep_tbt(self) -> None:
        """Lets go those who were promised no time, last come first, while the batch is too slow for the others."""
        limit = self.batch.tbt_slo_s
        while limit and self._tbt_s(len(self.batch), self.batch.context) > limit:
            last = max((m for m in self.batch.members if not m.tbt_slo_s), key=_age, default=None)
            if last is None:
                return
            self._unready(last)

    def _may_join(self, request: Request) -> bool:
        """Whether a sequence that was promised nothing leaves the others what they were promised."""
        if request.tbt_slo_s or not self.places_taken:
            return True  # somebody must run, or nobody for whom places are kept would get room
        if self.places_taken + len(self.seats_kept) >= self._config.max_batch:
            return False
        limit = self.batch.tbt_slo_s
        return not limit or self._tbt_s(len(self.batch) + 1, self.batch.context + request.tokens) <= limit

    # --- the batch -------------------------------------------------------------------------------------------------

    def _seat(self, out: list[Action]) -> None:
        for request in list(self.ready):
            if not self._has_seat():
                return
            if request.state is State.READY and self._may_join(request) and self._has_block(request, out):
                self.ready.remove(request)
                self.join(request)

    def join(self, request: Request) -> None:
        """Takes a sequence into the batch."""
        request.state = State.RUNNING
        self.batch.join(request)
        self.seats_kept.pop(request.id, None)

    def _unseat(self, request: Request) -> None:
        self.batch.leave(request)
        self.keep_seat(request)

    def keep_seat(self, request: Request) -> None:
        """Keeps a place for a request that was promised a time between tokens."""
        if request.tbt_slo_s:
            self.seats_kept[request.id] = None

    def _unready(self, request: Request) -> None:
        """Back among those who wait."""
        self._unseat(request)
        self.add(request)

    def _has_block(self, request: Request, out: list[Action]) -> bool:
        """Whether the table holds all tokens; it may get one more block."""
        missing = len(request.table) < self._config.blocks_for(request.tokens)
        return not missing or self._take(request, out)

    def _grow(self, out: list[Action]) -> None:
        for member in self.batch.due():
            if member.state is not State.RUNNING:
                continue
            if self._take(member, out):
                self.batch.grew(member)
            elif member.state is State.RUNNING:
                self._unready(member)

    def _take(self, request: Request, out: list[Action]) -> bool:
        """Gives a sequence a block, by preempting others or itself if there is none."""
        while self._room.spare < 1:
            if self._parking.coming > self._waiting:
                self._waiting += 1
                return False
            victim = choose_victim([*self.batch.members, *self.ready, *self.catching], request)
            if victim is None:
                return False
            self._preempt(victim, out)
            if victim is request:
                return False
        [block] = self._room.blocks.allocate(1)
        request.table.append(block)
        out.append(Grew(request.id, block))
        self.expect(request, self.batch.tokens_of(request))
        return True

    def _preempt(self, victim: Request, out: list[Action]) -> None:
        self.take_out(victim)
        self._parking.preempt(victim, out)

    def expect(self, request: Request, tokens: int) -> None:
        """Claims what a sequence of so many tokens is expected to need; thinks anew when that was exceeded."""
        have = len(request.table) + request.promised
        if have > request.expected_blocks or not request.expected_blocks:
            answer = self._lengths.expected(max(0, tokens - request.prompt_tokens))
            total = min(request.total_tokens, request.prompt_tokens + answer)
            request.expected_blocks = max(have, self._config.blocks_for(max(total, tokens)))
        self._room.claim(request, request.expected_blocks - have)

    # --- catching up -----------------------------------------------------------------------------------------------

    def _chunks(self) -> tuple[Chunk, ...]:
        chunks, left = [], self._chunk_tokens() if self.catching else 0
        for request in self.catching:
            count = min(left, request.tokens - request.computed)
            if not count:
                break
            left -= count
            end = request.computed + count
            chunks.append(Chunk(request.id, request.computed, count, end == request.tokens))
        return tuple(chunks)

    def _chunk_tokens(self) -> int:
        """Tokens that may be computed again beside the batch: fewer when its time between tokens was promised."""
        tokens, limit = self._config.step_tokens, self.batch.tbt_slo_s
        step_s = self._tbt_s(len(self.batch), self.batch.context)
        longest = max(request.computed for request in self.catching)
        while limit and tokens > 1 and step_s + prefill_seconds(self._tracker.speeds, tokens, longest) > limit:
            tokens //= 2
        return tokens

    def caught(self, chunk: Chunk, request: Request) -> None:
        """A chunk was computed; with its last one the sequence has got a token and is in the batch again."""
        self.recomputed_tokens += chunk.count
        request.computed = chunk.start + chunk.count
        for index in range(chunk.start // self._config.block_tokens, request.computed // self._config.block_tokens):
            if index < len(request.keys):
                self._room.blocks.register(request.table[index], request.keys[index])
        if chunk.sample:
            self.catching.remove(request)
            request.tokens += 1
            self.join(request)

    def check_invariants(self, requests: list[Request]) -> None:
        """Asserts that every sequence is where its state says, with blocks for its tokens."""
        self.batch.check_invariants()
        leaving = [request for request in requests if request.state is State.LEAVING]
        assert all(member.state is State.RUNNING or member in leaving for member in self.batch.members)
        for state, place in ((State.READY, self.ready), (State.CATCHING_UP, self.catching)):
            there = sorted((r for r in requests if r.state is state), key=_age)
            assert there == [request for request in place if request not in leaving]
        for request in self.ready:
            assert len(request.table) >= self._config.blocks_for(request.tokens - 1)
        if self.flight is not None:
            for member in self.batch.members:
                assert len(member.table) == self._config.blocks_for(self.batch.tokens_of(member))
        kept = [r for r in requests if r.tbt_slo_s and r.state not in (State.RUNNING, State.LEAVING)]
        assert sorted(self.seats_kept) == sorted(r.id for r in kept)
        assert self.places_taken <= self._config.max_batch


def _age(request: Request) -> int:
    return request.id
