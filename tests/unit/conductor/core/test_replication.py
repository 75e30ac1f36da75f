"""Copies of hot prefixes: when one is ordered, from whom to whom, and within which budget."""

from collections.abc import Sequence

import pytest

from moonpool.conductor.core.replication import MAX_HOT_PREFIXES, PrefixReplication, ReplicatePrefix, ReplicationHint

from .worlds import SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(8)]


def wish(target: str = "prefill-1", source: str = "decode-0", gain_s: float = 1.0) -> ReplicationHint:
    return ReplicationHint(2, target, source, gain_s, read_s=1.0)


WISH = wish()
ORDER = ReplicatePrefix("prefill-1", tuple(KEYS[:2]), "decode-0", "tenant")


def ask(hot: PrefixReplication, times: Sequence[float], wish: ReplicationHint | None = WISH) -> list[bool]:
    """Whether a copy was ordered at each time."""
    found = [hot.placed(KEYS, wish, "tenant", now) for now in times]
    hot.check_invariants()
    assert all(order in (None, ORDER) for order in found)
    return [order is not None for order in found]


def test_several_prompts_must_have_lost_more_than_the_copy_takes() -> None:
    assert ask(PrefixReplication(0.1), [0.0, 1.0, 2.0]) == [False, False, True]
    cheap = wish(gain_s=0.1)
    assert ask(PrefixReplication(0.1), [0.1 * number for number in range(19)], cheap) == [False] * 19
    assert True in ask(PrefixReplication(0.1), [0.1 * number for number in range(25)], cheap)


def test_what_was_lost_long_ago_does_not_count() -> None:
    assert ask(PrefixReplication(0.1), [0.0, 60.0, 120.0, 180.0], wish(gain_s=1.4)) == [False] * 4


def test_one_prompt_is_no_demand_however_much_it_lost() -> None:
    assert ask(PrefixReplication(0.1), [0.0], wish(gain_s=1000.0)) == [False]
    assert ask(PrefixReplication(0.1), [0.0, 1.0]) == [False, False]
    assert ask(PrefixReplication(0.1), [0.0, 1.0, 2.0], None) == [False] * 3


def test_a_copy_uses_up_the_budget_of_both_ends() -> None:
    """A second on the link, of which a tenth may be used: the next one after ten seconds."""
    hot = PrefixReplication(0.1)
    assert ask(hot, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 11.9, 12.0]) == [False, False, True, *[False] * 4, True]
    elsewhere = wish(target="prefill-2", source="prefill-3")
    assert [hot.placed(KEYS[2:], elsewhere, "", 13.0 + number) for number in range(3)][2] is not None


def test_what_is_watched_is_bounded() -> None:
    """Those of most regret stay."""
    hot = PrefixReplication(0.1)
    chains = [[number.to_bytes(32, "big")] for number in range(2 * MAX_HOT_PREFIXES + 1)]
    for number, chain in enumerate(chains):
        hot.placed(chain, ReplicationHint(1, "prefill-1", "decode-0", 1.0 + number, 1e6), "", 0.0)
        hot.check_invariants()
    late, early = (ReplicationHint(1, "prefill-1", "decode-0", 0.5, 0.1) for _ in range(2))
    assert hot.placed(chains[-1], late, "", 0.0) is not None
    assert hot.placed(chains[0], early, "", 0.0) is None


def cluster(**settings: object) -> World:
    engines = [facts(name, speeds=SECOND_PER_TOKEN) for name in ("prefill-0", "prefill-1")]
    return World(facts("decode-0"), *engines, **{"peers": True, "copy_share": 0.1, **settings})


def test_a_plan_says_which_copy_it_would_have_gained_from() -> None:
    """The idle instance would have begun with the rest of the prompt; it must load the prefix now."""
    world = cluster()
    world.events("prefill-1", KEYS[:3])
    world.report("prefill-1", drain_s=50.0)
    plan = world.plan(64, keys=KEYS[:4])
    assert (plan.prefill.id, plan.prefill.source) == ("prefill-0", "prefill-1")
    assert plan.hint is not None
    assert plan.hint == ReplicationHint(3, "prefill-0", "prefill-1", plan.hint.gain_s, plan.prefill.read_s)
    assert plan.hint.gain_s == pytest.approx(plan.prefill.load_s)


def test_a_holder_that_has_time_leaves_nothing_to_wish_for() -> None:
    world = cluster()
    world.events("prefill-1", KEYS[:3])
    assert world.plan(64, keys=KEYS[:4]).hint is None
    world.events("prefill-0", KEYS[:3])
    world.report("prefill-1", drain_s=50.0)
    assert world.plan(64, keys=KEYS[:4]).hint is None


def test_nothing_is_wished_for_without_a_budget() -> None:
    world = cluster(copy_share=0.0)
    world.events("decode-0", KEYS[:3])
    assert world.plan(64, keys=KEYS[:4]).hint is None
