"""Plans the next step or run: which sequences join the batch, get a block, are preempted or recompute tokens.

Steps respect the promised time between tokens (TBT). One request's sequences are planned together.
"""

from bisect import bisect_left, insort

from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core.actions import AppendBlock, Chunk, StartRun
from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.block_budget import most_blocks
from moonpool.engine.decode.core.chunks import is_recomputed, plan_chunks, take_computed_chunk
from moonpool.engine.decode.core.copy_on_write import (
    BlockCopy,
    check_block_writes,
    copy_on_write,
    count_lacking_blocks,
    undo_copy_on_write,
)
from moonpool.engine.decode.core.output_lengths import OutputLengths
from moonpool.engine.decode.core.overdue import OverdueGrants
from moonpool.engine.decode.core.preemption import PreemptedRequests, choose_for_holder, choose_victim
from moonpool.engine.decode.core.present_tenants import PresentTenants
from moonpool.engine.decode.core.prompt_starts import PromptStarts
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence, RequestStatus
from moonpool.engine.decode.core.runs import RunInFlight, sequences_short_ahead, uninterrupted_steps
from moonpool.engine.decode.core.scored_turns import ScoredTurns
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tbt_limiter import TbtLimiter
from moonpool.engine.decode.core.tenant_rotation import TenantRotation
from moonpool.engine.decode.core.tenant_shares import (
    TenantUse,
    by_tenant,
    leave_for_share,
    several_tenants,
    tenant_use,
)
from moonpool.engine.decode.core.windows import count_lacking_window_blocks
from moonpool.engine.scheduler.windows import pass_windows


