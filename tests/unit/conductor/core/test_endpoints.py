"""Engines for requests that a proxy sends by itself: each counts as load until its engine answers."""

import random

from moonpool.conductor.core.actions import EndpointPicked
from moonpool.conductor.core.events import EndpointAsked, EndpointDone
from moonpool.conductor.core.failures import FailureKind
from moonpool.conductor.core.request_spec import RequestSpec, SloLimits
from tests.unit.conductor.core.world import World


def asked(world: World, number: int, *others: str, ttft_s: float | None = None, prompt: int = 40) -> EndpointPicked:
    spec = RequestSpec(number, f"p{number}", prompt, 8, b"key", SloLimits(ttft_s=ttft_s), world.now, world.now + 30.0)
    [picked] = world.post(EndpointAsked(spec, (), others))
    assert isinstance(picked, EndpointPicked)
    return picked


def test_prompts_count_at_their_engines_until_these_answer() -> None:
    world = World(prefills=2)
    first = asked(world, 1)
    second = asked(world, 2)
    assert {first.engines[0], second.engines[0]} == {"prefill-0", "prefill-1"}  # the first one's work counts
    assert sorted(first.engines) == ["prefill-0", "prefill-1"]
    assert len(world.core.cluster.claims) == 2
    for number in (1, 2, 2, 9):  # also twice, or never asked
        world.post(EndpointDone(number))
    assert not world.core.cluster.claims


def test_only_what_may_be_chosen_is() -> None:
    world = World(prefills=2)
    assert asked(world, 1, "prefill-0").engines == ("prefill-1",)
    refused = asked(world, 2, "prefill-0", "prefill-1")
    assert refused.failure is not None
    assert (refused.engines, refused.failure.kind) == ((), FailureKind.UNAVAILABLE)
    late = asked(world, 3, ttft_s=1e-6)
    assert late.failure is not None
    assert (late.failure.kind, late.failure.reason) == (FailureKind.OVERLOADED, "ttft_slo")
    assert len(world.core.cluster.claims) == 1  # refusals hold nothing


def test_a_walk_of_questions_answers_and_losses_leaves_nothing_behind() -> None:
    draw, world, open_ones = random.Random(8), World(prefills=3), set[int]()
    for number in range(1, 300):
        match draw.randrange(6):
            case 0 if open_ones:
                done = draw.choice(sorted(open_ones))
                open_ones.discard(done)
                world.post(EndpointDone(done))
            case 1:
                name = f"prefill-{draw.randrange(3)}"
                world.leave(name)
                world.join_prefill(name)
            case _:
                others = [f"prefill-{at}" for at in range(3) if draw.random() < 0.3]
                if asked(world, number, *others).failure is None:
                    open_ones.add(number)
        world.core.check_invariants()
    for number in sorted(open_ones):
        world.post(EndpointDone(number))
    assert not world.core.cluster.claims
