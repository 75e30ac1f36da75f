"""Exact tables: where each policy sends a request, and how ties are decided."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from moonpool.scheduling.fair_share import QueueKey
from services.conductor.core.latency_model import PrefillChoice
from services.conductor.core.policies import POLICIES
from services.conductor.core.policies.base import Candidates, TtftLimit

from .worlds import SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(4)]
NAMES = ("prefill-0", "prefill-1", "prefill-2")
STEP_TOKENS = 64

Row = tuple[str, str, int, float, float]
"""Instance, kvstore, blocks used, seconds of queue, seconds to the first token."""


def world(policy: str, *more: str, seed: int = 0) -> World:
    """Three prefill instances that compute a token a second, and a decode instance."""
    engines = (facts(name, speeds=SECOND_PER_TOKEN) for name in (*NAMES, *more))
    return World(facts("decode-0"), *engines, policy=POLICIES[policy], seed=seed)


def unlike(policy: str, seed: int = 0) -> World:
    """The first instance holds most and is busy, the second holds nothing and is idle, the third is in between.

    A kvstore holds two blocks of the prompt's four; a block is loaded in 1.6 s and computed in 16.
    """
    found = world(policy, seed=seed)
    found.join(facts("kvstore-0"))
    found.events("prefill-0", KEYS[:3])
    found.events("prefill-2", KEYS[:1])
    found.events("kvstore-0", KEYS[:2])
    for name, drain_s in zip(NAMES, (50.0, 0.0, 10.0), strict=True):
        found.report(name, drain_s=drain_s)
    return found


TABLE: dict[str, list[Row]] = {
    "kvcache_centric": [
        ("prefill-1", "kvstore-0", 2, 0.0, 35.2),
        ("prefill-2", "kvstore-0", 2, 10.0, 43.6),
        ("prefill-0", "", 3, 50.0, 66.0),
    ],
    "cache_aware": [
        ("prefill-2", "", 1, 10.0, 58.0),
        ("prefill-1", "", 0, 0.0, 64.0),
        ("prefill-0", "", 3, 50.0, 66.0),
    ],
    "load_balance": [
        ("prefill-1", "", 0, 0.0, 64.0),
        ("prefill-2", "", 1, 10.0, 58.0),
        ("prefill-0", "", 3, 50.0, 66.0),
    ],
    "round_robin": [
        ("prefill-0", "", 3, 50.0, 66.0),
        ("prefill-1", "", 0, 0.0, 64.0),
        ("prefill-2", "", 1, 10.0, 58.0),
    ],
}


@pytest.mark.parametrize("policy", TABLE)
def test_each_policy_has_its_order(policy: str) -> None:
    plan = unlike(policy).plan(64, keys=KEYS)
    rows = [(it.id, it.source, it.used_blocks, it.queue_s, round(it.ttft_s, 9)) for it in plan.candidates]
    assert rows == TABLE[policy]
    assert plan.prefill == plan.candidates[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_the_default_reads_and_writes_kvstores(policy: str) -> None:
    plan = unlike(policy).plan(64, keys=KEYS)
    used = [source.id for source in plan.sources] + [view.id for view in plan.write_back]
    assert used == (["kvstore-0", "kvstore-0"] if policy == "kvcache_centric" else [])


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_offered_who_cannot_and_suspects_come_last(policy: str) -> None:
    found = world(policy, "prefill-3")
    found.join(facts("prefill-4", total_blocks=3, speeds=SECOND_PER_TOKEN))
    found.report("prefill-0", drain_s=0.0, draining=True)
    ids = [it.id for it in found.plan(64, suspects={"prefill-1"}).candidates]
    assert set(ids[:2]) == {"prefill-2", "prefill-3"}
    assert ids[2:] == ["prefill-1", "prefill-0", "prefill-4"]


class TestLimits:
    """The first instance holds most and is busy until 20.0; later prompts may take 16 s more of its next step."""

    behind, before = QueueKey("they", 2.0, 9), QueueKey("they", 0.0, 9)

    def world(self, policy: str = "kvcache_centric") -> World:
        engines = [facts(name, speeds=SECOND_PER_TOKEN, step_tokens=64) for name in NAMES[:2]]
        found = World(facts("decode-0"), *engines, policy=POLICIES[policy])
        found.events("prefill-0", KEYS[:3])
        found.events("prefill-1", KEYS[:1])
        for number in range(2):
            found.cluster.claim_prefill("prefill-0", 10.0, 0.0, queue_key=QueueKey("they", 1.0, number))
        return found

    def order(self, found: World, within_s: float) -> list[tuple[str, float]]:
        plan = found.plan(64, keys=KEYS, ttft_limit=TtftLimit(within_s, self.behind))
        assert plan.prefill == plan.candidates[0]
        return [(it.id, it.ttft_s) for it in plan.candidates]

    @pytest.mark.parametrize(("within_s", "first"), [(52.0, 0), (51.9, 1), (48.0, 1), (47.9, 0)])
    def test_the_next_best_is_taken_where_it_alone_keeps_a_limit(self, within_s: float, first: int) -> None:
        found = [("prefill-0", 52.0), ("prefill-1", 48.0)]
        assert self.order(self.world(), within_s) == [found[first], found[1 - first]]

    def test_the_queue_is_that_of_the_request_s_own_place(self) -> None:
        plan = self.world().plan(64, keys=KEYS, ttft_limit=TtftLimit(51.9, self.before))
        assert plan.prefill.id == "prefill-0"

    def test_a_policy_that_looks_at_no_time_looks_at_no_limit(self) -> None:
        found = self.world("round_robin")
        found.cluster.claim_prefill("prefill-1", 0.0, 0.0)
        assert self.order(found, 50.0) == [("prefill-0", 52.0), ("prefill-1", 48.0)]


class TestRoundRobin:
    def test_all_take_turns_whatever_they_hold(self) -> None:
        found = unlike("round_robin")
        assert [found.serve(keys=KEYS)[0] for _ in range(7)] == [*NAMES, *NAMES, NAMES[0]]

    def test_who_joins_is_next_and_who_drains_is_passed_over(self) -> None:
        found = world("round_robin")
        chosen = [found.serve()[0] for _ in range(2)]
        found.join(facts("prefill-9", speeds=SECOND_PER_TOKEN))
        found.report("prefill-0", drain_s=0.0, draining=True)
        chosen += [found.serve()[0] for _ in range(4)]
        assert chosen == ["prefill-0", "prefill-1", "prefill-2", "prefill-9", "prefill-1", "prefill-2"]


class TestRandom:
    def served(self, seed: int, count: int) -> list[str]:
        found = world("random", seed=seed)
        return [found.serve()[0] for _ in range(count)]

    def test_draws_follow_from_the_seed_and_the_number_of_the_decision(self) -> None:
        chosen = self.served(0, 8)
        assert chosen == self.served(0, 8)
        assert [name[-1] for name in chosen] == list("01111210")
        assert chosen != self.served(1, 8)

    def test_all_are_chosen_alike(self) -> None:
        counts = Counter(self.served(7, 600))
        assert sorted(counts) == list(NAMES)
        assert all(150 < count < 250 for count in counts.values()), counts

    def test_the_others_are_told_once_each(self) -> None:
        assert sorted(it.id for it in world("random").plan(64).candidates) == list(NAMES)


class TestLoadBalance:
    def test_queues_are_levelled(self) -> None:
        found = unlike("load_balance")
        assert [found.serve(64)[0][-1] for _ in range(5)] == ["1", "2", "0", "1", "2"]


def pipelines(*, wide: float = 0.0, narrow: float = 0.0) -> World:
    """A pipeline of four stages and a single instance of the same speeds, with these seconds of queue."""
    shapes: dict[str, dict[str, Any]] = {"prefill-0": {"stages": 4}, "prefill-1": {}}
    engines = (facts(name, speeds=SECOND_PER_TOKEN, step_tokens=STEP_TOKENS, **shape) for name, shape in shapes.items())
    found = World(facts("decode-0"), *engines)
    found.report("prefill-0", drain_s=wide)
    found.report("prefill-1", drain_s=narrow)
    return found


class TestTies:
    @pytest.mark.parametrize(
        ("tokens", "wide", "narrow", "chosen"),
        [
            (64, 0.0, 0.0, "narrow"),
            (64, 10.0, 10.0, "narrow"),
            (64, 10.0, 9.0, "narrow"),
            (64, 0.0, 1.0, "wide"),
            (64, 9.0, 10.0, "wide"),
            (256, 0.0, 0.0, "wide"),  # four steps: 256 * (4 + 3) / (4 * 4) = 112 s
            (256, 143.0, 0.0, "wide"),
            (256, 145.0, 0.0, "narrow"),
        ],
    )
    def test_a_prompt_of_one_step_gains_nothing_from_a_wide_pipeline(
        self, tokens: int, wide: float, narrow: float, chosen: str
    ) -> None:
        best = pipelines(wide=wide, narrow=narrow).plan(tokens).prefill.id
        assert best == {"wide": "prefill-0", "narrow": "prefill-1"}[chosen]

    def test_who_is_idle_longest_then_who_was_chosen_least_recently_then_by_name(self) -> None:
        found = world("kvcache_centric")
        assert found.plan().prefill.id == "prefill-0"
        found.cluster.release(found.cluster.claim_prefill("prefill-0", 1.0, 0.0), 1.0)
        for name in NAMES:
            found.report(name, now=5.0, drain_s=0.0)
        assert found.plan(now=9.0).prefill.id == "prefill-1"


class Nobody:
    stores = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        return []


def test_a_policy_that_chooses_nobody_is_named_as_the_fault() -> None:
    found = World(facts("decode-0"), facts("prefill-0"), policy=Nobody())
    with pytest.raises(ValueError, match="chosen none of 1 instances"):
        found.plan()
