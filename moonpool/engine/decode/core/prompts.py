"""Prompts that are computed here from the start: whose turn is next, and how much of a step they get."""

from collections.abc import Collection, Iterator, Sequence

from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueEntry, QueueKey, priority_rank
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds, steps_of
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core.actions import Chunk
from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.request import DecodeRequest, RequestStatus
from moonpool.engine.decode.core.state import DecodeState


class PromptQueue:
    """The fair order of whole prompts, and their share of the steps.

    Tenants get equal predicted seconds per weight, as in prefill. While answers run without a promised time, a step
    with chunks of prompts is followed by `num_continuous_decode_steps` steps without.

    Args:
        state: shared state of the scheduler.
        batch: the answers.

    Attributes:
        waiting: QUEUED requests, by id.
        idle_since: when the engine had nothing to compute, seconds; None = it computes.
    """

    def __init__(self, state: DecodeState, batch: RunningBatch) -> None:
        self._state, self._settings, self._batch = state, state.settings, batch
        self._shares = FairShares()
        self._queue = FairQueue(self._shares)
        self.waiting: dict[int, DecodeRequest] = {}
        self._since_chunk = state.settings.num_continuous_decode_steps
        self.idle_since: float | None = 0.0

    def __len__(self) -> int:
        """Return number of prompts that wait for their turn."""
        return len(self.waiting)

    # --- the order -------------------------------------------------------------------------------------------------

    def add(self, request: DecodeRequest, delay_s: float) -> None:
        """Let a request wait for its turn."""
        spec = request.spec
        rank = priority_rank(self._state.now, spec.priority)
        request.turn = QueueKey(spec.tenant, rank, request.id, spec.weight).delayed(delay_s)
        request.set_status(RequestStatus.QUEUED)
        self.waiting[request.id] = request
        self._queue.add(request.turn, self._seconds(request, spec.tokens))

    def remove(self, request: DecodeRequest) -> None:
        """Take a request out of the waiting ones."""
        del self.waiting[request.id]
        self._queue.remove(request.id)

    def in_turn(self, recomputing: Sequence[DecodeRequest]) -> Iterator[DecodeRequest]:
        """Return waiting requests in fair order, without those whose next block is being computed."""
        under_way = [request for request in recomputing if request.lacks_first_token]
        for number in list(self._queue):
            request = self.waiting[number]
            if not any(self._computes_next_block(other, request) for other in under_way):
                yield request

    def _computes_next_block(self, other: DecodeRequest, request: DecodeRequest) -> bool:
        """Return whether a started prompt is about to compute the block that `request` would compute first."""
        at, keys = len(request.sequences[0].table.blocks), request.spec.keys
        usable = request.asked.reuse and not other.owner.transient and at < self.reusable_blocks(request)
        if not usable or other.sequences[0].computed >= (at + 1) * self._settings.block_size:
            return False
        return other.spec.keys[at : at + 1] == keys[at : at + 1]

    def reusable_blocks(self, request: DecodeRequest) -> int:
        """Return blocks of a prompt that need not be computed at most: not a recurrent state behind the last token."""
        return self._settings.reusable_blocks(request.spec.tokens) if request.asked.reuse else 0

    def in_order(self, recomputing: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Return requests in the order of their chunks: what was running before, then prompts in fair order."""
        prompts, entries = dict[int, DecodeRequest](), list[QueueEntry]()
        for request in recomputing:
            if request.turn is not None:
                prompts[request.id] = request
                entries.append(QueueEntry(request.turn, self._seconds(request, self._left(request))))
        if not prompts:
            return list(recomputing)
        fair = [prompts[entry.key.number] for entry in self._shares.order_unsorted(entries)]
        return [*(request for request in recomputing if not request.lacks_first_token), *fair]

    def _seconds(self, request: DecodeRequest, tokens: int, behind: int = 0) -> float:
        speeds = self._state.tracker.speeds
        return request.spec.token_cost * prefill_seconds(speeds, tokens, behind, begins=not behind)

    # --- the share of the steps ------------------------------------------------------------------------------------

    @property
    def steps_until_due(self) -> int:
        """Steps of answers before the next step that computes prompts beside them; 0 = the next one does."""
        if not len(self._batch) or self._batch.tbt_slo_s:
            return 0
        return max(0, self._settings.num_continuous_decode_steps - self._since_chunk)

    def advance(self, steps: int) -> None:
        """Count steps of answers."""
        self._since_chunk = min(self._since_chunk + steps, self._settings.num_continuous_decode_steps)

    def planned(self, chunks: Sequence[Chunk], requests: Sequence[DecodeRequest]) -> None:
        """Charge the tenants for a step's chunks. `requests`: each chunk's."""
        for chunk, request in zip(chunks, requests, strict=True):
            if request.turn is not None:
                seconds = self._seconds(request, chunk.count, chunk.start)
                self._shares.serve(request.turn.tenant, seconds, request.turn.weight)
                self._since_chunk = -1  # this step is one of the answers', too

    def forgive_idle(self) -> None:
        """Tell the shares how long the engine was idle, before they decide anything."""
        if self.idle_since is not None:
            self._shares.forgive_idle(self._state.now - self.idle_since)
            self.idle_since = self._state.now

    # --- figures ---------------------------------------------------------------------------------------------------

    def tokens_left(self, requests: Collection[DecodeRequest]) -> int:
        """Return tokens without KV of whole prompts computed here."""
        return sum(self._left(request) for request in requests if request.waits_as_prompt)

    def _left(self, request: DecodeRequest) -> int:
        sequence = request.sequences[0]
        begun = request.status not in (RequestStatus.PROMISED, RequestStatus.QUEUED)
        there = request.prefix.asked_end if request.status is RequestStatus.LOADING else len(sequence.table.blocks)
        begun = begun and request.status is not RequestStatus.LOADING
        done = sequence.computed if begun else there * self._settings.block_size
        return max(1, sequence.tokens - done)

    def drain_s(self, requests: Collection[DecodeRequest]) -> float:
        """Return predicted seconds until all prompts of `requests` are computed, beside the answers of now."""
        prompts = [request for request in requests if request.waits_as_prompt]
        if not prompts:
            return 0.0
        speeds, settings, answers = self._state.tracker.speeds, self._settings, len(self._batch)
        most = settings.chunked_prefill_size if answers else settings.max_num_batched_tokens
        seconds, tokens = 0.0, 0
        for request in prompts:
            left, cost = self._left(request), request.spec.token_cost
            behind, chunks = request.sequences[0].tokens - left, steps_of(left, most)
            seconds += cost * prefill_seconds(speeds, left, behind, steps=0, chunks=chunks)
            tokens += cost * left
        steps = steps_of(tokens, most)
        seconds += speeds.prefill_base_s * steps
        if answers:
            each_s = decode_step_seconds(speeds, answers, self._batch.context)
            plain = 0 if self._batch.tbt_slo_s else settings.num_continuous_decode_steps
            seconds += steps * (1 + plain) * each_s
        return seconds

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        """Assert that the waiting prompts are those of the requests, and that prompts have one sequence."""
        self._queue.check_invariants()
        queued = {request.id for request in requests if request.status is RequestStatus.QUEUED}
        assert queued == self.waiting.keys() == set(self._queue)
        assert all(len(request.sequences) == 1 for request in requests if request.turn is not None)

    def digest(self) -> bytes:
        """Return a hash of the order."""
        return digest_of(self._shares, self._queue, self._since_chunk, self.idle_since)
