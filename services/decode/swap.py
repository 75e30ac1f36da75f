"""DRAM for the KV of preempted sequences."""

from collections.abc import Sequence

from moonpool.kv.pool import KVPool

_Block = list[tuple[bytes, int]]  # a slice and its hash for each layer


class SwapSpace:
    """Copies blocks out of a pool and back. `save` and `restore` take time: call them in a thread."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._layers = range(pool.layout.layers)
        self._saved: dict[int, list[_Block]] = {}

    @property
    def blocks(self) -> int:
        """Blocks that are kept."""
        return sum(map(len, self._saved.values()))

    def save(self, number: int, blocks: Sequence[int]) -> None:
        """Copies a sequence's blocks, part-filled ones as they are."""
        self._saved[number] = [[self._read(layer, block) for layer in self._layers] for block in blocks]

    def restore(self, number: int, first: int, blocks: Sequence[int]) -> None:
        """Copies what was saved, from its block `first` on, into these blocks, and forgets it."""
        for saved, block in zip(self._saved.pop(number)[first:], blocks, strict=True):
            for layer, (data, value) in enumerate(saved):
                self._pool.write(layer, block, memoryview(data), value)

    def drop(self, number: int) -> None:
        """Forgets a sequence; unknown ones are fine."""
        self._saved.pop(number, None)

    def _read(self, layer: int, block: int) -> tuple[bytes, int]:
        data, value = self._pool.read(layer, block)
        return bytes(data), value
