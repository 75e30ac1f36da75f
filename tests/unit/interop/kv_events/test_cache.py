"""What an engine's events say of its cache, under the cluster's keys: recorded ones, and each case alone."""

import json
import random
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root
from moonpool.base.kv.media import MediaItem
from moonpool.interop.kv_events.cache import NO_RANK, EngineCache
from moonpool.interop.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    decode_batch,
    read_batch,
)
from tests.unit.interop.kv_events.follower import NAMESPACE, root_of

SIZE = 4
RECORDED = Path(__file__).parent / "recorded"
SALT = "moonpool:" + "ab" * 32


def new_cache(max_names: int = 1000) -> EngineCache:
    return EngineCache(SIZE, root_of, max_names)


def keys_of(tokens: list[int], tenant: str = "", size: int = SIZE) -> list[BlockKey]:
    return block_keys(chain_root(NAMESPACE, tenant), tokens, size)


def stored(*hashes: int | bytes, parent: int | bytes | None = None, first: int = 0, **changes: Any) -> BlockStored:
    """Blocks `first`, `first` + 1, ... of the chain 0 0 0 0 1 1 1 1 2 2 2 2 ..."""
    tokens = [first + at // SIZE for at in range(SIZE * len(hashes))]
    fields = {"extra_keys": tuple(() for _ in hashes), **changes}
    return BlockStored(hashes, parent, tokens, SIZE, **fields)


CHAIN = [at // SIZE for at in range(10 * SIZE)]


def matched(cache: EngineCache, tenant: str = "") -> int:
    cache.check_invariants()
    return cache.matched_blocks(keys_of(CHAIN, tenant))[0]


# --- recorded from vLLM 0.32 ------------------------------------------------------------------------------------------


def test_recorded_events_of_vllm_give_the_blocks_that_it_held() -> None:
    first, second = [1] * 32, [2] * 32
    salted = chain_root(NAMESPACE, SALT)
    expected = [  # after each batch: blocks of the first prompt, of the second, and of the first under the salt
        (2, 1, 0), (2, 2, 0), (2, 2, 2), (2, 2, 2), (2, 1, 0),
    ]  # fmt: skip
    cache = EngineCache(32, root_of, 1000)
    for (_, message), counts in zip(json.loads((RECORDED / "vllm_0_32.json").read_text()), expected, strict=True):
        for event in read_batch(message).events:
            cache.rank(0).apply(event)
        plain = keys_of(first + second, size=32), keys_of(first + [4] * 32, size=32)
        chains = (*plain, block_keys(salted, first + second, 32))
        assert tuple(cache.matched_blocks(keys)[0] for keys in chains) == counts
        cache.check_invariants()


# --- forms of messages ------------------------------------------------------------------------------------------------


def test_maps_and_arrays_say_the_same() -> None:
    fields = {
        "block_hashes": [b"x" * 32, b"y" * 32], "parent_block_hash": None, "token_ids": [0] * 4 + [1] * 4,
        "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["s"], None],
        "group_idx": 1, "kv_cache_spec_kind": "sliding_window",
    }  # fmt: skip
    as_map, as_array = {"type": "BlockStored", **fields}, ["BlockStored", *fields.values()]
    [event] = read_batch([1.5, [as_map]]).events
    assert read_batch({"ts": 1.5, "events": [as_array]}) == read_batch([1.5, [as_map], 3])
    assert event == BlockStored(
        (b"x" * 32, b"y" * 32), None, [0] * 4 + [1] * 4, 4, "GPU", (("s",), ()), group=1, kind="sliding_window"
    )


def test_short_arrays_of_older_engines_are_read() -> None:
    message = [2.0, [["BlockStored", [7], None, [0, 0, 0, 0], 4, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]]]
    assert read_batch(message).events == (
        BlockStored((7,), None, [0, 0, 0, 0], 4),
        BlockRemoved((7,)),
        AllBlocksCleared(),
    )


def test_a_block_of_which_a_copy_is_left_is_not_removed() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "remaining_copy_counts": [1, 0]}
    assert read_batch([0.0, [removed]]).events == (BlockRemoved((2,), "GPU"),)


def test_unknown_kinds_of_events_are_skipped() -> None:
    assert read_batch([0.0, [{"type": "BlockPinned", "block_hashes": [1]}, ["Tomorrow", 1]]]).events == ()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (7, "batch"),
        ([1.0], "batch"),
        (["late", []], "batch.ts"),
        ([nan, []], "batch.ts"),
        ({"ts": -inf, "events": []}, "batch.ts"),
        ([1.0, "no list"], "batch.events"),
        ([1.0, [5]], "event"),
        ([1.0, [{"no": "type"}]], "event.type"),
        ([1.0, [["BlockStored", "ab", None, [], 4, None]]], "event.block_hashes"),
        ([1.0, [["BlockStored", [1.5], None, [], 4, None]]], "event.block_hashes"),
        ([1.0, [["BlockStored", [1], "parent", [], 4, None]]], "event.parent_block_hash"),
        ([1.0, [["BlockStored", [1], None, ["a"], 4, None]]], "event.token_ids"),
        ([1.0, [["BlockStored", [1], None, [], 0, None]]], "event.block_size"),
        ([1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [], "block_size": 4, "extra_keys": []}]],
         "event.extra_keys"),
        ([1.0, [["BlockRemoved", None]]], "event.block_hashes"),
    ],
)  # fmt: skip
def test_a_message_that_is_no_batch_is_refused_by_field(message: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_batch(message)
    assert error.value.field == field


# --- what is told -----------------------------------------------------------------------------------------------------


def test_chains_grow_by_their_parents() -> None:
    cache = new_cache()
    rank = cache.rank(0)
    rank.apply(stored(10, 11))
    rank.apply(stored(12, parent=11, first=2))
    assert matched(cache) == 3
    rank.apply(BlockRemoved((11,)))
    assert matched(cache) == 1
    rank.apply(stored(11, parent=10, first=1))  # computed again
    assert matched(cache) == 3
    stored_keys, removed, _ = cache.take_changes()
    assert set(stored_keys) == set(keys_of(CHAIN)[:3])
    assert not list(removed)


def test_blocks_behind_an_unknown_block_are_nobodys() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(12, parent=11, first=2))
    assert len(cache) == 0
    cache.rank(0).apply(stored(10, 11))
    assert matched(cache) == 2  # the hash 12 has no meaning yet
    cache.rank(0).apply(stored(12, parent=11, first=2))
    assert matched(cache) == 3


