"""Where chains live: who keeps one, who gets a new one, what a lost or added store moves; on the planner's own path."""

import random
from collections import Counter
from typing import Any

import pytest

from moonpool.base.kv.keys import BlockKey, block_keys
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.chain_forks import SHARED_BY, ChainForks
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.core.store_pool import StoreView, choose_write_back, in_reading_order, rendezvous_weights

from .worlds import BLOCK_SIZE, facts
from .worlds import World as Cluster

SEED = 20_26
ROOT = b"r" * 32


class World(Cluster):
    """One prefill, one decode, and kvstores."""

    def __init__(self, stores: int, replicas: int = 1, capacities: tuple[int, ...] = ()) -> None:
        speeds = Speeds(prefill_per_token_s=1.0, load_bytes_per_s=1e12)
        engines = [facts(name, total_blocks=1 << 20, speeds=speeds) for name in ("prefill-0", "decode-0")]
        super().__init__(*engines, kvstore_replicas=replicas)
        self.index = self.cluster.index
        for number in range(stores):
            self.add(f"kvstore-{number}", capacities[number] if capacities else 0)

    def add(self, name: str, capacity: int = 0) -> None:
        self.join(facts(name, capacity_bytes=capacity))

    def lose(self, name: str) -> None:
        self.cluster.leave(name)

    def plan_chain(self, keys: list[BlockKey], **changes: Any) -> RoutingDecision:
        return self.plan(tokens=len(keys) * BLOCK_SIZE + 1, keys=keys, **changes)

    def serve_chain(self, keys: list[BlockKey]) -> RoutingDecision:
        """A request, and what prefill then offers to the stores."""
        plan = self.plan_chain(keys)
        for view in plan.write_back:
            assert self.index.lengths(keys).get(view.id, 0) == view.blocks, "a chain is held from its first block on"
            self.events(view.id, keys[view.blocks :])
        return plan


def chain(blocks: int, seed: object, after: list[BlockKey] | None = None) -> list[BlockKey]:
    """A chain of so many blocks, or one that goes on for so many blocks after another."""
    generator = random.Random(f"{SEED}/{seed}")
    tokens = [generator.randrange(1000) for _ in range(blocks * BLOCK_SIZE)]
    before = after or []
    return before + block_keys(before[-1] if before else ROOT, tokens, BLOCK_SIZE)


def homes(plan: RoutingDecision) -> list[str]:
    return [view.id for view in plan.write_back]


def test_encoded_pictures_have_a_store_by_their_key_and_stay_where_they_are() -> None:
    world, places = World(3), ((2, 9), (20, 30))
    keys = chain(2, "pictures")
    plans = [
        world.plan(tokens=40, keys=[], pictures=places, row_keys=(keys[0], key)) for key in chain(60, "more pictures")
    ]
    found = [plan.rows for plan in plans]
    assert {first for first, _ in found} == {found[0][0]}, "the same picture has the same store"
    assert len({row.store for _, row in found if row is not None}) == 3
    assert not any(row.held for rows in found for row in rows if row is not None)
    assert (plans[0].demand.pictures, plans[0].demand.encoded) == (places, ())

    home = found[0][0]
    assert home is not None
    elsewhere = next(f"kvstore-{number}" for number in range(3) if home.store != f"kvstore-{number}")
    world.events(elsewhere, keys[:1])
    plan = world.plan(tokens=40, keys=[], pictures=places, row_keys=tuple(keys))
    assert plan.rows[0] == (elsewhere, True)
    assert plan.rows[1] is not None
    assert not plan.rows[1].held
    assert (plan.demand.pictures, plan.demand.encoded) == (places[1:], places[:1])

    prefix = chain(1, "prefix")
    world.events("prefill-0", prefix)
    plan = world.plan(tokens=40, keys=prefix, pictures=places, row_keys=tuple(keys))
    assert plan.rows[0] is None, "its KV is there: nobody encodes it"
    assert plan.rows[1] is not None
    world.lose(elsewhere)
    plan = world.plan(tokens=40, keys=[], pictures=places, row_keys=tuple(keys))
    assert plan.rows[0] == home
    for number in range(3):
        if f"kvstore-{number}" != elsewhere:
            world.lose(f"kvstore-{number}")
    assert world.plan(tokens=40, keys=[], pictures=places, row_keys=tuple(keys)).rows == (None, None)


