"""Whose chunks are computed next, where several tenants wait: by their shares, and by priority among a tenant's own."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.actions import RefusalReason
from tests.examples import examples
from tests.unit.engine.prefill.core.world import BT, Client, World, staged

STEP = 2 * BT
LONG = 10 * STEP


def wide(**changes: int | float) -> World:
    return World(staged(1, num_blocks=200, max_num_batched_tokens=STEP, **changes))


def steps(world: World, count: int) -> list[list[int]]:
    """Requests of the next steps, each run to its end; the one under way first."""
    found = []
    for _ in range(count):
        (io,) = world.steps
        found.append([chunk.id for chunk in world.steps[io].order.chunks])
        world.run_step(io)
    return found


def flood(world: World, count: int, tokens: int = LONG, first: int = 10) -> list[Client]:
    return [world.arrive(tokens, first + number, tenant="flood") for number in range(count)]


def test_another_tenants_prompt_does_not_wait_for_a_flood() -> None:
    world = wide()
    flood(world, 5)
    calm = world.arrive(2 * STEP, 1, tenant="calm")
    assert steps(world, 3) == [[1], [6], [6]], "only the step under way goes before"
    assert calm.token is not None
    assert steps(world, 2) == [[1], [1]]


def test_two_that_flood_take_turns() -> None:
    world = wide()
    flood(world, 2)
    for number in range(2):
        world.arrive(LONG, 20 + number, tenant="other")
    requests = [request for step in steps(world, 20) for request in step]
    assert abs(requests.count(1) - requests.count(3)) <= 2
    assert set(requests) == {1, 3}, "of each tenant the first alone"


def test_a_weight_is_a_share_of_the_chunks() -> None:
    world = wide()
    flood(world, 4)
    for number in range(4):
        world.arrive(LONG, 20 + number, tenant="heavy", weight=3.0)
    requests = [request for step in steps(world, 36) for request in step]
    heavy = sum(request > 4 for request in requests)
    assert 26 <= heavy <= 28


def test_a_tenant_that_comes_back_has_its_credit_and_no_more() -> None:
    """What was computed for others meanwhile is made good, up to some seconds of work."""
    world = wide()
    flood(world, 12)
    steps(world, 60)
    world.arrive(LONG, 1, tenant="calm")
    expected = [[13]] * 8 + [[7]] + [[13]] * 2
    assert steps(world, 12)[1:] == expected, "a step takes less than a tenth of a second"


def test_a_prompt_that_has_begun_goes_on_after_eight_steps_of_others() -> None:
    """However many others have begun: then they take turns, and each has a step after eight in fair order."""
    world = wide()
    for number in range(3):
        world.arrive(LONG, 10 + number, tenant=f"flood {number}")
    world.arrive(3 * LONG, 1, tenant="calm", weight=1000.0)
    found = [request for (request,) in steps(world, 34)][4:]
    assert found == [*[4] * 5, 1, *[4] * 8, 2, *[4] * 8, 3, *[4] * 6]


def test_more_urgent_prompts_of_a_tenant_hold_a_begun_one_up_for_eight_steps() -> None:
    world = wide()
    world.arrive(LONG, 1)
    for family in range(2, 30):
        world.arrive(STEP, family, priority=-5)
    found = [request for (request,) in steps(world, 28)]
    places = [place for place, request in enumerate(found) if request == 1]
    assert places == [0, 9, 18, 27]


def test_who_was_computed_alone_now_and_then_is_not_behind_a_newcomer() -> None:
    """The engine rested more than it computed for the tenant: it took nothing from others, and owes them nothing."""
    world = wide()
    for family in range(1, 5):
        world.arrive(LONG, family, tenant="calm")
        steps(world, 10)
        world.pass_time(1.0)
    flood(world, 5)
    world.arrive(2 * STEP, 5, tenant="calm")
    assert steps(world, 2) == [[5], [10]], "only the step under way goes before"


def test_a_tenants_own_go_by_priority_and_then_as_they_came() -> None:
    world = wide()
    for family, priority in enumerate((0, 5, 0, -3), 1):
        world.arrive(STEP, family, priority=priority)
    assert steps(world, 4) == [[1], [4], [3], [2]]


def test_a_tenants_own_go_by_arrival_and_delay() -> None:
    world = wide()
    for family, delay_s in enumerate((0.0, 9.0, 2.0, 5.0), 1):
        world.arrive(STEP, family, delay_s=delay_s)
    world.pass_time(1.0)
    world.arrive(STEP, 5, delay_s=2.0)
    assert steps(world, 5) == [[1], [3], [5], [4], [2]], "three seconds after the first came, the third comes before"


def test_a_delay_takes_nothing_from_other_tenants() -> None:
    world = wide()
    flood(world, 3)
    world.arrive(2 * STEP, 1, tenant="calm", delay_s=1000.0)
    assert steps(world, 3) == [[1], [4], [4]], "only the step under way goes before"


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(0, 4)), min_size=2, max_size=8))
def test_nobody_is_overtaken_by_a_prompt_that_came_later_than_its_own_delay(
    prompts: list[tuple[int, int, int]],
) -> None:
    """Blocks to compute, delay in quarters of a second, and seconds until the next prompt comes."""
    world = wide()
    came: dict[int, float] = {}
    delays: dict[int, float] = {}
    ended: list[int] = []

    def run(count: int) -> None:
        while world.steps and count:
            steps(world, 1)
            ended.extend(
                [request for request, client in world.clients.items() if client.token and request not in ended]
            )
            count -= 1

    for number, (blocks, delay, pause) in enumerate(prompts, 1):
        came[number], delays[number] = world.now, delay / 4
        world.arrive(blocks * BT, number, delay_s=delay / 4)
        run(1)
        world.pass_time(float(pause))
    run(1000)
    assert sorted(ended) == sorted(came)
    for at, request in enumerate(ended):
        assert not [ended_one for ended_one in ended[:at] if came[ended_one] > came[request] + delays[request]]


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one() -> None:
    world = wide()
    world.arrive(LONG, 1)
    steps(world, 2)
    world.arrive(2 * STEP, 2, priority=-1)
    assert steps(world, 5) == [[1], [2], [2], [1], [1]]


def test_small_prompts_of_two_tenants_share_steps() -> None:
    world = wide()
    flood(world, 1)
    for number in range(3):
        world.arrive(BT, 20 + number, tenant="flood")
        world.arrive(BT, 30 + number, tenant="calm")
    found = steps(world, 13)
    assert found[1] == [3, 5]
    assert {request for step in found for request in step} == set(range(1, 8))


def test_what_is_waiting_is_forgotten_when_it_leaves() -> None:
    world = wide()
    flood(world, 3)
    calm = world.arrive(STEP, 1, tenant="calm")
    for number in range(1, 5):
        world.post(events.CancelPrefill(number))
    assert calm.end is not None
    world.settle()
    world.check_rest()


def test_a_full_queue_has_room_for_who_has_less_than_its_share() -> None:
    world = wide(max_queue=4)
    flood(world, 4)
    refused = world.arrive(STEP, 20, tenant="flood")
    calm = [world.arrive(STEP, 30 + number, tenant="calm") for number in range(3)]
    assert [client.accepted for client in (refused, *calm)] == [False, True, True, False]
    whys = [action.why for action in world.done if isinstance(action, actions.RefuseRequest)]
    assert whys == [RefusalReason.QUEUE_FULL] * 2
