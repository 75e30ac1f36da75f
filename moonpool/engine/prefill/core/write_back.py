"""Write-back: which blocks of prompts go to kvstores, and which of them with the slices of layers with a window."""

from collections.abc import Sequence

from moonpool.engine.prefill.core.actions import WriteBackBlocks
from moonpool.engine.prefill.core.in_flight import WriteBackFlight
from moonpool.engine.prefill.core.request import PrefillRequest
from moonpool.engine.prefill.core.state import PrefillState


class PromptWriteBack:
    """Writes prompts' full blocks to the kvstores that the conductor named."""

    def __init__(self, state: PrefillState) -> None:
        self._state = state

    def write(self, request: PrefillRequest) -> None:
        """Write full blocks to the kvstores as soon as they are computed, after the prefix blocks that these lack."""
        if request.owner.transient:
            return
        prefix, full = request.prefix.blocks, request.computed // self._state.settings.block_size
        if not request.put_until:
            # Computed blocks are always written: a store that could not provide them does not hold them.
            request.put_until = [prefix if copy.held is None else min(copy.held, prefix) for copy in request.copies]
        for copy, first in enumerate(request.put_until):
            if request.table is not None and first < full:
                blocks = tuple(request.table.blocks[first:full])
                windowed = self._windowed(request, request.table.blocks, range(first, full), request.copies[copy].held)
                read = {request.table.blocks[index] for index in windowed}
                pinned, past = sorted(blocks, key=read.__contains__), len(blocks) - len(read)
                io = self._state.ios.begin(WriteBackFlight(self._state.writes.hold(pinned, past)))
                self._state.act(WriteBackBlocks(io, request.id, copy, first, blocks, windowed))
                request.put_until[copy] = full

    def _windowed(
        self, request: PrefillRequest, table: Sequence[int], blocks: range, held: int | None
    ) -> tuple[int, ...]:
        """Return blocks whose windowed slices a store gets: for who continues the prompt or forks where `held` ends.

        The store holds `held` blocks of another prompt, maybe without the windows needed to continue behind these
        blocks.
        """
        window = self._state.settings.window_blocks
        if not window or self._state.writes.hold_too_many_windows():
            return ()
        tokens, size = request.spec.tokens, self._state.settings.block_size
        ends = (tokens // size, self._state.settings.reusable_blocks(tokens), held or 0)
        wanted = [index for index in blocks if any(end - window <= index < end for end in ends)]
        return tuple(index for index in wanted if not self._state.manager.is_partial(table[index]))