def test_chains_spread_and_stay_where_they_are() -> None:
    world = World(3)
    chains = [chain(3, number) for number in range(300)]
    first = [homes(world.serve_chain(keys)) for keys in chains]
    share = Counter(home[0] for home in first)
    print(f"seed {SEED}: {dict(share)}")
    assert len(share) == 3
    assert all(70 <= count <= 130 for count in share.values())
    for number, (keys, home) in enumerate(zip(chains, first, strict=True)):
        plan = world.serve_chain(chain(2, f"next {number}", keys))
        assert homes(plan) == home
        assert (plan.sources[0].id, plan.sources[0].blocks) == (home[0], 3)


def test_an_added_store_gets_its_share_of_new_chains_and_old_ones_stay() -> None:
    world = World(3)
    old = [chain(2, number) for number in range(300)]
    before = [homes(world.serve_chain(keys)) for keys in old]
    world.add("kvstore-3")
    assert [homes(world.serve_chain(chain(1, f"on {n}", keys))) for n, keys in enumerate(old)] == before
    new = Counter(homes(world.serve_chain(chain(2, f"new {number}")))[0] for number in range(400))
    print(f"seed {SEED}: {dict(new)}")
    assert len(new) == 4
    assert 65 <= new["kvstore-3"] <= 135


def test_a_lost_store_is_a_miss_for_its_chains_only_and_they_move_on_whole() -> None:
    world = World(3)
    chains = [chain(3, number) for number in range(90)]
    before = [homes(world.serve_chain(keys))[0] for keys in chains]
    world.lose("kvstore-1")
    for keys, home in zip(chains, before, strict=True):
        plan = world.serve_chain(keys)
        if home == "kvstore-1":
            assert plan.sources == ()
            assert [view.blocks for view in plan.write_back] == [0]
        else:
            assert homes(plan) == [home]
            assert plan.sources[0].blocks == 3
    world.index.check_invariants()
    heirs = Counter(
        homes(world.serve_chain(keys))[0] for keys, home in zip(chains, before, strict=True) if home == "kvstore-1"
    )
    assert set(heirs) == {"kvstore-0", "kvstore-2"}


def test_a_shared_prompt_does_not_pin_conversations() -> None:
    """All begin with the same 20 blocks; each has 3 of its own, and 2 more in its next turn."""
    world = World(3)
    prompt = chain(20, "system prompt")
    talks = [chain(3, number, prompt) for number in range(120)]
    first = [homes(world.serve_chain(keys))[0] for keys in talks]
    share = Counter(first)
    print(f"seed {SEED}: {dict(share)}")
    assert len(set(first[:SHARED_BY])) == 1  # not known to be shared yet
    assert all(25 <= count <= 60 for count in share.values())
    assert all(world.index.lengths(prompt)[name] == 20 for name in share)
    for number, (keys, home) in enumerate(zip(talks, first, strict=True)):
        plan = world.serve_chain(chain(2, f"turn two of {number}", keys))
        assert homes(plan) == [home]
        assert (plan.sources[0].id, plan.sources[0].blocks) == (home, 23)


def test_a_turn_asked_again_stays_at_home() -> None:
    world = World(3)
    talk = chain(10, "talk")
    home = homes(world.serve_chain(talk))
    for number in range(SHARED_BY - 1):
        assert homes(world.serve_chain(chain(2, f"again {number}", talk))) == home
        assert homes(world.plan_chain(chain(2, f"again {number}", talk))) == home


def test_copies_go_to_different_stores_and_are_made_good_when_one_is_lost() -> None:
    world = World(4, replicas=2)
    chains = [chain(3, number) for number in range(100)]
    before = [homes(world.serve_chain(keys)) for keys in chains]
    assert all(len(set(pair)) == 2 for pair in before)
    assert [set(homes(world.serve_chain(keys))) for keys in chains] == [set(pair) for pair in before]
    world.lose("kvstore-2")
    for keys, pair in zip(chains, before, strict=True):
        plan = world.serve_chain(keys)
        assert plan.sources[0].blocks == 3
        kept = [name for name in pair if name != "kvstore-2"]
        assert set(kept) <= set(homes(plan))
        assert len(set(homes(plan))) == 2
        assert world.index.lengths(keys) == dict.fromkeys(homes(plan), 3)


def test_fewer_stores_than_copies() -> None:
    assert homes(World(1, replicas=3).serve_chain(chain(2, "a"))) == ["kvstore-0"]
    assert homes(World(0, replicas=3).serve_chain(chain(2, "a"))) == []


def test_an_evicting_store_is_a_shorter_match_and_is_filled_up_again() -> None:
    world = World(3)
    keys = chain(4, "a")
    home = homes(world.serve_chain(keys))
    world.events(home[0], [], keys[2:])
    plan = world.serve_chain(keys)
    assert homes(plan) == home
    assert (plan.sources[0].id, plan.sources[0].blocks) == (home[0], 2)
    assert world.index.lengths(keys) == {home[0]: 4}