def test_a_removed_block_still_tells_what_follows_it() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, 11))
    cache.rank(0).apply(BlockRemoved((11,)))  # one of two copies, by an engine that does not count them
    cache.rank(0).apply(stored(12, parent=11, first=2))
    assert set(cache.held) == {keys_of(CHAIN)[0], keys_of(CHAIN)[2]}


def test_only_the_first_block_tells_the_salt() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(20, 21, extra_keys=(("tenant",), ())))
    cache.rank(0).apply(stored(22, parent=21, first=2))
    assert (matched(cache), matched(cache, "tenant")) == (0, 3)


def test_blocks_whose_extra_keys_are_not_told_are_not_told() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, extra_keys=None))  # it may have a salt
    assert len(cache) == 0


def test_blocks_of_adapters_are_of_other_chains_than_the_base_models() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, 11, lora="sql", extra_keys=(("sql",), ("sql",))))
    cache.rank(0).apply(stored(12, parent=11, first=2, lora="sql", extra_keys=(("sql",),)))
    assert len(cache) == 3
    assert matched(cache) == 0
    cache.rank(0).apply(stored(20))
    assert matched(cache) == 1


def test_blocks_of_an_unknown_adapter_are_not_told() -> None:
    cache = EngineCache(SIZE, lambda extra, lora: None if lora else root_of(extra, lora), 10)
    cache.rank(0).apply(stored(10, lora="sql", extra_keys=(("sql",),)))
    cache.rank(0).apply(stored(11, parent=10, first=1, lora="sql", extra_keys=(("sql",),)))
    assert len(cache) == 0


def test_from_a_block_with_an_image_on_hashes_mean_more_than_tokens() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, 11, 12, extra_keys=((), (("image", 0),), ())))
    cache.rank(0).apply(stored(13, parent=12, first=3))
    assert matched(cache) == 1
    assert len(cache) == 1


