"""Whom prefixes are loaded from: kvstores and other engine instances, the backlog of their links, what is learnt."""

import pytest

from moonpool.conductor.core.kv_links import LinkRead
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.policies import POLICIES

from .worlds import SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(8)]
READ_S = 3 * 16 * 10 / 100.0
"""Of three blocks, at the rate at which the instances load."""


def cluster(*others: str, **settings: object) -> World:
    """Two prefill instances that compute a token a second, a decode instance, and others."""
    engines = [facts(name, speeds=SECOND_PER_TOKEN) for name in ("prefill-0", "prefill-1")]
    return World(facts("decode-0"), *engines, *map(facts, others), **{"peers": True, **settings})


def rows(plan: RoutingDecision) -> list[tuple[str, int, str]]:
    return [(candidate.id, candidate.used_blocks, candidate.source) for candidate in plan.candidates]


def claim(world: World, plan: RoutingDecision, now: float = 0.0) -> int:
    best = plan.prefill
    return world.cluster.claim_prefill(best.id, best.busy_s, now, best.source, None, LinkRead.of(best))


@pytest.mark.parametrize("holder", ["prefill-1", "decode-0"])
def test_a_prefix_is_loaded_from_a_peer_where_that_is_soonest(holder: str) -> None:
    """Its holder has a long queue, or computes no prompts."""
    world = cluster()
    world.events(holder, KEYS[:3])
    world.report("prefill-1", drain_s=50.0)
    plan = world.plan(64, keys=KEYS[:4])
    assert (plan.prefill.id, plan.prefill.used_blocks, plan.prefill.source) == ("prefill-0", 3, holder)
    assert (plan.prefill.prefill_s, plan.prefill.read_s) == (16.0, READ_S)
    assert plan.sources == (PrefixHolder(holder, 3, peer=True),)


def test_each_candidate_has_a_source_of_its_own() -> None:
    """Who holds something itself loads from who holds more."""
    world = cluster()
    world.events("prefill-0", KEYS[:1])
    world.events("prefill-1", KEYS[:3])
    world.report("prefill-1", drain_s=15.0)
    assert rows(world.plan(64, keys=KEYS[:4])) == [("prefill-0", 3, "prefill-1"), ("prefill-1", 3, "")]


def test_without_peers_only_stores_are_read() -> None:
    world = cluster("kvstore-0", peers=False)
    world.events("decode-0", KEYS[:3])
    world.events("kvstore-0", KEYS[:2])
    assert world.plan(64, keys=KEYS[:4]).sources == (PrefixHolder("kvstore-0", 2),)


@pytest.mark.parametrize("policy", ["cache_aware", "load_balance", "round_robin", "random"])
def test_the_baselines_know_of_no_peers(policy: str) -> None:
    world = cluster(policy=POLICIES[policy])
    world.events("decode-0", KEYS[:3])
    assert {source for _, _, source in rows(world.plan(64, keys=KEYS[:4]))} == {""}


def test_the_longest_prefix_first_and_others_if_it_fails() -> None:
    """A store that holds as much goes before a peer; who holds less comes last."""
    world = cluster("kvstore-0")
    for holder, blocks in (("kvstore-0", 2), ("decode-0", 3), ("prefill-1", 2)):
        world.events(holder, KEYS[:blocks])
    world.report("prefill-1", drain_s=50.0)
    plan = world.plan(64, keys=KEYS[:4])
    assert [(source.id, source.blocks) for source in plan.sources] == [
        ("decode-0", 3),
        ("kvstore-0", 2),
        ("prefill-1", 2),
    ]
    world.events("kvstore-0", KEYS[2:3])
    assert [source.id for source in world.plan(64, keys=KEYS[:4]).sources][:2] == ["kvstore-0", "decode-0"]


