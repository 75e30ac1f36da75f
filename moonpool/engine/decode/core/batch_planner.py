"""Plans the next step or run: which sequences join the batch, get a block, are preempted or recompute tokens.

Steps respect the promised time between tokens (TBT). One request's sequences are planned together.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import field

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.base.scheduling.steps import REPORT_WITHIN_S, longest_wait_s
from moonpool.engine.decode.core import batch
from moonpool.engine.decode.core.actions import AppendBlock, Chunk, StartRun, StopRun
from moonpool.engine.decode.core.batch import BlockCopy, RunningBatch, pass_windows
from moonpool.engine.decode.core.events import RunDone, RunProgress
from moonpool.engine.decode.core.overdue import OverdueTurns
from moonpool.engine.decode.core.preemption import PreemptedRequests, block_use, choose_victim
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence, RequestStatus
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tenant_shares import (
    TenantUse,
    by_tenant,
    leave_for_share,
    leave_for_turn,
    several_tenants,
    tenant_use,
)

LENGTH_WINDOW = 512
"""Answers with remembered lengths."""
FEW_LENGTHS = 16
"""With fewer answers than this, the assumed length is used."""
RESERVED_PERCENTILE = 75
"""Percentage of answers expected to be no longer than forecast, for reserving blocks."""
MEDIAN_PERCENTILE = 50
"""The same, for forecasting how many answers are still running."""


class OutputLengths:
    """Running quantile over the last answers' lengths, in tokens.

    Args:
        assumed: expected length until enough answers have ended.
    """

    def __init__(self, assumed: int) -> None:
        self._assumed = assumed
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        """Records the length after an answer ended normally."""
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > LENGTH_WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def expected(self, so_far: int, percent: int = RESERVED_PERCENTILE) -> int:
        """Length that an answer of `so_far` tokens is expected to reach; more than `so_far`.

        Out of the longer answers, `percent` were no longer than this. If no answer was longer, `so_far` is doubled.
        """
        if len(self._sorted) < FEW_LENGTHS:
            return max(self._assumed, 2 * so_far)
        first = bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        return self._sorted[first + longer * percent // 100] if longer else 2 * so_far + 1

    def digest(self) -> bytes:
        """Hash input: the recent lengths, from which the sorted lengths follow."""
        return b"".join(tokens.to_bytes(8, "little") for tokens in self._recent)


class TbtLimiter:
    """Keeps each step within the promised times between tokens.

    A promise can be kept if a step with this request alone would keep the promise. Otherwise no batch is small enough,
    so a request with a promise does not leave for such a request. A request without promise leaves for any promise.

    Args:
        state: shared state of the scheduler.
        batch: takes the steps.
    """

    def __init__(self, state: DecodeState, batch: RunningBatch) -> None:
        self._state = state
        self._batch = batch

    def step_s(self, sequences: int, context: int) -> float:
        """A step's predicted seconds."""
        return decode_step_seconds(self._state.tracker.speeds, sequences, context)

    def chunk_s(self, recomputing: list[DecodeRequest], tokens: int = 1) -> float:
        """Predicted seconds for `tokens` recomputed tokens; 0 if no request recomputes."""
        longest = max((sequence.computed for request in recomputing for sequence in request.sequences), default=0)
        return prefill_seconds(self._state.tracker.speeds, tokens, longest) if recomputing else 0.0

    @property
    def _now_s(self) -> float:
        return self.step_s(len(self._batch), self._batch.context)

    @property
    def limit_s(self) -> float:
        """The strictest promise in the batch that can be kept, seconds; 0 = none."""
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return strictest
        return self._strictest(self._batch.requests)

    def _strictest(self, requests: list[DecodeRequest]) -> float:
        return min((request.tbt_slo_s for request in requests if self._can_keep(request)), default=0.0)

    def _can_keep(self, request: DecodeRequest) -> bool:
        """Whether the request has a promise that a step with this request alone keeps."""
        alone_s = self.step_s(len(request.sequences), self._batch.context_of(request))
        return bool(request.tbt_slo_s) and alone_s <= request.tbt_slo_s

    def next_to_leave(self) -> DecodeRequest | None:
        """The request that leaves the batch because the step is too long; None if no request need leave.

        Requests without promise leave first, then requests with a promise. Each time, the tenant whose requests take
        most step time per weight gives up the last request.
        """
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return None
        requests = self._batch.requests
        free = [request for request in requests if not request.tbt_slo_s]
        limit = self._strictest(requests)
        leaving = free or (requests if limit and self._now_s > limit else [])
        use = tenant_use(requests, self._own_s) if several_tenants(leaving) else TenantUse({})
        return max(leaving, key=use.order, default=None)

    def _own_s(self, request: DecodeRequest) -> float:
        """Seconds that a request adds to a step."""
        return self.step_s(len(request.sequences), self._batch.context_of(request)) - self.step_s(0, 0)

    def may_join(self, request: DecodeRequest, recomputing: list[DecodeRequest]) -> bool:
        """Whether one more request fits into the batch within the promised times.

        A request with a promise may displace requests that would leave: later requests, and requests without a promise.
        """
        batch = self._batch
        count, context, key = len(request.sequences), batch.context_of(request), request.order_key
        if not request.tbt_slo_s:
            step_s = self.step_s(len(batch) + count, batch.context + context) + self.chunk_s(recomputing)
            return not batch.tbt_slo_s or step_s <= batch.tbt_slo_s
        before = [it for it in batch.requests if it.tbt_slo_s and it.order_key < key] if batch.tbt_slo_s else []
        limit = self._strictest([*before, request])
        count += sum(len(it.sequences) for it in before)
        return not limit or self.step_s(count, context + sum(map(batch.context_of, before))) <= limit

    def chunk_tokens(self, recomputing: list[DecodeRequest]) -> int:
        """Tokens recomputed beside the batch in a step: fewer if times were promised, 0 if no token fits."""
        tokens, strictest, step_s = self._state.settings.chunked_prefill_size, self._batch.tbt_slo_s, self._now_s
        while strictest and tokens > 1 and step_s + self.chunk_s(recomputing, tokens) > strictest:
            tokens //= 2
        limit = self.limit_s
        return 0 if limit and step_s + self.chunk_s(recomputing, tokens) > limit else tokens


