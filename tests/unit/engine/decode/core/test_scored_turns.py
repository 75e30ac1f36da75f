"""Beside other tenants, a step has few sequences with log probabilities of one tenant: the others take turns."""

import random
from typing import Any

import pytest

from moonpool.engine.decode.core.events import SearchRules
from moonpool.engine.decode.core.present_tenants import LINGER_S
from moonpool.engine.decode.core.scored_turns import SCORED_ROWS
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.test_walks import advance
from tests.unit.engine.decode.core.world import World, config

SCORED: dict[str, Any] = {"tenant": "scored", "logprob_bytes": 168}
MANY = 3 * SCORED_ROWS + 1


def rows(world: World, tenant: str = "scored") -> list[int]:
    """The tenant's sequences in the run in flight."""
    batch = world.run.batch if world.run is not None else ()
    return [n for n in batch if world.asked[world.sequences[n].request].request.tenant == tenant]


def lengths(world: World, number: int, count: int) -> list[int]:
    return [len(world.answers[other]) for other in range(number, number + count)]


def test_another_tenant_has_a_token_in_each_step_and_the_group_takes_turns() -> None:
    world = World(config(400, max_num_seqs=32))
    group = world.go(prompt(5, 1), (40,) * MANY, **SCORED)
    world.step()
    assert len(rows(world)) == MANY, "alone, all are in each step"
    calm = world.go(prompt(5, 2), 30, tenant="calm")
    world.step()
    for step in range(1, 20):
        assert len(rows(world)) <= SCORED_ROWS
        world.step()
        assert len(world.answers[calm]) == 1 + step
        had = lengths(world, group, MANY)
        assert max(had) - min(had) <= 1, "each has a turn before another has two"
    world.work()
    assert lengths(world, group, MANY) == [40] * MANY
    assert len(world.answers[calm]) == 30
    world.assert_at_rest()
    world.assert_reruns()


def test_a_group_that_fills_the_batch_has_few_rows_in_its_steps() -> None:
    world = World(config(400, max_num_seqs=MANY))
    group = world.go(prompt(5, 1), (20,) * MANY, **SCORED)
    calm = world.go(prompt(5, 2), 20, tenant="calm")
    world.step()
    for _ in range(12):
        assert len(rows(world)) <= SCORED_ROWS
        world.step()
    assert len(world.answers[calm]) >= 6, "in every second step, as beside any group that fills the batch"
    world.work()
    assert lengths(world, group, MANY) == [20] * MANY
    world.assert_at_rest()


def test_requests_of_one_tenant_share_the_turns_and_a_newcomer_waits_for_one_round() -> None:
    world = World(config(400, max_num_seqs=64))
    world.go(prompt(5, 0), 60, tenant="calm")
    first = [world.go(prompt(5, 1 + index), 40, **SCORED) for index in range(2 * SCORED_ROWS)]
    for _ in range(5):
        world.step()
    late = world.go(prompt(5, 50), 40, **SCORED)
    before = lengths(world, first[0], len(first))
    for _ in range(3 + 1):
        world.step()
    assert len(world.answers[late]) > 1
    assert all(now > then for now, then in zip(lengths(world, first[0], len(first)), before, strict=True))
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_turns_go_on_where_they_were_after_short_answers_of_others() -> None:
    """Else the same few sequences would have each turn beside one short answer after the other."""
    world = World(config(400, max_num_seqs=64))
    group = world.go(prompt(5, 1), (60,) * MANY, **SCORED)
    for number in range(12):
        calm = world.go(prompt(5, 2 + number), 2, tenant="calm")
        while calm in world.core.requests:
            world.step()
        had = lengths(world, group, MANY)
        assert max(had) - min(had) <= 1
    world.work()
    assert lengths(world, group, MANY) == [60] * MANY
    world.assert_reruns()


