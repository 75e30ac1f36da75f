"""Preemption: which request gives up its blocks, how (swap, store, recompute), and how it is restored."""

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.scheduling.latency import SpeedTracker, load_seconds, prefill_seconds
from moonpool.scheduling.state_machine import PendingIo, digest_of
from services.decode.core import batch
from services.decode.core.actions import Action, LoadStoredBlocks, SetBlockTable, StoreBlock, SwapDrop, SwapIn, SwapOut
from services.decode.core.block_budget import BlockBudget, BlockPin, LoadPin, StorePin, SwapPin, peak_blocks
from services.decode.core.events import LoadEnd, StoreEnd, SwapEnd
from services.decode.core.request import ACTIVE, DecodeRequest, RequestSequence, RequestStatus
from services.decode.core.settings import DecodeSettings, Preemption

LOAD_SLACK = 4.0
"""A load may take so many times the predicted seconds of all that is being loaded, besides the configured ones."""


@frozen
class StoredPrefix:
    """A kvstore, and how many leading blocks of a sequence it is thought to have."""

    store: int
    blocks: int


class StoredBlocks:
    """Copies of the sequences' full blocks in kvstores.

    What a store has is presumed: prefill has written the prompt's blocks to the same stores, and a store may lose any
    block at any time. Where that was wrong, less is loaded and the rest is computed.

    Args:
        config: of the core.
        room: has the blocks.
        tracker: predicts times of loading and computing; learns from loads.
        ios: I/O under way.
    """

    def __init__(
        self, config: DecodeSettings, room: BlockBudget, tracker: SpeedTracker, ios: PendingIo[BlockPin]
    ) -> None:
        self._config = config
        self._room = room
        self._tracker = tracker
        self._ios = ios
        self.loading = 0
        """Places of requests that are being loaded."""
        self._loading_blocks = 0
        self.loaded_blocks = 0
        self.failures = 0

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, request: DecodeRequest, member: RequestSequence, index: int, store: int, out: list[Action]) -> None:
        """Writes a full block to one of its request's kvstores; it stays in the pool until that is over.

        Does nothing where the request's blocks are not to be kept.
        """
        if request.owner.transient:
            return
        block = member.table[index]
        self._room.blocks.acquire([block])
        if member.stored[store] == index:
            member.stored[store] = index + 1
        io = self._ios.begin(StorePin(request, member, index, block, store))
        out.append(StoreBlock(io, member.id, index, block, store))

    def filled(self, request: DecodeRequest, member: RequestSequence, key: BlockKey, out: list[Action]) -> None:
        """A member's next block is full: it gets its key, and is written to the kvstores.

        One that has its key was held when its prompt came: the kvstores are presumed to have it, as what is before it.
        """
        index, blocks = len(member.keys), self._room.blocks
        held = blocks.key_of(member.table[index]) is not None
        member.keys.append(key)
        blocks.register(member.table[index], key, request.owner)
        if held:
            member.stored = [there + (there == index) for there in member.stored]
            return
        for store in range(request.stores):
            self.write(request, member, index, store, out)

    def write_missing(self, request: DecodeRequest, out: list[Action]) -> None:
        """Writes what the fullest kvstore lacks of the first member's full blocks, if there is a kvstore."""
        source = self.source(request)
        if source is not None:
            member = request.members[0]
            for index in range(source.blocks, len(member.keys)):
                self.write(request, member, index, source.store, out)

    def write_prompt(self, request: DecodeRequest, out: list[Action]) -> None:
        """Writes the full blocks of a prompt that were computed here; of other prompts it is prefill's business."""
        if not request.prompt_here:
            return
        for member in request.members:
            full = min(member.computed // self._config.block_tokens, len(member.keys))
            for store, there in enumerate(member.stored):
                for index in range(there, full):
                    self.write(request, member, index, store, out)

    def written(self, holds: StorePin, result: object) -> None:
        """A write is over."""
        self._room.blocks.release([holds.block])
        if not (isinstance(result, StoreEnd) and result.ok):
            stored = holds.member.stored
            stored[holds.store] = min(stored[holds.store], holds.index)

    # --- reading ---------------------------------------------------------------------------------------------------

    def source(self, request: DecodeRequest) -> StoredPrefix | None:
        """The kvstore that has most; None when the request has none."""
        stored = request.members[0].stored
        most = max(stored, default=None)
        return None if most is None else StoredPrefix(stored.index(most), most)

    def back_s(self, request: DecodeRequest) -> float:
        """Predicted seconds of loading what the stores have and of computing the rest; all of it without a store."""
        source, speeds = self.source(request), self._tracker.speeds
        loaded = source.blocks if source is not None else 0
        there = loaded * self._config.block_tokens
        tokens = batch.tokens_to_recompute(request, self._config)
        return self._load_s(loaded) + prefill_seconds(speeds, tokens - there, there)

    def held(self, request: DecodeRequest) -> dict[int, int]:
        """Blocks of the pool with which a request comes back, by their number in its shape.

        None where it is to be loaded, or computed, wholly.
        """
        if request.recompute:
            return {}
        held, source = batch.find_cached_blocks(request, self._room.blocks), self.source(request)
        first = batch.count_leading_blocks(request, held)
        loads = self._config.preemption is Preemption.STORE and source is not None and source.blocks >= first
        return {} if loads else held

    def load(self, request: DecodeRequest, held: frozenset[int], out: list[Action]) -> bool:
        """Begins to load what lies behind the first member's blocks in `held`, if a store has some and it pays.

        What further members have of their own is computed.
        """
        source, member, first = self.source(request), request.members[0], batch.count_leading_blocks(request, held)
        if source is None or source.blocks <= first or not self._pays(request, first, source):
            return False
        blocks = tuple(member.table[first : source.blocks])
        request.state = RequestStatus.LOADING
        self.loading += request.places
        self._loading_blocks += len(blocks)
        timeout_s = self._config.load_timeout_s + LOAD_SLACK * self._load_s(self._loading_blocks)
        io = self._ios.begin(LoadPin(request, member, held, first, blocks, source.store, self._loading_blocks))
        out.append(LoadStoredBlocks(io, member.id, first, blocks, source.store, timeout_s))
        return True

    def loaded(self, holds: LoadPin, result: LoadEnd) -> None:
        """A load is over. A request that has ended meanwhile is the caller's business afterwards."""
        request, end = holds.request, holds.first + result.blocks
        self.loading -= request.places
        self._loading_blocks -= len(holds.blocks)
        self._learn(holds, result)
        if request.state is not RequestStatus.LOADING:
            return
        for block, key in zip(holds.blocks[: result.blocks], holds.member.keys[holds.first : end], strict=True):
            self._room.blocks.register(block, key, request.owner)
        batch.resume_with_blocks(request, holds.held.union(range(end)), self._config)

    def _load_s(self, blocks: int) -> float:
        """Seconds of loading by itself. Who waits for the link does not hold up the batch, as computing does."""
        return load_seconds(self._tracker.speeds, blocks * self._config.block_bytes)

    def _pays(self, request: DecodeRequest, held: int, source: StoredPrefix) -> bool:
        if request.recompute or self._config.preemption not in (Preemption.AUTO, Preemption.STORE):
            return False
        blocks, size = source.blocks - held, self._config.block_tokens
        compute_s = prefill_seconds(self._tracker.speeds, blocks * size, held * size)
        return self._config.preemption is Preemption.STORE or self._load_s(blocks) < compute_s

    def _learn(self, holds: LoadPin, result: LoadEnd) -> None:
        self.loaded_blocks += result.blocks
        self.failures += result.failed
        stored = holds.member.stored
        if result.failed:
            stored[holds.store] = 0
        elif result.blocks < len(holds.blocks):
            stored[holds.store] = min(stored[holds.store], holds.first + result.blocks)
        else:
            self._tracker.observe_load(holds.ahead * self._config.block_bytes, result.seconds)

    def digest(self) -> bytes:
        """Hash of what is not the requests' own."""
        return digest_of(self.loading, self._loading_blocks, self.loaded_blocks, self.failures)

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that what is read back has its I/O, and that no more is presumed than there can be."""
        loading = [holds.request for _, holds in self._ios if isinstance(holds, LoadPin)]
        assert len(loading) == len(set(map(id, loading))), "a request is loaded twice"
        assert sum(request.places for request in loading) == self.loading
        blocks = [len(holds.blocks) for _, holds in self._ios if isinstance(holds, LoadPin)]
        assert sum(blocks) == self._loading_blocks
        for request in requests:
            for member in request.members:
                assert len(member.stored) == request.stores
                assert all(0 <= blocks <= len(member.keys) for blocks in member.stored)
            assert request.state is not RequestStatus.LOADING or request in loading


PROTECTED_AFTER_PREEMPTIONS = 2
"""Who was preempted so often is spared as long as there is somebody else."""


SWAP_BYTES_PER_S = 4e9
"""Assumed rate of copying to DRAM and back until it was measured."""


SWAP_WEIGHT = 0.2
"""Weight of one measured copy."""


def choose_victim(active: list[DecodeRequest], wanting: DecodeRequest) -> DecodeRequest | None:
    """Who is preempted so that `wanting` gets a block: last come of the lowest priority first.

    The one whose turn is first is never chosen, so it can always finish; those preempted twice are spared if possible.

    Returns:
        A request, maybe `wanting` itself; None when nobody may be preempted.
    """
    first = min((*active, wanting), key=_victim_order)
    free = [request for request in active if request is not first]
    spared = [request for request in free if request.preemptions < PROTECTED_AFTER_PREEMPTIONS]
    return max(spared or free, key=_victim_order, default=None)


def _victim_order(request: DecodeRequest) -> tuple[float, int]:
    return request.turn


class PreemptedRequests:
    """The preempted requests.

    Args:
        config: of the core.
        room: counts blocks.
        tracker: predicts the engine's times.
        ios: I/O under way.
        shelf: what is in kvstores.
    """

    def __init__(
        self,
        config: DecodeSettings,
        room: BlockBudget,
        tracker: SpeedTracker,
        ios: PendingIo[BlockPin],
        shelf: StoredBlocks,
    ) -> None:
        self._config = config
        self._room = room
        self._tracker = tracker
        self._ios = ios
        self._shelf = shelf
        self.parked: list[DecodeRequest] = []
        """Without blocks, in the order in which they come back: who has waited longest is first."""
        self._refused: tuple[int, int, int, int] | None = None  # how it was when there was no room for the first one
        self.coming = 0
        """Blocks that are free when the copies out of the pool are over."""
        self.saved = 0
        """Blocks swapped out, or being copied."""
        self.swap_bytes_per_s = SWAP_BYTES_PER_S
        self.preemptions = 0
        self.swaps = 0

    @property
    def loading(self) -> int:
        """Sequences that are being loaded from kvstores."""
        return self._shelf.loading

    # --- giving up -------------------------------------------------------------------------------------------------

    def preempt(self, request: DecodeRequest, out: list[Action]) -> None:
        """Takes the blocks of a request that is in no container and no step any more."""
        request.preemptions += 1
        self.preemptions += 1
        request.shape = batch.block_sharing_of(request, self._config)
        whole = request.state is not RequestStatus.CATCHING_UP
        blocks = tuple(request.blocks_of(request.shape)) if whole else ()
        way = self._way(request, len(blocks))
        if way is Preemption.SWAP and blocks:
            self._swap_out(request, blocks, out)
            return
        if way is Preemption.STORE and whole:
            self._shelf.write_missing(request, out)
        request.recompute = way is Preemption.RECOMPUTE
        self._room.give_back(request)
        self.park(request)

    def predicted_s(self, request: DecodeRequest, blocks: int) -> dict[Preemption, float]:
        """Seconds until a request would be back, by each way; cached blocks may be gone by then."""
        tokens = batch.tokens_to_recompute(request, self._config)
        return {
            Preemption.SWAP: 2 * blocks * self._config.block_bytes / self.swap_bytes_per_s,
            Preemption.STORE: self._shelf.back_s(request),
            Preemption.CACHE: prefill_seconds(self._tracker.speeds, tokens, 0),
        }

    def _way(self, request: DecodeRequest, blocks: int) -> Preemption:
        """How a sequence gives its blocks up."""
        way, full = self._config.preemption, self.saved + blocks > self._config.swap_blocks
        if way is Preemption.SWAP:
            return Preemption.CACHE if full else way
        if way is not Preemption.AUTO:
            return way
        predicted = self.predicted_s(request, blocks)
        if full:
            del predicted[Preemption.SWAP]
        return min(reversed(predicted), key=lambda way: predicted[way])

    def _swap_out(self, request: DecodeRequest, blocks: tuple[int, ...], out: list[Action]) -> None:
        request.state = RequestStatus.SWAPPING_OUT
        request.saved = len(blocks)
        self.saved += len(blocks)
        self.coming += len(request.blocks)
        self.swaps += 1
        out.append(SwapOut(self._ios.begin(SwapPin(request, True, blocks)), request.id, blocks))

    def park(self, request: DecodeRequest) -> None:
        """Lets a sequence without blocks wait for its return."""
        request.state = RequestStatus.PARKED
        self._room.claim(request, max(request.expected_blocks, batch.blocks_to_resume(request, self._config)))
        self.parked.append(request)

    def go_on(self, request: DecodeRequest) -> None:
        """Lets a request begin behind known tokens, whose KV is computed as that of one that comes back."""
        request.prompt_here, request.shape = True, batch.block_sharing_behind_prompt(request, self._config)
        self._room.give_back(request)  # full blocks stay in the pool as cache as long as they are not needed
        self.park(request)

    # --- coming back -----------------------------------------------------------------------------------------------

    def bring_back(self, active: list[DecodeRequest], out: list[Action]) -> DecodeRequest | None:
        """Brings the first parked request back if there is room for it now, and for all of them as they grow and end.

        Args:
            active: who runs, or could; when nobody does, nobody else's growth need be thought of.
            out: gets the actions.

        Returns:
            The request, READY, CATCHING_UP, SWAPPING_IN or LOADING; None when there is no room, or nobody is parked.
        """
        if not self.parked:
            return None
        request = self.parked[0]
        # Who grows as expected takes as much from what is free as from what is claimed: then nothing has changed.
        asked = request.id, self._room.spare - self._room.claims, len(self.parked), len(active)
        if active and asked == self._refused:
            return None
        held = self._shelf.held(request)
        new = batch.blocks_to_resume(request, self._config) - len(held)
        left = self._room.spare - self._room.cost(list(held.values()), new)
        growth = request.claim - len(held) - new
        if left < 0 or (active and left < self._room.watermark + self._needed(active, growth, new)):
            self._refused = asked
            return None
        del self.parked[0]
        blocks = batch.rebuild_tables(request, held, self._config, self._room.blocks)
        self._room.claim(request, growth)
        out += [SetBlockTable(member.id, tuple(member.table)) for member in request.members]
        self._fill(request, held, blocks, out)
        return request

    def _needed(self, active: list[DecodeRequest], growth: int, new: int) -> int:
        """Blocks that all will need beyond what they have, if one more comes with so many blocks and so much growth."""
        known = sum(request.claim for request in (*active, *self.parked))
        lives = [(request.claim, self._room.frees(request)) for request in active]
        return self._room.claims - known + peak_blocks([*lives, (growth, new)])

    def _fill(self, request: DecodeRequest, held: dict[int, int], blocks: list[int], out: list[Action]) -> None:
        """Chooses how the KV that is not held comes back."""
        if request.saved > len(held):
            copied = tuple(blocks[len(held) : request.saved])
            request.state = RequestStatus.SWAPPING_IN
            out.append(SwapIn(self._ios.begin(SwapPin(request, False, copied)), request.id, len(held), copied))
            return
        self.forget(request, out)
        if not self._shelf.load(request, frozenset(held), out):
            batch.resume_with_blocks(request, frozenset(held), self._config)

    def copied(self, result: SwapEnd, copy: SwapPin) -> None:
        """A copy is over. A request that has ended meanwhile is the caller's business afterwards."""
        request = copy.request
        if result.ok:
            self._observe(len(copy.blocks) * self._config.block_bytes, result.seconds)
        if copy.out:
            self._out(request, ok=result.ok)
        else:
            self._in(request, ok=result.ok)

    def _out(self, request: DecodeRequest, *, ok: bool) -> None:
        self.coming -= len(request.blocks)
        self._room.give_back(request)
        if not ok:
            self.saved -= request.saved
            request.saved = 0
        if request.state is RequestStatus.SWAPPING_OUT:
            self.park(request)

    def _in(self, request: DecodeRequest, *, ok: bool) -> None:
        self.saved -= request.saved
        request.saved = 0
        if request.state is not RequestStatus.SWAPPING_IN:
            return
        if not ok:
            self._room.give_back(request)
            self.park(request)
            return
        for member in request.members:
            for block, key in zip(member.table, member.keys, strict=False):
                self._room.blocks.register(block, key, request.owner)
        request.state = RequestStatus.READY

    def _observe(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self.swap_bytes_per_s += SWAP_WEIGHT * (nbytes / seconds - self.swap_bytes_per_s)

    def forget(self, request: DecodeRequest, out: list[Action]) -> None:
        """Drops what a request has swapped out, if anything."""
        if request.saved:
            out.append(SwapDrop(request.id))
            self.saved -= request.saved
            request.saved = 0

    def digest(self) -> bytes:
        """Hash of what is not the requests' own."""
        waiting = [request.id for request in self.parked]
        counts = (self.coming, self.saved, self.preemptions, self.swaps, self.swap_bytes_per_s)
        return digest_of(waiting, self._refused, counts)

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Asserts that lists and counts are those of the requests."""
        parked = [request for request in requests if request.state is RequestStatus.PARKED]
        assert sorted(r.id for r in self.parked) == sorted(request.id for request in parked)
        assert not any(request.blocks for request in parked)
        assert self.saved == sum(request.saved for request in requests)
        out = [copy.request for _, copy in self._ios if isinstance(copy, SwapPin) and copy.out]
        assert self.coming == sum(len(request.blocks) for request in out)
        assert not any(request.saved for request in requests if request.state in ACTIVE)
