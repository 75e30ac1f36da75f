"""A sequence as the world of the decode core keeps it: its tokens, its blocks, and the KV that must be in them."""

from array import array
from dataclasses import dataclass, field

from moonpool.base.kv.keys import BlockKey, block_keys
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core.actions import ForkSequences, SwapIn, SwapOut
from tests.unit.engine.decode.core.plain_beams import following
from tests.unit.engine.kv_memory import TokenMemory

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
    saved: dict[int, list[dict[int, bytes] | None]] = field(default_factory=dict)
    contents: list[bytes] = field(default_factory=list)

    def keys(self) -> list[BlockKey]:
        return block_keys(ROOT, self.tokens, BT)

    def go_on(self, count: int) -> list[int]:
        """Takes so many tokens more; returns them."""
        for _ in range(count):
            self.tokens.append(self.token_after(len(self.tokens)))
        return self.tokens[len(self.tokens) - max(count, 0) :].tolist()

    def copy(self, action: SwapOut | SwapIn, memory: TokenMemory, *, ok: bool) -> None:
        """Its blocks are swapped out or in."""
        if isinstance(action, SwapOut):
            self.saved = {n: memory.save(block) for n, block in enumerate(action.blocks)} if ok else {}
            return
        for n, block in enumerate(action.blocks, action.first):
            memory.restore(block, self.saved[n])
        self.saved = {}

    def content(self, position: int) -> bytes:
        """What a slot holds: a hash of all tokens up to its own."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else b""
            self.contents.append(digest_of(before, self.tokens[len(self.contents)]))
        return self.contents[position]

    def token_after(self, tokens: int) -> int:
        return (len(self.tokens) * 31 + tokens * 7 + self.tokens[0] + 101 * self.index) % 1000


def follow_beams(
    beams: list[Sequence], chosen: ForkSequences, kept: "dict[int, array[int]]"
) -> "dict[int, array[int]]":
    """Each beam takes the tokens of its parent and one more; returns the hypotheses that are kept."""

    def follow(parent: int, candidate: int) -> "array[int]":
        return beams[parent].tokens + array("i", [following(beams[parent].tokens)[candidate][0]])

    kept = kept | {number: follow(parent, candidate) for number, parent, candidate in chosen.ended}
    taken = [(follow(*beam), list(beams[beam[0]].contents[: len(beams[0].tokens)])) for beam in chosen.forks]
    for sequence, (tokens, contents) in zip(beams, taken, strict=False):
        sequence.tokens, sequence.contents = tokens, contents
    return {number: kept[number] for number in chosen.kept}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens unlike those of another seed."""
    return [seed * 1000 + n for n in range(length)]
