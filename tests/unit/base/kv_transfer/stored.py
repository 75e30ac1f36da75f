"""The blocks that tests of the store's streams write and read."""

from __future__ import annotations

from moonpool.base.kv.keys import BlockKey, block_keys
from tests.unit.base.transport.fakes import LAYOUT, ROOT, FakeStore, content

SLICE = LAYOUT.slice_bytes(0)
WAIT_S = 60.0
KEYS = block_keys(ROOT, range(16 * 5), 16)
PARENTS = [BlockKey(ROOT), *KEYS[:-1]]


def read_content(layer: int, index: int) -> memoryview:
    """The bytes of a layer of a block."""
    return memoryview(content(layer, index))


def fill(store: FakeStore, blocks: int) -> None:
    """Puts the leading blocks into a store."""
    for index in range(blocks):
        store.blocks[KEYS[index]] = {layer: bytes(content(layer, index)) for layer in range(LAYOUT.layers)}
