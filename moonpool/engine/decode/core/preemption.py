"""Preemption: which request gives up blocks, how (swap or recompute), and how the request is restored."""

from moonpool.base.scheduling.latency import prefill_seconds, steps_of
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core.actions import SetBlockTable, SwapDrop, SwapIn, SwapOut
from moonpool.engine.decode.core.block_budget import peak_blocks
from moonpool.engine.decode.core.events import SwapEnd
from moonpool.engine.decode.core.in_flight import SwapFlight
from moonpool.engine.decode.core.request import PREEMPTIBLE, DecodeRequest, RequestStatus
from moonpool.engine.decode.core.restoring import (
    block_sharing_behind_prompt,
    block_sharing_of,
    blocks_to_resume,
    find_cached_blocks,
    rebuild_tables,
    resume_with_blocks,
    tokens_to_recompute,
    window_blocks_to_resume,
)
from moonpool.engine.decode.core.settings import Preemption
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tenant_shares import TenantUse, block_use, several_tenants
from moonpool.engine.decode.core.windows import expected_window_blocks
from moonpool.engine.scheduler.windows import pass_windows

PROTECTED_AFTER_PREEMPTIONS = 2
"""A request preempted this often is spared if another request can be preempted."""
SWAP_BYTES_PER_S = 4e9
"""Assumed rate for copies to DRAM and back before the first measurement."""
SWAP_WEIGHT = 0.2
"""One measured copy's weight."""


