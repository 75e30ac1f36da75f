"""The exact order in which blocks leave, policy by policy."""

from collections.abc import Sequence

import pytest

from moonpool.base.kv.blocks import NO_PARENT, BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.kv_aware import FIRST_GROWTH, FRESH, MAX_GROWTH, POPULAR, POPULAR_USES, TAIL, KVAware
from moonpool.kvstore.eviction.policies import LFU, LRU, POLICIES, S3FIFO, LengthAware
from moonpool.simulator.experiments.prefix_caching import HeadFirstLRU
from tests.unit.kvstore.helpers import BLOCK, FORMAT, Driven, keys_of
from tests.unit.kvstore.invariants import check


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(32, b"."))


def name_of(block: BlockKey) -> str:
    return block.rstrip(b".").decode()


def store(policy: EvictionPolicy, chain: str, behind: str = "") -> None:
    """One request stores the blocks of `chain`, one letter each, behind one that may be here or not."""
    parent = key(behind) if behind else NO_PARENT
    for letter in chain:
        policy.added(BlockInfo(key(letter), parent, "", FORMAT))
        parent = key(letter)
    policy.arrived([key(letter) for letter in chain])


def read(policy: EvictionPolicy, chain: str) -> None:
    policy.touched([key(letter) for letter in chain])


def remove(policy: EvictionPolicy, *names: str) -> None:
    for name in names:
        policy.removed(key(name))


def order(policy: EvictionPolicy) -> str:
    check(policy)
    names = "".join(map(name_of, policy.candidates()))
    assert "".join(map(name_of, policy.candidates())) == names, "asking changed the answer"
    assert len(names) == len(set(names))
    return names


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_an_empty_policy_names_nothing(make: type[EvictionPolicy]) -> None:
    policy = make()
    assert order(policy) == ""
    policy.touched([])
    policy.arrived([])
    assert order(policy) == ""


def test_lru_names_the_tail_of_the_oldest_chain_first() -> None:
    policy = LRU()
    store(policy, "abc")
    store(policy, "xy")
    assert order(policy) == "cbayx"
    read(policy, "ab")
    assert order(policy) == "cyxba"
    remove(policy, "y")
    assert order(policy) == "cxba"


def test_the_textbook_lru_names_the_head_first() -> None:
    policy = HeadFirstLRU()
    store(policy, "abc")
    read(policy, "ab")
    assert order(policy) == "cab"


def test_lfu_counts_uses_and_breaks_ties_by_the_oldest_use() -> None:
    policy = LFU()
    store(policy, "abc")
    store(policy, "xy")
    assert order(policy) == "abcxy"
    read(policy, "ab")
    read(policy, "x")
    assert order(policy) == "cyabx"
    read(policy, "c")
    assert order(policy) == "yabxc"
    read(policy, "a")
    assert order(policy) == "ybxca"
    remove(policy, "x", "a")
    store(policy, "x")  # how often it was used is forgotten
    assert order(policy) == "yxbc"


def test_length_aware_breaks_ties_by_the_later_position() -> None:
    policy = LengthAware()
    store(policy, "abc")
    store(policy, "xy")
    assert order(policy) == "cbyax"
    read(policy, "bc")
    assert order(policy) == "yaxcb"
    store(policy, "d", behind="c")
    assert order(policy) == "dyaxcb"


def test_length_aware_knows_the_place_behind_a_block_that_just_left() -> None:
    policy = LengthAware()
    store(policy, "a")
    policy.added(BlockInfo(key("b"), key("a"), "", FORMAT))
    remove(policy, "b")
    policy.added(BlockInfo(key("c"), key("b"), "", FORMAT))
    store(policy, "xy")
    assert order(policy) == "cyax"


def test_length_aware_takes_a_block_with_an_unknown_parent_for_a_head() -> None:
    policy = LengthAware()
    store(policy, "ab")
    store(policy, "x", behind="?")
    assert order(policy) == "bax"


def test_s3_fifo_lets_unused_new_blocks_go_and_keeps_used_ones() -> None:
    policy = S3FIFO()
    store(policy, "abcdefghij")
    assert order(policy) == "abcdefghij"
    read(policy, "ac")
    assert order(policy) == "bdefghijac"
    remove(policy, "b", "d")
    assert order(policy) == "efghijac"
    store(policy, "d")  # back soon: to the main queue
    assert order(policy) == "efghijacd"


def test_s3_fifo_gives_a_used_block_of_the_main_queue_as_many_rounds() -> None:
    policy = S3FIFO()
    store(policy, "ab")
    remove(policy, "a", "b")
    store(policy, "abcd")
    assert order(policy) == "cdab"
    read(policy, "aaaa")  # three uses count at most
    remove(policy, "c", "d")
    assert order(policy) == "ba"
    store(policy, "x")
    assert order(policy) == "xba"


def test_s3_fifo_forgets_what_left_long_ago() -> None:
    policy = S3FIFO()
    store(policy, "ab")
    for number in range(8):
        name = f"{number}"
        store(policy, name)
        remove(policy, name)
    store(policy, "0")
    store(policy, "7")
    assert order(policy) == "ab07"
    read(policy, "ab")
    assert order(policy) == "07ab"
    read(policy, "00a")
    assert order(policy) == "7b0a", "0 came to the small queue, where uses are not worth rounds"


# kv-aware


