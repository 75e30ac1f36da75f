"""A sample of block keys chosen by hash (SHARDS: Waldspurger et al., FAST'15), for statistics over many blocks."""

import collections
import zlib
from typing import TypeVar

from moonpool.kv.keys import BlockKey

T = TypeVar("T")
_HASHES = 1 << 32


class KeySample(collections.OrderedDict[BlockKey, T]):
    """At most `size` keys and what is known of each, in the order they were set.

    A key is in the sample when its hash is below a bound, so that the same keys are followed from one use to the next.
    When there are too many, the bound is halved. `rate` is the share of all keys that belong to the sample.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.rate = 1.0

    def accepts(self, key: BlockKey) -> bool:
        return zlib.crc32(key) < self.rate * _HASHES

    def put(self, key: BlockKey, value: T) -> bool:
        """Sets the value of a key that belongs to the sample, as the latest; returns whether keys had to leave."""
        self[key] = value
        self.move_to_end(key)
        before = self.rate
        while len(self) > self.size:
            self.rate /= 2
            for other in [other for other in self if not self.accepts(other)]:
                del self[other]
        return self.rate < before
