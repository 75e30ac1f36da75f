"""Preemption: which request gives up blocks, how (swap, store, recompute), and how the request is restored."""

from collections.abc import Iterable

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import WRITTEN_PART
from moonpool.base.scheduling.latency import load_seconds, prefill_seconds, steps_of
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core import batch
from moonpool.engine.decode.core.actions import LoadStoredBlocks, SetBlockTable, StoreBlock, SwapDrop, SwapIn, SwapOut
from moonpool.engine.decode.core.block_budget import LoadPin, StorePin, SwapPin, peak_blocks
from moonpool.engine.decode.core.events import LoadEnd, StoreEnd, SwapEnd
from moonpool.engine.decode.core.request import PREEMPTIBLE, DecodeRequest, RequestSequence, RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tenant_shares import TenantUse, several_tenants, tenant_use

LOAD_SLACK = 4.0
"""A load may take this many times the predicted seconds for all loads in flight, plus the configured seconds."""


@frozen
class StoredCopy:
    """A kvstore, and the leading blocks of a sequence believed to be there."""

    store: int
    blocks: int


def recompute_seconds(state: DecodeState, tokens: int, there: int) -> float:
    """Predicted seconds for computing `tokens` tokens behind `there` tokens, in steps of decode's size."""
    steps = steps_of(tokens, state.settings.chunked_prefill_size)
    return prefill_seconds(state.tracker.speeds, tokens, there, steps=steps)


