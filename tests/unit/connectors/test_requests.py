"""What a scheduler loads and saves: look-ups that answer, that are late, that change; ranks; bounds."""

from collections.abc import Sequence
from concurrent.futures import Future

from moonpool.base.kv.blocks import NO_PARENT
from moonpool.base.kv.keys import block_keys
from moonpool.connectors.page_keys import PromptKeys, rank_key
from moonpool.connectors.requests import MAX_LOADS, PooledRequest, RequestPlanner

ROOT, SIZE, LIMIT_S = bytes(range(32)), 4, 0.25
TOKENS = list(range(18))  # four full blocks
KEYS = block_keys(ROOT, TOKENS, SIZE)


class Shelf:
    """Stores that hold some keys, and answer when they are told to."""

    def __init__(self, *held: bytes, answers: bool = True) -> None:
        self.held, self.answers, self.asked = set(held), answers, list[list[bytes]]()
        self.now = 100.0

    def look_up(self, tenant: str, chain: bytes, keys: Sequence[bytes]) -> Future[list[bool]]:
        self.asked.append(list(keys))
        future: Future[list[bool]] = Future()
        if self.answers:
            future.set_result([key in self.held for key in keys])
        return future

    def planner(self, ranks: int = 1) -> RequestPlanner:
        return RequestPlanner(SIZE, ranks, self.look_up, LIMIT_S, lambda: self.now)


def request(name: str = "a", tokens: Sequence[int] = TOKENS) -> PooledRequest:
    return PooledRequest(name, "ann", PromptKeys(ROOT, SIZE), tokens)


def test_a_prefix_in_the_stores_is_loaded_behind_the_engines_own_blocks() -> None:
    planner = Shelf(*KEYS[:3]).planner()
    planner.add(request())
    assert planner.matched_blocks("a", 1) == 2
    planner.allocated("a", [7, 8, 9], 2)
    [load] = planner.take_loads()
    assert (load.blocks, load.keys, load.parents) == ((8, 9), tuple(KEYS[1:3]), tuple(KEYS[:2]))
    assert (load.tenant, load.chain) == ("ann", KEYS[0])
    assert planner.take_loads() == []


def test_the_last_token_is_always_computed() -> None:
    planner = Shelf(*KEYS).planner()
    planner.add(request(tokens=TOKENS[:16]))
    assert planner.matched_blocks("a", 0) == 3


def test_a_hole_ends_the_prefix() -> None:
    planner = Shelf(KEYS[0], KEYS[2]).planner()
    planner.add(request())
    assert planner.matched_blocks("a", 0) == 1


def test_what_the_stores_lack_is_saved_once_as_it_is_computed() -> None:
    planner = Shelf(KEYS[1]).planner()
    planner.add(request())
    assert planner.matched_blocks("a", 0) == 0
    planner.allocated("a", [5], 0)
    first = planner.scheduled("a", [5, 6, 7], 3, whole=True)
    assert first is not None
    assert (first.blocks, first.keys, first.parents) == ((5, 7), (KEYS[0], KEYS[2]), (NO_PARENT, KEYS[1]))
    second = planner.scheduled("a", [8, 9], 5, whole=False)  # two tokens of the fifth block are not there yet
    assert second is not None
    assert (second.blocks, second.keys) == ((8,), (KEYS[3],))
    assert planner.scheduled("a", [], 5, whole=False) is None


def test_generated_tokens_fill_blocks() -> None:
    planner, tokens = Shelf().planner(), TOKENS[:6]
    planner.add(request(tokens=tokens))
    assert planner.scheduled("a", [1, 2], 1, whole=True) is not None
    tokens.extend(TOKENS[6:8])
    saved = planner.scheduled("a", [], 2, whole=False)
    assert saved is not None
    assert saved.keys == (KEYS[1],)


def test_a_request_waits_for_a_lookup_until_the_limit_and_no_longer() -> None:
    shelf = Shelf(*KEYS, answers=False)
    planner = shelf.planner()
    planner.add(request())
    assert planner.matched_blocks("a", 0) is None
    shelf.now += LIMIT_S / 2
    assert planner.matched_blocks("a", 0) is None
    shelf.now += LIMIT_S / 2
    assert planner.matched_blocks("a", 0) == 0
    assert planner.lookups_late == 1


def test_a_preempted_request_is_looked_up_anew() -> None:
    shelf = Shelf()
    planner = shelf.planner()
    planner.add(request())
    assert planner.matched_blocks("a", 0) == 0
    planner.scheduled("a", [1, 2, 3, 4], 4, whole=True)
    shelf.held.update(KEYS)
    assert planner.matched_blocks("a", 0) == 4
    assert len(shelf.asked) == 2


def test_a_block_that_is_found_but_never_loaded_is_not_tried_for_ever() -> None:
    planner = Shelf(*KEYS).planner()
    planner.add(request())
    for _ in range(MAX_LOADS):
        assert planner.matched_blocks("a", 0) == 4
        planner.allocated("a", [1, 2, 3, 4], 4)
    assert planner.matched_blocks("a", 0) == 0


def test_a_block_counts_if_every_rank_has_its_page() -> None:
    pages = [rank_key(key, rank) for key in KEYS for rank in range(2)]
    shelf = Shelf(*pages[:5])
    planner = shelf.planner(ranks=2)
    planner.add(request())
    assert shelf.asked == [pages]
    assert planner.matched_blocks("a", 0) == 2
    assert rank_key(KEYS[0], 0) == KEYS[0]
    assert len(set(pages)) == len(pages)


def test_unknown_and_ended_requests_are_left_alone() -> None:
    planner = Shelf(*KEYS).planner()
    planner.add(request())
    planner.matched_blocks("a", 0)
    planner.allocated("a", [1, 2, 3, 4], 4)
    planner.remove("a")
    assert planner.take_loads() == []
    assert planner.matched_blocks("a", 0) == 0
    assert planner.scheduled("a", [1], 1, whole=True) is None
    planner.allocated("a", [1], 1)
    assert len(planner) == 0