def test_reads_count_at_once_and_the_freer_holder_is_asked() -> None:
    """Two hold the same; each read that was placed makes its holder's link busier, until the prompt has its token."""
    world = cluster()
    world.join(facts("decode-1"))
    for holder in ("decode-0", "decode-1"):
        world.events(holder, KEYS[:3])
    first = world.plan(64, keys=KEYS[:4])
    number = claim(world, first)
    second = world.plan(64, keys=KEYS[:4])
    assert (first.prefill.source, second.prefill.source) == ("decode-0", "decode-1")
    claim(world, second)
    third = world.plan(64, keys=KEYS[:4])
    assert third.sources[0].wait_s == READ_S
    assert third.prefill.load_s == pytest.approx(2 * READ_S)
    assert world.cluster.reads_in_flight == 2
    world.cluster.release(number, 1.0)
    assert world.plan(64, keys=KEYS[:4], now=1.0).sources[0] == PrefixHolder("decode-0", 3, peer=True)


def test_what_a_prompt_sends_to_decode_keeps_its_instances_link_busy() -> None:
    """All 64 tokens, as decode holds nothing of them; at the rate at which the instance sends."""
    world = cluster()
    world.events("prefill-1", KEYS[:3])
    plan = world.plan(64, keys=KEYS[4:])
    assert plan.send_s == 640 / 100.0
    number = world.cluster.claim_prefill("prefill-1", 0.0, 0.0, send_s=plan.send_s)
    world.report("prefill-1", drain_s=50.0)
    assert world.plan(64, keys=KEYS[:4]).sources == (PrefixHolder("prefill-1", 3, wait_s=6.4, peer=True),)
    assert world.cluster.reads_in_flight == 0
    world.cluster.release(number, 1.0)
    assert world.plan(64, keys=KEYS[:4], now=1.0).sources == (PrefixHolder("prefill-1", 3, peer=True),)


def test_decode_is_not_sent_what_it_holds() -> None:
    world = cluster()
    world.events("decode-0", KEYS[:3])
    assert world.plan(64, keys=KEYS[:4]).send_s == 160 / 100.0
    assert world.plan(64, keys=KEYS[:4], answer_tokens=1).send_s == 0.0


def test_a_busy_link_makes_computing_cheaper() -> None:
    world = cluster()
    world.events("decode-0", KEYS[:3])
    world.cluster.claim_prefill("prefill-0", 0.0, 0.0, "decode-0", None, LinkRead(60.0))
    assert {source for _, _, source in rows(world.plan(64, keys=KEYS[:4]))} == {""}
    assert {source for _, _, source in rows(world.plan(64, keys=KEYS[:4], now=50.0))} == {"decode-0"}


def test_rates_are_learnt_of_reads_that_have_the_link_to_themselves() -> None:
    """A link is slower than the instances load: believed by a fifth, after one read, and for a minute."""
    world = cluster()
    world.events("decode-0", KEYS[:3])
    alone = claim(world, world.plan(64, keys=KEYS[:4]))
    world.cluster.read_measured(alone, "prefill-1", 3, 100.0, 1.0)  # not the one that it was to read from
    world.cluster.read_measured(alone, "decode-0", 3, 2 * READ_S, 1.0)
    world.cluster.release(alone, 1.0)
    [source] = world.plan(64, keys=KEYS[:4], now=1.0).sources
    assert source.bytes_per_s == pytest.approx(1 / (0.8 / 100 + 0.2 / 50))
    assert world.plan(64, keys=KEYS[:4], now=1.0).prefill.read_s == pytest.approx(480 / source.bytes_per_s)
    first, other = (claim(world, world.plan(64, keys=KEYS[:4], now=1.0), 1.0) for _ in range(2))
    for number in (first, other):
        world.cluster.read_measured(number, "decode-0", 3, 100.0, 2.0)
        world.cluster.release(number, 2.0)
    assert world.plan(64, keys=KEYS[:4], now=2.0).sources == (source,)
    assert world.plan(64, keys=KEYS[:4], now=61.0).sources[0].bytes_per_s == 0.0


