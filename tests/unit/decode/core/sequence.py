"""A sequence as the world of the decode core keeps it: its tokens, its blocks, and the KV that must be in them."""

from array import array
from dataclasses import dataclass, field

from moonpool.kv.keys import BlockKey, block_keys

BT = 16
ROOT = BlockKey(bytes(32))


@dataclass
class Sequence:
    """A sequence in this world; the members of a group have the following numbers."""

    tokens: "array[int]"
    answer: int
    """Length of its answer."""
    prompt: int
    request: int
    index: int = 0
    """Which of its group."""
    table: list[int] = field(default_factory=list)
    saved: dict[int, dict[int, bytes]] = field(default_factory=dict)
    contents: list[bytes] = field(default_factory=list)

    def keys(self) -> list[BlockKey]:
        return block_keys(ROOT, self.tokens, BT)

    def token_after(self, tokens: int) -> int:
        return (len(self.tokens) * 31 + tokens * 7 + self.tokens[0] + 101 * self.index) % 1000


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens unlike those of another seed."""
    return [seed * 1000 + n for n in range(length)]