OVERDUE_RATIO = 2.0
"""A step this many times longer than predicted lowers the engine's speed before the step ends."""


@frozen
class RunInFlight:
    """The run that the engine executes.

    Attributes:
        context: the batch's tokens in the step being computed.
        began: start of the step being computed, or report of the step before, seconds.
        copies: block copies made before the run.
        left: steps in the run that have not ended.
        is_stopped: the run was told to end with this step.
        is_hurried: the run was told not to yield to other work any more.
    """

    run: StartRun
    context: int
    began: float
    copies: list[BlockCopy] = field(default_factory=list)
    left: int = 1
    is_stopped: bool = False
    is_hurried: bool = False

    def advanced(self, now: float, steps: int, context: int) -> "RunInFlight":
        """The run after `steps` steps."""
        return RunInFlight(self.run, context, now, self.copies, self.left - steps, self.is_stopped, self.is_hurried)

    def overdue(self, now: float, speeds: Speeds) -> Speeds:
        """The engine's speeds, lower if the step being computed takes too long."""
        if self.run.chunks:
            return speeds
        expected_s = decode_step_seconds(speeds, len(self.run.batch), self.context)
        if self.run.patient:
            expected_s += longest_wait_s(expected_s) + (REPORT_WITHIN_S if self.run.steps > 1 else 0.0)
        late = (now - self.began) / expected_s if expected_s else 1.0
        return speeds.slowed_decode(late) if late > OVERDUE_RATIO else speeds

    def stopped(self, state: DecodeState, *waiting: list[DecodeRequest]) -> "RunInFlight":
        """The run, told to end with the step being computed; hurried if a waiting request is not patient."""
        hurried = self.run.patient and not all(it.patient for its in waiting for it in its)
        if (self.left == 1 or self.is_stopped) and hurried <= self.is_hurried:
            return self
        state.act(StopRun(self.run.step, hurried))
        return RunInFlight(self.run, self.context, self.began, self.copies, self.left, True, hurried)


def uninterrupted_steps(batch: RunningBatch, most: int, tbt: TbtLimiter) -> int:
    """Steps that the batch can take before a decision other than about blocks is needed, if no event comes.

    A decision is needed when the batch becomes too slow for a promise, and after each step of a search.

    Args:
        batch: the first step's batch.
        most: upper limit.
        tbt: the promised times.
    """
    if most == 1 or batch.has_search:
        return 1
    limit, count, context = tbt.limit_s, len(batch), batch.context
    if not limit:
        return most
    return 1 + bisect_left(range(1, most), True, key=lambda n: tbt.step_s(count, context + n * count) > limit)


