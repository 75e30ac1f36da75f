"""A fake KV memory for worlds around the cores: each slice remembers which tokens its KV was computed from.

A world writes, copies and reads slices where the core says, and compares what it reads with what must be there. So a
wrong block, an early gate, a freed block or a lost slot is found at the read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import NO_SLOT
from moonpool.base.scheduling.block_manager import BlockManager


class KVMemory:
    """What slices hold, by layer and block. Slices of windowed layers lie by slot, as on a device.

    A slot keeps its bytes when another block gets the slot: KV of the block before is then read, and is wrong there.

    Args:
        layers: number of layers.
        windowed: layers whose slices lie in window slots.
    """

    def __init__(self, layers: int, windowed: Collection[int] = ()) -> None:
        self.layers, self.windowed = layers, frozenset(windowed)
        self._slices: dict[tuple[int, int], Any] = {}
        self._writes = Counter[tuple[int, int]]()
        self._slot_of: dict[int, int] = {}
        self._right: dict[tuple[int, int], tuple[BlockKey, object]] = {}
        """The key that a slice was last found right for, and the slice's version then."""

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Blocks have these slots from now on."""
        self._slot_of.update(moves)
        held = [slot for slot in self._slot_of.values() if slot != NO_SLOT]
        assert len(held) == len(set(held)), "two blocks have one slot"

    def has(self, layer: int, block: int) -> bool:
        """Whether the block has bytes in this layer."""
        return layer not in self.windowed or self._slot_of.get(block, NO_SLOT) != NO_SLOT

    def _place(self, layer: int, block: int) -> tuple[int, int]:
        return layer, self._slot_of[block] if layer in self.windowed else block

    def __getitem__(self, at: tuple[int, int]) -> Any:
        """What a layer's slice of a block holds; None if nothing was written, or the block has no slot."""
        return self._slices.get(self._place(*at)) if self.has(*at) else None

    def __setitem__(self, at: tuple[int, int], content: Any) -> None:
        """Write a slice; without effect if the block has no slot."""
        if self.has(*at):
            place = self._place(*at)
            self._slices[place] = content
            self._writes[place] += 1

    def version(self, layer: int, block: int) -> object:
        """Changes with each write to a layer's slice of a block, and when the block gets another slot."""
        place = self._place(layer, block) if self.has(layer, block) else None
        return place, self._writes[place] if place is not None else 0

    def check_keys(self, manager: BlockManager, right: Callable[[BlockKey, int], Any]) -> None:
        """Assert that each block with a key holds the key's KV in each layer in which it has bytes.

        `right`: what a slice of a key must hold in a layer; None if the world does not know the key.
        """
        for block in range(manager.num_blocks):
            key = manager.key_of(block)
            if key is None:
                continue
            assert manager.is_partial(block) == (not all(self.has(layer, block) for layer in self.windowed)), (
                f"the core and the memory disagree on the slot of block {block}"
            )
            for layer in range(self.layers):
                if self._right.get((layer, block)) == (found := (key, self.version(layer, block))):
                    continue
                known = right(key, layer)
                assert known is None or not self.has(layer, block) or self[layer, block] == known, (
                    f"block {block} has a key, and other KV in layer {layer}"
                )
                if known is not None:
                    self._right[layer, block] = found


class TokenMemory(KVMemory):
    """Slices with an entry for each token of a block; a recurrent layer's slice has the last token's state alone.

    Args:
        block_size: tokens in a block.
        windowed: layers whose slices lie in window slots.
        recurrent: whether these have a recurrent state.
    """

    def __init__(
        self, layers: int, block_size: int, windowed: Collection[int] = (), *, recurrent: bool = False
    ) -> None:
        super().__init__(layers, windowed)
        self.block_size = block_size
        self.states = self.windowed if recurrent else frozenset()

    def write(self, layer: int, block: int, offset: int, content: bytes) -> None:
        """Write a token's KV, or the state behind the token."""
        if layer in self.states:
            self[layer, block] = {offset: content}
        elif self.has(layer, block):
            self[layer, block] = (self[layer, block] or {}) | {offset: content}

    def read(self, layer: int, block: int, offset: int) -> bytes | None:
        """Return a token's KV, or the state behind the token; None if there is none."""
        return (self[layer, block] or {}).get(offset)

    def clear(self, block: int) -> None:
        """Bytes that belong to no token lie in the block."""
        for layer in range(self.layers):
            self[layer, block] = {}

    def save(self, block: int) -> list[dict[int, bytes] | None]:
        """Return a copy of a block; None in place of slices that it lacks."""
        return [self[layer, block] for layer in range(self.layers)]

    def restore(self, block: int, saved: list[dict[int, bytes] | None]) -> None:
        """Write a copy from `save` into a block."""
        for layer, content in enumerate(saved):
            self[layer, block] = content

    def of_chain(self, layer: int, contents: list[bytes]) -> dict[int, bytes]:
        """Return what a full block's slice must hold; `contents`: of the block's tokens."""
        last = len(contents) - 1
        return {last: contents[last]} if layer in self.states else dict(enumerate(contents))
