"""Blocks as stores and engines hold them: format, identity, bytes in DRAM, tables by key, and net changes.

A `PartTable` is cut into parts, the same for every table, so no step over a table is long. Keys are hashes, so their
first bits choose the part.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from moonpool.base.errors import InvalidRequest
from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import KEY_BYTES, BlockKey, bind, slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.picture_rows import PICTURE_NAMESPACE

NO_PARENT = BlockKey(bytes(KEY_BYTES))
"""Parent for a block if the writer named no parent."""
MAX_TENANT_BYTES = 1024
"""Longest tenant name, as UTF-8."""
PICTURES = "pictures".ljust(MAX_TENANT_BYTES + 1)
"""To whose quotas rows of pictures count, of all tenants together. Longer than any tenant's name."""
PARTS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block's kind of KV; two sides read each other's blocks only if the formats are equal.

    Attributes:
        namespace: 32 bytes, a hash over everything that makes KV differ.
        layout: how the block's bytes are arranged.
    """

    namespace: bytes
    layout: KVLayout

    def __post_init__(self) -> None:
        if len(self.namespace) != KEY_BYTES:
            raise InvalidRequest("namespace", f"must be {KEY_BYTES} bytes, has {len(self.namespace)}")

    @property
    def of_pictures(self) -> bool:
        """Whether blocks of this kind are rows of pictures."""
        return self.namespace == PICTURE_NAMESPACE

    def account(self, tenant: str) -> str:
        """Whose quotas and guarantees a tenant's blocks of this kind count to: the tenant's, or `PICTURES`."""
        return PICTURES if self.of_pictures else tenant


@functools.lru_cache(256)
def block_format(namespace: bytes, layout: KVLayout) -> BlockFormat:
    """A format, the same object for the same kind of KV: then comparing two formats takes no time."""
    return BlockFormat(namespace, layout)


@frozen
class BlockInfo:
    """One block without bytes.

    Attributes:
        key: the block's identity.
        parent: key of the block before in the chain; `NO_PARENT` if unknown.
        tenant: the block's tenant; "" for none.
        format: the KV's namespace and layout. written_at: when the store got the block, whole seconds since 1970; 0 =
            unknown, long ago.
    """

    key: BlockKey
    parent: BlockKey
    tenant: str
    format: BlockFormat
    written_at: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the block's data, bytes."""
        return self.format.layout.block_bytes

    @property
    def account(self) -> str:
        """Whose quotas and guarantees the block counts to (`BlockFormat.account`)."""
        return self.format.account(self.tenant)


class DramBlock:
    """A whole block in DRAM.

    `data` is one slice per layer, layer after layer; `hashes` has one hash per layer, bound to the block.

    `holds` counts users that need the block in DRAM: readers, and the writer until the block is on SSD. `pinned`: a
    pin keeps the block. The memory is free when the block and all views of the memory are gone.
    """

    __slots__ = ("data", "hashes", "holds", "info", "pinned")

    def __init__(self, info: BlockInfo, data: memoryview | bytearray, hashes: Sequence[int]) -> None:
        assert len(data) == info.nbytes
        assert len(hashes) == info.format.layout.layers
        self.info = info
        self.data = memoryview(data)
        self.hashes = tuple(hashes)
        self.holds = 0
        self.pinned = False

    def is_of(self, block_format: BlockFormat) -> bool:
        """Whether the block has this kind of KV."""
        own = self.info.format
        return own is block_format or own == block_format

    def slice(self, layer: int) -> memoryview:
        """One layer's bytes, all heads, with scales."""
        return self.data[self.info.format.layout.place(layer)]

    @property
    def is_intact(self) -> bool:
        """Whether all bytes still match their hashes."""
        layers = range(self.info.format.layout.layers)
        return all(bind(slice_hash(self.slice(n)), self.info.key, n) == self.hashes[n] for n in layers)


Value = TypeVar("Value")


class PartTable(Generic[Value]):
    """Values by block key.

    Attributes:
        parts: the dicts, by the key's first byte; callers that look up many keys may do so here.
    """

    def __init__(self) -> None:
        self.parts: list[dict[BlockKey, Value]] = [{} for _ in range(PARTS)]

    def __contains__(self, key: bytes) -> bool:
        return key in self.parts[key[0]]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[BlockKey]:
        for part in self.parts:
            yield from part

    def __getitem__(self, key: BlockKey) -> Value:
        return self.parts[key[0]][key]

    def __setitem__(self, key: BlockKey, value: Value) -> None:
        self.parts[key[0]][key] = value

    def __delitem__(self, key: BlockKey) -> None:
        del self.parts[key[0]][key]

    def get(self, key: BlockKey) -> Value | None:
        """The key's value; None without a value."""
        return self.parts[key[0]].get(key)

    def pop(self, key: BlockKey) -> Value:
        """Take the key's value out.

        Raises:
            KeyError: no value.
        """
        return self.parts[key[0]].pop(key)

    def values(self) -> Iterator[Value]:
        for part in self.parts:
            yield from part.values()

    def items(self) -> Iterator[tuple[BlockKey, Value]]:
        for part in self.parts:
            yield from part.items()


STORED, COLD, COOLED, REMOVED = range(4)


class KeyChanges(NamedTuple):
    """Net changes to the set of held keys; no key is both stored and removed.

    Attributes:
        stored: held from now on.
        removed: not held any more.
        cooled: among the stored keys and those held before: in no memory from now on, only on SSD. Storing a key again
            brings the key back into memory.
    """

    stored: Iterable[bytes] = ()
    removed: Iterable[bytes] = ()
    cooled: Iterable[bytes] = ()


class NetChanges:
    """Changes that a listener has not heard yet: each key's last change only, in the order of the last changes.

    So memory is bounded by the number of distinct keys, and the lists' order does not matter.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Keys that have changed."""
        return len(self._last)

    def note(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), cooled: Iterable[bytes] = ()) -> None:
        """Take changes, in this order; a key that is cooled was held before."""
        last = self._last
        for keys, change in ((stored, STORED), (removed, REMOVED)):
            for key in keys:
                last.pop(key, None)  # at the end again
                last[key] = change
        for key in cooled:
            before = last.pop(key, COOLED)
            last[key] = COOLED if before == COOLED else COLD

    def take(self, max_keys: int | None = None) -> KeyChanges:
        """Take out the oldest changes, for at most so many keys."""
        last = self._last
        if max_keys is None or len(last) <= max_keys:
            taken, self._last = last, {}
        else:
            taken = {key: last.pop(key) for key, _ in zip(list(last), range(max_keys), strict=False)}
        lists: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        stored, removed, cooled = lists
        for key, change in taken.items():
            if change == REMOVED:
                removed.append(key)
                continue
            if change != COOLED:
                stored.append(key)
            if change != STORED:
                cooled.append(key)
        return KeyChanges(*lists)

    def clear(self) -> None:
        self._last.clear()
