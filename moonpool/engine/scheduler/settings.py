"""Settings that prefill's and decode's schedulers have in common: the pool's blocks, and windows."""

from dataclasses import dataclass

from moonpool.base.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """An instance's pool.

    A window block has the slices of layers with a window; other blocks lack these slices (ADR 65).

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        block_bytes: bytes of KV in a block, all layers.
        window_blocks: full blocks that windowed layers need before a token (`KVLayout.window_blocks`); 0 = no layer has
            a window.
        window_slots: window blocks in the pool: blocks that may have the slices of windowed layers.
        window_bytes: bytes of windowed layers in one block.
        recurrent: layers have a recurrent state: a prompt's last token cannot be computed behind its own state.
        states_alone: all windowed layers have a recurrent state (`KVLayout.states_alone`).
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    window_blocks: int = 0
    window_slots: int = 0
    window_bytes: int = 0
    recurrent: bool = False
    states_alone: bool = False
    load_timeout_s: float = setting(
        5.0, "seconds a load from a kvstore may take beyond what is predicted; after that the KV is computed", gt=0
    )

    def blocks_for(self, tokens: int) -> int:
        """Return blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def first_windowed_block(self, tokens: int) -> int:
        """Return the first block of which the token behind `tokens` tokens needs the windowed slices."""
        return max(0, tokens // self.block_size - self.window_blocks) if self.window_blocks else 0

    def moved_bytes(self, blocks: int, part_filled: int = 0) -> int:
        """Return bytes of `blocks` consecutive blocks when they are moved: before the window, of full layers alone.

        `part_filled`: part-filled blocks among these, behind the window's full blocks.
        """
        before = max(0, blocks - self.window_blocks - part_filled)
        return blocks * self.block_bytes - before * self.window_bytes

    def reusable_blocks(self, tokens: int) -> int:
        """Return how many full blocks of a prompt may be reused; with recurrent states, only before the last token."""
        return (tokens - self.recurrent) // self.block_size

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Return tokens not to compute if `blocks` leading blocks have KV; a prompt's last token is always computed."""
        return min(blocks * self.block_size, tokens - 1)
