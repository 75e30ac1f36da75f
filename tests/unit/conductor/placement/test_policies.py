"""Exact tables: where each policy sends a request, and how ties are decided."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.conductor.core.actions import Action, CallReserve, FailRequest
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.events import InstanceJoined, RequestArrived
from moonpool.conductor.core.instances import InstanceFacts
from moonpool.conductor.core.latency_model import PrefillLatencyModel
from moonpool.conductor.core.prefill_pool import ShadowTally, TtftLimit
from moonpool.conductor.core.request_spec import RequestSpec, SloLimits
from moonpool.conductor.placement.base import (
    Candidates,
    InstanceLoad,
    PlacementRequest,
    PrefillChoice,
    StoredPrefix,
)
from moonpool.conductor.placement.policies import POLICIES
from tests.examples import examples

from ..core.world import LIMITS
from ..core.worlds import BLOCK_SIZE, SECOND_PER_TOKEN, SHAPE, World, facts

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
    rows = [
        (candidate.id, candidate.source, candidate.used_blocks, candidate.queue_s, round(candidate.ttft_s, 9))
        for candidate in plan.candidates
    ]
    assert rows == TABLE[policy]
    assert plan.prefill == plan.candidates[0]


ORDERS = {
    "sglang": "120",  # five prompts more are uneven: the fewest
    "vllm": "012",  # the first lacks 16 tokens only
    "llm_d": "201",  # prefix, memory and queue: 4.33, 4.19 and 4
    "llm_d_sticky": "120",  # nobody holds 80 %
    "dynamo": "120",  # 40, 46 and 66 tokens, blocks of the store by three quarters
    "preble": "012",  # three quarters are held, and 50 s are less than twice 35.2 s
    "lmetric": "120",  # 64 * 1, 48 * 2 and 16 * 6: of equals the one that is free sooner
}


@pytest.mark.parametrize("policy", ORDERS)
def test_published_rules_have_their_order_in_prompts_and_tokens(policy: str) -> None:
    found = unlike(policy)
    found.report("prefill-0", drain_s=50.0, waiting=5, queued_tokens=50)
    found.report("prefill-2", drain_s=10.0, running=1, queued_tokens=10)
    assert "".join(candidate.id[-1] for candidate in found.plan(64, keys=KEYS).candidates) == ORDERS[policy]


class Watch:
    """Notes what a policy sees."""

    stores = True

    def __init__(self) -> None:
        self.candidates: list[Candidates] = []
        self.choices: list[PrefillChoice] = []

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        self.candidates.append(candidates)
        self.choices = [candidates.predict(place) for place in candidates]
        return self.choices


def test_policies_see_the_request_what_is_there_and_who_holds_the_prefix() -> None:
    watch = Watch()
    found = World(facts("decode-0"), *(facts(name, speeds=SECOND_PER_TOKEN) for name in NAMES[:2]), policy=watch)
    found.join(facts("kvstore-0", reports_ssd=True))
    found.events("kvstore-0", KEYS[:2], cooled=KEYS[1:2])
    found.report("prefill-0", running=1, waiting=2, queued_tokens=90, free_blocks=7, taken=3)
    found.cluster.claim_prefill("prefill-0", 12.0, 0.0, tokens=12)
    found.plan(64, keys=KEYS, limit_s=9.0, priority=-1, queue_key=QueueKey("they", 0.0, 5))
    (candidates,) = watch.candidates
    assert candidates.request == PlacementRequest(64, 4, 7, "they", -1, 9.0)
    assert candidates.holders == [StoredPrefix("kvstore-0", 2, 1, peer=False)]
    assert {choice.id: choice.there for choice in watch.choices} == {
        "prefill-0": InstanceLoad(4, 102, 0.2, 7, 100, 1),
        "prefill-1": InstanceLoad(0, 0, 0.0, 100, 100, 1),
    }


def test_arrivals_fade_by_the_times_of_events() -> None:
    watch = Watch()
    found = World(facts("decode-0"), *(facts(name, speeds=SECOND_PER_TOKEN) for name in NAMES[:2]), policy=watch)
    for number in range(6):
        found.cluster.claim_prefill("prefill-0", 10.0, float(number))
    for now in (5.0, 65.0):
        found.plan(64, now=now)
    lately, later = (candidate.arrivals for candidate in watch.candidates)
    assert lately.prompts_per_s == pytest.approx(5.76 / 60 / 2, rel=0.01)
    assert lately.busy_share == pytest.approx(10.0 * lately.prompts_per_s)
    assert lately.backlog_s == pytest.approx((60.0 - 5.0) / 2)
    assert later[:3] == pytest.approx((lately.prompts_per_s / 2.71828, lately.busy_share / 2.71828, 0.0), rel=1e-4)
    assert lately.usual_backlog_s == pytest.approx(27.5 * 5.0 / 600.0, rel=0.01), "of ten minutes, by time"
    assert later.usual_backlog_s == pytest.approx(lately.usual_backlog_s / 1.10517, rel=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_kvstores_are_written_to_and_read_from_by_the_policies_that_want_them(policy: str) -> None:
    plan = unlike(policy).plan(64, keys=KEYS)
    assert [view.id for view in plan.write_back] == (["kvstore-0"] if POLICIES[policy].stores else [])
    assert [source.id for source in plan.sources] == [source for source in (plan.prefill.source,) if source]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_offered_who_cannot_and_suspects_come_last(policy: str) -> None:
    found = world(policy, "prefill-3")
    found.join(facts("prefill-4", total_blocks=3, speeds=SECOND_PER_TOKEN))
    found.report("prefill-0", drain_s=0.0, draining=True)
    ids = [candidate.id for candidate in found.plan(64, suspects={"prefill-1"}).candidates]
    assert set(ids[:2]) == {"prefill-2", "prefill-3"}
    assert ids[2:] == ["prefill-1", "prefill-0", "prefill-4"]


class TestLimits:
    """The first instance holds most and is busy until 20.0; later prompts may take 16 s more of its next step."""

    behind, before = QueueKey("they", 2.0, 9), QueueKey("they", 0.0, 9)

    def world(self, policy: str = "kvcache_centric") -> World:
        engines = [facts(name, speeds=SECOND_PER_TOKEN, max_num_batched_tokens=64) for name in NAMES[:2]]
        found = World(facts("decode-0"), *engines, policy=POLICIES[policy])
        found.events("prefill-0", KEYS[:3])
        found.events("prefill-1", KEYS[:1])
        for number in range(2):
            found.cluster.claim_prefill("prefill-0", 10.0, 0.0, queue_key=QueueKey("they", 1.0, number))
        return found

    def order(self, found: World, within_s: float) -> list[tuple[str, float]]:
        plan = found.plan(64, keys=KEYS, ttft_limit=TtftLimit(within_s, self.behind))
        assert plan.prefill == plan.candidates[0]
        return [(candidate.id, candidate.ttft_s) for candidate in plan.candidates]

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
        assert sorted(candidate.id for candidate in world("random").plan(64).candidates) == list(NAMES)


class TestLoadBalance:
    def test_queues_are_levelled(self) -> None:
        found = unlike("load_balance")
        assert [found.serve(64)[0][-1] for _ in range(5)] == ["1", "2", "0", "1", "2"]


def pipelines(*, wide: float = 0.0, narrow: float = 0.0) -> World:
    """A pipeline of four stages and a single instance of the same speeds, with these seconds of queue."""
    shapes: dict[str, dict[str, Any]] = {"prefill-0": {"stages": 4}, "prefill-1": {}}
    engines = (
        facts(name, speeds=SECOND_PER_TOKEN, max_num_batched_tokens=STEP_TOKENS, **shape)
        for name, shape in shapes.items()
    )
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


SECONDS = st.sampled_from([0.0, 1e-4, 3e-3, 0.2])
SPEEDS = st.builds(
    Speeds,
    prefill_base_s=SECONDS,
    prefill_per_token_s=st.sampled_from([1e-4, 1.04e-4, 2e-3, 0.1]),
    prefill_per_pair_s=st.sampled_from([0.0, 1e-7]),
    decode_base_s=st.sampled_from([1e-3, 1.3e-3, 0.05]),
    decode_per_sequence_s=SECONDS,
    decode_per_context_token_s=st.sampled_from([0.0, 1e-6]),
)
ENGINES = st.lists(st.tuples(SPEEDS, st.sampled_from([1, 2, 4]), st.sampled_from([0, 16, 256])), min_size=1, max_size=8)
FACTORS = st.sampled_from([0.5, 0.99, 1.0, 1.01, 4.0])


def prefills(engines: list[tuple[Speeds, int, int]]) -> list[InstanceFacts]:
    return [
        facts(f"prefill-{number}", speeds=speeds, stages=stages, max_num_batched_tokens=max_num_batched_tokens)
        for number, (speeds, stages, max_num_batched_tokens) in enumerate(engines)
    ]


def alone_s(facts_of: InstanceFacts, tokens: int) -> float:
    """Predicted time to first token when nobody else is there."""
    demand = Demand(tokens, SHAPE.blocks_for(tokens), SHAPE.blocks_for(tokens), 1)
    return (
        PrefillLatencyModel(demand, SHAPE, (), 1.0)
        .cost(facts_of.speeds, facts_of.stages, facts_of.max_num_batched_tokens, 0)
        .alone_s
    )


@settings(max_examples=examples(150))
@given(ENGINES, ENGINES, st.integers(1, 600), FACTORS, FACTORS, st.sampled_from(AdmissionMode))
def test_an_idle_cluster_refuses_only_what_nobody_could_keep(
    computing: list[tuple[Speeds, int, int]],
    decoding: list[tuple[Speeds, int, int]],
    tokens: int,
    ttft_factor: float,
    tbt_factor: float,
    admission: AdmissionMode,
) -> None:
    engines = prefills(computing)
    decodes = [facts(f"decode-{number}", speeds=speeds) for number, (speeds, *_) in enumerate(decoding)]
    slo = SloLimits(
        ttft_factor * min(alone_s(engine, tokens) for engine in engines),
        tbt_factor * min(decode_step_seconds(decode.speeds, 1, tokens) for decode in decodes),
    )
    core = ConductorCore(replace(LIMITS, admission=admission), ClusterView())
    out: list[Action] = []
    for instance in (*engines, *decodes):
        core.handle(0.0, InstanceJoined(instance), out)
    core.handle(0.0, RequestArrived(RequestSpec(1, "r1", tokens, 8, b"key", slo, 0.0, 600.0), ()), out)
    refused = [action.failure.reason for action in out if isinstance(action, FailRequest)]
    limits = [("ttft_slo", ttft_factor), ("tbt_slo", tbt_factor)] if admission is not AdmissionMode.NONE else []
    assert refused == [reason for reason, factor in limits if factor < 1][:1]
    assert len([action for action in out if isinstance(action, CallReserve)]) == 1 - len(refused)


@settings(max_examples=examples(150))
@given(
    SPEEDS,
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.0, 0.5, 3.0, 40.0])), min_size=2, max_size=12),
    st.integers(1, BLOCK_SIZE),
)
def test_a_prompt_of_one_step_goes_to_a_wide_pipeline_only_where_it_is_free_sooner(
    speeds: Speeds, pipelines: list[tuple[int, float]], tokens: int
) -> None:
    found = World(facts("decode-0"), *prefills([(speeds, stages, 64) for stages, _ in pipelines]))
    for number, (_, drain_s) in enumerate(pipelines):
        found.report(f"prefill-{number}", drain_s=drain_s)
    stages, queue_s = pipelines[int(found.plan(tokens).prefill.id.removeprefix("prefill-"))]
    assert all(other_s > queue_s for width, other_s in pipelines if width < stages)


@settings(max_examples=examples(100))
@given(st.sampled_from(list(POLICIES)), ENGINES, st.integers(0, 99), st.lists(st.integers(1, 600), max_size=12))
def test_equal_histories_give_equal_placements(
    policy: str, computing: list[tuple[Speeds, int, int]], seed: int, prompts: list[int]
) -> None:
    def placed() -> list[tuple[str, str]]:
        found = World(facts("decode-0"), *prefills(computing), policy=POLICIES[policy], seed=seed)
        return [found.serve(now=number / 10, tokens=tokens) for number, tokens in enumerate(prompts)]

    assert placed() == placed()


class TestShadow:
    def world(self, shadow: str) -> World:
        engines = (facts(name, speeds=SECOND_PER_TOKEN) for name in NAMES)
        return World(facts("decode-0"), *engines, shadow_policy=POLICIES[shadow])

    def test_it_decides_beside_the_real_one_and_changes_nothing(self) -> None:
        found, alone = self.world("load_balance"), world("social")
        for cluster in (found, alone):
            cluster.events("prefill-0", KEYS[:3])
            cluster.report("prefill-0", drain_s=10.0)
        plan = found.plan(64, keys=KEYS)
        assert plan == alone.plan(64, keys=KEYS)
        tally = found.cluster.prefills.shadow
        assert (tally.decisions, tally.agreed) == (1, 0)
        assert tally.sooner_s == pytest.approx(26.0 - 64.0), "the holder has its token in 26 s, the idle one in 64"

    def test_it_agrees_with_itself(self) -> None:
        found = self.world("social")
        for tokens in (16, 64, 32):
            found.serve(tokens=tokens)
        assert found.cluster.prefills.shadow == ShadowTally(3, 3, 0.0)
