"""The cluster: plans from exact states, claims, and what must never happen again."""

import pickle
from dataclasses import replace

import pytest

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.events import KeysChanged

from .worlds import BLOCK_SIZE, SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(8)]
DECODE = facts("decode-0")


def prefills(*names: str, **changes: object) -> World:
    """A decode instance, and prefill instances that compute a token a second."""
    return World(DECODE, *(facts(name, speeds=SECOND_PER_TOKEN, **changes) for name in names))


class TestPrefill:
    def test_a_cached_prefix_wins_until_its_queue_is_longer_than_computing(self) -> None:
        world = prefills("prefill-0", "prefill-1")
        world.events("prefill-1", KEYS[:2])
        world.report("prefill-1", drain_s=31.0, free_blocks=98)
        plan = world.plan(64, keys=KEYS[:4])
        assert [(c.id, c.local_blocks, c.ttft_s) for c in plan.candidates] == [
            ("prefill-1", 2, 31.0 + 32.0),
            ("prefill-0", 0, 64.0),
        ]
        world.report("prefill-1", drain_s=33.0, free_blocks=98)
        assert world.plan(64, keys=KEYS[:4]).prefill.id == "prefill-0"

    @pytest.mark.parametrize(("tokens", "computed"), [(63, 15), (64, 1), (65, 1)])
    def test_the_last_token_is_always_computed(self, tokens: int, computed: int) -> None:
        world = prefills("prefill-0")
        world.events("prefill-0", KEYS[:4])
        assert world.plan(tokens, keys=KEYS[: tokens // 16]).prefill.prefill_s == computed

    def test_a_stored_prefix_is_loaded_where_that_is_cheaper(self) -> None:
        world = prefills("prefill-0")
        for name in ("kvstore-0", "kvstore-1"):
            world.join(facts(name))
        world.events("prefill-0", KEYS[:1])
        world.events("kvstore-0", KEYS[:3])
        world.events("kvstore-1", KEYS[:2])
        plan = world.plan(64, keys=KEYS[:4])
        assert (plan.prefill.source, plan.prefill.used_blocks, plan.prefill.prefill_s) == ("kvstore-0", 3, 16.0)
        assert plan.prefill.load_s == pytest.approx(3.2)
        assert [(view.id, view.blocks) for view in plan.sources] == [("kvstore-0", 3), ("kvstore-1", 2)]
        world.report("prefill-0", speeds=Speeds(prefill_per_token_s=1.0, load_bytes_per_s=1.0))
        best = world.plan(64, keys=KEYS[:4]).prefill
        assert (best.source, best.used_blocks, best.load_s, best.prefill_s) == ("", 1, 0.0, 48.0)

    @pytest.mark.parametrize(("threshold", "kvstore"), [(1.0, "kvstore-0"), (1.5, "")])
    def test_the_balancing_threshold_keeps_a_local_prefix_that_is_nearly_as_long(
        self, threshold: float, kvstore: str
    ) -> None:
        engine = facts("prefill-0", speeds=SECOND_PER_TOKEN)
        world = World(DECODE, engine, facts("kvstore-0"), balancing_threshold=threshold)
        world.events("prefill-0", KEYS[:2])
        world.events("kvstore-0", KEYS[:3])
        assert world.plan(64, keys=KEYS[:4]).prefill.source == kvstore

    def test_suspects_come_last_and_those_that_cannot_are_told_with_the_reason(self) -> None:
        world = prefills("prefill-0", "prefill-1", "prefill-2")
        world.join(facts("prefill-3", total_blocks=3, speeds=SECOND_PER_TOKEN))
        world.report("prefill-2", drain_s=0.0, draining=True)
        world.events("prefill-0", KEYS[:4])
        plan = world.plan(64, keys=KEYS[:4], suspects={"prefill-0", "gone"})
        assert [(choice.id, choice.excluded) for choice in plan.candidates] == [
            ("prefill-1", ""),
            ("prefill-0", ""),
            ("prefill-2", "draining"),
            ("prefill-3", "too small: 3 blocks, the prompt needs 4"),
        ]

    def test_who_was_idle_longest_comes_first(self) -> None:
        world = prefills("prefill-2", "prefill-0", "prefill-1")
        chosen = []
        for number in range(6):
            now = 20.0 + 100 * number
            plan = world.plan(now=now)
            claim = world.cluster.claim_prefill(plan.prefill.id, plan.prefill.busy_s, now)
            world.cluster.release(claim, now + 64)
            for name in ("prefill-0", "prefill-1", "prefill-2"):
                world.report(name, now=now + 65, drain_s=0.0)
            chosen.append(plan.prefill.id)
        assert chosen == ["prefill-0", "prefill-1", "prefill-2"] * 2

    def test_one_token_needs_no_decode(self) -> None:
        world = prefills("prefill-0")
        assert world.plan(5, answer_tokens=1).decodes == ()


class TestPipelines:
    """Steps of a pipeline overlap; and each queued prompt counts for itself."""

    def test_a_pipeline_is_not_predicted_as_slow_as_its_stages_one_after_the_other(self) -> None:
        world = prefills("prefill-0", stages=4, max_num_batched_tokens=16)
        best = world.plan(64).prefill  # four steps of 16 s each, which begin 4 s after each other
        assert (best.prefill_s, best.busy_s) == (16.0 + 3 * 4.0, 64.0 / 4)
        assert prefills("prefill-0", stages=1, max_num_batched_tokens=16).plan(64).prefill.prefill_s == 64.0

    def test_the_next_prompt_waits_for_what_the_first_keeps_busy(self) -> None:
        world = prefills("prefill-0", stages=4, max_num_batched_tokens=16)
        world.serve()
        assert world.plan(64).prefill.queue_s == 16.0

    def test_a_step_that_takes_long_because_of_its_stages_is_not_learnt_as_slow(self) -> None:
        world = prefills("prefill-0", stages=4, max_num_batched_tokens=16)
        for _ in range(20):
            world.cluster.first_token(world.plan(64), 64, 28.0, 0.0, 0.0)
        assert world.plan(64).prefill.prefill_s == pytest.approx(28.0)

    def test_a_hundred_prompts_take_a_hundred_times_as_long_as_one(self) -> None:
        quadratic = Speeds(prefill_per_pair_s=1.0)
        world = World(DECODE, facts("prefill-0", speeds=quadratic, total_blocks=10_000))
        busy_s = world.plan(64).prefill.busy_s
        for _ in range(100):
            world.serve()
        assert world.plan(64).prefill.queue_s == pytest.approx(100 * busy_s)
        world.report("prefill-0", drain_s=100 * busy_s)  # and reports are in seconds, not in tokens
        assert world.plan(64).prefill.queue_s == pytest.approx(200 * busy_s)  # it has not said that it knows ours


class TestClaims:
    def test_a_burst_spreads(self) -> None:
        speeds = Speeds(prefill_per_token_s=1.0, decode_per_sequence_s=1.0)
        world = World(*(facts(f"{kind}-{n}", speeds=speeds) for kind in ("prefill", "decode") for n in range(2)))
        chosen = [world.serve() for _ in range(4)]
        assert chosen == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")] * 2

    def test_a_prompt_counts_until_a_report_includes_it(self) -> None:
        world = prefills("prefill-0")
        cluster = world.cluster
        claim = cluster.claim_prefill("prefill-0", 10.0, 0.0)
        world.report("prefill-0", now=1.0, drain_s=5.0)  # made before the prompt came
        assert world.plan(now=1.0).prefill.queue_s == 15.0
        cluster.acknowledged(claim)
        assert world.plan(now=2.0).prefill.queue_s == 14.0
        world.report("prefill-0", now=2.0, drain_s=13.0)
        assert world.plan(now=2.0).prefill.queue_s == 13.0
        cluster.release(claim, 3.0)
        cluster.release(claim, 3.0)
        assert world.plan(now=3.0).prefill.queue_s == 12.0
        assert cluster.prompts_in_flight == 0

    def test_a_report_says_how_many_prompts_it_includes(self) -> None:
        """It comes on another stream than the answers to requests, before or after them."""
        world = prefills("prefill-0")
        cluster = world.cluster
        first, second = (cluster.claim_prefill("prefill-0", 10.0, 0.0) for _ in range(2))
        world.report("prefill-0", drain_s=10.0, taken=8)
        assert world.plan().prefill.queue_s == 30.0
        cluster.acknowledged(first, 8)  # the report was quicker
        assert world.plan().prefill.queue_s == 20.0
        cluster.acknowledged(second, 9)
        world.report("prefill-0", drain_s=10.0, taken=8)  # and this one slower: it was made before
        assert world.plan().prefill.queue_s == 20.0
        world.report("prefill-0", drain_s=20.0, taken=9)
        assert world.plan().prefill.queue_s == 20.0

    def test_a_report_says_how_many_promises_it_includes(self) -> None:
        world = World(facts("prefill-0"), facts("decode-0"))
        cluster = world.cluster
        first, second = (cluster.claim_decode("decode-0", PlacedAnswer(16, 1)) for _ in range(2))
        world.report("decode-0", free_blocks=9, promised_blocks=1, taken=8, waiting=1)
        cluster.acknowledged(first, 8)
        cluster.acknowledged(second, 9)
        assert cluster.blocks_unreported == 1
        world.report("decode-0", free_blocks=9, promised_blocks=1, taken=8, waiting=1)
        assert cluster.blocks_unreported == 1
        world.report("decode-0", free_blocks=9, promised_blocks=2, taken=9, waiting=2)
        assert cluster.blocks_unreported == 0
        cluster.check_invariants()

    def test_a_prompt_that_never_came_leaves_nothing(self) -> None:
        world = prefills("prefill-0")
        world.report("prefill-0", now=0.0, drain_s=5.0)
        claim = world.cluster.claim_prefill("prefill-0", 10.0, 1.0)
        assert world.plan(now=1.0).prefill.queue_s == 14.0
        world.cluster.release(claim, 2.0)
        assert world.plan(now=2.0).prefill.queue_s == 3.0

    def test_without_drain_times_our_own_prompts_are_worked_off_in_order(self) -> None:
        world = prefills("prefill-0")
        first = world.cluster.claim_prefill("prefill-0", 4.0, 10.0)
        second = world.cluster.claim_prefill("prefill-0", 2.0, 11.0)
        world.report("prefill-0", now=11.0)
        assert world.plan(now=11.0).prefill.queue_s == 5.0
        world.cluster.release(first, 12.0)
        assert world.plan(now=13.0).prefill.queue_s == 1.0
        world.cluster.release(second, 13.0)
        assert world.plan(now=13.0).prefill.queue_s == 0.0

    def test_an_answers_room_counts_until_a_report_includes_it(self) -> None:
        world = World(facts("prefill-0"), facts("decode-0"), facts("decode-1"))
        cluster = world.cluster
        world.report("decode-0", free_blocks=10)
        claim = cluster.claim_decode("decode-0", PlacedAnswer(64, 8))
        assert [c.id for c in world.plan(64).decodes] == ["decode-1", "decode-0"]
        assert cluster.blocks_unreported == 8
        world.report("decode-0", free_blocks=10)  # made before it was promised
        assert cluster.blocks_unreported == 8
        cluster.acknowledged(claim)
        world.report("decode-0", free_blocks=10, promised_blocks=8, waiting=1)
        assert (cluster.blocks_unreported, cluster.answers_in_flight) == (0, 1)
        cluster.release(claim, 1.0)
        assert cluster.answers_in_flight == 0
        cluster.check_invariants()

    def test_an_instance_that_is_gone_takes_its_claims_along(self) -> None:
        world = prefills("prefill-0")
        claims = [
            world.cluster.claim_prefill("prefill-0", 10.0, 0.0),
            world.cluster.claim_decode("decode-0", PlacedAnswer(1, 1)),
        ]
        world.cluster.leave("prefill-0")
        world.join(facts("prefill-0", epoch=2, speeds=SECOND_PER_TOKEN))
        assert world.plan().prefill.queue_s == 0.0
        for claim in claims:
            world.cluster.release(claim, 1.0)
        assert world.cluster.claim_prefill("nobody", 1.0, 1.0) not in claims
        world.cluster.check_invariants()

    def test_the_same_process_that_joins_again_keeps_its_claims_and_a_new_one_does_not(self) -> None:
        world = prefills("prefill-0")
        world.cluster.claim_prefill("prefill-0", 10.0, 0.0)
        again = facts("prefill-0", speeds=SECOND_PER_TOKEN)
        world.join(again)
        assert world.plan().prefill.queue_s == 10.0
        world.join(replace(again, epoch=2))
        assert world.plan().prefill.queue_s == 0.0


class TestDecode:
    STEP = Speeds(decode_base_s=1.0, decode_per_sequence_s=0.5, transfer_bytes_per_s=10.0)

    def world(self, *decodes: str) -> World:
        return World(facts("prefill-0"), *(facts(name, speeds=self.STEP, total_blocks=50) for name in decodes))

    def test_load_is_weighed_against_the_kv_it_holds(self) -> None:
        world = self.world("decode-0", "decode-1")
        world.report("decode-1", running=1, free_blocks=50)
        world.events("decode-1", KEYS[:4])
        plan = world.plan(64, keys=KEYS[:4], answer_tokens=11)
        assert [(c.id, c.tbt_s, c.finish_s) for c in plan.decodes] == [
            ("decode-1", 2.0, 20.0),
            ("decode-0", 1.5, 64.0 + 15.0),
        ]

    def test_without_room_comes_last_and_too_small_never(self) -> None:
        world = self.world("decode-0", "decode-1")
        world.join(facts("decode-2", speeds=self.STEP, total_blocks=4))
        world.report("decode-0", free_blocks=4)
        world.report("decode-1", running=9, free_blocks=50)
        assert [choice.id for choice in world.plan(64).decodes] == ["decode-1", "decode-0"]

    def test_room_is_what_an_answer_is_expected_to_need_there(self) -> None:
        world = self.world("decode-0", "decode-1", "decode-2")
        world.report("decode-0", running=9, free_blocks=10, answer_tokens=16)
        world.report("decode-1", running=8, free_blocks=10, answer_tokens=100)
        world.report("decode-2", free_blocks=10)  # does not tell: the longest is expected
        plan = world.plan(64, answer_tokens=320)
        assert [(choice.id, choice.blocks) for choice in plan.decodes] == [
            ("decode-0", 5),
            ("decode-2", 24),
            ("decode-1", 11),
        ]
        for _ in range(2):
            world.cluster.claim_decode("decode-0", PlacedAnswer(64, plan.decodes[0].blocks))
        assert world.cluster.decodes.available_of("decode-0") == (0, 50)
        assert world.plan(64, answer_tokens=320).decodes[0].id == "decode-2"

    def test_an_answer_is_not_expected_to_be_longer_than_asked_for(self) -> None:
        world = self.world("decode-0")
        world.report("decode-0", free_blocks=50, answer_tokens=1000)
        assert world.plan(64, answer_tokens=32).decodes[0].blocks == 6

    @pytest.mark.parametrize(("slower", "busy", "first"), [(1.4, 1, "slow"), (2.0, 1, "fast"), (10.0, 1, "fast")])
    def test_within_noise_fewer_sequences_beyond_it_the_speed(self, slower: float, busy: int, first: str) -> None:
        step = Speeds(decode_base_s=0.01, transfer_bytes_per_s=1e12)
        world = World(facts("prefill-0"), facts("decode-0", speeds=step))
        world.join(facts("decode-1", speeds=replace(step, decode_base_s=0.01 * slower)))
        for name in ("decode-0", "decode-1"):  # both have served, so both are known
            world.cluster.release(world.cluster.claim_decode(name, PlacedAnswer(1, 1)), 0.0)
        world.report("decode-0", running=busy, free_blocks=100)
        assert world.plan().decodes[0].id == {"fast": "decode-0", "slow": "decode-1"}[first]


class TestSpeeds:
    def test_reports_do_not_undo_what_was_learnt(self) -> None:
        world = prefills("prefill-0")
        for number in range(40):
            world.cluster.first_token(world.plan(64), 64, 128.0, 0.0, 0.0)
            told = replace(SECOND_PER_TOKEN, prefill_per_token_s=1.0 + number % 2 * 1e-3)
            world.report("prefill-0", drain_s=0.0, speeds=told)
        assert world.plan(64).prefill.prefill_s == pytest.approx(128.0, rel=0.1)

    def test_a_new_process_starts_from_what_it_tells(self) -> None:
        world = prefills("prefill-0")
        world.cluster.first_token(world.plan(64), 64, 128.0, 0.0, 0.0)
        world.join(facts("prefill-0", epoch=2, speeds=SECOND_PER_TOKEN))
        assert world.plan(64).prefill.prefill_s == 64.0


class TestWhoCannot:
    def test_unavailable_says_who_is_missing(self) -> None:
        with pytest.raises(Unavailable, match="joined"):
            World().plan()
        with pytest.raises(Unavailable, match=r"missing: decode"):
            World(facts("prefill-0")).plan()

    def test_what_is_larger_than_everyone_is_invalid(self) -> None:
        world = prefills("prefill-0")
        with pytest.raises(InvalidRequest) as caught:
            world.plan(64, answer_tokens=100 * BLOCK_SIZE)
        assert caught.value.field == "sampling.max_tokens"
        with pytest.raises(InvalidRequest) as caught:
            world.plan(101 * BLOCK_SIZE)
        assert caught.value.field == "prompt"

    @pytest.mark.parametrize("kind", ["prefill", "decode"])
    @pytest.mark.parametrize("gone", [False, True])
    def test_what_fits_the_large_one_that_drains_or_is_gone_may_be_tried_again(self, kind: str, gone: bool) -> None:
        large, small = facts(f"{kind}-1"), facts(f"{kind}-2", total_blocks=5)
        world = World(facts("prefill-0" if kind == "decode" else "decode-0"), large, small)
        if gone:
            world.cluster.leave(large.id)
        else:
            world.report(large.id, free_blocks=100, drain_s=0.0, draining=True)
        with pytest.raises(Unavailable):
            world.plan(6 * BLOCK_SIZE)
        assert world.plan(4 * BLOCK_SIZE).prefill.id
        world.join(replace(large, epoch=2))
        assert world.plan(6 * BLOCK_SIZE).prefill.id


def test_a_resync_gives_an_instance_another_slot_and_nothing_else_changes() -> None:
    world = prefills("prefill-0", "prefill-1")
    world.events("prefill-0", KEYS[:4])
    world.report("prefill-0", drain_s=3.0)
    cluster = world.cluster
    gap = KeysChanged("prefill-0", 99, tuple(KEYS[4:]), (), snapshot_begin=False, snapshot_end=False)
    assert cluster.keys_changed(gap)
    best = world.plan(64, keys=KEYS[:4])
    found = [(choice.id, choice.local_blocks, choice.queue_s) for choice in best.candidates]
    assert found == [("prefill-1", 0, 0.0), ("prefill-0", 0, 3.0)]
    snapshot = KeysChanged("prefill-0", 120, tuple(KEYS[:2]), (), snapshot_begin=True, snapshot_end=True)
    assert not cluster.keys_changed(snapshot)
    assert world.plan(64, keys=KEYS[:4]).prefill.local_blocks == 2


def test_a_miss_corrects_the_picture_unless_the_block_was_reported_since() -> None:
    world = prefills("prefill-0")
    world.join(facts("kvstore-0"))
    world.events("kvstore-0", KEYS[:3])
    plan = world.plan(64, keys=KEYS[:4])
    world.events("kvstore-0", KEYS[1:2])
    world.cluster.forget("kvstore-0", KEYS[1:3], plan.index_version)
    assert world.plan(64, keys=KEYS[:4]).prefill.used_blocks == 2


def test_it_goes_through_a_pickle() -> None:
    world = prefills("prefill-0", "prefill-1")
    world.join(facts("kvstore-0"))
    world.events("prefill-1", KEYS[:4])
    world.serve(keys=KEYS[:4])
    again: ClusterView = pickle.loads(pickle.dumps(world.cluster))
    again.check_invariants()
    assert again.digest() == world.cluster.digest()
    world.cluster.claim_decode("decode-0", PlacedAnswer(5, 1))
    assert again.digest() != world.cluster.digest()
