"""Settings of the prefill scheduler."""

from dataclasses import dataclass

from moonpool.base.kv.layout import STATES_IN_WORK
from moonpool.base.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """One prefill instance's settings.

    Attributes:
        blocks: blocks in the pool.
        slice_bytes: bytes for one layer in one block, on average.
        max_num_batched_tokens: most tokens in a step; at least one block.
        stages: most steps in flight.
        max_started: most requests with blocks.
        recurrent: layers have a recurrent state: a prompt's last token cannot be computed behind its own state.
        states_alone: all windowed layers have a recurrent state (`KVLayout.states_alone`).
        windowed_layers: layers that need the slices of a sequence's last blocks only.
        window_blocks: full blocks that windowed layers need before a token (`KVLayout.window_blocks`).
        window_slots: window blocks in the pool: blocks that may have the slices of windowed layers.
        window_bytes: bytes of windowed layers in one block; reads leave out bytes behind the window. 0 = no windowed
            layers.
    """

    blocks: int
    block_size: int
    layers: int
    slice_bytes: int
    max_num_batched_tokens: int
    stages: int = 1
    max_started: int = 64
    max_queue: int = setting(1024, "requests waiting or running at most; more are refused", ge=1)
    load_timeout_s: float = setting(
        5.0, "seconds a load from a kvstore may take beyond what is predicted; after that the KV is computed", gt=0
    )
    verdict_timeout_s: float = setting(30.0, "seconds a decode instance has to confirm a transfer", gt=0)
    windowed_layers: frozenset[int] = frozenset()
    window_blocks: int = 0
    window_slots: int = 0
    window_bytes: int = 0
    recurrent: bool = False
    states_alone: bool = False

    def read_bytes(self, blocks: int) -> int:
        """Return bytes to read for `blocks` blocks from elsewhere; of windowed layers, only the last ones are read."""
        behind = max(0, blocks - self.window_blocks)
        return blocks * self.layers * self.slice_bytes - behind * self.window_bytes

    def blocks_for(self, tokens: int) -> int:
        """Return blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def first_windowed_block(self, tokens: int) -> int:
        """First block with windowed slices that the token behind `tokens` tokens needs."""
        return max(0, tokens // self.block_size - self.window_blocks) if self.window_blocks else 0

    def held_window_blocks(self, tokens: int) -> int:
        """Return window blocks that a prompt with `tokens` tokens holds between two steps."""
        return min(self.blocks_for(tokens), self.window_blocks + 1) if self.window_blocks else 0

    @property
    def window_blocks_in_work(self) -> int:
        """Window blocks that steps in flight need besides those held between steps."""
        if not self.window_blocks:
            return 0
        return self.stages * (STATES_IN_WORK if self.states_alone else self.blocks_for(self.max_num_batched_tokens) + 1)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Return tokens not to compute if `blocks` leading blocks have KV; a prompt's last token is always computed."""
        return min(blocks * self.block_size, tokens - 1)
