"""Plans prefill steps: which requests get blocks, which tokens are computed next, and the KV gates of steps.

A step's gate at a layer opens when the layer is loaded for every request in the step. If a request's prefix is still
loading, the request joins a step only if the layers are predicted to arrive in time. If a layer is late while other
requests wait, the request's slice is dropped from the step and the request waits for the rest of the load.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.fair_share import QueueEntry, QueueKey
from moonpool.base.scheduling.latency import pipelined_step_tokens, prefill_seconds, work_of
from moonpool.engine.prefill.core.actions import ChunkOrder, DropSequenceSlice, GiveUpStep, OpenKVGate, RunStep
from moonpool.engine.prefill.core.events import StepEnded
from moonpool.engine.prefill.core.forecast import stall_grace, wait_for_layers, wait_for_other_load_until
from moonpool.engine.prefill.core.in_flight import SequenceSlice, StepFlight
from moonpool.engine.prefill.core.request import PrefillRequest, PrefillStatus
from moonpool.engine.prefill.core.state import PrefillState
from moonpool.engine.prefill.core.transfers import OutgoingTransfers
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.chunks import chunk_end
from moonpool.engine.scheduler.windows import give_chunk_slots

CORE_SHARE_WEIGHT = 0.2
"""One step's weight in the mean core share."""
MAX_FOREIGN_STEPS = 8
"""Steps after which the prompt goes on that was passed over for longest, if that is for so many steps."""


