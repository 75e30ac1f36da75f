"""Write-back: which full blocks of answers go to kvstores, and when their windows go along."""

from moonpool.base.kv.keys import BlockKey
from moonpool.engine.decode.core.actions import StoreBlock
from moonpool.engine.decode.core.chunks import may_recompute
from moonpool.engine.decode.core.events import StoreEnd
from moonpool.engine.decode.core.in_flight import BlockWriteFlight
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.state import DecodeState


class BlockWriteBack:
    """Writes the sequences' full blocks to kvstores.

    A store's content is a belief: prefill has written the prompt's blocks to the same stores, and a store may lose any
    block at any time. If the belief is wrong, a block is missing there, and a later prompt computes the block again.

    An answer's blocks are written when they are full, without the slices of layers with a window. These slices are
    written for the last blocks only, where a sequence ends.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state, self._settings = state, state.settings

    def write(
        self, request: DecodeRequest, sequence: RequestSequence, index: int, store: int, *, windowed: bool = False
    ) -> None:
        """Write a full block to one of the request's kvstores; the pool keeps the block until the write ends.

        Returns at once if the request's blocks may not be kept. `windowed`: also writes the slices of layers with a
        window, which the block must have; without such layers, a block is always written whole.
        """
        if request.owner.transient:
            return
        block, blocks = sequence.table.blocks[index], self._state.blocks
        windowed = windowed or not blocks.num_slots
        if sequence.stored[store] == index:
            sequence.stored[store] = index + 1
        table = self._state.writes.hold([block], 0 if windowed else 1)
        io = self._state.ios.begin(BlockWriteFlight(request, sequence, index, store, table))
        self._state.act(StoreBlock(io, sequence.id, index, block, store, windowed))

    def write_window(self, request: DecodeRequest, sequence: RequestSequence) -> None:
        """Write the window behind which a sequence's full blocks are continued, to the stores that have the blocks.

        Writes no block if a slice is missing, or if writes already hold their share of the window blocks.
        """
        blocks, end = self._state.blocks, len(sequence.keys)
        if not blocks.num_slots or request.owner.transient:
            return
        for store, border in enumerate(sequence.borders):
            first = max(border, end - self._settings.window_blocks)
            full = self._state.writes.hold_too_many_windows()
            lacking = sequence.stored[store] < end or any(map(blocks.is_partial, sequence.table.blocks[first:end]))
            if first < end and not full and not lacking:
                for index in range(first, end):
                    self.write(request, sequence, index, store, windowed=True)
                sequence.borders[store] = end

    def block_filled(self, request: DecodeRequest, sequence: RequestSequence, key: BlockKey) -> None:
        """Register the key of a sequence's next block, which is full now, and write the block to the kvstores.

        A block with a key was already cached when the prompt came: the kvstores are believed to hold the block.
        """
        index, blocks = len(sequence.keys), self._state.blocks
        cached = blocks.key_of(sequence.table.blocks[index]) is not None
        sequence.keys.append(key)
        blocks.register(sequence.table.blocks[index], key, request.owner)
        if cached:
            sequence.stored = [there + (there == index) for there in sequence.stored]
            return
        for store in range(request.stores):
            self.write(request, sequence, index, store)

    def write_prompt(self, request: DecodeRequest) -> None:
        """Write a prompt's full blocks if the prompt is computed here; prefill writes other prompts' blocks."""
        if not request.prompt_here:
            return
        for sequence in request.sequences:
            if not may_recompute(request, sequence):
                continue  # blocks that an earlier sequence computes are still without KV
            full = min(sequence.computed // self._settings.block_size, len(sequence.keys))
            for store, there in enumerate(sequence.stored):
                for index in range(there, full):
                    self.write(request, sequence, index, store)
            if full == len(sequence.keys):
                self.write_window(request, sequence)

    def written(self, flight: BlockWriteFlight, result: object) -> None:
        """Note that a write has ended."""
        self._state.writes.ended(flight.table)
        if not (isinstance(result, StoreEnd) and result.ok):
            stored, borders = flight.sequence.stored, flight.sequence.borders
            stored[flight.store] = min(stored[flight.store], flight.index)
            borders[flight.store] = 0 if flight.windowed else borders[flight.store]

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that beliefs about stores are possible."""
        self._state.writes.check_invariants(
            [flight.table for _, flight in self._state.ios if isinstance(flight, BlockWriteFlight)]
        )
        for request in requests:
            for sequence in request.sequences:
                assert len(sequence.stored) == request.stores
                assert len(sequence.borders) == request.stores
                assert all(0 <= blocks <= len(sequence.keys) for blocks in sequence.stored + sequence.borders)