def test_turns_begin_when_another_tenants_request_is_promised_and_end_a_second_after_its_last() -> None:
    world = World(config(400, max_num_seqs=32, run_steps=8, ahead_steps=8))
    world.go(prompt(5, 1), (60,) * MANY, **SCORED)
    while world.run is not None and world.run.steps == 1:
        world.step()
    assert world.left > 1
    calm = world.reserve(prompt(5, 2), 2, tenant="calm")
    assert calm is not None
    assert world.left == 1, "the run ends with the step being computed"
    world.step()
    assert len(rows(world)) == SCORED_ROWS
    world.arrive(calm)
    world.start(calm)
    while calm in world.core.requests:
        world.step()
    assert len(rows(world)) == SCORED_ROWS, "the tenant's next request may follow"
    world.tick(LINGER_S / 2)
    world.go(prompt(5, 3), 2, tenant="calm")
    while len(world.core.requests) > 1:
        world.step()
    world.tick(0.9 * LINGER_S)
    world.step()
    assert len(rows(world)) == SCORED_ROWS
    world.tick(0.2 * LINGER_S)
    world.step()
    assert len(rows(world)) == MANY
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_a_run_goes_on_beside_tenants_with_few_rows_each() -> None:
    """Only a tenant with more rows than have turns ends a run, not several with as many together."""
    world = World(config(400, max_num_seqs=32, run_steps=8, ahead_steps=8))
    for number, tenant in enumerate("ab"):
        world.go(prompt(5, number), (60,) * SCORED_ROWS, **SCORED | {"tenant": tenant})
    while world.run is not None and (world.run.steps == 1 or len(world.run.batch) < 2 * SCORED_ROWS):
        world.step()
    assert world.left > 1
    world.reserve(prompt(5, 2), 2, tenant="calm")
    assert world.left > 1


@pytest.mark.parametrize("options", [{"logprob_bytes": 0}, {"search": SearchRules(1.0, "never")}, {"tenant": "calm"}])
def test_no_turns(options: dict[str, Any]) -> None:
    """Of sequences without log probabilities, of searches, and where all requests are of one tenant."""
    world = World(config(400, max_num_seqs=32))
    world.go(prompt(5, 1), (9,) * MANY, **SCORED | options)
    world.go(prompt(5, 2), 12, tenant="calm")
    world.step()
    assert world.run is not None
    assert len(world.run.batch) == MANY + 1
    world.work()
    world.assert_at_rest()


@pytest.mark.parametrize(("way", "every"), [(Preemption.AUTO, 0), (Preemption.RECOMPUTE, 7), (Preemption.SWAP, 7)])
def test_walks(way: Preemption, every: int) -> None:
    """Groups of two tenants in a pool for a few of them: every token comes, once, whoever is preempted."""
    seed = f"scored {way}"
    print(seed)
    rng = random.Random(seed)
    crowded: dict[str, object] = {
        "preemption": way,
        "preempt_every": every,
        "swap_blocks": 40,
        "chunked_prefill_size": 40,
        "assumed_answer_tokens": 20,
    }
    world = World(config(100, max_num_seqs=24, run_steps=BT, ahead_steps=BT, draft_tokens=3, **crowded))
    left, wanted, turns = 20, dict[int, int](), 0
    while left or world.core.requests:
        if left and rng.random() < 0.2:
            answers = tuple(rng.randint(2, 4 * BT) for _ in range(rng.choice([1, 10, 14])))
            start, tenant, scored = (
                prompt(rng.randint(1, 2 * BT), rng.randrange(4)),
                rng.choice("ab"),
                rng.random() < 0.7,
            )
            number = world.reserve(start, answers, stores=1, tenant=tenant, logprob_bytes=168 * scored)
            if number is not None:
                left -= 1
                wanted |= dict(enumerate(answers, number))
        advance(world, rng)
        ids = world.core.planner.batch.ids
        turns += world.run is not None and len(world.run.batch) < len(ids)
        assert world.core.planner.steps < 40_000
    while world.ios:
        world.end_io(min(world.ios))
    world.assert_at_rest()
    world.assert_reruns()
    assert not world.failed
    assert {number: len(answer) for number, answer in world.answers.items()} == wanted
    print(f"{turns} steps with turns, {world.core.preempted.preemptions} preemptions")
    assert turns > 10
    assert (world.core.preempted.preemptions > 3) == (every > 0)