def test_kv_aware_is_lru_while_nothing_is_learnt() -> None:
    policy = KVAware()
    store(policy, "abc")
    store(policy, "xy")
    assert order(policy) == "cbayx"
    read(policy, "ab")
    assert order(policy) == "cyxba"


def test_kv_aware_never_names_a_block_before_those_behind_it() -> None:
    policy = KVAware()
    store(policy, "abc")
    store(policy, "de", behind="b")
    read(policy, "bcde")  # a was not asked for: another cache had it
    assert order(policy) == "edcba"
    remove(policy, "b")  # pinned, say
    assert order(policy) == "edca"
    store(policy, "b", behind="a")
    assert order(policy) == "edcba"


def test_kv_aware_takes_blocks_whose_parents_come_later_or_never() -> None:
    policy = KVAware()
    store(policy, "c", behind="b")
    store(policy, "x", behind="?")
    store(policy, "b", behind="a")
    assert order(policy) == "cxb"
    remove(policy, "c", "b")
    assert order(policy) == "x"
    remove(policy, "x")
    assert not policy.nodes


@pytest.mark.parametrize("parents", ["aa", "ba", "bc"])
def test_kv_aware_survives_writers_that_name_wrong_parents(parents: str) -> None:
    policy = KVAware()
    for letter, parent in zip("ab", parents, strict=True):
        policy.added(BlockInfo(key(letter), key(parent), "", FORMAT))
    store(policy, "c", behind="a")
    assert sorted(order(policy)) == ["a", "b", "c"]
    remove(policy, "a", "b", "c")
    assert not policy.nodes


def kinds(policy: KVAware, names: str) -> list[int]:
    return [policy.nodes[key(name)].kind for name in names]


def growth(blocks: int, *, continued: bool) -> int:
    return FIRST_GROWTH + blocks.bit_length() - 1 + (MAX_GROWTH if continued else 0)


def test_kv_aware_classifies_a_chain_by_its_latest_growth() -> None:
    policy = KVAware()
    policy.added(BlockInfo(key("a"), NO_PARENT, "", FORMAT))
    assert kinds(policy, "a") == [FRESH]
    store(policy, "bcde", behind="a")
    first = growth(5, continued=False)
    assert kinds(policy, "abcde") == [first] * 4 + [first + TAIL]
    read(policy, "abcd")
    store(policy, "xy", behind="d")
    turn = growth(2, continued=True)
    assert kinds(policy, "abcdexy") == [turn] * 4 + [first + TAIL, turn, turn + TAIL]
    store(policy, "z", behind="y")  # y was not read: the same request went on
    turn = growth(3, continued=True)
    assert kinds(policy, "axyz") == [turn] * 3 + [turn + TAIL]


def test_kv_aware_sets_what_many_share_apart() -> None:
    policy = KVAware()
    store(policy, "ab")
    for name in "1234":
        read(policy, "a")
        store(policy, name, behind="a")
    assert POPULAR_USES == 4
    assert kinds(policy, "a") == [POPULAR]
    read(policy, "1")
    read(policy, "4")
    store(policy, "56", behind="1")
    store(policy, "78", behind="4")
    assert kinds(policy, "a15") == [POPULAR, growth(2, continued=True), growth(2, continued=True)]


def test_kv_aware_learns_what_comes_back() -> None:
    """Chains of two blocks are read again, those of eight are not: even one that has just come leaves before them."""
    policy = KVAware()
    number = 0

    def chain(length: int) -> list[BlockKey]:
        nonlocal number
        number += 1
        return [key(f"{number}-{place}") for place in range(length)]

    def put(keys: Sequence[BlockKey]) -> None:
        parent = NO_PARENT
        for block in keys:
            policy.added(BlockInfo(block, parent, "", FORMAT))
            parent = block
        policy.arrived(keys)

    questions: list[list[BlockKey]] = []
    documents: list[BlockKey] = []

    for _ in range(1500):
        questions.append(chain(2))
        put(questions[-1])
        documents += (document := chain(8))
        put(document)
        if len(questions) > 60:
            policy.touched(questions[-60])
    check(policy)
    place = {block: number for number, block in enumerate(policy.candidates())}
    pending = [question[0] for question in questions[-50:]]
    assert max(place[block] for block in documents) < min(place[block] for block in pending)


# The calls of a tier


class Told(LRU):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, Sequence[BlockKey]]] = []

    def added(self, info: BlockInfo) -> None:
        super().added(info)
        self.events.append(("added", [info.key]))

    def touched(self, chain: Sequence[BlockKey]) -> None:
        super().touched(chain)
        if chain:
            self.events.append(("touched", chain))

    def arrived(self, chain: Sequence[BlockKey]) -> None:
        if chain:
            self.events.append(("arrived", chain))


def test_a_tier_tells_uses_apart_from_arrivals() -> None:
    policy = Told()
    driven = Driven(dram_bytes=8 * BLOCK, policy=policy)
    a, b, c = keys_of(3)
    driven.store.writes.close(driven.put([a, b]))
    assert policy.events == [("added", [a]), ("added", [b]), ("arrived", [a, b])]
    policy.events.clear()
    driven.read([a, b, c])
    driven.store.writes.close(driven.put([b, c]))
    assert policy.events == [("touched", [a, b]), ("touched", [b]), ("added", [c]), ("arrived", [b, c])]