class BatchPlanner:
    """Plans requests that have started, or that compute their prompt here.

    As in vLLM, requests are `waiting` or in the running batch, and one function, `plan`, says what the next step
    computes. Nobody waits for ever, by six rules:

    - **Kept slots** (`BatchSlots.kept`): who was promised a time between tokens finds a batch slot.
    - **Promised times** (`TbtLimiter`): others leave, or do not join, before a step breaks a promise.
    - **Shares** (`tenant_shares`): tenants above their share give up slots and blocks for tenants below.
    - **Rotation** (`TenantRotation`): a tenant whose share is less than one request runs in turn with the others.
    - **Turns of scored rows** (`ScoredTurns`): beside other tenants, a step has few sequences with log probabilities.
    - **Overdue grants** (`OverdueGrants`): who was preempted long ago gets blocks and slots from others for some steps.
      What is free but not enough yet stays due to the holder.

    Args:
        state: shared state of the scheduler.
        preempted: the preempted requests.
        lengths: predicts answer lengths.
        tenants: those that are present at the instance.

    Attributes:
        batch: the running sequences.
        tbt: promised times between tokens.
        waiting: requests that wait for a batch slot or a block, in order.
        recomputing: requests that compute missing KV, in order.
        slots: batch slots taken, kept and due.
        run_in_flight: the run that the engine executes.
        copies: block copies to be made before the next step.
        overdue: grants for preempted requests that waited long.
        steps: runs so far.
        recomputed_tokens: tokens recomputed so far.
        drafted_tokens: guessed tokens that were checked so far.
        accepted_tokens: checked tokens that were right and became part of the answer.
        prompts: whole prompts that wait for their turn to be computed here, and their order.
        loads: prefixes of whole prompts that are being loaded.
        starts: begins prompts that are computed here.
    """

    def __init__(
        self,
        state: DecodeState,
        preempted: PreemptedRequests,
        lengths: OutputLengths,
        tenants: PresentTenants,
    ) -> None:
        self._state, self._settings, self._budget = state, state.settings, state.budget
        self._preempted = preempted
        self._lengths = lengths
        self.batch = RunningBatch(state.settings.block_size)
        self.tbt = TbtLimiter(state, self.batch)
        self.waiting: list[DecodeRequest] = []
        self.recomputing: list[DecodeRequest] = []
        self.run_in_flight: RunInFlight | None = None
        self.copies: list[BlockCopy] = []
        self.overdue = OverdueGrants(state, preempted)
        self._rotation = TenantRotation()
        self._scored = ScoredTurns(tenants)
        self._resting: list[RequestSequence] = []  # in the batch, but not in the run
        self._blocks_due = 0  # available blocks that stay free for the holder of the grant
        self._blocks_awaited = 0  # of the blocks being freed, those that running requests wait for
        self.steps = 0
        self.recomputed_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.starts = PromptStarts(state, self.batch, self.waiting, self.recomputing, preempted)
        self.prompts, self.loads, self.slots = self.starts.prompts, self.starts.loads, self.starts.slots
        self._batch_changed = False  # by this plan: waiting requests may fit into the next step

    # --- the lists -------------------------------------------------------------------------------------------------

    def add(self, request: DecodeRequest) -> None:
        """Add a request with all KV and the first token."""
        request.set_status(RequestStatus.WAITING)
        insort(self.waiting, request, key=_queue_order)

    def add_restored(self, request: DecodeRequest) -> None:
        """Add a request with restored blocks to the list for the request's status."""
        if request.status is RequestStatus.WAITING:
            insort(self.waiting, request, key=_queue_order)
        elif request.status is RequestStatus.RECOMPUTING:
            insort(self.recomputing, request, key=_queue_order)

    def in_flight(self, request: DecodeRequest) -> bool:
        """Return whether the run in flight computes the request."""
        if self.run_in_flight is None:
            return False
        if request.status is RequestStatus.RUNNING:
            return True
        chunks = self.run_in_flight.run.chunks if request.status is RequestStatus.RECOMPUTING else ()
        return any(request.find(chunk.id) is not None for chunk in chunks)

    def try_remove(self, request: DecodeRequest) -> bool:
        """Remove a request from the list for the request's status.

        Returns:
            False if the run in flight computes the request: it stays until `finish_step`.
        """
        if self.in_flight(request):
            return False
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RECOMPUTING:
            self.recomputing.remove(request)
        elif request.status is RequestStatus.PREEMPTED:
            self._preempted.queue.remove(request)
        elif request.status is RequestStatus.QUEUED:
            self.prompts.remove(request)
        return True

    def finish_step(self, request: DecodeRequest) -> None:
        """Remove a request that has ended, and that `try_remove` left in the step."""
        if request in self.batch:
            self.batch.leave(request)
        else:
            self.recomputing.remove(request)

    def _leave(self, request: DecodeRequest) -> None:
        """Take a request out of the batch; a promised slot is kept for it."""
        self.batch.leave(request)
        self.slots.keep(request)

    def _requeue(self, request: DecodeRequest) -> None:
        """Let a running request wait again, with its blocks."""
        self._batch_changed = True
        self._undo_copies(request)
        self._leave(request)
        self.add(request)

    def speeds(self, now: float) -> Speeds:
        """Return the engine's speeds at `now`: a step that takes too long counts before the step ends."""
        speeds = self._state.tracker.speeds
        return speeds if self.run_in_flight is None else self.run_in_flight.overdue(now, speeds)

    # --- the next step ---------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Start the next run if none is in flight and there is something to compute."""
        if self.run_in_flight is not None:
            return
        self._blocks_awaited, self._batch_changed = 0, False
        self.prompts.forgive_idle()
        self._preempt_for_diagnosis()
        self._keep_tbt()  # contexts have grown since the last step
        self._serve_overdue()  # before others: any free block or slot would go to a stream of newcomers
        self._fill_slots()
        self._grow()
        # If all have given way, waiting requests may fit now; without them no step and no further event would come.
        gave_way = self._batch_changed and not len(self.batch) and not self._blocks_awaited
        if self._restore() or gave_way:
            self._fill_slots()
        self.starts.begin_all()
        self._rotation.note((*self.batch.requests, *self.recomputing), self.waiting)
        chunks = self._chunks()
        while not chunks and not len(self.batch) and self.starts.begin(even_if_others_wait=True):
            chunks = self._chunks()  # the next prompt's promised window blocks may be what is missing
        if not len(self.batch) and not chunks:
            return
        self.steps += 1
        self.prompts.idle_since = None
        self._resting = self._scored.resting(self.batch.requests, self._state.now)
        ids, context = self._stepping()
        steps = 1 if chunks or self._must_ask_after_step else self._run_steps()
        patient = self.batch.patient and not chunks
        copies = tuple((copied.source, copied.block) for copied in self.copies)
        drafts = 0 if chunks or self._resting else self._draft_tokens()
        run = StartRun(self.steps, ids, chunks, copies, steps, patient, drafts)
        self.run_in_flight = RunInFlight(run, context, self._state.now, self.copies, steps)
        self.copies = []
        self._state.act(run)

    def _stepping(self) -> tuple[tuple[int, ...], int]:
        """Return the sequences of the next step, and their tokens."""
        if not self._resting:
            return self.batch.ids, self.batch.context
        resting = {sequence.id for sequence in self._resting}
        context = self.batch.context - sum(map(self.batch.tokens_of, self._resting))
        return tuple(number for number in self.batch.ids if number not in resting), context

    def _run_steps(self) -> int:
        """Return the number of steps in the next run, after giving blocks ahead."""
        most = min(self._settings.run_steps, self._most_steps)
        steps = uninterrupted_steps(self.batch, most, self.tbt)
        # While running requests wait for blocks, no block is given ahead.
        for request, sequence in () if self._blocks_awaited else sequences_short_ahead(self.batch, self._state, steps):
            self._add_block(sequence)
            self.batch.grew(sequence)
            self.update_expected(request)
        return self.batch.covered(steps)

    def _draft_tokens(self) -> int:
        """Return how many guessed tokens the next step may check: as many as keep the promised times."""
        count, context = len(self.batch), self.batch.context
        most = min(self._settings.draft_tokens * count, self._settings.chunked_prefill_size)
        limit = self.tbt.limit_s if most else 0.0
        if not limit:
            return most
        each = context // count  # a guess costs as much as one more sequence (ADR 66)

        def is_late(drafts: int) -> bool:
            return self.tbt.step_s(count + drafts, context + drafts * each) > limit

        return bisect_left(range(1, most + 1), True, key=is_late)

    @property
    def _must_ask_after_step(self) -> bool:
        """Whether a decision follows the next step: who fits now, copies made once, the next chunks, the next turns."""
        follows = self._batch_changed or self.copies or self._catching_up or self._rotation or self._resting
        return bool(follows or self._settings.preempt_every)

    @property
    def _catching_up(self) -> list[DecodeRequest]:
        """Requests that recompute, and prompts whose remainder was expected to be short: each step has their chunk."""
        return [request for request in self.recomputing if not request.lacks_first_token]

    @property
    def _most_steps(self) -> int:
        """Most steps of answers before the next step with chunks of prompts."""
        ready = len(self._catching_up) < len(self.recomputing) or self.starts.following() is not None
        return max(1, self.prompts.steps_until_due) if ready else self._settings.run_steps

    def advance(self, steps: int, *, over: bool) -> None:
        """Count steps in the run in flight; `over`: the run has ended."""
        flight = self.run_in_flight
        assert flight is not None
        assert steps <= flight.left, "the engine continued without asking"
        self.batch.advance(steps)
        for sequence in self._resting:
            self.batch.gained(sequence, -1)
        self._preempted.steps += steps
        self.prompts.advance(steps)
        if over:
            self.prompts.idle_since = self._state.now
        self.overdue.advance(steps, self.batch)
        if self._rotation:
            self._rotation.advance(steps, self.batch.requests)
        self.run_in_flight = None if over else flight.advanced(self._state.now, steps, self.batch.context)

    def stop_run(self, *, leaving: bool) -> None:
        """End the run in flight after the current step if a request waits for the end, or turns begin.

        `leaving`: an ended request waits.
        """
        flight = self.run_in_flight
        if flight is None:
            return
        queues = self.waiting, self._catching_up, self._preempted.queue
        # A run of this length was planned with prompts in mind.
        prompts = [] if flight.run.steps <= max(1, self._settings.num_continuous_decode_steps) else self.starts.ready
        turns = not self._resting and self._scored.needed(self.batch.requests, self._state.now)
        if leaving or prompts or turns or any(queues):
            self.run_in_flight = flight.stopped(self._state, *queues, prompts)

    def not_computed(self, flight: RunInFlight) -> None:
        """Undo what an aborted run was to do: its copies were not made."""
        self.run_in_flight, self.prompts.idle_since = None, self._state.now
        for copied in flight.copies:
            undo_copy_on_write(self._state, copied)
            if copied.request in self.batch:
                self.batch.forked(copied.request)

    def _preempt_for_diagnosis(self) -> None:
        every = self._settings.preempt_every
        if every and len(self.batch) and self.steps % every == 0:
            requests = self.batch.requests
            self._preempt(requests[self.steps // every % len(requests)])

    def _restore(self) -> int:
        """Restore preempted requests; return how many.

        Not before running requests that wait for a block: a restored request would take that block, and be preempted
        for it again, without end.
        """
        count = 0
        while self._preempted.queue and not self._blocks_awaited:
            active = self._active
            request = self._preempted.next_to_restore(active)
            if request is None or not self.slots.has_room(request):
                break
            if not self._preempted.restore(request, active, self._blocks_due):
                break
            self.add_restored(request)
            count += 1
        return count

    # --- joining the batch -----------------------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        """Let waiting requests join: each time the first request of the tenant with fewest slots per weight.

        A request that does not fit, preempted or not, blocks later requests: others would take each slot that becomes
        free. If its tenant has no slot at all, only this tenant is passed over: the rotation serves it.
        """
        queues = by_tenant(request for request in self.waiting if request is not self.overdue.holder)
        use: TenantUse | None = None
        preempted: DecodeRequest | None = None
        while queues:
            if use is None:  # slots or blocks have changed hands: else not, as it costs a look at all requests
                use, preempted = self._slot_use(), self._preempted.next_to_restore(self._active)
            request = self._first(queues, use)
            # A group would starve if later requests took the slots that it needs to be restored.
            is_later = preempted is not None and use.order(preempted) < use.order(request)
            if preempted is not None and is_later and not self.slots.has_room(preempted):
                break
            if not self.slots.has_room(request):
                if not self._make_way(request, use):
                    if use.of(request) or not use.taken:
                        break
                    del queues[request.spec.tenant]
                    continue
                use = None
            _drop_first(queues, request.spec.tenant)
            # Blocks given to an earlier request may have preempted this one.
            if request.status is RequestStatus.WAITING and self._may_join(request):
                use = None
                if self._give_blocks(request):
                    self.waiting.remove(request)
                    self.join(request)
                    self._batch_changed |= bool(self._preempted.queue)
        self._keep_tbt()  # a request with a promise joins first; others then leave for that request

    def _first(self, queues: dict[str, list[DecodeRequest]], use: TenantUse) -> DecodeRequest:
        """Return the request that joins first; tenants with equal use go by the rotation."""
        heads = [queue[0] for queue in queues.values()]
        return min(heads, key=lambda head: (use.of(head), self._rotation.steps_of(head), head.order_key))

    @property
    def _active(self) -> list[DecodeRequest]:
        """Requests that run or could run."""
        return [*self.batch.requests, *self.waiting, *self.recomputing]

    def _slot_use(self) -> TenantUse:
        """Return the slots that tenants take; empty if all requests have one tenant."""
        taking = [*self.batch.requests, *self.recomputing]
        others = [*self.waiting, *self._preempted.queue]
        if not several_tenants([*taking, *others]):
            return TenantUse({})
        most = self._settings.max_num_seqs
        return tenant_use(taking, lambda request: len(request.sequences), total=most, others=others)

    def _make_way(self, request: DecodeRequest, use: TenantUse) -> bool:
        """Let other tenants' requests wait, so that a request has the slots due to its tenant.

        Returns:
            Whether the request has all slots now.
        """
        # Nobody leaves for a request that was just preempted for an earlier one.
        is_waiting = request.status is RequestStatus.WAITING
        if not is_waiting or not use.taken or not self.tbt.may_join(request, self.recomputing):
            return False
        lacking = self.slots.lacking(request) + self.slots.due
        running = [other for other in self.batch.requests if other is not self.overdue.holder]
        leaving = leave_for_share(running, request, lacking, use)
        if not leaving and not use.of(request):
            leaving = self._rotation.leaving(running, request, lacking)
        for victim in leaving:
            self._requeue(victim)
        return bool(leaving)

    def _may_join(self, request: DecodeRequest) -> bool:
        """Return whether a request leaves the others their promised times and slots."""
        if not self.slots.num_running:
            return True  # one must run, or requests with kept slots would never get blocks
        if not request.tbt_slo_s and not self.slots.has_room_beside_kept(request):
            return False
        return self.tbt.may_join(request, self.recomputing)

    def join(self, request: DecodeRequest) -> None:
        """Take a request into the batch."""
        request.set_status(RequestStatus.RUNNING)
        self.batch.join(request)
        request.preemption.since = None
        self.slots.kept.pop(request.id, None)

    def end(self, request: DecodeRequest, sequence: RequestSequence) -> None:
        """End a request's sequence between two steps; others continue."""
        if request in self.batch:
            self.batch.end(sequence)
        request.sequences.remove(sequence)
        request.ended_tokens += sequence.tokens - request.spec.prompt_tokens
        sequence.table.unpin(self._state.blocks)
        if request.id in self.slots.kept:
            self.slots.keep(request)
        request.expected_blocks = 0  # of fewer sequences: forecast anew
        self.update_expected(request)

    # --- overdue requests ------------------------------------------------------------------------------------------

    def _serve_overdue(self) -> None:
        """Restore the request with the grant, and let it join, at the cost of others.

        If others can give enough, what the request still lacks is kept for the request; if not, another request gets
        the grant.
        """
        self.slots.due = self._blocks_due = 0
        candidates = self.overdue.choose(self._active, self.waiting)
        self.overdue.give(next((request for request in candidates if self._can_serve(request)), None))
        holder = self.overdue.holder
        if holder is None:
            return
        if holder.status is RequestStatus.PREEMPTED:
            self._free_slots(holder)
            self._restore_overdue(holder)
        if holder.status is RequestStatus.WAITING:  # maybe just restored: its blocks may all have been cached
            self._free_slots(holder)
            if self._give_blocks(holder):
                self.waiting.remove(holder)
                self.join(holder)
                self._batch_changed = True
        if holder.status in (RequestStatus.WAITING, RequestStatus.SWAPPING_IN):
            self.slots.due = len(holder.sequences)

    def _can_serve(self, holder: DecodeRequest) -> bool:
        """Return whether a request can get what is missing, from others or soon from copies under way."""
        if holder.status not in (RequestStatus.PREEMPTED, RequestStatus.WAITING):
            return True
        giving = self.overdue.giving_way(holder, self.batch.requests)
        if sum(len(request.sequences) for request in giving) < self._lacking_slots(holder):
            return False
        if holder.status is RequestStatus.WAITING:
            return self.tbt.may_join(holder, self.recomputing)
        return self.overdue.lacking_blocks(holder, self.overdue.giving_way(holder, self._active)) is not None

    def _restore_overdue(self, holder: DecodeRequest) -> None:
        """Preempt others until the holder is restored, or until the copies under way free enough blocks."""
        giving = self.overdue.giving_way(holder, self._active)
        while not self._preempted.restore(holder, []):  # as if alone: others' growth does not matter
            lacking = self.overdue.lacking_blocks(holder, giving)
            if not giving or lacking is None or lacking <= self._preempted.blocks_being_freed:
                self.slots.due, self._blocks_due = len(holder.sequences), self._budget.available
                return
            victim = choose_for_holder(giving, self._active)
            giving.remove(victim)
            self._preempt(victim)
        self.add_restored(holder)

    def _lacking_slots(self, holder: DecodeRequest) -> int:
        # Not more than are taken: one must run, whatever is kept for others.
        return min(self.slots.lacking(holder), self.slots.num_running)

    def _free_slots(self, holder: DecodeRequest) -> None:
        """Let others wait until the request with the grant has all slots."""
        lacking, use = self._lacking_slots(holder), self._slot_use()
        for victim in sorted(self.overdue.giving_way(holder, self.batch.requests), key=use.order, reverse=True):
            if lacking > 0:
                lacking -= len(victim.sequences)
                self._requeue(victim)

    # --- time between tokens ---------------------------------------------------------------------------------------

    @property
    def least_chunk_s(self) -> float:
        """Predicted seconds for one recomputed token beside a batch; 0 if no request is to recompute.

        New promises leave time for this token: beside batches as slow as allowed, no preempted request would be
        restored.
        """
        return self.tbt.chunk_s(self.recomputing or self._preempted.queue or list(self.prompts.waiting.values()))

    def _keep_tbt(self) -> None:
        """Move requests back to waiting while the step is too long for a promise."""
        while (request := self.tbt.next_to_leave()) is not None:
            self._requeue(request)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Give blocks to the running requests that need one for the next step."""
        for request in self.batch.due():
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier request of this list
            if self._give_blocks(request):
                for sequence in request.sequences:
                    self.batch.grew(sequence)
            elif request.status is RequestStatus.RUNNING:
                self._requeue(request)

    def _add_block(self, sequence: RequestSequence) -> None:
        [block] = self._state.blocks.allocate(1)
        self._state.blocks.give_slots([block])
        sequence.table.blocks.append(block)
        self._state.act(AppendBlock(sequence.id, block))

    def _give_blocks(self, request: DecodeRequest) -> bool:
        """Give each sequence an unshared block for the last token; preempt others, or the request, if needed."""
        blocks_for, blocks = self._settings.blocks_for, self._state.blocks
        writes = [(sequence, blocks_for(self.batch.tokens_of(sequence)) - 1) for sequence in request.sequences]
        for sequence in request.sequences:
            pass_windows(sequence.table, self.batch.tokens_of(sequence) - 1, self._settings, blocks)
        due = 0 if request is self.overdue.holder else self._blocks_due
        while True:
            lacking = count_lacking_blocks(writes, blocks)
            windows = lacking + count_lacking_window_blocks(writes, blocks) if blocks.num_slots else 0
            if lacking <= self._budget.available - due and windows <= self._budget.window_blocks_available:
                break
            if due:
                return False  # until the holder of the grant has them
            # Blocks come free when the copies of preempted requests end: preempting more would free too many.
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
            if index == len(sequence.table.blocks):
                self._add_block(sequence)
                continue
            if blocks.is_partial(sequence.table.blocks[index]):
                blocks.give_slots([sequence.table.blocks[index]])
            if (copied := copy_on_write(self._state, request, sequence, index)) is not None:
                self.copies.append(copied)
        self.update_expected(request)
        return True

    def _preempt(self, victim: DecodeRequest) -> None:
        self._batch_changed = True
        self._undo_copies(victim)
        self.try_remove(victim)
        self._preempted.preempt(victim)

    def _undo_copies(self, request: DecodeRequest) -> None:
        """Undo a request's copies: it does not take part in the next step after all."""
        for copied in self.copies:
            if copied.request is request:
                undo_copy_on_write(self._state, copied)
        self.copies = [copied for copied in self.copies if copied.request is not request]

    def update_expected(self, request: DecodeRequest) -> None:
        """Update the blocks that a request is expected to need; forecast anew if the forecast was exceeded."""
        have = len(request.blocks) + request.promised
        if have > request.expected_blocks or not request.expected_blocks:
            tokens = max(self.batch.tokens_of(sequence) for sequence in request.sequences)
            made, told = max(0, tokens - request.spec.prompt_tokens), request.spec.expected_tokens
            answer = self._lengths.expected(made, told=told)
            total = max(tokens, min(request.total_tokens, request.spec.prompt_tokens + answer))
            needed = most_blocks(self._settings, request.spec.prompt_tokens, total, request.num_seqs)
            request.expected_blocks = max(have, needed)
        self._budget.expect(request, request.expected_blocks - have)

    # --- recomputing -----------------------------------------------------------------------------------------------

    def _chunks(self) -> tuple[Chunk, ...]:
        """Plan the chunks computed beside the batch.

        If no chunk gets window blocks, and no other event can free any, requests that recompute give up theirs.
        """
        while self.recomputing:
            chunks = self._plan_chunks()
            stuck = not chunks and not len(self.batch) and not self._preempted.blocks_being_freed
            if not stuck or len(self.recomputing) == 1 or not self._state.blocks.num_slots:
                return chunks
            self._preempt(self.recomputing[-1])
        return ()

    def _plan_chunks(self) -> tuple[Chunk, ...]:
        """Plan one step's chunks: of requests that recompute, then of whole prompts if the step is theirs, too."""
        catching_up = self._catching_up
        if len(catching_up) == len(self.recomputing) or self.prompts.steps_until_due:
            return plan_chunks(catching_up, self.tbt.chunk_tokens(catching_up), self._state)
        requests = self.prompts.in_order(self.recomputing)
        alone = not len(self.batch)
        tokens = self._settings.max_num_batched_tokens if alone else self.tbt.chunk_tokens(requests)
        chunks = plan_chunks(requests, tokens, self._state)
        owners = {sequence.id: request for request in requests for sequence in request.sequences}
        self.prompts.planned(chunks, [owners[chunk.id] for chunk in chunks])
        return chunks

    def chunk_computed(self, chunk: Chunk, request: DecodeRequest) -> None:
        """Count a computed chunk.

        With the last chunk, a single sequence has sampled a token and joins the batch. A group waits for slots once
        all sequences are recomputed.
        """
        self.recomputed_tokens += 0 if request.prompt_here else chunk.count
        sequence = take_computed_chunk(request, chunk, self._settings, self._state.blocks)
        if request.lacks_first_token:
            return  # the last chunk's first tokens are told by `FirstTokens`
        if chunk.sample:
            self.recomputing.remove(request)
            sequence.tokens += 1
            self.join(request)
        elif request.is_group and is_recomputed(request):
            self.recomputing.remove(request)
            self.add(request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """Return a hash of the lists and counters; requests have their own."""
        lists = [[request.id for request in requests] for requests in (self.waiting, self.recomputing)]
        counts = (self.batch.ids, self.batch.ticks, self.batch.context, self.steps, self.recomputed_tokens)
        run = self.run_in_flight.run if self.run_in_flight is not None else None
        orders = list(self.slots.kept), self._rotation.digest(), self._scored.digest(), self.overdue.digest()
        return digest_of(counts, run, lists, *orders, self.prompts, self.loads)

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that every request is where the status says, with blocks for all tokens."""
        self.batch.check_invariants()
        self.overdue.check_invariants(requests)
        self.prompts.check_invariants(requests)
        self.loads.check_invariants(requests)
        finishing = [request for request in requests if request.status is RequestStatus.FINISHING]
        assert all(request.status is RequestStatus.RUNNING or request in finishing for request in self.batch.requests)
        for status, found in (
            (RequestStatus.WAITING, self.waiting),
            (RequestStatus.RECOMPUTING, self.recomputing),
        ):
            expected = sorted((request for request in requests if request.status is status), key=_queue_order)
            assert expected == [request for request in found if request not in finishing]
        for request in self.waiting:
            for sequence in request.sequences:
                assert len(sequence.table.blocks) >= self._settings.blocks_for(sequence.tokens - 1)
        assert not self.copies, "a copy belongs to a step"
        if self.run_in_flight is not None:
            check_block_writes(self.batch, self._state, self.run_in_flight.copies)
        there = (RequestStatus.RUNNING, RequestStatus.FINISHING)
        self.slots.check_invariants([request for request in requests if request.status not in there])


def _drop_first(queues: dict[str, list[DecodeRequest]], tenant: str) -> None:
    del queues[tenant][0]
    if not queues[tenant]:
        del queues[tenant]


def _queue_order(request: DecodeRequest) -> tuple[float, int]:
    return request.order_key