class StoredBlocks:
    """Copies of the sequences' full blocks in kvstores: writes and loads.

    A store's content is a belief: prefill has written the prompt's blocks to the same stores, and a store may lose any
    block at any time. If the belief is wrong, fewer blocks are loaded and the rest is computed.

    An answer's blocks are written when they are full, without the slices of layers with a window. These slices are
    written for the last blocks only: where a sequence ends, or is preempted to come back from the store.

    Attributes:
        loading: slots of requests that are being loaded.
        loaded_blocks: blocks loaded so far.
        failures: loads that failed for another reason than missing blocks.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state, self._settings = state, state.settings
        self.loading = 0
        self._loading_blocks = 0
        self._windows_written = 0
        self.loaded_blocks = 0
        self.failures = 0

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(
        self, request: DecodeRequest, sequence: RequestSequence, index: int, store: int, *, windowed: bool = False
    ) -> None:
        """Writes a full block to one of the request's kvstores; the pool keeps the block until the write ends.

        Returns at once if the request's blocks may not be kept. `windowed`: also writes the slices of layers with a
        window, which the block must have; without such layers, a block is always written whole.
        """
        if request.owner.transient:
            return
        block, blocks = sequence.table[index], self._state.blocks
        windowed = windowed or not blocks.num_slots
        self._windows_written += windowed and blocks.num_slots > 0
        blocks.acquire([block], 0 if windowed else 1)
        if sequence.stored[store] == index:
            sequence.stored[store] = index + 1
        io = self._state.ios.begin(StorePin(request, sequence, index, block, store, windowed))
        self._state.act(StoreBlock(io, sequence.id, index, block, store, windowed))

    def write_window(self, request: DecodeRequest, sequence: RequestSequence) -> None:
        """Writes the window behind which a sequence's full blocks are continued, to the stores that have the blocks.

        Writes no block if a slice is missing, or if writes already hold their share of the window slots.
        """
        blocks, end = self._state.blocks, len(sequence.keys)
        if not blocks.num_slots or request.owner.transient:
            return
        for store, border in enumerate(sequence.borders):
            first = max(border, end - self._settings.window_blocks)
            full = self._windows_written * WRITTEN_PART > blocks.num_slots
            lacking = sequence.stored[store] < end or any(map(blocks.is_partial, sequence.table[first:end]))
            if first < end and not full and not lacking:
                for index in range(first, end):
                    self.write(request, sequence, index, store, windowed=True)
                sequence.borders[store] = end

    def block_filled(self, request: DecodeRequest, sequence: RequestSequence, key: BlockKey) -> None:
        """A sequence's next block is full: registers the block's key and writes the block to the kvstores.

        A block with a key was already cached when the prompt came: the kvstores are believed to hold the block.
        """
        index, blocks = len(sequence.keys), self._state.blocks
        cached = blocks.key_of(sequence.table[index]) is not None
        sequence.keys.append(key)
        blocks.register(sequence.table[index], key, request.owner)
        if cached:
            sequence.stored = [there + (there == index) for there in sequence.stored]
            return
        for store in range(request.stores):
            self.write(request, sequence, index, store)

    def write_missing(self, request: DecodeRequest) -> None:
        """Writes the first sequence's full blocks that the fullest kvstore lacks, if there is a kvstore.

        With windows, writes a lone sequence's window. A group is loaded as far as its sequences share blocks.
        """
        sequence = request.sequences[0]
        most = max(sequence.stored, default=None)
        if most is None:
            return
        store = sequence.stored.index(most)
        for index in range(most, len(sequence.keys)):
            self.write(request, sequence, index, store)
        if len(request.sequences) == 1:
            self.write_window(request, sequence)

    def write_prompt(self, request: DecodeRequest) -> None:
        """Writes a prompt's full blocks if the prompt is computed here; prefill writes other prompts' blocks."""
        if not request.prompt_here:
            return
        for sequence in request.sequences:
            full = min(sequence.computed // self._settings.block_size, len(sequence.keys))
            for store, there in enumerate(sequence.stored):
                for index in range(there, full):
                    self.write(request, sequence, index, store)
            if full == len(sequence.keys):
                self.write_window(request, sequence)

    def written(self, pin: StorePin, result: object) -> None:
        """A write has ended."""
        self._windows_written -= pin.windowed and self._state.blocks.num_slots > 0
        self._state.blocks.release([pin.block], 0 if pin.windowed else 1)
        if not (isinstance(result, StoreEnd) and result.ok):
            stored, borders = pin.sequence.stored, pin.sequence.borders
            stored[pin.store] = min(stored[pin.store], pin.index)
            borders[pin.store] = 0 if pin.windowed else borders[pin.store]

    # --- reading ---------------------------------------------------------------------------------------------------

    def source(self, request: DecodeRequest) -> StoredCopy | None:
        """The kvstore from which most blocks can be loaded; None if the request has no kvstore."""
        sequence = request.sequences[0]
        loadable = sequence.stored
        if self._settings.window_blocks:  # where the window is there, too; of a group, behind blocks that all share
            pairs = zip(sequence.stored, sequence.borders, strict=True)
            loadable = [border if border <= there else 0 for there, border in pairs]
        most = max(loadable, default=None)
        return None if most is None else StoredCopy(loadable.index(most), most)

    def restore_s(self, request: DecodeRequest) -> float:
        """Predicted seconds for loading what the stores hold and computing the rest, or all without a store."""
        source, sequence = self.source(request), request.sequences[0]
        loaded = source.blocks if source is not None else 0
        if len(request.sequences) == 1:  # the window is written on being preempted
            loaded = max(sequence.stored, default=0)
        there = loaded * self._settings.block_size
        tokens = batch.tokens_to_recompute(request, self._settings)
        return self._load_s(loaded) + recompute_seconds(self._state, tokens - there, there)

    def cached_blocks(self, request: DecodeRequest) -> dict[int, int]:
        """Pool blocks for restoring a request, by index in the `BlockSharing`.

        Empty if all KV is to be loaded or computed.
        """
        if request.preemption.recompute:
            return {}
        held, source = batch.find_cached_blocks(request, self._state.blocks), self.source(request)
        first = batch.count_leading_blocks(request, held)
        loads = self._settings.preemption is Preemption.STORE and source is not None and source.blocks >= first
        return {} if loads else held

    def load(self, request: DecodeRequest, held: frozenset[int]) -> bool:
        """Begins to load the first sequence's blocks behind `held`, if a store holds some and loading pays.

        Blocks that only further sequences have are computed. With windows, all sequences of a group continue where the
        loaded blocks end.
        """
        source, sequence, first = self.source(request), request.sequences[0], batch.count_leading_blocks(request, held)
        if source is None or source.blocks <= first or not self._pays(request, first, source):
            return False
        if self._settings.window_blocks and source.blocks > batch.count_shared_blocks(request):
            return False
        blocks = tuple(sequence.table[first : source.blocks])
        windows = blocks[len(blocks) - min(len(blocks), self._settings.window_blocks) :]
        if sum(map(self._state.blocks.is_partial, windows)) > max(0, self._state.budget.slots):
            return False
        self._state.blocks.give_slots(windows)
        request.set_status(RequestStatus.LOADING)
        self.loading += request.slots
        self._loading_blocks += len(blocks)
        timeout_s = self._settings.load_timeout_s + LOAD_SLACK * self._load_s(self._loading_blocks)
        pin = LoadPin(request, sequence, held, first, blocks, source.store, self._loading_blocks)
        io = self._state.ios.begin(pin)
        self._state.act(LoadStoredBlocks(io, sequence.id, first, blocks, source.store, timeout_s))
        return True

    def load_ended(self, pin: LoadPin, result: LoadEnd) -> None:
        """A load has ended. The caller handles a request that has ended meanwhile."""
        request, end = pin.request, pin.first + result.blocks
        self.loading -= request.slots
        self._loading_blocks -= len(pin.blocks)
        self._learn(pin, result)
        if request.status is not RequestStatus.LOADING:
            return
        if result.blocks < len(pin.blocks):  # with windows, fewer than wanted may be worth nothing
            end = self._state.blocks.continuable(pin.sequence.table[:end])
        for index in range(pin.first, end):
            self._state.blocks.register(pin.sequence.table[index], pin.sequence.keys[index], request.owner)
        batch.resume_with_blocks(request, pin.held.union(range(end)), self._settings, self._state.blocks)

    def _load_s(self, blocks: int) -> float:
        """Seconds for loading alone. A load that waits for the link does not delay the batch; a chunk does."""
        return load_seconds(self._state.tracker.speeds, self._settings.moved_bytes(blocks))

    def _pays(self, request: DecodeRequest, held: int, source: StoredCopy) -> bool:
        mode = self._settings.preemption
        if request.preemption.recompute or mode not in (Preemption.AUTO, Preemption.STORE):
            return False
        blocks, size = source.blocks - held, self._settings.block_size
        compute_s = recompute_seconds(self._state, blocks * size, held * size)
        return mode is Preemption.STORE or self._load_s(blocks) < compute_s

    def _learn(self, pin: LoadPin, result: LoadEnd) -> None:
        self.loaded_blocks += result.blocks
        self.failures += result.failed
        stored = pin.sequence.stored
        if result.failed:
            stored[pin.store] = 0
        elif result.blocks < len(pin.blocks):
            stored[pin.store] = min(stored[pin.store], pin.first + result.blocks)
        else:
            self._state.tracker.observe_load(self._settings.moved_bytes(pin.ahead), result.seconds)

    # --- checks ----------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """Hash of the counters; requests have their own."""
        return digest_of(self.loading, self._loading_blocks, self.loaded_blocks, self.failures)

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that each LOADING request has I/O, and that beliefs about stores are possible."""
        pins = [pin for _, pin in self._state.ios if isinstance(pin, LoadPin)]
        loading = [pin.request for pin in pins]
        assert len(loading) == len(set(map(id, loading))), "a request is loaded twice"
        assert sum(request.slots for request in loading) == self.loading
        assert sum(len(pin.blocks) for pin in pins) == self._loading_blocks
        written = sum(pin.windowed for _, pin in self._state.ios if isinstance(pin, StorePin))
        assert self._windows_written == (written if self._state.blocks.num_slots else 0)
        for request in requests:
            for sequence in request.sequences:
                assert len(sequence.stored) == request.stores
                assert len(sequence.borders) == request.stores
                assert all(0 <= blocks <= len(sequence.keys) for blocks in sequence.stored + sequence.borders)
            assert request.status is not RequestStatus.LOADING or request in loading