@pytest.mark.parametrize("mark", [(), ("mm",)], ids=["before", "vLLM 0.32"])
def test_pictures_are_parts_of_the_keys_of_blocks_where_they_begin(mark: tuple[str, ...]) -> None:
    """Digests in hex, and where a picture begins behind the block's first token; before it, the picture goes on."""
    first, second = bytes(range(32)), bytes(32)
    cache = new_cache()
    told = ((first, 1), (second, 3)), ((second, 3 - SIZE),), ((first, 0),), ((first, -SIZE),)
    extra = tuple(tuple((*mark, digest.hex(), begin) for digest, begin in of) for of in told)
    cache.rank(0).apply(stored(10, 11, 12, extra_keys=extra[:3]))
    cache.rank(0).apply(stored(13, parent=12, first=3, extra_keys=extra[3:]))
    places = ((1, first), (3, second), (2 * SIZE, first))
    media = [MediaItem(begin, begin + 1, digest) for begin, digest in places]
    assert set(cache.held) == set(block_keys(chain_root(NAMESPACE, ""), CHAIN[: 4 * SIZE], SIZE, media))


@pytest.mark.parametrize("extra", [(("salt", "image"),), ((("image", 3),),)])
def test_first_blocks_with_more_than_a_salt_are_nobodys(extra: tuple[ExtraKeys, ...]) -> None:
    def root(keys: ExtraKeys | None, lora: str) -> BlockKey | None:
        return root_of(keys, lora) if keys is None or all(map(_is_text, keys)) else None

    cache = EngineCache(SIZE, root, 10)
    cache.rank(0).apply(stored(10, extra_keys=extra))
    assert len(cache) == 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL"])
def test_blocks_elsewhere_than_on_the_device_are_not_told(medium: str) -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, medium=medium))
    assert len(cache) == 0
    cache.rank(0).apply(stored(11, parent=10, first=1, medium="GPU"))  # what is elsewhere still says what follows it
    assert set(cache.held) == {keys_of(CHAIN)[1]}
    cache.rank(0).apply(stored(10, medium="GPU"))
    cache.rank(0).apply(BlockRemoved((10,), medium))  # the copy elsewhere
    assert matched(cache) == 2


def test_blocks_of_another_size_make_the_cache_opaque() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10))
    assert len(cache) == 1
    cache.rank(0).apply(BlockStored((30,), None, [0] * 8, 8, extra_keys=((),)))
    assert cache.opaque
    cache.rank(0).apply(stored(11, parent=10, first=1))
    assert len(cache) == 0
    cache.rank(0).restart()
    cache.rank(0).apply(stored(10))
    assert matched(cache) == 1


@pytest.mark.parametrize("kind", ["mamba", "cross_attention", "unknown"])
def test_groups_that_are_not_understood_make_the_cache_opaque(kind: str) -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10))
    cache.rank(0).apply(stored(10, group=1, kind=kind))
    assert cache.opaque
    assert len(cache) == 0


def test_a_block_is_told_while_every_group_holds_it() -> None:
    cache = new_cache()
    rank = cache.rank(0)
    rank.apply(stored(10, 11, 12, kind="full_attention"))
    assert matched(cache) == 3
    rank.apply(stored(11, 12, parent=10, first=1, group=1, kind="sliding_window"))  # the engine has a window, too
    assert set(cache.held) == set(keys_of(CHAIN)[1:3])
    rank.apply(BlockRemoved((12,), "GPU", 1))
    assert set(cache.held) == {keys_of(CHAIN)[1]}
    rank.apply(AllBlocksCleared())
    rank.apply(stored(10, kind="full_attention"))
    assert len(cache) == 0  # cleared, the engine still has its groups


def test_clearing_removes_all_and_keeps_what_hashes_mean() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, 11))
    cache.take_changes()
    cache.rank(0).apply(AllBlocksCleared())
    assert set(cache.take_changes().removed) == set(keys_of(CHAIN)[:2])
    cache.rank(0).apply(stored(12, parent=11, first=2))
    assert set(cache.held) == {keys_of(CHAIN)[2]}


