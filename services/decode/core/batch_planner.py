"""Plans the next step or run: which sequences join the batch, get a block, are preempted or recompute tokens.

Steps respect the promised time between tokens (TBT). The sequences of one request are planned together.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import field

from moonpool.frozen import frozen
from moonpool.scheduling.latency import Speeds, SpeedTracker, decode_step_seconds, prefill_seconds
from moonpool.scheduling.state_machine import digest_of
from moonpool.scheduling.steps import REPORT_WITHIN_S, longest_wait_s
from services.decode.core import batch
from services.decode.core.actions import Action, AppendBlock, Chunk, StartRun, StopRun
from services.decode.core.batch import BlockCopy, RunningBatch
from services.decode.core.block_budget import BlockBudget
from services.decode.core.events import RunDone, RunProgress
from services.decode.core.preemption import PreemptedRequests, choose_victim
from services.decode.core.request import DecodeRequest, RequestSequence, RequestStatus
from services.decode.core.settings import DecodeSettings

LENGTH_WINDOW = 512
"""Answers that are remembered."""


FEW_LENGTHS = 16
"""With fewer than so many, what was assumed at the start is believed."""


RESERVED_PERCENTILE = 75
"""Share of answers that are to be no longer than expected, where room is kept for them."""


MEDIAN_PERCENTILE = 50
"""The same, where it is to be known how many there will be."""


class OutputLengths:
    """A running quantile over the last answers, in tokens.

    Args:
        assumed: length that is expected as long as few answers have ended.
    """

    def __init__(self, assumed: int) -> None:
        self._assumed = assumed
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        """An answer has ended by itself."""
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > LENGTH_WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def expected(self, so_far: int, percent: int = RESERVED_PERCENTILE) -> int:
        """Length that an answer of `so_far` tokens is expected to reach; more than `so_far`.

        `percent` of the answers that were so long have been no longer.

        Where no answer was as long, as much again.
        """
        if len(self._sorted) < FEW_LENGTHS:
            return max(self._assumed, 2 * so_far)
        first = bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        return self._sorted[first + longer * percent // 100] if longer else 2 * so_far + 1

    def digest(self) -> bytes:
        """For the core's digest: the sorted ones follow from the recent ones."""
        return b"".join(tokens.to_bytes(8, "little") for tokens in self._recent)


