"""Which tokens of which prompts the next prefill step computes.

It plans steps; the caller loads, computes and sends, and reports progress (`load_started`, `layer_ready`,
`load_complete`, `load_failed`, `step_done`).

A sequence's states:

    add -> waiting -> start_next -> started -> plan ... step_done -> finished -> remove
                                      |  load_started -> LOADING -> layer_ready -> GATED -> load_complete -> IDLE
                                      |                     '----------- load_failed ---------'
Started sequences hold the blocks of their whole prompt, waiting ones none. `remove` ends a sequence at any point.
"""

from collections import deque
from collections.abc import Iterator

from moonpool.errors import ConfigError, InvalidRequest
from moonpool.kv.keys import tokens_to_bytes
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.prefill_sequence import Load, PlannedChunk, PrefillSequence, PrefillStep, StepOutcome
from moonpool.sched.steps import SequenceStep, Step

__all__ = ["Load", "PlannedChunk", "PrefillScheduler", "PrefillSequence", "PrefillStep", "StepOutcome"]


class PrefillScheduler:
    """Plans the steps of one prefill instance, first come, first served."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_tokens: int,
        step_tokens: int,
        stages: int = 1,
        max_started: int = 64,
        layer_events: bool = True,
    ) -> None:
        """Plans over `blocks`.

        Args:
            blocks: Of the instance's pool; shared with others that hold references.
            block_tokens: Tokens in a block.
            step_tokens: Tokens computed by one step at most.
            stages: Steps in flight at most.
            max_started: Sequences that hold blocks at most.
            layer_events: Ask the engine for `LayerDone`.

        Raises:
            ConfigError: `step_tokens` is less than one block.
        """
        if step_tokens < block_tokens:
            raise ConfigError("step_tokens", f"must be at least one block ({block_tokens} tokens), not {step_tokens}")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.step_tokens = step_tokens
        self.stages = stages
        self.max_started = max_started
        self.layer_events = layer_events
        self._waiting: deque[PrefillSequence] = deque()
        self._started: dict[str, PrefillSequence] = {}  # in the order of starting; until removed
        self._sequences: dict[str, PrefillSequence] = {}
        self._in_flight: dict[int, PrefillStep] = {}
        self._next_step_id = 1

    # --- the queue -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_started(self) -> int:
        """Sequences with blocks, finished ones that were not removed among them."""
        return len(self._started)

    @property
    def steps_in_flight(self) -> int:
        """Steps planned and not done."""
        return len(self._in_flight)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not in the pool yet."""
        return sum(s.num_tokens - s.num_computed for s in self._sequences.values() if not s.removed)

    def get(self, request_id: str) -> PrefillSequence | None:
        """The sequence, unless it is unknown or removed."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None or sequence.removed else sequence

    def add(self, sequence: PrefillSequence) -> None:
        """Queues a new sequence.

        Raises:
            InvalidRequest: No tokens, more than the pool can ever hold, or an id that is already here.
        """
        if not sequence.num_tokens:
            raise InvalidRequest("token_ids", "must not be empty")
        if self._blocks_for(sequence.num_tokens) > self.blocks.num_blocks:
            room = self.blocks.num_blocks * self.block_tokens
            raise InvalidRequest("token_ids", f"{sequence.num_tokens} tokens do not fit this instance's {room}")
        if sequence.request_id in self._sequences:
            raise InvalidRequest("request_id", f"{sequence.request_id!r} is running already")
        assert len(sequence.keys) == sequence.num_tokens // self.block_tokens, "one key per full block"
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def start_next(self, now: float) -> PrefillSequence | None:
        """Binds the blocks of the first waiting sequence, if there is room and work ahead is running short.

        Call until it returns None, before each `plan`; for each sequence decide at once whether to load more of its
        prefix (`load_started`). The last token is never taken from a cache: its logits are wanted.
        """
        if not self._waiting or len(self._started) >= self.max_started or not self._short_of_work():
            return None
        sequence = self._waiting[0]
        held = self.blocks.match(sequence.keys[: self.reusable_blocks(sequence)])
        self.blocks.acquire(held)
        missing = self._blocks_for(sequence.num_tokens) - len(held)
        if not self.blocks.can_allocate(missing):
            self.blocks.release(held)
            return None
        self._waiting.popleft()
        sequence.block_table = held + self.blocks.allocate(missing)
        sequence.num_cached = sequence.num_computed = sequence.num_scheduled = len(held) * self.block_tokens
        sequence.started_at = now
        self._started[sequence.request_id] = sequence
        return sequence

    def reusable_blocks(self, sequence: PrefillSequence) -> int:
        """Leading blocks that may be cached or loaded: full ones, without the last token."""
        return (sequence.num_tokens - 1) // self.block_tokens

    def remove(self, request_id: str) -> bool:
        """Ends a sequence, finished or not, and releases its blocks, at once or when its chunks in flight are done.

        The caller's loader and senders must be quiet: they write and read the blocks that are released here.

        Returns:
            Whether it is removed already; True for an unknown one.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return True
        sequence.removed = True
        if sequence.started_at is None:
            self._waiting.remove(sequence)
        if sequence.in_flight:
            return False
        self._drop(sequence)
        return True

    # --- loading ---------------------------------------------------------------------------------------------------

    def load_started(self, request_id: str, num_blocks: int) -> list[int]:
        """The prefix up to `num_blocks` leading blocks (cached ones counted) is going to be loaded.

        Only between `start_next` and the sequence's first chunk. Until the load ends, by `load_complete` or
        `load_failed`, at most one step of the sequence is planned, alone and gated.

        Returns:
            The blocks to load into: from the first one not cached to the last.
        """
        sequence = self._sequences[request_id]
        first = sequence.num_cached // self.block_tokens
        assert sequence.first_step_at is None
        assert sequence.load is Load.IDLE
        assert first < num_blocks <= self.reusable_blocks(sequence)
        sequence.load = Load.LOADING
        sequence.load_end = num_blocks * self.block_tokens
        return sequence.block_table[first:num_blocks]

    def layer_ready(self, request_id: str) -> None:
        """The first layer of the running load is in the pool: a gated step may be planned."""
        sequence = self.get(request_id)
        if sequence is not None and sequence.load is Load.LOADING:
            sequence.load = Load.GATED

    def load_complete(self, request_id: str) -> None:
        """All slices of the running load are in the pool, verified. Without effect when no load is running."""
        sequence = self.get(request_id)
        if sequence is not None and sequence.load is not Load.IDLE:
            self._end_load(sequence, sequence.load_end)

    def load_broken(self, request_id: str) -> int | None:
        """The running load is going to fail: nothing of the sequence is planned until `load_failed`.

        For a caller that must first wait until the blocks to be recomputed are not read any more. Without effect
        when no load is running. The loader must be quiet.

        Returns:
            Id of the gated step in flight that counts for nothing now and must be aborted, or None.
        """
        sequence = self.get(request_id)
        if sequence is None or sequence.load is Load.IDLE:
            return None
        sequence.load = Load.LOADING
        sequence.stale = sequence.in_flight > 0
        return self._step_in_flight_of(sequence)

    def load_failed(self, request_id: str, blocks_left: int) -> int | None:
        """The running load ended early; only `blocks_left` leading blocks (cached ones counted) are whole.

        The rest will be computed. Without effect when no load is running. The loader must be quiet.

        Returns:
            Id of the gated step in flight that counts for nothing now and must be aborted, or None.
        """
        sequence = self.get(request_id)
        if sequence is None or sequence.load is Load.IDLE:
            return None
        whole = min(max(blocks_left * self.block_tokens, sequence.num_cached), sequence.load_end)
        self._end_load(sequence, whole)
        sequence.num_scheduled = sequence.num_computed
        sequence.stale = sequence.in_flight > 0
        return self._step_in_flight_of(sequence)

    def _step_in_flight_of(self, sequence: PrefillSequence) -> int | None:
        for step_id, plan in self._in_flight.items():
            if any(chunk.sequence is sequence for chunk in plan.chunks):
                return step_id
        return None

    def _end_load(self, sequence: PrefillSequence, whole_tokens: int) -> None:
        sequence.load, sequence.load_end = Load.IDLE, 0
        sequence.num_loaded = whole_tokens - sequence.num_cached
        self._advance(sequence, whole_tokens)

    # --- steps -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> PrefillStep | None:
        """The next step, or None when nothing can be computed now or `stages` steps are in flight."""
        if len(self._in_flight) >= self.stages:
            return None
        chunks: list[PlannedChunk] = []
        budget = self.step_tokens
        gated = False
        for sequence in self._plannable():
            if sequence.load is Load.GATED and chunks:
                continue  # it goes alone, in a later step
            gated = sequence.load is Load.GATED
            chunk = self._chunk(sequence, budget)
            if chunk is None:
                break  # less than a block of budget left; others behind wait for their turn
            self._schedule(chunk, now, gated=gated)
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
            if gated or budget == 0:
                break
        if not chunks:
            return None
        step = Step(self._next_step_id, tuple(self._step_of(c) for c in chunks), gated, self.layer_events)
        plan = PrefillStep(step, tuple(chunks))
        self._next_step_id += 1
        self._in_flight[step.step_id] = plan
        return plan

    def step_done(self, step_id: int, *, aborted: bool = False) -> StepOutcome:
        """A step is over and its blocks are quiet. Steps end in the order in which they were planned.

        Chunks of an aborted step are planned anew. That of a gated step that was not aborted proves that its load was
        complete: the last gate had been opened.
        """
        plan = self._in_flight.pop(step_id)
        assert all(step_id < other for other in self._in_flight), "steps end in order"
        counted, finished, removed = [], [], []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.in_flight -= 1
            sequence.gated = False
            if sequence.removed:
                if not sequence.in_flight:
                    self._drop(sequence)
                    removed.append(sequence)
            elif aborted or sequence.stale:
                self._rewind(sequence)
            else:
                if sequence.load is not Load.IDLE:
                    self._end_load(sequence, sequence.load_end)
                assert sequence.num_computed == chunk.start
                self._advance(sequence, chunk.end)
                counted.append(chunk)
                if chunk.last:
                    finished.append(sequence)
        return StepOutcome(tuple(counted), tuple(finished), tuple(removed))

    def _plannable(self) -> Iterator[PrefillSequence]:
        for sequence in list(self._started.values()):
            if sequence.removed or sequence.stale or sequence.gated or sequence.load is Load.LOADING:
                continue
            if sequence.num_scheduled < sequence.num_tokens:
                yield sequence

    def _chunk(self, sequence: PrefillSequence, budget: int) -> PlannedChunk | None:
        """The sequence's next tokens within the budget; the prompt's end or a block border ends them."""
        first = sequence.first_step_at is None
        if first and sequence.load is Load.IDLE and not sequence.num_loaded:
            self._match_again(sequence)
        start = sequence.load_end or sequence.num_scheduled
        end = min(sequence.num_tokens, start + budget)
        if end < sequence.num_tokens:
            end -= end % self.block_tokens
        return PlannedChunk(sequence, start, end, first) if end > start else None

    def _match_again(self, sequence: PrefillSequence) -> None:
        """Blocks that others computed since the sequence was started need not be computed again."""
        held = sequence.num_cached // self.block_tokens
        more = self.blocks.match(sequence.keys[: self.reusable_blocks(sequence)])[held:]
        if not more:
            return
        self.blocks.acquire(more)
        self.blocks.release(sequence.block_table[held : held + len(more)])
        sequence.block_table[held : held + len(more)] = more
        sequence.num_cached = (held + len(more)) * self.block_tokens
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached

    def _schedule(self, chunk: PlannedChunk, now: float, *, gated: bool) -> None:
        sequence = chunk.sequence
        if sequence.first_step_at is None:
            sequence.first_step_at = now
        sequence.num_scheduled = chunk.end
        sequence.in_flight += 1
        sequence.gated = gated

    def _step_of(self, chunk: PlannedChunk) -> SequenceStep:
        sequence = chunk.sequence
        return SequenceStep(
            token_ids=tokens_to_bytes(sequence.token_ids[chunk.start : chunk.end]),
            start=chunk.start,
            block_table=tuple(sequence.block_table[: self._blocks_for(chunk.end)]),
            sample=sequence.sampling.at(sequence.token_ids) if chunk.last else None,
            loading_tokens=sequence.load_end - sequence.num_cached if sequence.gated else 0,
            history=sequence.history,
        )

    def _advance(self, sequence: PrefillSequence, end: int) -> None:
        """Tokens up to `end` are in the pool: the blocks they fill get their identity."""
        begin = sequence.num_computed
        sequence.num_computed = end
        sequence.num_scheduled = max(sequence.num_scheduled, end)
        for index in range(begin // self.block_tokens, end // self.block_tokens):
            self.blocks.register(sequence.block_table[index], sequence.keys[index])

    def _rewind(self, sequence: PrefillSequence) -> None:
        """Discards the chunks in flight; planning goes on when the last of them is done."""
        sequence.num_scheduled = sequence.num_computed
        sequence.stale = sequence.in_flight > 0

    def _drop(self, sequence: PrefillSequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        self._started.pop(sequence.request_id, None)
        del self._sequences[sequence.request_id]

    def _short_of_work(self) -> bool:
        """Whether the started sequences have less to compute than the steps that can be in flight, and one more.

        What waits for a load does not count: a slow store must not keep the engine from work that needs no load.
        """
        ahead = sum(
            s.num_tokens - (s.load_end or s.num_scheduled)
            for s in self._started.values()
            if not s.removed and s.load is not Load.LOADING
        )
        return ahead < (self.stages + 1) * self.step_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls."""
        self.blocks.check_invariants()
        assert len(self._in_flight) <= self.stages
        waiting = {s.request_id for s in self._waiting}
        assert waiting | self._started.keys() == self._sequences.keys()
        assert not waiting & self._started.keys()
        flying = [chunk.sequence for plan in self._in_flight.values() for chunk in plan.chunks]
        for sequence in self._sequences.values():
            assert sequence.in_flight == sum(s is sequence for s in flying)
            assert not sequence.stale or sequence.in_flight
            assert not sequence.gated or sequence.in_flight == 1
            assert not sequence.removed or sequence.in_flight, "removed sequences leave when they are quiet"
            if sequence.started_at is None:
                assert not sequence.block_table
                assert not sequence.in_flight
                continue
            assert 0 <= sequence.num_cached <= sequence.num_computed <= sequence.num_scheduled <= sequence.num_tokens
            assert len(sequence.block_table) == self._blocks_for(sequence.num_tokens)
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert all(self.blocks.ref_count(block) > 0 for block in sequence.block_table)
            assert (sequence.load is Load.IDLE) == (sequence.load_end == 0)
            if sequence.load is not Load.IDLE:
                assert sequence.num_computed == sequence.num_cached < sequence.load_end < sequence.num_tokens