def test_two_hashes_of_one_block_count_once() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10))
    cache.rank(0).apply(stored(b"ten"))
    cache.rank(0).apply(BlockRemoved((10,)))
    assert len(cache) == 0  # less than the engine holds, never more


def test_a_hash_with_another_meaning_is_believed_anew() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10, 11))
    cache.rank(0).apply(stored(11))
    assert matched(cache) == 1
    assert len(cache) == 1  # the block 11 is now a first block, told under the hash 10


def test_tokens_that_do_not_fill_the_blocks_name_nothing() -> None:
    cache = new_cache()
    cache.rank(0).apply(BlockStored((10, 11), None, [0] * 7, SIZE, extra_keys=((), ())))
    assert len(cache) == 0


def test_ranks_hold_apart_and_the_longest_match_is_of_one_rank() -> None:
    cache = new_cache()
    cache.rank(0).apply(stored(10))
    cache.rank(1).apply(stored(10, 11))
    cache.rank(2).apply(stored(10, 11, 12))
    cache.rank(2).apply(BlockRemoved((11,)))
    assert cache.matched_blocks(keys_of(CHAIN)) == (2, 1)
    cache.take_changes()
    cache.rank(1).apply(BlockRemoved((10,)))
    assert not list(cache.take_changes().removed)  # others hold it
    assert cache.matched_blocks(keys_of(CHAIN)) == (1, 0)
    assert cache.matched_blocks(keys_of(CHAIN, "other")) == (0, NO_RANK)
    cache.check_invariants()


def test_names_are_bounded() -> None:
    cache = new_cache(max_names=8)
    for at in range(100):
        cache.rank(0).apply(stored(at))
        cache.rank(0).apply(BlockRemoved((at,)))
        cache.check_invariants()


ODD_EVENTS = {
    "token_ids": [2**40],
    "group_idx": -1,
    "block_size": -4,
    "parent_block_hash": 1.5,
    "block_hashes": [None],
    "extra_keys": [1, 2, 3],
}


@pytest.mark.parametrize("field", ODD_EVENTS)
def test_an_odd_event_is_an_unreadable_batch_that_names_the_field(field: str) -> None:
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    assert read_batch([0.0, [stored]]).events
    with pytest.raises(InvalidRequest, match=rf"event\.{field}"):
        read_batch([0.0, [{**stored, field: ODD_EVENTS[field]}]])


@pytest.mark.parametrize("group", [-1, 2**40])
def test_an_odd_group_of_a_removal_is_unreadable(group: int) -> None:
    with pytest.raises(InvalidRequest, match=r"event\.group_idx"):
        read_batch([0.0, [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": group}]])


MESSAGE = [
    0.0,
    [
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1,
         "lora_name": "x", "medium": "GPU", "extra_keys": [["a"]], "group_idx": 0},
        ["BlockRemoved", [b"12345678"], "GPU"],
    ],
    0,
]  # fmt: skip
BYTES = [b"\xff", b"\xa1\xff", b"\xc7\x05\x01abcde", b"\xcf" + b"\xff" * 8, b"\x81\x90\x01", b"\xdd\xff\xff\xff\xff"]
"""In msgpack: nothing, a text that is no UTF-8, an extension, a number, a map whose name is a list, a long list."""


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_batch_is_read_or_refused(seed: int) -> None:
    """Another error would end the engine's stream."""
    print(f"seed {seed}")
    draws, whole, refused = random.Random(seed), msgspec.msgpack.encode(MESSAGE), 0
    assert len(decode_batch(whole).events) == 2
    for _ in range(2000):
        damaged = bytearray(whole)
        at = draws.randrange(len(whole))
        damaged[at : at + draws.randrange(3)] = draws.choice([draws.randbytes(1), draws.choice(BYTES)])
        try:
            decode_batch(bytes(damaged))
        except InvalidRequest:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("payload", [b"", b"\x92\x00\x91\xa1\xff", b"\x91" * 100_000], ids=["empty", "text", "deep"])
def test_what_is_no_msgpack_is_unreadable(payload: bytes) -> None:
    with pytest.raises(InvalidRequest, match="batch: is no msgpack"):
        decode_batch(payload)