class TbtLimiter:
    """No step is longer than a promise of its members that can be kept.

    A promise can be kept where a step over its request alone would keep it. For others no batch is small enough, so
    nobody who was promised a time himself leaves for them. Those who were promised nothing leave for any promise.

    Args:
        config: of the core.
        batch: that takes the steps.
        tracker: predicts the engine's times.
    """

    def __init__(self, config: DecodeSettings, batch: RunningBatch, tracker: SpeedTracker) -> None:
        self._config = config
        self._batch = batch
        self._tracker = tracker

    def step_s(self, sequences: int, context: int) -> float:
        """Predicted seconds of a step."""
        return decode_step_seconds(self._tracker.speeds, sequences, context)

    def chunk_s(self, catching: list[DecodeRequest], tokens: int = 1) -> float:
        """Predicted seconds of so many tokens of those who catch up; 0 where nobody does."""
        longest = max((member.computed for request in catching for member in request.members), default=0)
        return prefill_seconds(self._tracker.speeds, tokens, longest) if catching else 0.0

    @property
    def _now_s(self) -> float:
        return self.step_s(len(self._batch), self._batch.context)

    @property
    def limit_s(self) -> float:
        """The strictest promise in the batch that can be kept; 0 = there is none."""
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return strictest
        return self._strictest(self._batch.requests)

    def _strictest(self, requests: list[DecodeRequest]) -> float:
        return min((request.tbt_slo_s for request in requests if self._can_keep(request)), default=0.0)

    def _can_keep(self, request: DecodeRequest) -> bool:
        """Whether it was promised a time that a step over it alone keeps."""
        alone_s = self.step_s(len(request.members), self._batch.context_of(request))
        return bool(request.tbt_slo_s) and alone_s <= request.tbt_slo_s

    def leaves(self) -> DecodeRequest | None:
        """Who leaves the batch because its step is too long; None when nobody need.

        Those who were promised nothing go first, then those who were; each time last come of the lowest priority first.
        """
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return None
        requests = self._batch.requests
        free = [request for request in requests if not request.tbt_slo_s]
        limit = self._strictest(requests)
        leaving = free or (requests if limit and self._now_s > limit else [])
        return max(leaving, key=lambda request: request.turn, default=None)

    def may_join(self, request: DecodeRequest, catching: list[DecodeRequest]) -> bool:
        """Whether the times between tokens leave room for one more request in the batch.

        One that was promised a time does not ask those who would leave for it: who came later, or was promised nothing.
        """
        batch = self._batch
        count, context = len(request.members), batch.context_of(request)
        if not request.tbt_slo_s:
            step_s = self.step_s(len(batch) + count, batch.context + context) + self.chunk_s(catching)
            return not batch.tbt_slo_s or step_s <= batch.tbt_slo_s
        before = [it for it in batch.requests if it.tbt_slo_s and it.turn < request.turn] if batch.tbt_slo_s else []
        limit = self._strictest([*before, request])
        count += sum(len(it.members) for it in before)
        return not limit or self.step_s(count, context + sum(map(batch.context_of, before))) <= limit

    def chunk_tokens(self, catching: list[DecodeRequest]) -> int:
        """Tokens that are computed beside the batch: fewer where its time was promised, none if that leaves no room."""
        tokens, strictest, step_s = self._config.step_tokens, self._batch.tbt_slo_s, self._now_s
        while strictest and tokens > 1 and step_s + self.chunk_s(catching, tokens) > strictest:
            tokens //= 2
        limit = self.limit_s
        return 0 if limit and step_s + self.chunk_s(catching, tokens) > limit else tokens


OVERDUE_RATIO = 2.0
"""Times what it was expected to take, after which a step that is not over counts for its engine's speed."""


@frozen
class RunInFlight:
    """The run that the engine has."""

    run: StartRun
    context: int
    """Tokens attended to by the batch in the step that is being computed."""
    began: float
    """When the step that is being computed was ordered, or the one before it was told to be over."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Made before it."""
    left: int = 1
    """Steps of the run that are not over."""
    is_cut: bool = False
    """It was told to end with this step."""
    is_hurried: bool = False
    """And to let nothing else go before."""

    def advanced(self, now: float, steps: int, context: int) -> "RunInFlight":
        """So many steps are over, and it goes on."""
        return RunInFlight(self.run, context, now, self.copies, self.left - steps, self.is_cut, self.is_hurried)

    def overdue(self, now: float, speeds: Speeds) -> Speeds:
        """The engine's speeds, slower where the step that is being computed takes too long."""
        if self.run.chunks:
            return speeds
        expected_s = decode_step_seconds(speeds, len(self.run.batch), self.context)
        if self.run.patient:
            expected_s += longest_wait_s(expected_s) + (REPORT_WITHIN_S if self.run.steps > 1 else 0.0)
        late = (now - self.began) / expected_s if expected_s else 1.0
        return speeds.slowed_decode(late) if late > OVERDUE_RATIO else speeds

    def cut(self, out: list[Action], *waiting: list[DecodeRequest]) -> "RunInFlight":
        """Ends with the step that is being computed, and that at once where one of those who wait is not patient."""
        hurried = self.run.patient and not all(it.patient for its in waiting for it in its)
        if (self.left == 1 or self.is_cut) and hurried <= self.is_hurried:
            return self
        out.append(StopRun(self.run.step, hurried))
        return RunInFlight(self.run, self.context, self.began, self.copies, self.left, is_cut=True, is_hurried=hurried)