def test_what_a_kvstore_has_on_ssd_only_has_a_rate_of_its_own() -> None:
    """Of three blocks the first is in DRAM. The read takes twice as long as foreseen; two thirds are the SSD's."""
    world = cluster()
    world.join(facts("kvstore-0", reports_ssd=True))
    world.events("kvstore-0", KEYS[:3], cooled=KEYS[1:3])
    plan = world.plan(64, keys=KEYS[:4])
    assert plan.sources == (PrefixHolder("kvstore-0", 3, warm=1),)
    assert [plan.sources[0].cold_blocks(local) for local in range(4)] == [2, 2, 1, 0]
    assert (plan.prefill.read_s, plan.prefill.cold_blocks) == (READ_S, 2)
    number = claim(world, plan)
    world.cluster.read_measured(number, "kvstore-0", 3, 2 * READ_S, 1.0)
    world.cluster.release(number, 1.0)
    plan = world.plan(64, keys=KEYS[:4], now=1.0)
    [source] = plan.sources
    assert source.bytes_per_s == 0.0
    assert source.cold_bytes_per_s == pytest.approx(1 / (0.8 / 100 + 0.2 / 50))
    assert plan.prefill.read_s == pytest.approx(160 / 100 + 320 / source.cold_bytes_per_s)
    world.events("kvstore-0", KEYS[1:3])
    warm = world.plan(64, keys=KEYS[:4], now=1.0).prefill
    assert (warm.read_s, warm.cold_blocks) == (READ_S, 0)
    world.events("kvstore-0", (), cooled=KEYS[:1])
    assert world.plan(64, keys=KEYS[:4], now=1.0).prefill.cold_blocks == 3, "who has the first block, has all warm ones"
    assert world.plan(64, keys=KEYS[:4], now=61.0).sources[0].cold_bytes_per_s == 0.0


def test_a_prefix_on_a_slow_ssd_is_computed() -> None:
    """48 tokens take 48 s; a read from SSD was far slower, and believed for a minute."""
    world = cluster()
    world.join(facts("kvstore-0", reports_ssd=True))
    world.events("kvstore-0", KEYS[:3], cooled=KEYS[:3])
    for _ in range(9):
        number = claim(world, plan := world.plan(64, keys=KEYS[:4]))
        world.cluster.read_measured(number, "kvstore-0", 3, 100 * READ_S, 0.0)
        world.cluster.release(number, 0.0)
    plan = world.plan(64, keys=KEYS[:4])
    assert (plan.prefill.source, plan.prefill.prefill_s) == ("", 64.0)
    world.events("kvstore-0", KEYS[:3])
    assert world.plan(64, keys=KEYS[:4]).prefill.read_s == READ_S


def test_slow_draining_and_suspected_instances_are_not_read() -> None:
    world = cluster()
    world.events("decode-0", KEYS[:3])
    assert world.plan(64, keys=KEYS[:4], suspects=("decode-0",)).sources == ()
    world.join(facts("decode-1"))
    world.report("decode-0", draining=True)
    assert world.plan(64, keys=KEYS[:4]).sources == ()


def test_a_miss_corrects_the_index() -> None:
    world = cluster()
    world.events("decode-0", KEYS[:3])
    plan = world.plan(64, keys=KEYS[:4])
    world.cluster.forget("decode-0", KEYS[1:2], plan.index_version)
    assert plan.prefill.source == "decode-0"
    assert world.plan(64, keys=KEYS[:4]).prefill.used_blocks == 1


def test_a_lost_instance_is_no_source() -> None:
    world = cluster()
    world.events("prefill-1", KEYS[:3])
    number = claim(world, world.plan(64, keys=KEYS[:4]))
    world.cluster.leave("prefill-1")
    assert world.plan(64, keys=KEYS[:4]).sources == ()
    world.cluster.release(number, 1.0)
    assert world.cluster.reads_in_flight == 0