PROTECTED_AFTER_PREEMPTIONS = 2
"""A request preempted this often is spared if another request can be preempted."""
SWAP_BYTES_PER_S = 4e9
"""Assumed rate for copies to DRAM and back before the first measurement."""
SWAP_WEIGHT = 0.2
"""One measured copy's weight."""


def choose_victim(
    active: list[DecodeRequest], wanting: DecodeRequest, holder: DecodeRequest | None = None
) -> DecodeRequest | None:
    """Chooses the request to preempt so that `wanting` gets a block.

    The tenant with most blocks per weight gives up its last request in order. The tenant with fewest blocks never gives
    up its first request, so this request can always finish. Requests preempted twice are spared if possible.

    Args:
        active: requests that run or could run.
        wanting: wants the block.
        holder: has the turn (`OverdueTurns`): never chosen, in place of the first request.

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


def block_use(requests: Iterable[DecodeRequest], total: int = 0) -> TenantUse:
    """Blocks out of `total` that tenants have or were promised."""
    return tenant_use(requests, lambda request: len(request.blocks) + request.promised, total=total)


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

    def __init__(self, state: DecodeState, stored_blocks: StoredBlocks) -> None:
        self._state, self._settings, self._budget = state, state.settings, state.budget
        self._stored_blocks = stored_blocks
        self.queue: list[DecodeRequest] = []
        self._refused: tuple[int, int, int, int] | None = None  # what there was when the first request did not fit
        self.blocks_being_freed = 0
        self.swapped_blocks = 0
        self.swap_bytes_per_s = SWAP_BYTES_PER_S
        self.preemptions = 0
        self.swaps = 0
        self.steps = 0

    @property
    def loading(self) -> int:
        """Slots of requests that are being loaded from kvstores."""
        return self._stored_blocks.loading

    # --- giving up blocks ------------------------------------------------------------------------------------------

    def preempt(self, request: DecodeRequest) -> None:
        """Takes the blocks from a request that is in no list and no step any more."""
        request.preemption.count += 1
        self.preemptions += 1
        self._note_wait(request)
        sharing = request.preemption.sharing = batch.block_sharing_of(request, self._settings)
        whole = request.status is not RequestStatus.RECOMPUTING
        blocks = tuple(request.blocks_of(sharing)) if whole else ()
        mode = self._choose_mode(request, len(blocks))
        if mode is Preemption.SWAP and blocks:
            self._swap_out(request, blocks)
            return
        if mode is Preemption.STORE and whole:
            self._stored_blocks.write_missing(request)
        request.preemption.recompute = mode is Preemption.RECOMPUTE
        self._budget.release(request)
        self.enqueue(request)

    def predicted_s(self, request: DecodeRequest, blocks: int) -> dict[Preemption, float]:
        """Predicted seconds until a request is restored, by mode; cached blocks may be gone by then."""
        tokens = batch.tokens_to_recompute(request, self._settings)
        return {
            Preemption.SWAP: 2 * self._settings.moved_bytes(blocks) / self.swap_bytes_per_s,
            Preemption.STORE: self._stored_blocks.restore_s(request),
            Preemption.CACHE: recompute_seconds(self._state, tokens, 0),
        }

    def _choose_mode(self, request: DecodeRequest, blocks: int) -> Preemption:
        mode, full = self._settings.preemption, self.swapped_blocks + blocks > self._settings.swap_blocks
        if mode is Preemption.SWAP:
            return Preemption.CACHE if full else mode
        if mode is not Preemption.AUTO:
            return mode
        predicted = self.predicted_s(request, blocks)
        if full:
            del predicted[Preemption.SWAP]
        return min(reversed(predicted), key=lambda mode: predicted[mode])

    def _swap_out(self, request: DecodeRequest, blocks: tuple[int, ...]) -> None:
        request.set_status(RequestStatus.SWAPPING_OUT)
        request.preemption.swapped_blocks = len(blocks)
        self.swapped_blocks += len(blocks)
        self.blocks_being_freed += len(request.blocks)
        self.swaps += 1
        self._state.act(SwapOut(self._state.ios.begin(SwapPin(request, True, blocks)), request.id, blocks))

    def enqueue(self, request: DecodeRequest) -> None:
        """Lets a request without blocks wait until restored."""
        request.set_status(RequestStatus.PREEMPTED)
        self._note_wait(request)
        needed = batch.blocks_to_resume(request, self._settings)
        self._budget.expect(request, max(request.expected_blocks, needed))
        self.queue.append(request)

    def _note_wait(self, request: DecodeRequest) -> None:
        if request.preemption.since is None:
            request.preemption.since = self.steps

    def recompute_known(self, request: DecodeRequest) -> None:
        """Lets a request begin behind known tokens, with KV computed as after preemption."""
        request.prompt_here = True
        request.preemption.sharing = batch.block_sharing_behind_prompt(request, self._settings)
        self._budget.release(request)  # full blocks stay in the pool as cache until they are needed
        self.enqueue(request)

    # --- restoring -------------------------------------------------------------------------------------------------

    def next_in_turn(self, active: list[DecodeRequest]) -> DecodeRequest | None:
        """The request that is restored next: the first request of the tenant with fewest blocks per weight."""
        if not several_tenants(self.queue):
            return self.queue[0] if self.queue else None
        return min(self.queue, key=block_use(active).of)

    def blocks_to_restore(self, request: DecodeRequest) -> tuple[list[int], int]:
        """A queued request's cached blocks, and how many new blocks the request needs to be restored."""
        held = list(self._stored_blocks.cached_blocks(request).values())
        return held, batch.blocks_to_resume(request, self._settings) - len(held)

    def restore(self, request: DecodeRequest, active: list[DecodeRequest], kept: int = 0) -> bool:
        """Restores a queued request if the request's blocks fit now, and all blocks fit as requests grow and end.

        Args:
            request: `next_in_turn`; WAITING, RECOMPUTING, SWAPPING_IN or LOADING afterwards.
            active: requests that run or could run. If there is none, the growth of others does not matter.
            kept: available blocks that are kept for another request.

        Returns:
            Whether the request fits.
        """
        # A request that grows as expected takes as much from available as from expected blocks: the balance is
        # unchanged.
        asked = request.id, self._budget.available - kept - self._budget.expected, len(self.queue), len(active)
        if active and asked == self._refused:
            return False
        held = self._stored_blocks.cached_blocks(request)
        new = batch.blocks_to_resume(request, self._settings) - len(held)
        left = self._budget.available - kept - self._budget.cost(list(held.values()), new)
        growth = request.expected_growth - len(held) - new
        slots = self._budget.slots - batch.slots_to_resume(request, self._settings)
        if slots < sum(batch.expected_slots(it, self._settings) for it in active):
            return False
        if left < 0 or (active and left < self._budget.watermark + self._needed(active, growth, new)):
            self._refused = asked
            return False
        self.queue.remove(request)
        blocks = batch.rebuild_tables(request, held, self._settings, self._state.blocks)
        self._budget.expect(request, growth)
        self._state.out += [SetBlockTable(sequence.id, tuple(sequence.table)) for sequence in request.sequences]
        self._fill(request, held, blocks)
        return True

    def _needed(self, active: list[DecodeRequest], growth: int, new: int) -> int:
        """Blocks that all requests will need beyond their own, if a request with these new blocks and growth joins."""
        known = sum(request.expected_growth for request in (*active, *self.queue))
        ends = [(request.expected_growth, self._budget.exclusive_blocks(request)) for request in active]
        return self._budget.expected - known + peak_blocks([*ends, (growth, new)])

    def _fill(self, request: DecodeRequest, held: dict[int, int], blocks: list[int]) -> None:
        """Chooses how the KV that is not cached is restored."""
        if request.preemption.swapped_blocks > len(held):
            copied = tuple(blocks[len(held) : request.preemption.swapped_blocks])
            for sequence in request.sequences:
                batch.pass_windows(sequence, sequence.tokens - 1, self._settings, self._state.blocks)
            needed = {block for sequence in request.sequences for block in sequence.table[sequence.past :]}
            self._state.blocks.give_slots(block for block in copied if block in needed)
            request.set_status(RequestStatus.SWAPPING_IN)
            io = self._state.ios.begin(SwapPin(request, False, copied))
            self._state.act(SwapIn(io, request.id, len(held), copied))
            return
        self.drop_swapped(request)
        if not self._stored_blocks.load(request, frozenset(held)):
            batch.resume_with_blocks(request, frozenset(held), self._settings, self._state.blocks)

    def swap_ended(self, pin: SwapPin, result: SwapEnd) -> None:
        """A copy has ended. The caller handles a request that has ended meanwhile."""
        if result.ok:
            self._observe(self._settings.moved_bytes(len(pin.blocks)), result.seconds)
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
        for sequence in request.sequences:
            for block, key in zip(sequence.table, sequence.keys, strict=False):
                self._state.blocks.register(block, key, request.owner)
        request.set_status(RequestStatus.WAITING)

    def _observe(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self.swap_bytes_per_s += SWAP_WEIGHT * (nbytes / seconds - self.swap_bytes_per_s)

    def _count_no_swapped(self, request: DecodeRequest) -> None:
        self.swapped_blocks -= request.preemption.swapped_blocks
        request.preemption.swapped_blocks = 0

    def drop_swapped(self, request: DecodeRequest) -> None:
        """Drops the blocks that a request has swapped out, if any."""
        if request.preemption.swapped_blocks:
            self._state.act(SwapDrop(request.id))
            self._count_no_swapped(request)

    # --- checks ----------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """Hash of the queue and the counters; requests have their own."""
        waiting = [request.id for request in self.queue]
        counts = (self.blocks_being_freed, self.swapped_blocks, self.preemptions, self.swaps, self.swap_bytes_per_s)
        return digest_of(waiting, self._refused, counts)

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that queue and counters match the requests."""
        preempted = [request for request in requests if request.status is RequestStatus.PREEMPTED]
        assert sorted(r.id for r in self.queue) == sorted(request.id for request in preempted)
        assert not any(request.blocks for request in preempted)
        assert self.swapped_blocks == sum(request.preemption.swapped_blocks for request in requests)
        out = [pin.request for _, pin in self._state.ios if isinstance(pin, SwapPin) and pin.out]
        assert self.blocks_being_freed == sum(len(request.blocks) for request in out)
        assert not any(r.preemption.swapped_blocks for r in requests if r.status in PREEMPTIBLE)
