"""Clusters of several kinds of engines: KV stays within a domain, and requests go where they can be served."""

from typing import Any

import pytest

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.conductor.core.routing import RoutingDecision

from .worlds import BLOCK_SIZE, SECOND_PER_TOKEN, World, facts

CHAIN = [bytes([number]) * 32 for number in range(4)]
PROMPT: dict[str, Any] = {"tokens": 4 * BLOCK_SIZE, "keys": CHAIN}


def mixed(**settings: Any) -> World:
    """An engine of the domain "a", one of "b", and two instances of the cluster's own, with a kvstore."""
    world = World(**settings)
    for domain in ("a", "b"):
        world.join(facts(f"prefill-{domain}", kv_domain=domain, speeds=SECOND_PER_TOKEN, unsupported=("beam_width",)))
        world.join(facts(f"decode-{domain}", kv_domain=domain, speeds=SECOND_PER_TOKEN, unsupported=("beam_width",)))
    for name in ("prefill-own", "decode-own", "kvstore-own"):
        world.join(facts(name, speeds=SECOND_PER_TOKEN))
    for name in ("decode-a", "decode-b", "decode-own"):
        world.report(name, free_blocks=100)
    return world


def places(plan: RoutingDecision) -> tuple[str, list[str]]:
    return plan.prefill.id, [choice.id for choice in plan.decodes]


@pytest.mark.parametrize("domain", ["a", "b"])
def test_decode_is_where_the_prompts_kv_can_go(domain: str) -> None:
    world = mixed()
    world.events(f"prefill-{domain}", CHAIN)
    assert places(world.plan(**PROMPT)) == (f"prefill-{domain}", [f"decode-{domain}"])


def test_engines_of_a_domain_load_nothing_and_write_nothing_back() -> None:
    world = mixed(peers=True)
    world.events("kvstore-own", CHAIN)
    world.events("prefill-a", CHAIN)
    plan = world.plan(**PROMPT)
    assert plan.prefill.id == "prefill-a"
    assert (plan.sources, plan.write_back) == ((), ())


def test_an_engine_that_uses_kvstores_by_itself_is_expected_to_load() -> None:
    world = mixed()
    world.join(facts("prefill-c", kv_domain="c", speeds=SECOND_PER_TOKEN, uses_kvstores=True))
    world.join(facts("decode-c", kv_domain="c", speeds=SECOND_PER_TOKEN))
    world.report("decode-c", free_blocks=100)
    world.report("prefill-own", draining=True)
    world.events("kvstore-own", CHAIN)
    plan = world.plan(**PROMPT)
    assert plan.prefill.id == "prefill-c"  # the others of a domain would compute the prompt
    assert [source.id for source in plan.sources] == ["kvstore-own"]
    assert [store.id for store in plan.write_back] == ["kvstore-own"]
    [other] = [choice for choice in plan.candidates if choice.id == "prefill-a"]
    assert plan.prefill.used_blocks > other.used_blocks == 0


def test_nobody_loads_from_another_domain() -> None:
    world = mixed(peers=True)
    world.events("prefill-a", CHAIN)
    world.report("decode-a", draining=True)
    plan = world.plan(**PROMPT)
    assert plan.prefill.id != "prefill-a"
    assert plan.sources == ()
    own = next(choice for choice in plan.candidates if choice.id == "prefill-own")
    assert (own.source, own.used_blocks) == ("", 0)


def test_an_engine_whose_decode_side_takes_nothing_gets_no_prompt() -> None:
    world = mixed()
    world.events("prefill-a", CHAIN)
    world.report("decode-a", draining=True)
    plan = world.plan(**PROMPT)
    assert plan.prefill.id != "prefill-a"
    [left_out] = [choice for choice in plan.candidates if choice.id == "prefill-a"]
    assert left_out.excluded == "no decode instance can take its KV now"
    assert world.plan(**PROMPT, answer_tokens=1).prefill.id == "prefill-a"  # one token needs no decode instance


def test_an_engine_whose_decode_side_failed_the_request_comes_last() -> None:
    world = mixed()
    world.events("prefill-a", CHAIN)
    plan = world.plan(**PROMPT, suspects=["decode-a"])
    assert plan.prefill.id != "prefill-a"
    alone = World(facts("prefill-a", kv_domain="a"), facts("decode-a", kv_domain="a"))
    assert places(alone.plan(**PROMPT, suspects=["decode-a"])) == ("prefill-a", ["decode-a"])


def test_a_request_goes_where_its_options_are() -> None:
    world = mixed()
    world.events("prefill-a", CHAIN)
    plan = world.plan(**PROMPT, needs=("n", "beam_width"))
    assert places(plan) == ("prefill-own", ["decode-own"])
    reasons = {choice.id: choice.excluded for choice in plan.candidates}
    assert reasons["prefill-a"] == reasons["prefill-b"] == "cannot serve beam_width"


def test_an_option_that_no_engine_has_is_refused_by_name() -> None:
    world = World(
        facts("prefill-a", kv_domain="a", unsupported=("beam_width", "embedding")),
        facts("decode-a", kv_domain="a", unsupported=("beam_width",)),
    )
    with pytest.raises(InvalidRequest) as error:
        world.plan(needs=("n", "beam_width"))
    assert error.value.field == "sampling.beam_width"
    world.join(facts("prefill-own"))
    world.join(facts("decode-own"))
    assert places(world.plan(needs=("n", "beam_width"))) == ("prefill-own", ["decode-own"])
    world.report("prefill-own", draining=True)  # it comes back, perhaps: that is no fault of the request
    with pytest.raises(Unavailable):
        world.plan(needs=("beam_width",))


def test_instances_that_leave_take_their_domain_along() -> None:
    world = mixed()
    for name in ("prefill-a", "decode-a", "prefill-own", "decode-own"):
        world.cluster.leave(name)
    assert places(world.plan(**PROMPT)) == ("prefill-b", ["decode-b"])
    assert world.cluster.paired("prefill-b", "decode-b")
    assert not world.cluster.paired("prefill-b", "decode-a")
