"""What of the sequences is in kvstores, and reading it back."""

from moonpool.core.digest import digest_of
from moonpool.core.kernel import Outstanding
from moonpool.cost import SpeedTracker, load_seconds, prefill_seconds
from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from services.decode.core import groups
from services.decode.core.actions import Action, Load, Store
from services.decode.core.config import CoreConfig, Preemption
from services.decode.core.events import LoadEnd, StoreEnd
from services.decode.core.holds import Holds, Loading, Writing
from services.decode.core.request import Member, Request, State
from services.decode.core.room import Room

SLACK = 4.0
"""A load may take so many times the predicted seconds of all that is being loaded, besides the configured ones."""


@frozen
class Source:
    """A kvstore, and how many leading blocks of a sequence it is thought to have."""

    store: int
    blocks: int


class Shelf:
    """Copies of the sequences' full blocks in kvstores.

    What a store has is presumed: prefill has written the prompt's blocks to the same stores, and a store may lose any
    block at any time. Where that was wrong, less is loaded and the rest is computed.

    Args:
        config: of the core.
        room: has the blocks.
        tracker: predicts times of loading and computing; learns from loads.
        ios: I/O under way.
    """

    def __init__(self, config: CoreConfig, room: Room, tracker: SpeedTracker, ios: Outstanding[Holds]) -> None:
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

    def write(self, request: Request, member: Member, index: int, store: int, out: list[Action]) -> None:
        """Writes a full block to one of its request's kvstores; it stays in the pool until that is over.

        Does nothing where the request's blocks are not to be kept.
        """
        if request.owner.transient:
            return
        block = member.table[index]
        self._room.blocks.acquire([block])
        if member.stored[store] == index:
            member.stored[store] = index + 1
        io = self._ios.begin(Writing(request, member, index, block, store))
        out.append(Store(io, member.id, index, block, store))

    def filled(self, request: Request, member: Member, key: BlockKey, out: list[Action]) -> None:
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

    def write_missing(self, request: Request, out: list[Action]) -> None:
        """Writes what the fullest kvstore lacks of the first member's full blocks, if there is a kvstore."""
        source = self.source(request)
        if source is not None:
            member = request.members[0]
            for index in range(source.blocks, len(member.keys)):
                self.write(request, member, index, source.store, out)

    def write_prompt(self, request: Request, out: list[Action]) -> None:
        """Writes the full blocks of a prompt that were computed here; of other prompts it is prefill's business."""
        if not request.prompt_here:
            return
        for member in request.members:
            full = min(member.computed // self._config.block_tokens, len(member.keys))
            for store, there in enumerate(member.stored):
                for index in range(there, full):
                    self.write(request, member, index, store, out)

    def written(self, holds: Writing, result: object) -> None:
        """A write is over."""
        self._room.blocks.release([holds.block])
        if not (isinstance(result, StoreEnd) and result.ok):
            stored = holds.member.stored
            stored[holds.store] = min(stored[holds.store], holds.index)

    # --- reading ---------------------------------------------------------------------------------------------------

    def source(self, request: Request) -> Source | None:
        """The kvstore that has most; None when the request has none."""
        stored = request.members[0].stored
        most = max(stored, default=None)
        return None if most is None else Source(stored.index(most), most)

    def back_s(self, request: Request) -> float:
        """Predicted seconds of loading what the stores have and of computing the rest; all of it without a store."""
        source, speeds = self.source(request), self._tracker.speeds
        loaded = source.blocks if source is not None else 0
        there = loaded * self._config.block_tokens
        tokens = groups.tokens_to_compute(request, self._config)
        return self._load_s(loaded) + prefill_seconds(speeds, tokens - there, there)

    def held(self, request: Request) -> dict[int, int]:
        """Blocks of the pool with which a request comes back, by their number in its shape.

        None where it is to be loaded, or computed, wholly.
        """
        if request.recompute:
            return {}
        held, source = groups.find(request, self._room.blocks), self.source(request)
        first = groups.leading(request, held)
        loads = self._config.preemption is Preemption.STORE and source is not None and source.blocks >= first
        return {} if loads else held

    def load(self, request: Request, held: frozenset[int], out: list[Action]) -> bool:
        """Begins to load what lies behind the first member's blocks in `held`, if a store has some and it pays.

        What further members have of their own is computed.
        """
        source, member, first = self.source(request), request.members[0], groups.leading(request, held)
        if source is None or source.blocks <= first or not self._pays(request, first, source):
            return False
        blocks = tuple(member.table[first : source.blocks])
        request.state = State.LOADING
        self.loading += request.places
        self._loading_blocks += len(blocks)
        timeout_s = self._config.load_timeout_s + SLACK * self._load_s(self._loading_blocks)
        io = self._ios.begin(Loading(request, member, held, first, blocks, source.store, self._loading_blocks))
        out.append(Load(io, member.id, first, blocks, source.store, timeout_s))
        return True

    def loaded(self, holds: Loading, result: LoadEnd) -> None:
        """A load is over. A request that has ended meanwhile is the caller's business afterwards."""
        request, end = holds.request, holds.first + result.blocks
        self.loading -= request.places
        self._loading_blocks -= len(holds.blocks)
        self._learn(holds, result)
        if request.state is not State.LOADING:
            return
        for block, key in zip(holds.blocks[: result.blocks], holds.member.keys[holds.first : end], strict=True):
            self._room.blocks.register(block, key, request.owner)
        groups.comes_with(request, holds.held.union(range(end)), self._config)

    def _load_s(self, blocks: int) -> float:
        """Seconds of loading by itself. Who waits for the link does not hold up the batch, as computing does."""
        return load_seconds(self._tracker.speeds, blocks * self._config.block_bytes)

    def _pays(self, request: Request, held: int, source: Source) -> bool:
        if request.recompute or self._config.preemption not in (Preemption.AUTO, Preemption.STORE):
            return False
        blocks, size = source.blocks - held, self._config.block_tokens
        compute_s = prefill_seconds(self._tracker.speeds, blocks * size, held * size)
        return self._config.preemption is Preemption.STORE or self._load_s(blocks) < compute_s

    def _learn(self, holds: Loading, result: LoadEnd) -> None:
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

    def check_invariants(self, requests: list[Request]) -> None:
        """Asserts that what is read back has its I/O, and that no more is presumed than there can be."""
        loading = [holds.request for _, holds in self._ios if isinstance(holds, Loading)]
        assert len(loading) == len(set(map(id, loading))), "a request is loaded twice"
        assert sum(request.places for request in loading) == self.loading
        blocks = [len(holds.blocks) for _, holds in self._ios if isinstance(holds, Loading)]
        assert sum(blocks) == self._loading_blocks
        for request in requests:
            for member in request.members:
                assert len(member.stored) == request.stores
                assert all(0 <= blocks <= len(member.keys) for blocks in member.stored)
            assert request.state is not State.LOADING or request in loading