def sequences_short_ahead(
    batch: RunningBatch, state: DecodeState, steps: int
) -> Iterator[tuple[DecodeRequest, RequestSequence]]:
    """Sequences that need a block during the next run, soonest first; the caller gives the block now.

    Only surplus blocks are given ahead, so requests that arrive or grow find as many blocks as without this.
    """
    settings, budget = state.settings, state.budget
    ahead = batch.blocks_ahead if batch.soonest(steps := min(steps, settings.ahead_steps)) else 0
    while (short := batch.soonest(steps)) is not None and ahead < budget.surplus:
        request, sequence = short
        pass_windows(sequence, batch.tokens_of(sequence) - 1, settings, state.blocks)
        if state.blocks.num_slots and budget.slots < 1:
            return
        if len(sequence.table) == settings.blocks_for(request.total_tokens - 1):
            return  # the answer ends in this block: the last token is never computed
        ahead += 1
        yield short


def observe_run(tracker: SpeedTracker, now: float, flight: RunInFlight, event: RunProgress | RunDone) -> None:
    """Learns steps' speed, once per report, from their mean.

    A step with chunks teaches the chunks' speed; the progress's batch counts with the predicted time.
    """
    if not event.seconds:
        return
    batch, seconds = len(flight.run.batch), event.seconds / event.steps
    if flight.run.steps == 1:  # a token takes the way to the engine and back, not just the computation
        seconds = max(seconds, now - flight.began - event.waited_s)
    if flight.run.chunks:
        batch_s = decode_step_seconds(tracker.speeds, batch, flight.context) if batch else 0.0
        chunks = [(chunk.count, chunk.start, False) for chunk in flight.run.chunks]
        tracker.observe_prefill(chunks, seconds, known_s=batch_s)
        return
    drafted = sum(draft.tokens for draft in event.drafts) if isinstance(event, RunDone) else 0
    context = flight.context + batch * (event.steps - 1) // 2
    tracker.observe_decode(batch + drafted, context + drafted * context // batch, seconds)


class BatchPlanner:
    """Plans requests that have started, or that compute their prompt here.

    Args:
        state: shared state of the scheduler.
        preempted: the preempted requests.
        lengths: predicts answer lengths.

    Attributes:
        batch: the running sequences.
        tbt: promised times between tokens.
        waiting: requests that wait for a slot or a block, in order.
        recomputing: requests that compute missing KV, in order.
        run_in_flight: the run that the engine executes.
        copies: block copies to be made before the next step.
        overdue: turns for preempted requests that waited long.
        slots_kept: slots kept for requests with a promised time between tokens that are not in the batch, by id.
        steps: runs so far.
        recomputed_tokens: tokens recomputed so far.
        drafted_tokens: guessed tokens that were checked so far.
        accepted_tokens: checked tokens that were right and became part of the answer.
        prompts: prompts computed here so far.
    """

    def __init__(self, state: DecodeState, preempted: PreemptedRequests, lengths: OutputLengths) -> None:
        self._state, self._settings, self._budget = state, state.settings, state.budget
        self._preempted = preempted
        self._lengths = lengths
        self.batch = RunningBatch(state.settings.block_size)
        self.tbt = TbtLimiter(state, self.batch)
        self.waiting: list[DecodeRequest] = []
        self.recomputing: list[DecodeRequest] = []
        self.run_in_flight: RunInFlight | None = None
        self.copies: list[BlockCopy] = []
        self.overdue = OverdueTurns(state, preempted)
        self._places_due = 0  # for the holder of the turn, of places and blocks that are free
        self._blocks_due = 0
        self.slots_kept: dict[int, int] = {}
        self._blocks_awaited = 0  # of the blocks being freed, those that running requests wait for
        self.steps = 0
        self.recomputed_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.prompts = 0
        self._batch_changed = False  # by this plan: waiting requests may fit into the next step
        self._turns: dict[str, float] = {}  # while a tenant waits without a place: steps of each, over its weight

    # --- the lists -------------------------------------------------------------------------------------------------

    def add(self, request: DecodeRequest) -> None:
        """Adds a request with all KV and the first token."""
        request.set_status(RequestStatus.WAITING)
        insort(self.waiting, request, key=_queue_order)

    def take_out(self, request: DecodeRequest) -> bool:
        """Takes a request out of the batch or the waiting list.

        Returns:
            False if a step in flight computes the request: the request stays until the step ends.
        """
        if self.in_flight(request):
            return False
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RECOMPUTING:
            self.recomputing.remove(request)
        elif request.status is RequestStatus.PREEMPTED:
            self._preempted.queue.remove(request)
        return True

    def in_flight(self, request: DecodeRequest) -> bool:
        """Whether the run in flight computes the request."""
        if self.run_in_flight is None:
            return False
        if request.status is RequestStatus.RUNNING:
            return True
        chunks = self.run_in_flight.run.chunks if request.status is RequestStatus.RECOMPUTING else ()
        return any(request.find(chunk.id) is not None for chunk in chunks)

    def step_over(self, request: DecodeRequest) -> None:
        """Takes out a request that `take_out` left in the step."""
        if request in self.batch:
            self.batch.leave(request)
        else:
            self.recomputing.remove(request)

    def restored(self, request: DecodeRequest) -> None:
        """Adds a request with restored blocks to the list for the request's status."""
        if request.status is RequestStatus.WAITING:
            insort(self.waiting, request, key=_queue_order)
        elif request.status is RequestStatus.RECOMPUTING:
            insort(self.recomputing, request, key=_queue_order)

    def speeds(self, now: float) -> Speeds:
        """The engine's speeds at `now`: a step that takes too long counts before the step ends."""
        speeds = self._state.tracker.speeds
        return speeds if self.run_in_flight is None else self.run_in_flight.overdue(now, speeds)

    # --- the next step ---------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Starts the next run if none is in flight and there is something to compute."""
        if self.run_in_flight is not None:
            return
        self._blocks_awaited, self._batch_changed = 0, False
        self._preempt_for_diagnosis()
        self._keep_tbt()
        self._serve_overdue()
        self._fill_slots()
        self._grow()
        gave_way = self._batch_changed and not len(self.batch) and not self._blocks_awaited
        if self._restore() or gave_way:
            self._fill_slots()
        self._note_turns()
        chunks = self._chunks()
        if not len(self.batch) and not chunks:
            return
        self.steps += 1
        steps = 1 if chunks or self._must_ask_after_step else self._run_steps()
        patient, copies = self.batch.patient and not chunks, tuple((it.source, it.block) for it in self.copies)
        drafts = 0 if chunks else self._draft_tokens()
        run = StartRun(self.steps, self.batch.ids, chunks, copies, steps, patient, drafts)
        self.run_in_flight = RunInFlight(run, self.batch.context, self._state.now, self.copies, steps)
        self.copies = []
        self._state.act(run)

    def _run_steps(self) -> int:
        """Number of steps in the next run."""
        steps = uninterrupted_steps(self.batch, self._settings.run_steps, self.tbt)
        for request, sequence in () if self._blocks_awaited else sequences_short_ahead(self.batch, self._state, steps):
            self._add_block(sequence)
            self.batch.grew(sequence)
            self.update_expected(request)
        return self.batch.covered(steps)

    def _draft_tokens(self) -> int:
        """Guessed tokens that the next step may check: as many as keep the promised times."""
        count, context = len(self.batch), self.batch.context
        most = min(self._settings.draft_tokens * count, self._settings.chunked_prefill_size)
        limit = self.tbt.limit_s if most else 0.0
        if not limit:
            return most
        each = context // count  # a guess costs as much as one more sequence

        def is_late(drafts: int) -> bool:
            return self.tbt.step_s(count + drafts, context + drafts * each) > limit

        return bisect_left(range(1, most + 1), True, key=is_late)

    @property
    def _must_ask_after_step(self) -> bool:
        waiting = self.copies or self.recomputing or self._turns
        return bool(self._batch_changed or waiting or self._settings.preempt_every)

    def advance(self, steps: int, *, over: bool) -> None:
        """Counts steps in the run in flight; `over`: the run has ended."""
        flight = self.run_in_flight
        assert flight is not None
        assert steps <= flight.left, "the engine continued without asking"
        self.batch.advance(steps)
        self._preempted.steps += steps
        self.overdue.advance(steps, self.batch)
        if self._turns:
            weights = {request.spec.tenant: request.spec.weight for request in self.batch.requests}
            self._turns |= {tenant: self._turns.get(tenant, 0.0) + steps / weights[tenant] for tenant in weights}
        self.run_in_flight = None if over else flight.advanced(self._state.now, steps, self.batch.context)

    def stop_run(self, *, leaving: bool) -> None:
        """Ends the run in flight after the current step if a request waits for the end; `leaving`: one waits."""
        queues = self.waiting, self.recomputing, self._preempted.queue
        if self.run_in_flight is not None and (leaving or any(queues)):
            self.run_in_flight = self.run_in_flight.stopped(self._state, *queues)

    def not_computed(self, flight: RunInFlight) -> None:
        """The run was aborted, so the run's copies were not made."""
        self.run_in_flight = None
        for copied in flight.copies:
            batch.undo_copy_on_write(self._state, copied)
            if copied.request in self.batch:
                self.batch.forked(copied.request)

    def _preempt_for_diagnosis(self) -> None:
        every = self._settings.preempt_every
        if every and len(self.batch) and self.steps % every == 0:
            requests = self.batch.requests
            self._preempt(requests[self.steps // every % len(requests)])

    def _restore(self) -> int:
        """Restores preempted requests, but not before requests that wait for a block; returns how many."""
        count = 0
        while self._preempted.queue and not self._blocks_awaited:
            active = self._active
            request = self._preempted.next_in_turn(active)
            if request is None or not self._has_slots(request):
                break
            if not self._preempted.restore(request, active, self._blocks_due):
                break
            self.restored(request)
            count += 1
        return count

    # --- slots -----------------------------------------------------------------------------------------------------

    def _has_slots(self, request: DecodeRequest) -> bool:
        return self.slots_taken + self._places_due + len(request.sequences) <= self._settings.max_num_seqs

    @property
    def slots_taken(self) -> int:
        """Slots taken, also by requests being loaded, which may have to recompute then."""
        return len(self.batch) + sum(len(request.sequences) for request in self.recomputing) + self._preempted.loading

    def keep_slots(self, request: DecodeRequest) -> None:
        """Keeps slots for a request that was promised a time between tokens."""
        if request.tbt_slo_s:
            self.slots_kept[request.id] = request.slots

    def _fill_slots(self) -> None:
        """Lets waiting requests join: each time the first request of the tenant with fewest places per weight.

        A request that does not fit, preempted or not, blocks later requests. If the request's tenant has no place,
        other tenants take the free places, and `_make_way` gives this tenant a turn.
        """
        queues = by_tenant(it for it in self.waiting if it is not self.overdue.holder)
        use, first, changed = TenantUse({}), None, True
        while queues:
            if changed:
                use, first, changed = self._place_use(), self._preempted.next_in_turn(self._active), False
            heads = [queue[0] for queue in queues.values()]
            request = min(heads, key=lambda it: (use.of(it), self._turn_of(it), it.order_key))
            if first is not None and not self._has_slots(first) and use.order(first) < use.order(request):
                break
            if not self._has_slots(request):
                if not self._make_way(request, use):
                    if use.of(request) or not use.taken:
                        break
                    del queues[request.spec.tenant]
                    continue
                changed = True
            queue = queues[request.spec.tenant]
            del queue[0]
            if not queue:
                del queues[request.spec.tenant]
            if request.status is RequestStatus.WAITING and self._may_join(request):
                changed = True  # also blocks that are given can cost others theirs
                if self._give_blocks(request):
                    self.waiting.remove(request)
                    self.join(request)
                    self._batch_changed |= bool(self._preempted.queue)
        self._keep_tbt()  # a request with a promise joins first; others then leave for that request

    @property
    def _active(self) -> list[DecodeRequest]:
        """Requests that run or could run."""
        return [*self.batch.requests, *self.waiting, *self.recomputing]

    def _place_use(self) -> TenantUse:
        """Places that tenants take; empty if all requests have one tenant."""
        taking = [*self.batch.requests, *self.recomputing]
        others = [*self.waiting, *self._preempted.queue]
        if not several_tenants([*taking, *others]):
            return TenantUse({})
        return tenant_use(taking, lambda it: len(it.sequences), total=self._settings.max_num_seqs, others=others)

    def _make_way(self, request: DecodeRequest, use: TenantUse) -> bool:
        """Lets other tenants' requests wait, so that the request has the places due to the request's tenant.

        A tenant without a place takes turns with the others, even if the request needs more than the tenant's share.
        Tenants that had as many steps per weight, or more, leave.

        Returns:
            Whether the request has all places now.
        """
        is_waiting = request.status is RequestStatus.WAITING  # not preempted for a request that joined before
        if not is_waiting or not use.taken or not self.tbt.may_join(request, self.recomputing):
            return False
        kept = 0 if request.tbt_slo_s else sum(self.slots_kept.values())
        lacking = self.slots_taken + self._places_due + kept + len(request.sequences) - self._settings.max_num_seqs
        running = [it for it in self.batch.requests if it is not self.overdue.holder]
        leaving = leave_for_share(running, request, lacking, use)
        if not leaving and not use.of(request) and request.spec.tenant in self._turns:
            leaving = leave_for_turn(running, request, lacking, self._turns)
        for victim in leaving:
            self._back_to_waiting(victim)
        return bool(leaving)

    def _turn_of(self, request: DecodeRequest) -> float:
        return self._turns.get(request.spec.tenant, 0.0)

    def _note_turns(self) -> None:
        """Begins to count steps when a tenant waits without a place, and ends when no tenant does."""
        if not self.waiting:
            self._turns = {}
            return
        placed = [request.spec.tenant for request in (*self.batch.requests, *self.recomputing)]
        waiting = [request.spec.tenant for request in self.waiting]
        least = min(self._turns.values(), default=0.0)
        contend = dict.fromkeys([*placed, *waiting]) if not set(waiting) <= set(placed) else {}
        self._turns = {tenant: self._turns.get(tenant, least) for tenant in contend}

    def _may_join(self, request: DecodeRequest) -> bool:
        """Whether a request leaves the others their promised times and slots."""
        if not self.slots_taken:
            return True  # one must run, or requests with kept slots would never get blocks
        if not request.tbt_slo_s:
            taken = self.slots_taken + self._places_due + sum(self.slots_kept.values())
            if taken + len(request.sequences) > self._settings.max_num_seqs:
                return False
        return self.tbt.may_join(request, self.recomputing)

    def join(self, request: DecodeRequest) -> None:
        """Takes a request into the batch."""
        request.set_status(RequestStatus.RUNNING)
        self.batch.join(request)
        request.preemption.since = None
        self.slots_kept.pop(request.id, None)

    def end(self, request: DecodeRequest, sequence: RequestSequence) -> None:
        """A request's sequence has ended between two steps; others continue."""
        if request in self.batch:
            self.batch.end(sequence)
        request.sequences.remove(sequence)
        request.ended_tokens += sequence.tokens - request.spec.prompt_tokens
        self._state.blocks.release(sequence.table, sequence.past)
        if request.id in self.slots_kept:
            self.keep_slots(request)
        request.expected_blocks = 0
        self.update_expected(request)

    def _vacate(self, request: DecodeRequest) -> None:
        self.batch.leave(request)
        self.keep_slots(request)

    def _back_to_waiting(self, request: DecodeRequest) -> None:
        self._batch_changed = True
        self._undo_copies(request)
        self._vacate(request)
        self.add(request)

    # --- overdue requests ------------------------------------------------------------------------------------------

    def _serve_overdue(self) -> None:
        """Restores the request with the turn, and lets it join, at the cost of others.

        If others can give enough, what the request still lacks is kept for the request; if not, another request gets
        the turn.
        """
        self._places_due = self._blocks_due = 0
        candidates = self.overdue.choose(self._active, self.waiting)
        self.overdue.give(next((it for it in candidates if self._can_serve(it)), None))
        holder = self.overdue.holder
        if holder is None:
            return
        if holder.status is RequestStatus.PREEMPTED:
            self._free_places(holder)
            self._restore_overdue(holder)
        if holder.status is RequestStatus.WAITING:
            self._free_places(holder)
            if self._give_blocks(holder):
                self.waiting.remove(holder)
                self.join(holder)
                self._batch_changed = True
        if holder.status in (RequestStatus.WAITING, RequestStatus.SWAPPING_IN):
            self._places_due = len(holder.sequences)

    def _can_serve(self, holder: DecodeRequest) -> bool:
        """Whether the request with the turn can get what is missing, from others or soon from copies under way."""
        if holder.status not in (RequestStatus.PREEMPTED, RequestStatus.WAITING):
            return True
        giving = self.overdue.giving_way(holder, self.batch.requests)
        if sum(len(it.sequences) for it in giving) < self._lacking_places(holder):
            return False
        if holder.status is RequestStatus.WAITING:
            return self.tbt.may_join(holder, self.recomputing)
        return self.overdue.lacking_blocks(holder, self.overdue.giving_way(holder, self._active)) is not None

    def _restore_overdue(self, holder: DecodeRequest) -> None:
        giving = self.overdue.giving_way(holder, self._active)
        while not self._preempted.restore(holder, []):
            lacking = self.overdue.lacking_blocks(holder, giving)
            if not giving or lacking is None or lacking <= self._preempted.blocks_being_freed:
                self._places_due, self._blocks_due = len(holder.sequences), self._budget.available
                return
            victim = max(giving, key=block_use(self._active).order)
            giving.remove(victim)
            self._preempt(victim)
        self.restored(holder)

    def _lacking_places(self, holder: DecodeRequest) -> int:
        kept = 0 if holder.tbt_slo_s else sum(self.slots_kept.values())
        lacking = self.slots_taken + kept + len(holder.sequences) - self._settings.max_num_seqs
        return min(lacking, self.slots_taken)  # one must run, whatever is kept for others

    def _free_places(self, holder: DecodeRequest) -> None:
        """Lets others wait until the request with the turn has all places."""
        lacking, use = self._lacking_places(holder), self._place_use()
        for victim in sorted(self.overdue.giving_way(holder, self.batch.requests), key=use.order, reverse=True):
            if lacking > 0:
                lacking -= len(victim.sequences)
                self._back_to_waiting(victim)

    # --- time between tokens ---------------------------------------------------------------------------------------

    @property
    def least_chunk_s(self) -> float:
        """Predicted seconds for one recomputed token beside a batch; 0 if no request is to recompute.

        New promises leave time for this token: beside batches as slow as allowed, no preempted request would be
        restored.
        """
        return self.tbt.chunk_s(self.recomputing or self._preempted.queue)

    def _keep_tbt(self) -> None:
        """Moves requests back to waiting while the step is too long for a promise."""
        while (request := self.tbt.next_to_leave()) is not None:
            self._back_to_waiting(request)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        for request in self.batch.due():
            if request.status is not RequestStatus.RUNNING:
                continue
            if self._give_blocks(request):
                for sequence in request.sequences:
                    self.batch.grew(sequence)
            elif request.status is RequestStatus.RUNNING:
                self._back_to_waiting(request)

    def _add_block(self, sequence: RequestSequence) -> None:
        [block] = self._state.blocks.allocate(1)
        self._state.blocks.give_slots([block])
        sequence.table.append(block)
        self._state.act(AppendBlock(sequence.id, block))

    def _give_blocks(self, request: DecodeRequest) -> bool:
        """Gives each sequence an unshared block for the last token; preempts others, or the request, if needed."""
        blocks_for, blocks = self._settings.blocks_for, self._state.blocks
        writes = [(sequence, blocks_for(self.batch.tokens_of(sequence)) - 1) for sequence in request.sequences]
        for sequence in request.sequences:
            batch.pass_windows(sequence, self.batch.tokens_of(sequence) - 1, self._settings, blocks)
        kept = 0 if request is self.overdue.holder else self._blocks_due
        while True:
            lacking = batch.count_lacking_blocks(writes, blocks)
            slots = lacking + batch.count_lacking_slots(writes, blocks) if blocks.num_slots else 0
            if lacking <= self._budget.available - kept and slots <= self._budget.slots:
                break
            if kept:
                return False  # until the holder of the turn has them
            if self._preempted.blocks_being_freed > self._blocks_awaited:
                self._blocks_awaited += lacking
                return False
            victim = choose_victim(self._active, request, self.overdue.holder)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        for sequence, index in writes:
            if index == len(sequence.table):
                self._add_block(sequence)
                continue
            if blocks.is_partial(sequence.table[index]):
                blocks.give_slots([sequence.table[index]])
            if (copied := batch.copy_on_write(self._state, request, sequence, index)) is not None:
                self.copies.append(copied)
        self.update_expected(request)
        return True

    def _preempt(self, victim: DecodeRequest) -> None:
        self._batch_changed = True
        self._undo_copies(victim)
        self.take_out(victim)
        self._preempted.preempt(victim)

    def _undo_copies(self, request: DecodeRequest) -> None:
        """The request does not take part in the next step after all."""
        for copied in self.copies:
            if copied.request is request:
                batch.undo_copy_on_write(self._state, copied)
        self.copies = [copied for copied in self.copies if copied.request is not request]

    def update_expected(self, request: DecodeRequest) -> None:
        """Updates the blocks that a request is expected to need; forecasts anew if the forecast was exceeded."""
        have = len(request.blocks) + request.promised
        if have > request.expected_blocks or not request.expected_blocks:
            tokens = max(self.batch.tokens_of(sequence) for sequence in request.sequences)
            answer = self._lengths.expected(max(0, tokens - request.spec.prompt_tokens))
            total = max(tokens, min(request.total_tokens, request.spec.prompt_tokens + answer))
            needed = batch.most_blocks(self._settings, request.spec.prompt_tokens, total, request.slots)
            request.expected_blocks = max(have, needed)
        self._budget.expect(request, request.expected_blocks - have)

    # --- recomputing -----------------------------------------------------------------------------------------------

    def compute_prompt(self, request: DecodeRequest) -> bool:
        """Binds the promised blocks and computes the prompt behind the cached prefix, as after preemption.

        Returns:
            False if that is not possible: no slot is free, preempted requests wait for blocks, or cached blocks
            lack slices and the pool has none to compute these blocks anew.
        """
        kept = sum(self.slots_kept.values()) - self.slots_kept.get(request.id, 0)
        is_full = self.slots_taken + kept >= self._settings.max_num_seqs
        if request.is_group or self._preempted.queue or is_full:
            return False
        settings = self._settings
        most = (request.spec.tokens - settings.recurrent) // settings.block_size
        if not self._budget.keep_continuable(request, most, settings.window_blocks):
            return False
        held = len(request.blocks)
        self._budget.bind(request)
        batch.begin_prompt_here(request, held, settings, self._state.blocks)
        self.restored(request)
        self.prompts += 1
        return True

    def _chunks(self) -> tuple[Chunk, ...]:
        """Chunks computed beside the batch. If only giving up can free a chunk's window slots, requests give up."""
        while self.recomputing:
            chunks = batch.plan_chunks(self.recomputing, self.tbt.chunk_tokens(self.recomputing), self._state)
            stuck = not chunks and not len(self.batch) and not self._preempted.blocks_being_freed
            if not stuck or len(self.recomputing) == 1 or not self._state.blocks.num_slots:
                return chunks
            self._preempt(self.recomputing[-1])
        return ()

    def chunk_computed(self, chunk: Chunk, request: DecodeRequest) -> None:
        """Counts a computed chunk.

        With the last chunk, a single sequence has sampled a token and joins the batch. A group waits for a slot once
        all sequences are recomputed.
        """
        self.recomputed_tokens += 0 if request.prompt_here else chunk.count
        sequence = batch.take_computed_chunk(request, chunk, self._settings, self._state.blocks)
        if chunk.sample:
            self.recomputing.remove(request)
            sequence.tokens += 1
            self.join(request)
        elif request.is_group and batch.is_recomputed(request):
            self.recomputing.remove(request)
            self.add(request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """Hash of the lists and counters; requests have their own."""
        lists = [[request.id for request in it] for it in (self.waiting, self.recomputing)]
        counts = (self.batch.ids, self.batch.ticks, self.batch.context, self.steps, self.recomputed_tokens)
        turns = list(self._turns.items())
        run = self.run_in_flight.run if self.run_in_flight is not None else None
        return digest_of(counts, run, lists, list(self.slots_kept), turns, self.overdue.digest())

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that every request is where the status says, with blocks for all tokens."""
        self.batch.check_invariants()
        self.overdue.check_invariants(requests)
        finishing = [request for request in requests if request.status is RequestStatus.FINISHING]
        assert all(request.status is RequestStatus.RUNNING or request in finishing for request in self.batch.requests)
        for status, found in (
            (RequestStatus.WAITING, self.waiting),
            (RequestStatus.RECOMPUTING, self.recomputing),
        ):
            expected = sorted((r for r in requests if r.status is status), key=_queue_order)
            assert expected == [request for request in found if request not in finishing]
        for request in self.waiting:
            for sequence in request.sequences:
                assert len(sequence.table) >= self._settings.blocks_for(sequence.tokens - 1)
        assert not self.copies, "a copy belongs to a step"
        if self.run_in_flight is not None:
            batch.check_block_writes(self.batch, self._state, self.run_in_flight.copies)
        apart = [r for r in requests if r.status not in (RequestStatus.RUNNING, RequestStatus.FINISHING)]
        kept = {r.id: r.slots for r in apart if r.tbt_slo_s}
        assert self.slots_kept == kept
        assert self.slots_taken <= self._settings.max_num_seqs


def _queue_order(request: DecodeRequest) -> tuple[float, int]:
    return request.order_key
