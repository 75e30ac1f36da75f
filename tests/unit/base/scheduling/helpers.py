"""Small builders for sequences; keys are the real ones, so that equal prefixes have equal keys."""

from array import array

from moonpool.base.kv.keys import BlockKey, block_keys

BT = 16
ROOT = bytes(32)


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(32, "big"))


def tokens(n: int, *, first: int = 0) -> "array[int]":
    return array("i", range(first, first + n))


def keys_of(ids: "array[int]") -> list[BlockKey]:
    return block_keys(ROOT, ids, BT)