class StepPlanner:
    """Plans the engine's steps, opens KV gates, and drops slices if their load stalls.

    Attributes:
        plan_at: when a request with a loading prefix can join a step, if no event comes; None = not foreseen.
        done: steps that have ended.
        idle_since: since when no token is computed, as told to the tenants' shares, seconds.
    """

    def __init__(self, state: PrefillState, sends: OutgoingTransfers) -> None:
        self._state = state
        self._sends = sends
        self._flights = state.steps
        self.plan_at: float | None = None
        self.done = 0
        self.idle_since = 0.0
        self._fair_steps = 0  # since a step in another order

    def are_full(self) -> bool:
        """Return whether as many steps are in flight as may be."""
        return len(self._flights) >= self._state.settings.max_steps

    @property
    def in_flight(self) -> list[int]:
        """Steps in flight, in order."""
        return list(self._flights)

    # --- starting requests -----------------------------------------------------------------------------------------

    def start_next(self) -> PrefillRequest | None:
        """Bind the blocks of the first waiting request, if they are available and the engine lacks work before it.

        Returns:
            The request, for which the caller decides at once whether to load a prefix; None if none can start now.
        """
        state = self._state
        started = len(state.started)
        if started == len(state.requests) or started >= state.settings.max_started:
            return None
        # The first in fair order alone: a prompt that waits for blocks keeps its turn.
        first = state.waiting.first()
        if not self._is_short_of_work(first):
            return None
        request = state.requests[first.number]
        if not self._has_window_blocks(request):
            return None
        held = state.manager.match(request.spec.keys[: state.reusable_blocks(request)])
        missing = state.settings.blocks_for(request.spec.tokens) - len(held)
        if missing > state.manager.num_available - sum(map(state.manager.is_cached, held)):
            return None
        state.waiting.remove(request.id)
        request.table = BlockTable(held)
        state.hold_prefix(request, [], held)
        state.note_borders(request)
        request.table.blocks = held + state.manager.allocate(missing)
        request.set_status(PrefillStatus.STARTED)
        state.started[request.id] = request
        return request

    def _has_window_blocks(self, request: PrefillRequest) -> bool:
        """Return whether all started requests and this request leave enough window blocks for the steps in flight."""
        settings = self._state.settings
        tokens = [other.spec.tokens for other in self._state.started.values() if other.table is not None]
        if not settings.window_blocks or not tokens:
            return True
        held = sum(map(settings.held_window_blocks, [*tokens, request.spec.tokens]))
        return held + settings.window_blocks_in_work <= settings.window_slots

    def _is_short_of_work(self, first: QueueKey) -> bool:
        """Return whether the requests before `first` have less to compute than the steps in flight, plus one.

        A request that waits for layers, from the request's own load or another, does not count: a slow store must not
        keep the engine from work that needs no load. A request with a load starts as much sooner as the load is
        expected to take, so that the blocks are here when the request's turn comes.
        """
        state = self._state
        key = state.shares.key
        last = key(first)
        ahead = sum(self._tokens_ahead(request) for request in state.started.values() if key(request.queue_key) < last)
        max_num_batched_tokens, load_s = state.settings.max_num_batched_tokens, state.requests[first.number].load_s
        beyond = ahead - (state.settings.max_steps + 1) * max_num_batched_tokens
        if beyond < 0 or not load_s:
            return beyond < 0
        step_s = prefill_seconds(state.tracker.speeds, max_num_batched_tokens, 0) / state.settings.stages
        return beyond * step_s < load_s * max_num_batched_tokens

    def _tokens_ahead(self, request: PrefillRequest) -> int:
        state = self._state
        if request.prefix.load is None or request.gated:
            return (
                0 if wait_for_other_load_until(state, request) is not None else request.spec.tokens - request.scheduled
            )
        if wait_for_layers(state, request.prefix.load, step_s=0.0) != 0.0:
            return 0
        return request.spec.tokens - request.prefix.load.end * state.settings.block_size

    # --- planning --------------------------------------------------------------------------------------------------

    def plan(self) -> bool:
        """Start the next step; False if no token can be computed now, or no further step may be in flight."""
        self.plan_at = None
        if self.are_full() or not self._state.started:
            return False
        slices = self._slices()
        if not slices:
            return False
        self._charge(slices)
        tables = tuple(table for part in slices if (table := self._state.requests[part.request].table) is not None)
        flight = StepFlight(slices, tables, any(part.loading for part in slices), self._state.now, self._state.now)
        io = self._state.ios.begin(flight)
        self._flights[io] = flight
        chunks = tuple(self._order_of(part, table) for part, table in zip(slices, tables, strict=True))
        self._state.act(RunStep(io, chunks, flight.gated))
        self._open(io, flight)
        return True

    def forgive_idle(self) -> None:
        """Tell the tenants' shares how long the engine was idle, before they decide anything."""
        if not self._flights:
            self._state.shares.forgive_idle(self._state.now - self.idle_since)
            self.idle_since = self._state.now

    def _slices(self) -> list[SequenceSlice]:
        slices: list[SequenceSlice] = []
        budget, seconds = self._step_tokens(), 0.0
        under_way = self._under_way()
        plannable = [request for request in self._state.started.values() if self._plannable(request)]
        begun = [request for request in plannable if request.first_step_at is not None]
        for request in self._order(plannable, begun):
            part = self._next_slice(request, budget, first=not slices)
            if part is None:
                break  # less than a block of budget left; others behind wait for their turn
            # Computing what is computed or loaded at this moment would cost a step and a second copy of the blocks.
            if self._is_under_way(request, part, under_way) or self._is_loaded(request):
                continue
            with_it = seconds + self._seconds(part)
            # A gate that stays shut would hold up all others in the step.
            if request.prefix.load is not None and not self._ready(request, with_it):
                continue
            if not self._give_window_blocks(request, part):
                continue
            self._schedule(request, part)
            under_way.update(self._keys(request, part))
            slices.append(part)
            budget, seconds = budget - (part.end - part.start) * request.spec.token_cost, with_it
            if budget <= 0:
                break
        if slices:
            computed = {part.request for part in slices}
            self._fair_steps += 1
            for request in begun:
                request.foreign_steps = 0 if request.id in computed else request.foreign_steps + 1
        return slices

    def _step_tokens(self) -> int:
        """Return the most tokens of the next step.

        A prompt alone in a pipeline is divided, so that its first token comes sooner. Where others have something to
        compute, they fill the pipeline, and large steps cost least.
        """
        state, settings = self._state, self._state.settings
        most = settings.max_num_batched_tokens
        if settings.stages == 1:
            return most
        computing = (request for request in state.requests.values() if request.scheduled < request.spec.tokens)
        found = list(islice(computing, 2))
        if len(found) != 1:
            return most
        request = found[0]
        if not request.step_tokens:  # once: the prompt's own first step makes the engine busy
            prefix = request.prefix.cached + request.prefix.loaded
            if request.prefix.load is not None:
                prefix = settings.reused_tokens(request.spec.tokens, request.prefix.load.end)
            work, busy = work_of(request.spec.tokens - prefix, prefix), state.recent.mean_per_s(state.now)
            speeds, size = state.tracker.speeds, settings.block_size
            request.step_tokens = pipelined_step_tokens(speeds, settings.stages, work, most, size, busy)
        return request.step_tokens

    def _give_window_blocks(self, request: PrefillRequest, part: SequenceSlice) -> bool:
        """Give window blocks to a slice's blocks; make the slice shorter if they do not suffice.

        Recurrent states are written behind the slice, behind the prompt's last full block, and behind further borders
        if any are left. Idle window blocks take states for blocks between: another prompt may leave the chain there.

        Returns:
            False if no token can be computed.
        """
        settings, manager, size = self._state.settings, self._state.manager, self._state.settings.block_size
        if not settings.window_blocks or part.full_hit:
            return True
        assert request.table is not None
        blocks, borders = request.table.blocks, ((request.spec.tokens // size,), request.borders)
        if request.prefix.load is None:
            # A load that came short, or a dropped slice, has left slots behind: without these, too few may be left to
            # compute what comes before.
            manager.take_slots_back(blocks[settings.blocks_for(part.end) :])
        available = manager.num_slots_available
        end = give_chunk_slots(blocks, range(part.start, part.end), borders, settings, manager, available)
        if end < part.end:
            part.end, part.last = end, False
        elif settings.states_alone and (idle := manager.num_slots_idle // 2):
            first, behind = part.start // size, settings.blocks_for(part.end)
            between = [block for block in blocks[first:behind] if manager.is_partial(block)]
            manager.give_slots(between[:: -(-len(between) // idle)] if between else ())
        return part.end > part.start

    def _order(self, plannable: Sequence[PrefillRequest], begun: Sequence[PrefillRequest]) -> list[PrefillRequest]:
        """Return requests in fair order, but one of those that have `begun` first, if others were for many steps.

        A begun prompt holds blocks for all its tokens, so that no tenant's credit should stop a prompt for long.
        """
        state = self._state
        entries = [QueueEntry(request.queue_key, self._next_s(request)) for request in plannable]
        order = [state.requests[entry.key.number] for entry in state.shares.order_unsorted(entries)]
        longest = max(begun, key=lambda request: request.foreign_steps, default=None)
        if longest is not None and min(longest.foreign_steps, self._fair_steps) >= MAX_FOREIGN_STEPS:
            order.sort(key=lambda request: request is not longest)
            self._fair_steps = -1  # this step is none
        return order

    def _next_s(self, request: PrefillRequest) -> float:
        """Return predicted seconds for a request's largest slice that fits a step."""
        settings = self._state.settings
        start = self._start(request)
        end = min(request.spec.tokens, start + settings.max_num_batched_tokens)
        speeds = self._state.tracker.speeds
        begins, cost = request.first_step_at is None, request.spec.token_cost
        return cost * prefill_seconds(speeds, end - start, start, steps=1, begins=begins)

    def _charge(self, slices: list[SequenceSlice]) -> None:
        state = self._state
        for part in slices:
            key, seconds = state.requests[part.request].queue_key, self._seconds(part)
            state.shares.serve(key.tenant, seconds, key.weight)
            state.recent.add(seconds / state.settings.stages, state.now)

    def _plannable(self, request: PrefillRequest) -> bool:
        # One gated step per request: what is computed again after a failed load was then never sent on (ADR 2).
        if request.table is None or request.gated or request.blocked_by:
            return False
        if request.prefix.overtaken is not None and request.prefix.overtaken.whole:
            return False  # the rest comes from the load once the steps in flight have ended
        return request.scheduled < request.spec.tokens

    def _under_way(self) -> set[BlockKey]:
        """Return keys for blocks that steps in flight compute."""
        found: set[BlockKey] = set()
        for flight in self._flights.values():
            for part in flight.slices:
                if part.live:
                    found.update(self._keys(self._state.requests[part.request], part))
        return found

    def _keys(self, request: PrefillRequest, part: SequenceSlice) -> tuple[BlockKey, ...]:
        """Return keys for blocks that a slice fills."""
        size = self._state.settings.block_size
        return () if part.full_hit else request.spec.keys[part.start // size : part.end // size]

    def _is_under_way(self, request: PrefillRequest, part: SequenceSlice, under_way: set[BlockKey]) -> bool:
        """Return whether a request without steps would compute a block that another request computes now."""
        at = part.start // self._state.settings.block_size
        begins = request.may_match and not part.full_hit
        return begins and at < self._state.reusable_blocks(request) and request.spec.keys[at] in under_way

    def _is_loaded(self, request: PrefillRequest) -> bool:
        """Return whether another request loads what this request would compute; note until when to wait."""
        until = wait_for_other_load_until(self._state, request)
        if until is not None:
            self._look_again(until)
        return until is not None

    def _ready(self, request: PrefillRequest, step_s: float) -> bool:
        """Return whether the request's layers arrive in time for a step of `step_s` seconds; note the time if not."""
        assert request.prefix.load is not None
        wait = wait_for_layers(self._state, request.prefix.load, step_s)
        if wait is None:
            return False
        if wait > 0:
            self._look_again(self._state.now + wait)
        return wait <= 0

    def _look_again(self, at: float) -> None:
        self.plan_at = at if self.plan_at is None else min(at, self.plan_at)

    def _next_slice(self, request: PrefillRequest, budget: int, *, first: bool) -> SequenceSlice | None:
        """Return the request's next slice within the budget; a slice ends at a block border or at the prompt's end.

        Tokens that take longer make a slice shorter: every step takes about equally long. `first`: of the step.
        """
        size, most = self._state.settings.block_size, budget
        if request.spec.token_cost > 1:
            most = max(size if first else 0, budget // request.spec.token_cost)
        if request.may_match:
            self.match_again(request)  # others may have computed the prefix while this request waited
        start = self._start(request)
        end = chunk_end(start, request.spec.tokens, most, size)
        if end <= start:
            return None
        begins = request.prefix.load is not None or start == request.prefix.cached + request.prefix.loaded
        prefix_blocks = request.prefix.blocks if request.prefix.load is None else request.prefix.load.end
        loading, full_hit = request.prefix.load is not None, start < prefix_blocks * size
        return SequenceSlice(request.id, start, end, begins, end == request.spec.tokens, loading, full_hit)

    def _start(self, request: PrefillRequest) -> int:
        """Return the next token to compute; while a prefix is loading, the first token behind the prefix."""
        if request.prefix.load is None:
            return request.scheduled
        return self._state.settings.reused_tokens(request.spec.tokens, request.prefix.load.end)

    def match_again(self, request: PrefillRequest) -> None:
        """Take blocks that other requests have computed since this request started."""
        state = self._state
        assert request.table is not None
        held = request.prefix.blocks
        more = state.manager.match(request.spec.keys[: state.reusable_blocks(request)])[held:]
        if not more:
            return
        own = request.table.blocks[held : held + len(more)]
        state.hold_prefix(request, request.table.blocks[:held], more)
        state.note_borders(request)
        state.manager.release(own)
        request.table.blocks[held : held + len(more)] = more

    def _schedule(self, request: PrefillRequest, part: SequenceSlice) -> None:
        if request.first_step_at is None:
            request.first_step_at = self._state.now
            request.set_status(PrefillStatus.COMPUTING)
            self._sends.leading(request, request.prefix.blocks)
        request.scheduled = part.end
        request.slices_in_flight += 1
        request.gated = part.loading

    def _order_of(self, part: SequenceSlice, table: BlockTable) -> ChunkOrder:
        blocks = tuple(table.blocks[: self._state.settings.blocks_for(part.end)])
        return ChunkOrder(part.request, part.start, part.end, blocks, part.last, part.full_hit)

    def _seconds(self, part: SequenceSlice) -> float:
        seconds = prefill_seconds(
            self._state.tracker.speeds, part.end - part.start, part.start, steps=1, begins=part.first
        )
        return self._state.requests[part.request].spec.token_cost * seconds

    # --- in flight -------------------------------------------------------------------------------------------------

    def layer_computed(self, io: int, layer: int) -> None:
        """Send a step's layer, whose KV is in the pool."""
        flight = self._flights.get(io)
        if flight is None:
            return
        flight.layers, flight.progressed_at = max(flight.layers, layer + 1), self._state.now
        size, requests = self._state.settings.block_size, self._state.requests
        for part in flight.slices:
            request = requests.get(part.request)
            if part.live and request is not None:
                self._sends.add(request, layer, part.start // size, -(-part.end // size), io)

    def sampled(self, io: int) -> list[PrefillRequest]:
        """Return the requests whose first tokens a step in flight has sampled."""
        flight, requests = self._flights.get(io), self._state.requests
        parts = [] if flight is None else [part for part in flight.slices if part.live and part.last]
        return [request for part in parts if (request := requests.get(part.request)) is not None]

    def ended(self, io: int, flight: StepFlight, result: StepEnded) -> "StepOutcome":
        """End a step. Steps end in the order of planning, except steps without a live slice."""
        assert self._state.front is flight or not any(part.live for part in flight.slices), "steps end in order"
        del self._flights[io]
        self.done += 1
        self.idle_since = self._state.now
        self._to_the_front()
        self._learn(flight, result)
        news = StepOutcome()
        for part in flight.slices:
            request = self._state.requests.get(part.request)
            if request is None or not part.live:
                continue
            self._slice_over(request)
            if result.aborted:
                request.scheduled = request.computed
                news.given_up.append(request)
            else:
                self._count(request, part)
                news.counted.append(request)
        return news

    def _to_the_front(self) -> None:
        """Note that the next step is in front: from now on the step's gates may hold others up."""
        front = self._state.front
        if front is not None:
            front.progressed_at = max(front.progressed_at, self._state.now)

    def _count(self, request: PrefillRequest, part: SequenceSlice) -> None:
        if request.prefix.load is not None:  # every gate was open, so every layer has arrived
            assert request.prefix.load.layers == self._state.settings.layers
            request.prefix.loaded, request.prefix.blocks = part.start - request.prefix.cached, request.prefix.load.end
            self._state.advance(request, part.start)
            request.prefix.load = None
        assert request.computed == part.start
        self._state.advance(request, part.end)

    def _slice_over(self, request: PrefillRequest) -> None:
        request.slices_in_flight -= 1
        request.gated = False

    def _learn(self, flight: StepFlight, result: StepEnded) -> None:
        """Learn a step's speed. A step alone in the engine counts until the report of the end.

        A step with prompts' log probabilities is left out: its speed does not predict other steps.
        """
        requests = [
            request for part in flight.slices if (request := self._state.requests.get(part.request)) is not None
        ]
        if result.encoded_tokens and not result.aborted:
            self._state.tracker.observe_encode(result.encoded_tokens, result.encode_s * result.share)
        if flight.gated or result.aborted or any(request.spec.token_cost > 1 for request in requests):
            return
        # In a pipeline steps overlap, so the time until the report is that of several steps.
        alone = self._state.settings.stages == 1
        since_s = self._state.now - flight.began_at - result.encode_s
        seconds = max(result.seconds, since_s) if alone else result.seconds
        chunks = [(part.end - part.start, part.start, part.first) for part in flight.slices]
        self._state.tracker.observe_prefill(chunks, seconds, share=result.share)
        self._state.core_share += CORE_SHARE_WEIGHT * (result.share - self._state.core_share)

    # --- gates -----------------------------------------------------------------------------------------------------

    def open_gates(self, request: PrefillRequest) -> None:
        """Note that more layers of the request's prefix have arrived."""
        if request.gated:
            for io, flight in self._flights.items():
                if any(part.request == request.id for part in flight.slices):
                    self._open(io, flight)

    def _open(self, io: int, flight: StepFlight) -> None:
        """Open the gates up to the last layer that has arrived for all requests of a step."""
        layer = min((self._layers_of(part) for part in flight.slices), default=0) - 1
        if flight.gated and layer > flight.opened:
            flight.opened = layer
            self._state.act(OpenKVGate(io, layer))

    def _layers_of(self, part: SequenceSlice) -> int:
        request = self._state.requests.get(part.request)
        if not part.live or not part.loading or request is None or request.prefix.load is None:
            return self._state.settings.layers
        return request.prefix.load.layers

    def rewind(self, request: PrefillRequest, first: int) -> None:
        """Compute blocks from `first` on again, once no I/O reads or writes them."""
        request.blocked_by.update(self._drop(request))
        self._sends.take_back(request, first)
        request.scheduled = request.computed

    def drop_request(self, request: PrefillRequest) -> None:
        """Drop the slices of a request that ends."""
        self._drop(request)

    def _drop(self, request: PrefillRequest) -> list[int]:
        """Drop the request's slices; return their steps. Gives up a step without a live slice."""
        dropped = []
        for io, flight in self._flights.items():
            for index, part in enumerate(flight.slices):
                if part.request == request.id and part.live:
                    part.live = False
                    self._slice_over(request)
                    dropped.append(io)
                    self._dropped(io, flight, index)
        return dropped

    def _dropped(self, io: int, flight: StepFlight, index: int) -> None:
        if not any(part.live for part in flight.slices):
            self._state.act(GiveUpStep(io))
        else:  # also a slice without a load: the step that computes the prefix may have been aborted
            self._state.act(DropSequenceSlice(io, index))
            self._open(io, flight)

    # --- stalled loads ---------------------------------------------------------------------------------------------

    def stalled_at(self) -> float | None:
        """Return when the step in front will have waited too long at a gate while other requests wait; None = never."""
        flight = self._state.front
        if flight is None or not flight.gated:
            return None
        late = self._late(flight)
        if not late or not self._others_wait(late):
            return None
        loads = [request.prefix.load for request in late if request.prefix.load is not None]
        return flight.progressed_at + max(stall_grace(self._state, load) for load in loads)

    def _late(self, flight: StepFlight) -> list[PrefillRequest]:
        """Return the requests that a step waits for at the next gate."""
        if flight.opened >= flight.layers or flight.layers == self._state.settings.layers:
            return []
        late = [part.request for part in flight.slices if self._layers_of(part) <= flight.layers]
        return [self._state.requests[number] for number in late]

    def _others_wait(self, late: list[PrefillRequest]) -> bool:
        """Return whether another request could be computed if the step did not wait."""
        return bool(self._state.waiting) or any(
            request not in late and request.prefix.load is None and not request.finished
            for request in self._state.started.values()
        )

    def drop_stalled(self) -> None:
        """Drop late requests' slices from the step in front; the step continues without these slices."""
        at = self.stalled_at()
        if at is None or self._state.now < at:
            return
        # Not the whole step: with a flaky store the others would lose their work again and again (ADR 8).
        front = self._state.front
        assert front is not None
        for request in self._late(front):
            assert request.prefix.load is not None
            request.prefix.load.stalled = True
            self.rewind(request, request.prefix.load.end)


@dataclass(slots=True)
class StepOutcome:
    """Requests in a step that has ended.

    Attributes:
        counted: requests with a slice computed now, finished requests included.
        given_up: requests with a slice that the engine gave up by itself.
    """

    counted: list[PrefillRequest] = field(default_factory=list)
    given_up: list[PrefillRequest] = field(default_factory=list)