class PreemptedRequests:
    """The preempted requests.

    Attributes:
        queue: requests without blocks, in the order in which a tenant's requests are restored: longest waiting first.
        blocks_being_freed: blocks that become free when the copies out of the pool end.
        swapped_blocks: blocks swapped out, or being copied.
        swap_bytes_per_s: measured rate of copies.
        preemptions: preemptions so far.
        swaps: requests swapped out so far.
        steps: engine steps so far.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state, self._settings, self._budget = state, state.settings, state.budget
        self.queue: list[DecodeRequest] = []
        self._refused: tuple[int, int, int, int] | None = None  # what there was when the first request did not fit
        self.blocks_being_freed = 0
        self.swapped_blocks = 0
        self.swap_bytes_per_s = SWAP_BYTES_PER_S
        self.preemptions = 0
        self.swaps = 0
        self.steps = 0

    # --- giving up blocks ------------------------------------------------------------------------------------------

    def preempt(self, request: DecodeRequest) -> None:
        """Take the blocks from a request that is in no list and no step any more."""
        request.preemption.count += 1
        self.preemptions += 1
        self._note_wait(request)
        sharing = request.preemption.sharing = block_sharing_of(request, self._settings)
        is_whole = request.status is not RequestStatus.RECOMPUTING  # else blocks without KV would be copied
        blocks = tuple(request.blocks_of(sharing)) if is_whole else ()
        if blocks and self._choose_mode(request, len(blocks)) is Preemption.SWAP:
            self._swap_out(request, blocks)
            return
        self._budget.release(request)
        self.enqueue(request)

    def predicted_s(self, request: DecodeRequest, blocks: int) -> dict[Preemption, float]:
        """Return predicted seconds until a request is restored, by mode; cached blocks may be gone by then."""
        tokens = tokens_to_recompute(request, self._settings)
        steps = steps_of(tokens, self._settings.chunked_prefill_size)
        return {
            Preemption.SWAP: 2 * self._settings.moved_bytes(blocks, part_filled=1) / self.swap_bytes_per_s,
            Preemption.RECOMPUTE: prefill_seconds(self._state.tracker.speeds, tokens, 0, steps=steps),
        }

    def _choose_mode(self, request: DecodeRequest, blocks: int) -> Preemption:
        if self.swapped_blocks + blocks > self._settings.swap_blocks:  # swap memory is bounded
            return Preemption.RECOMPUTE
        if self._settings.preemption is not Preemption.AUTO:
            return self._settings.preemption
        predicted = self.predicted_s(request, blocks)
        is_quicker = predicted[Preemption.SWAP] < predicted[Preemption.RECOMPUTE]
        return Preemption.SWAP if is_quicker else Preemption.RECOMPUTE

    def _swap_out(self, request: DecodeRequest, blocks: tuple[int, ...]) -> None:
        request.set_status(RequestStatus.SWAPPING_OUT)
        request.preemption.swapped_blocks = len(blocks)
        self.swapped_blocks += len(blocks)
        self.blocks_being_freed += len(request.blocks)
        self.swaps += 1
        io = self._state.ios.begin(SwapFlight(request, True, blocks, request.tables))
        self._state.act(SwapOut(io, request.id, blocks))

    def enqueue(self, request: DecodeRequest) -> None:
        """Let a request without blocks wait until restored."""
        request.set_status(RequestStatus.PREEMPTED)
        self._note_wait(request)
        needed = blocks_to_resume(request, self._settings)
        self._budget.expect(request, max(request.expected_blocks, needed))
        self.queue.append(request)

    def _note_wait(self, request: DecodeRequest) -> None:
        if request.preemption.since is None:
            request.preemption.since = self.steps

    def recompute_known(self, request: DecodeRequest) -> None:
        """Let a request begin behind known tokens, with KV computed as after preemption."""
        request.prompt_here = True
        request.preemption.sharing = block_sharing_behind_prompt(request, self._settings)
        self._budget.release(request)  # full blocks stay in the pool as cache until they are needed
        self.enqueue(request)

    # --- restoring -------------------------------------------------------------------------------------------------

    def next_to_restore(self, active: list[DecodeRequest]) -> DecodeRequest | None:
        """Return the request that is restored next: the first request of the tenant with fewest blocks per weight."""
        if not several_tenants(self.queue):
            return self.queue[0] if self.queue else None
        return min(self.queue, key=block_use(active).of)

    def blocks_to_restore(self, request: DecodeRequest) -> tuple[list[int], int]:
        """Return a queued request's cached blocks, and how many new blocks the request needs to be restored."""
        held = list(find_cached_blocks(request, self._state.blocks).values())
        return held, blocks_to_resume(request, self._settings) - len(held)

    def restore(self, request: DecodeRequest, active: list[DecodeRequest], kept: int = 0) -> bool:
        """Restore a queued request if the request's blocks fit now, and all blocks fit as requests grow and end.

        Args:
            request: `next_to_restore`; WAITING, RECOMPUTING or SWAPPING_IN afterwards.
            active: requests that run or could run. If there is none, the growth of others does not matter.
            kept: available blocks that are kept for another request.

        Returns:
            Whether the request fits.
        """
        # A request that grows as expected takes as much from available as from expected blocks: the balance is
        # unchanged.
        asked = request.id, self._budget.available - kept - self._budget.expected, len(self.queue), len(active)
        if active and asked == self._refused:  # nothing has changed since: most steps come here
            return False
        held = find_cached_blocks(request, self._state.blocks)
        new = blocks_to_resume(request, self._settings) - len(held)
        left = self._budget.available - kept - self._budget.cost(list(held.values()), new)
        growth = request.expected_growth - len(held) - new
        windows = self._budget.window_blocks_available - window_blocks_to_resume(request, self._settings)
        if windows < sum(expected_window_blocks(other, self._settings) for other in active):
            return False
        # Room for the worst moment, not for all growth: that would leave a fifth of the pool unused (ADR 7).
        if left < 0 or (active and left < self._budget.watermark + self._needed(active, growth, new)):
            self._refused = asked
            return False
        self.queue.remove(request)
        blocks = rebuild_tables(request, held, self._settings, self._state.blocks)
        self._budget.expect(request, growth)
        self._state.out += [SetBlockTable(sequence.id, tuple(sequence.table.blocks)) for sequence in request.sequences]
        self._fill(request, held, blocks)
        return True

    def _needed(self, active: list[DecodeRequest], growth: int, new: int) -> int:
        """Return blocks that all requests will need beyond their own, if one with these new blocks and growth joins."""
        known = sum(request.expected_growth for request in (*active, *self.queue))
        ends = [(request.expected_growth, self._budget.exclusive_blocks(request)) for request in active]
        return self._budget.expected - known + peak_blocks([*ends, (growth, new)])

    def _fill(self, request: DecodeRequest, held: dict[int, int], blocks: list[int]) -> None:
        """Choose how the KV that is not cached is restored."""
        if request.preemption.swapped_blocks > len(held):
            copied = tuple(blocks[len(held) : request.preemption.swapped_blocks])
            for sequence in request.sequences:
                pass_windows(sequence.table, sequence.tokens - 1, self._settings, self._state.blocks)
            needed = {block for sequence in request.sequences for block in sequence.table.blocks[sequence.table.past :]}
            self._state.blocks.give_slots(block for block in copied if block in needed)
            request.set_status(RequestStatus.SWAPPING_IN)
            io = self._state.ios.begin(SwapFlight(request, False, copied, request.tables))
            self._state.act(SwapIn(io, request.id, len(held), copied))
            return
        self.drop_swapped(request)  # the pool still has as many blocks as the copy
        resume_with_blocks(request, held, self._settings, self._state.blocks)

    def swap_ended(self, pin: SwapFlight, result: SwapEnd) -> None:
        """Note that a copy has ended. The caller handles a request that has ended meanwhile."""
        if result.ok:
            self._observe(self._settings.moved_bytes(len(pin.blocks), part_filled=1), result.seconds)
        if pin.out:
            self._swapped_out(pin.request, ok=result.ok)
        else:
            self._swapped_in(pin.request, ok=result.ok)

    def _swapped_out(self, request: DecodeRequest, *, ok: bool) -> None:
        self.blocks_being_freed -= len(request.blocks)
        self._budget.release(request)
        if not ok:
            self._count_no_swapped(request)
        if request.status is RequestStatus.SWAPPING_OUT:
            self.enqueue(request)

    def _swapped_in(self, request: DecodeRequest, *, ok: bool) -> None:
        self._count_no_swapped(request)
        if request.status is not RequestStatus.SWAPPING_IN:
            return
        if not ok:
            self._budget.release(request)
            self.enqueue(request)
            return
        for sequence in request.sequences:  # copied blocks are found by their keys again
            blocks = range(len(sequence.table.blocks))
            sequence.table.register(sequence.keys, blocks, self._state.blocks, request.owner)
        request.set_status(RequestStatus.WAITING)

    def _observe(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self.swap_bytes_per_s += SWAP_WEIGHT * (nbytes / seconds - self.swap_bytes_per_s)

    def _count_no_swapped(self, request: DecodeRequest) -> None:
        self.swapped_blocks -= request.preemption.swapped_blocks
        request.preemption.swapped_blocks = 0

    def drop_swapped(self, request: DecodeRequest) -> None:
        """Drop the blocks that a request has swapped out, if any."""
        if request.preemption.swapped_blocks:
            self._state.act(SwapDrop(request.id))
            self._count_no_swapped(request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """Return a hash of the queue and the counters; requests have their own."""
        waiting = [request.id for request in self.queue]
        counts = (self.blocks_being_freed, self.swapped_blocks, self.preemptions, self.swaps, self.swap_bytes_per_s)
        return digest_of(waiting, self._refused, counts)

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that queue and counters match the requests."""
        preempted = [request for request in requests if request.status is RequestStatus.PREEMPTED]
        assert sorted(r.id for r in self.queue) == sorted(request.id for request in preempted)
        assert not any(request.blocks for request in preempted)
        assert self.swapped_blocks == sum(request.preemption.swapped_blocks for request in requests)
        out = [pin.request for _, pin in self._state.ios if isinstance(pin, SwapFlight) and pin.out]
        assert self.blocks_being_freed == sum(len(request.blocks) for request in out)
        assert not any(r.preemption.swapped_blocks for r in requests if r.status in PREEMPTIBLE)


def choose_victim(
    active: list[DecodeRequest], wanting: DecodeRequest, holder: DecodeRequest | None = None
) -> DecodeRequest | None:
    """Choose the request to preempt so that `wanting` gets a block.

    The tenant with most blocks per weight gives up its last request in order. The tenant with fewest blocks never gives
    up its first request, so this request can always finish. Requests preempted twice are spared if possible.

    Args:
        active: requests that run or could run.
        wanting: wants the block.
        holder: has the grant (`OverdueGrants`): never chosen, in place of the first request.

    Returns:
        A request, maybe `wanting`; None if no request may be preempted.
    """
    everyone = [*active, *(() if wanting in active else (wanting,))]
    use = block_use(everyone) if several_tenants(everyone) else TenantUse({})
    first = holder if holder is not None and holder in everyone else min(everyone, key=use.order)
    free = [request for request in active if request is not first]
    most = max(map(use.of, free), default=0.0)
    giving = [request for request in free if use.of(request) == most]
    spared = [request for request in giving if request.preemption.count < PROTECTED_AFTER_PREEMPTIONS]
    return max(spared or giving, key=use.order, default=None)


def choose_for_holder(giving: list[DecodeRequest], active: list[DecodeRequest]) -> DecodeRequest:
    """Choose which of the requests that give way to the holder of a grant goes first: the last one in order.

    Args:
        giving: give way to the holder; not empty.
        active: requests that run or could run.
    """
    return max(giving, key=block_use(active).order)