def test_reads_of_a_hot_chain_spread_over_its_copies() -> None:
    world = World(3, replicas=2)
    keys = chain(3, "hot")
    pair = homes(world.serve_chain(keys))
    read: Counter[str] = Counter()
    claims = []
    for _ in range(10):
        plan = world.plan_chain(keys)
        assert {view.id for view in plan.sources} == set(pair)
        claims.append(world.cluster.claim_prefill("prefill-0", 1.0, 0.0, plan.prefill.source))
        read[plan.prefill.source] += 1
    assert read == dict.fromkeys(pair, 5)
    for claim in claims:
        world.cluster.release(claim, 1.0)
        world.cluster.release(claim, 1.0)
    assert (world.cluster.reads_in_flight, world.cluster.prompts_in_flight) == (0, 0)
    world.cluster.check_invariants()


def test_a_draining_store_gets_nothing_new() -> None:
    world = World(2)
    keys = chain(2, "a")
    home = homes(world.serve_chain(keys))[0]
    world.report(home, draining=True)
    plan = world.plan_chain(keys)
    assert plan.sources == ()
    assert homes(plan) == [{"kvstore-0": "kvstore-1", "kvstore-1": "kvstore-0"}[home]]


def test_a_larger_store_gets_more() -> None:
    world = World(2, capacities=(1 << 30, 3 << 30))
    share = Counter(homes(world.plan_chain(chain(1, number)))[0] for number in range(400))
    print(f"seed {SEED}: {dict(share)}")
    assert 260 <= share["kvstore-1"] <= 340


def test_a_capacity_that_is_not_known_is_an_average_one() -> None:
    assert rendezvous_weights({"a": 0, "b": 0}) == {"a": 1.0, "b": 1.0}
    assert rendezvous_weights({"a": 0, "b": 10, "c": 30}) == {"a": 20.0, "b": 10.0, "c": 30.0}


def test_answers_to_prompts_without_a_full_block_spread_over_the_stores() -> None:
    world = World(3)
    share = Counter(homes(world.plan_chain([], prompt_key=b"prompt %d" % number))[0] for number in range(90))
    print(f"seed {SEED}: {dict(share)}")
    assert len(share) == 3
    assert all(15 <= count <= 45 for count in share.values())
    assert homes(world.plan_chain([], prompt_key=b"prompt 7")) == homes(world.plan_chain([], prompt_key=b"prompt 7"))


def test_write_back_keeps_to_whoever_holds_half_of_the_longest() -> None:
    stores = [StoreView("best", 10), StoreView("half", 5, score=1.0), StoreView("less", 4, score=9.0)]
    assert [view.id for view in choose_write_back(stores, 3)] == ["best", "half", "less"]
    assert [view.id for view in choose_write_back(stores, 2)] == ["best", "half"]
    assert [view.id for view in choose_write_back(stores, 1, shared=True)] == ["less"]
    assert choose_write_back([], 2) == []


def test_reading_prefers_the_longest_then_the_least_busy() -> None:
    stores = [StoreView("a", 3, busy=0), StoreView("b", 4, busy=2), StoreView("c", 4, busy=1, score=1.0)]
    assert [view.id for view in in_reading_order(stores)] == ["c", "b", "a"]
    stores = [StoreView("a", 4, score=1.0), StoreView("b", 4, score=2.0), StoreView("c", 4, score=2.0)]
    assert [view.id for view in in_reading_order(stores)] == ["b", "c", "a"]
    stores = [StoreView("a", 4, score=2.0, warm=1), StoreView("b", 4, score=1.0, warm=3), StoreView("c", 4)]
    assert [view.id for view in in_reading_order(stores)] == ["c", "b", "a"], "who does not tell has all in memory"


def test_forks_are_counted_by_different_followers_in_bounded_memory() -> None:
    forks = ChainForks(max_blocks=2)
    told = [forks.shared(b"p", follower) for follower in (b"1", b"1", b"2", b"3", b"2", b"4", b"4", b"5")]
    assert told == [False] * 5 + [True] * 3
    forks.check_invariants()
    forks.shared(b"q", b"1")
    assert forks.shared(b"p", b"1")  # met again: q is the oldest now
    forks.shared(b"r", b"1")
    assert len(forks) == 2
    assert forks.shared(b"p", b"6")
    forks.check_invariants()
    with pytest.raises(ValueError, match="max_blocks"):
        ChainForks(0)