def uninterrupted_steps(batch: RunningBatch, most: int, pace: TbtLimiter) -> int:
    """Steps that the batch can take before there is anything to decide but blocks, unless something happens.

    Until the batch becomes too slow for a promise, when somebody has to leave it or the promise can be kept no longer.
    Groups are asked about after each step.

    Args:
        batch: as the first step takes it.
        most: steps at most.
        pace: the promised times.
    """
    if most == 1 or not batch.is_plain:
        return 1
    limit, count, context = pace.limit_s, len(batch), batch.context
    if not limit:
        return most
    return 1 + bisect_left(range(1, most), True, key=lambda n: pace.step_s(count, context + n * count) > limit)


def sequences_short_ahead(
    batch: RunningBatch, room: BlockBudget, config: DecodeSettings, steps: int
) -> Iterator[tuple[DecodeRequest, RequestSequence]]:
    """Sequences that get a block now because they need it during the next run, soonest first; their caller gives it.

    As many blocks are ahead of their tokens as nobody is expected to need, so that who comes or grows finds room as if
    there were none, and a full pool has none.
    """
    ahead = batch.blocks_ahead if batch.soonest(steps := min(steps, config.ahead_steps)) else 0
    while (short := batch.soonest(steps)) is not None and ahead < room.unexpected:
        request, member = short
        if len(member.table) == config.blocks_for(request.total_tokens - 1):
            return  # its answer ends there: the last token is never computed
        ahead += 1
        yield short


