"""Sizes of the served KV."""

from moonpool.base.frozen import frozen


@frozen
class KVShape:
    """Sizes of the served KV.

    Attributes:
        emulated: all engines emulate compute.
        token_bytes: bytes of a token in layers whose KV travels for all tokens.
        window_blocks: blocks whose windowed slices must be there where a prompt is continued; 0 = all slices are
            there wherever a block is.
        window_bytes: bytes of one block's windowed slices, which are not in `token_bytes`.
    """

    block_size: int
    token_bytes: int
    layers: int
    emulated: bool = False
    window_blocks: int = 0
    window_bytes: int = 0

    def moved_bytes(self, tokens: int, held: int) -> int:
        """Bytes that travel if of `tokens` tokens the first `held` are there: of windowed slices the last blocks'."""
        nbytes = max(0, tokens - held) * self.token_bytes
        if not self.window_bytes:
            return nbytes
        blocks = self.blocks_for(tokens) - held // self.block_size
        return nbytes + max(0, min(blocks, self.window_blocks + 1)) * self.window_bytes

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Return the number of prompt tokens that need no computing if the first `blocks` blocks are there.

        The last token is always computed: its logits give the answer's first token.
        """
        return min(blocks * self.block_size, tokens - 1)

    def blocks_for_choices(self, tokens: int, answer_tokens: int, choices: int) -> int:
        """Return the blocks for `choices` answers that share the full blocks of their first `tokens` tokens."""
        shared = tokens // self.block_size
        return shared + choices * (self.blocks_for(tokens + answer_tokens) - shared)