def observe_run(tracker: SpeedTracker, now: float, flight: RunInFlight, event: RunProgress | RunDone) -> None:
    """Learns from steps how long they take: of a run once, from its mean step.

    Of a step with chunks these are what is learnt; the batch beside them takes what is known of it.
    """
    if not event.seconds:
        return
    batch, seconds = len(flight.run.batch), event.seconds / event.steps
    if flight.run.steps == 1:  # tokens wait for the whole way to the engine and back, not just for its computing
        seconds = max(seconds, now - flight.began - event.waited_s)
    if flight.run.chunks:
        batch_s = decode_step_seconds(tracker.speeds, batch, flight.context) if batch else 0.0
        chunks = [(chunk.count, chunk.start, False) for chunk in flight.run.chunks]
        tracker.observe_prefill(chunks, seconds, known_s=batch_s)
        return
    tracker.observe_decode(batch, flight.context + batch * (event.steps - 1) // 2, seconds)


class BatchPlanner:
    """Requests whose KV is, or was, whole.

    Args:
        config: of the core.
        room: counts blocks.
        parking: the preempted ones.
        lengths: says how long answers become.
        tracker: predicts the engine's times.
    """

    def __init__(
        self,
        config: DecodeSettings,
        room: BlockBudget,
        parking: PreemptedRequests,
        lengths: OutputLengths,
        tracker: SpeedTracker,
    ) -> None:
        self._config = config
        self._room = room
        self._parking = parking
        self._lengths = lengths
        self._tracker = tracker
        self.batch = RunningBatch(config.block_tokens)
        self.pace = TbtLimiter(config, self.batch, tracker)
        self.ready: list[DecodeRequest] = []
        """They wait for a place or a block; first come first, later by their priority."""
        self.catching: list[DecodeRequest] = []
        """They compute what is gone; first come first."""
        self.flight: RunInFlight | None = None
        self.copies: list[BlockCopy] = []
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

    def add(self, request: DecodeRequest) -> None:
        """A sequence has all its KV and its first token."""
        request.state = RequestStatus.READY
        insort(self.ready, request, key=_queue_order)

    def take_out(self, request: DecodeRequest) -> bool:
        """Takes a sequence out of the batch or of those that wait.

        Returns:
            Whether it is quiet; otherwise it stays until its step is done.
        """
        if self.in_flight(request):
            return False
        if request.state is RequestStatus.RUNNING:
            self._unseat(request)
        elif request.state is RequestStatus.READY:
            self.ready.remove(request)
        elif request.state is RequestStatus.CATCHING_UP:
            self.catching.remove(request)
        elif request.state is RequestStatus.PARKED:
            self._parking.parked.remove(request)
        return True

    def in_flight(self, request: DecodeRequest) -> bool:
        """Whether the running step computes the sequence."""
        if self.flight is None:
            return False
        chunked = (request.member(chunk.id) is not None for chunk in self.flight.run.chunks)
        return request.state is RequestStatus.RUNNING or (request.state is RequestStatus.CATCHING_UP and any(chunked))

    def step_over(self, request: DecodeRequest) -> None:
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
        run = StartRun(self.steps, self.batch.ids, chunks, copies, steps, patient)
        self.flight, self.copies = RunInFlight(run, self.batch.context, now, self.copies, steps), []
        out.append(run)

    def _quiet_steps(self, out: list[Action]) -> int:
        """Steps of the next run."""
        steps = uninterrupted_steps(self.batch, self._config.run_steps, self.pace)
        for request, member in (
            () if self._waiting else sequences_short_ahead(self.batch, self._room, self._config, steps)
        ):
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

    def not_computed(self, flight: RunInFlight, out: list[Action]) -> None:
        """A step was given up, so its copies were not made."""
        self.flight = None
        for copied in flight.copies:
            batch.undo_copy_on_write(copied, self._room.blocks, out)
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

    def returned(self, request: DecodeRequest) -> None:
        """A preempted sequence has its blocks again; with all KV it is ready."""
        if request.state is RequestStatus.READY:
            insort(self.ready, request, key=_queue_order)
        elif request.state is RequestStatus.CATCHING_UP:
            insort(self.catching, request, key=_queue_order)

    def _has_seats(self, request: DecodeRequest) -> bool:
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

    def _may_join(self, request: DecodeRequest) -> bool:
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
            if request.state is RequestStatus.READY and self._may_join(request) and self._equip(request, out):
                self.ready.remove(request)
                self.join(request)
                self._upset |= bool(self._parking.parked)
        self._keep_tbt(out)  # one that was promised a time joins for those who leave for it

    def join(self, request: DecodeRequest) -> None:
        """Takes a request into the batch."""
        request.state = RequestStatus.RUNNING
        self.batch.join(request)
        self.seats_kept.pop(request.id, None)

    def end(self, request: DecodeRequest, member: RequestSequence) -> None:
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

    def _unseat(self, request: DecodeRequest) -> None:
        self.batch.leave(request)
        self.keep_seat(request)

    def keep_seat(self, request: DecodeRequest) -> None:
        """Keeps places for a request that was promised a time between tokens."""
        if request.tbt_slo_s:
            self.seats_kept[request.id] = request.places

    def _unready(self, request: DecodeRequest, out: list[Action]) -> None:
        """Back among those who wait."""
        self._upset = True
        self._undo_copies(request, out)
        self._unseat(request)
        self.add(request)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _grow(self, out: list[Action]) -> None:
        for request in self.batch.due():
            if request.state is not RequestStatus.RUNNING:
                continue
            if self._equip(request, out):
                for member in request.members:
                    self.batch.grew(member)
            elif request.state is RequestStatus.RUNNING:
                self._unready(request, out)

    def _add_block(self, member: RequestSequence, out: list[Action]) -> None:
        [block] = self._room.blocks.allocate(1)
        member.table.append(block)
        out.append(AppendBlock(member.id, block))

    def _equip(self, request: DecodeRequest, out: list[Action]) -> bool:
        """Gives the members blocks of their own for their last tokens, by preempting others or itself if need be."""
        manager = self._room.blocks
        places = [(member, self._config.blocks_for(self.batch.tokens_of(member)) - 1) for member in request.members]
        while self._room.spare < (lacking := batch.count_lacking_blocks(places, manager)):
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
            elif (copied := batch.copy_on_write(request, member, index, manager, out)) is not None:
                self.copies.append(copied)
        self.expect(request)
        return True

    def _preempt(self, victim: DecodeRequest, out: list[Action]) -> None:
        self._upset = True
        self._undo_copies(victim, out)
        self.take_out(victim)
        self._parking.preempt(victim, out)

    def _undo_copies(self, request: DecodeRequest, out: list[Action]) -> None:
        """It does not take part in the next step after all."""
        for copied in self.copies:
            if copied.request is request:
                batch.undo_copy_on_write(copied, self._room.blocks, out)
        self.copies = [copied for copied in self.copies if copied.request is not request]

    def expect(self, request: DecodeRequest) -> None:
        """Claims what a request is expected to need; thinks anew when that was exceeded."""
        have = len(request.blocks) + request.promised
        if have > request.expected_blocks or not request.expected_blocks:
            tokens = max(self.batch.tokens_of(member) for member in request.members)
            answer = self._lengths.expected(max(0, tokens - request.prompt_tokens))
            total = max(tokens, min(request.total_tokens, request.prompt_tokens + answer))
            needed = batch.most_blocks(self._config, request.prompt_tokens, total, request.places)
            request.expected_blocks = max(have, needed)
        self._room.claim(request, request.expected_blocks - have)

    # --- catching up -----------------------------------------------------------------------------------------------

    def compute(self, request: DecodeRequest) -> bool:
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
        batch.begin_prompt_here(request, held, self._config)
        self.returned(request)
        self.prompts += 1
        return True

    def _chunks(self) -> tuple[Chunk, ...]:
        """What is computed again beside the batch."""
        return batch.plan_chunks(self.catching, self.pace.chunk_tokens(self.catching)) if self.catching else ()

    def caught(self, chunk: Chunk, request: DecodeRequest) -> None:
        """A chunk was computed.

        With its last one a sequence alone has got a token and is in the batch again; a group is ready when all are.
        """
        self.recomputed_tokens += 0 if request.prompt_here else chunk.count
        member = batch.take_computed_chunk(request, chunk, self._config, self._room.blocks)
        if chunk.sample:
            self.catching.remove(request)
            member.tokens += 1
            self.join(request)
        elif request.is_group and batch.is_recomputed(request):
            self.catching.remove(request)
            self.add(request)

    def digest(self) -> bytes:
        """Hash of what is not the requests' own."""
        waiting = [[request.id for request in place] for place in (self.ready, self.catching)]
        counts = (self.batch.ids, self.batch.ticks, self.batch.context, self.steps, self.recomputed_tokens)
        return digest_of(counts, self.flight.run if self.flight is not None else None, waiting, list(self.seats_kept))

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that every request is where its state says, with blocks for its tokens."""
        self.batch.check_invariants()
        leaving = [request for request in requests if request.state is RequestStatus.LEAVING]
        assert all(request.state is RequestStatus.RUNNING or request in leaving for request in self.batch.requests)
        for state, place in ((RequestStatus.READY, self.ready), (RequestStatus.CATCHING_UP, self.catching)):
            there = sorted((r for r in requests if r.state is state), key=_queue_order)
            assert there == [request for request in place if request not in leaving]
        for request in self.ready:
            for member in request.members:
                assert len(member.table) >= self._config.blocks_for(member.tokens - 1)
        assert not self.copies, "a copy belongs to a step"
        if self.flight is not None:
            batch.check_block_writes(self.batch, self._room.blocks, self._config, self.flight.copies)
        kept = [r for r in requests if r.tbt_slo_s and r.state not in (RequestStatus.RUNNING, RequestStatus.LEAVING)]
        assert dict(sorted(self.seats_kept.items())) == {r.id: r.places for r in sorted(kept, key=_queue_order)}
        assert self.places_taken <= self._config.max_batch


def _queue_order(request: DecodeRequest) -> tuple[float, int]:
    return request.turn
