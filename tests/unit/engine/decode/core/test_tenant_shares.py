"""Tenants share a decode instance: places, blocks and step time go by weights, whatever one tenant sends."""

import pytest

from moonpool.engine.decode.core.events import SearchRules
from moonpool.engine.decode.core.preemption import choose_victim
from moonpool.engine.decode.core.request import DecodeRequest, RequestStatus
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config, preemptible


def places(world: World) -> dict[str, int]:
    """Places of each tenant in the run in flight."""
    found: dict[str, int] = {}
    for number in world.run.batch if world.run is not None else ():
        tenant = world.asked[world.sequences[number].request].request.tenant
        found[tenant] = found.get(tenant, 0) + 1
    return found


def gaps(world: World, number: int, steps: int) -> int:
    """Longest run of steps in which a sequence got no token, among the next ones."""
    longest = gap = 0
    for _ in range(steps):
        before = len(world.answers[number])
        world.step()
        gap = 0 if len(world.answers[number]) > before else gap + 1
        longest = max(longest, gap)
    return longest


def flood(world: World, count: int, answer: int = 40, tenant: str = "flood", weight: float = 1.0) -> list[int]:
    return [world.go(prompt(4, 10 + index), answer, tenant=tenant, weight=weight) for index in range(count)]


@pytest.mark.parametrize("calm_weight", [1.0, 4.0])
def test_a_group_that_fills_the_batch_takes_turns_with_another_tenant(calm_weight: float) -> None:
    world = World(config(200, max_num_seqs=8))
    group = world.go(prompt(5, 1), (60,) * 8, tenant="flood")
    world.step()
    assert places(world) == {"flood": 8}
    calm = world.go(prompt(5, 2), 20, tenant="calm", weight=calm_weight)
    world.step()
    world.step()
    assert gaps(world, calm, 12) == 1
    assert len(world.answers[group]) >= 5, "neither has the group to wait"
    world.work()
    assert [len(world.answers[number]) for number in (group, group + 7, calm)] == [60, 60, 20]
    world.assert_at_rest()
    world.assert_reruns()


def test_turns_go_by_weights() -> None:
    world = World(config(200, max_num_seqs=8))
    tokens = {}
    for name, weight in (("light", 1.0), ("heavy", 3.0)):
        tokens[name] = world.go(prompt(5, len(name)), (200,) * 8, tenant=name, weight=weight)
    before = {}
    for step in range(84):
        if step == 4:
            before = {name: len(world.answers[number]) for name, number in tokens.items()}
        world.step()
    had = {name: len(world.answers[number]) - before[name] for name, number in tokens.items()}
    assert had == {"light": 20, "heavy": 60}


@pytest.mark.parametrize(("weight", "wanted"), [(1.0, 4), (3.0, 6), (1 / 3, 2)])
def test_a_tenant_that_comes_late_gets_its_share_of_the_places(weight: float, wanted: int) -> None:
    world = World(config(400, max_num_seqs=8))
    flood(world, 12)
    world.step()
    assert places(world) == {"flood": 8}
    flood(world, 12, tenant="late", weight=weight)
    for _ in range(3):
        world.step()
    for _ in range(8):
        assert places(world) == {"late": wanted, "flood": 8 - wanted}, "nothing is swapped to and fro"
        world.step()
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize(("weights", "wanted"), [((1.0, 3.0), 48), ((0.1, 0.3), 48), ((0.3, 0.1), 16)])
def test_a_share_of_many_places_is_exact(weights: tuple[float, float], wanted: int) -> None:
    """Sums such as 48 times a third are a little more than 16."""
    world = World(config(1000, max_num_seqs=64))
    flood(world, 70, tenant="first", weight=weights[0])
    world.step()
    flood(world, 70, tenant="late", weight=weights[1])
    for _ in range(3):
        world.step()
    assert places(world) == {"late": wanted, "first": 64 - wanted}


def test_places_come_from_several_tenants_when_one_has_no_more_that_may_leave() -> None:
    world = World(config(400, max_num_seqs=8))
    promised = [world.go(prompt(4, 10 + index), 60, tenant="promised", slo=1.0) for index in range(3)]
    world.go(prompt(4, 13), 30, tenant="promised")
    flood(world, 4)
    world.step()
    assert places(world) == {"promised": 4, "flood": 4}
    pair = world.go(prompt(5, 2), (60, 60), tenant="pair")
    world.step()
    assert places(world) == {"promised": 3, "flood": 3, "pair": 2}
    assert all(gaps(world, number, 8) == 0 for number in (*promised, pair))
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_nobody_leaves_when_too_few_requests_may_leave() -> None:
    world = World(config(400, max_num_seqs=8))
    for index in range(7):
        world.go(prompt(4, 10 + index), 20, tenant="promised", slo=1.0)
    free = world.go(prompt(4, 17), 30, tenant="promised")
    world.step()
    pair = world.go(prompt(5, 2), (20, 20), tenant="pair")
    assert gaps(world, free, 12) == 0, "one place would not do"
    assert places(world) == {"promised": 8}
    world.work()
    assert [len(world.answers[number]) for number in (free, pair, pair + 1)] == [30, 20, 20]
    world.assert_at_rest()
    world.assert_reruns()


def test_what_others_do_not_need_is_taken() -> None:
    world = World(config(400, max_num_seqs=8))
    flood(world, 12)
    calm = world.go(prompt(5, 2), 30, tenant="calm")
    world.step()
    world.step()
    assert gaps(world, calm, 20) == 0
    assert places(world) == {"flood": 7, "calm": 1}


def test_more_tenants_than_places_all_get_turns() -> None:
    world = World(config(400, max_num_seqs=4))
    numbers = [world.go(prompt(4, index), 60, tenant=f"tenant {index}") for index in range(7)]
    for _ in range(70):
        world.step()
    counts = [len(world.answers[number]) for number in numbers]
    assert max(counts) - min(counts) <= 3, counts
    assert sum(counts) >= 4 * 69
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_a_search_takes_turns_as_well() -> None:
    world = World(config(200, max_num_seqs=4))
    search = world.go(
        prompt(5, 1), (12,) * 4, total=17, tenant="flood", search=SearchRules(1.0, early_stopping="never")
    )
    calm = world.go(prompt(5, 2), 20, tenant="calm")
    world.step()
    world.step()
    assert gaps(world, calm, 10) == 1
    world.work()
    assert len(world.searched[search]) == 4, "the plain search finds the same"


def test_a_promised_time_between_tokens_is_kept() -> None:
    world = World(config(200, max_num_seqs=4))
    promised = [world.go(prompt(4, index), 20, tenant="flood", slo=1.0) for index in range(4)]
    calm = world.go(prompt(5, 9), 5, tenant="calm")
    assert all(gaps(world, number, 4) == 0 for number in promised)
    assert world.core.requests[calm].status is RequestStatus.WAITING
    world.work()
    assert len(world.answers[calm]) == 5


def of(tenant: str, number: int, blocks: int, *, weight: float = 1.0, preemptions: int = 0) -> DecodeRequest:
    request = preemptible(number, float(number), preemptions, tenant=tenant, weight=weight)
    request.sequences[0].table.blocks = list(range(100 * number, 100 * number + blocks))
    return request


def test_the_tenant_with_most_blocks_for_its_weight_gives_up_its_last_request() -> None:
    old, young, calm = of("flood", 1, 6), of("flood", 2, 6), of("calm", 3, 4)
    assert choose_victim([old, young, calm], calm) is young
    assert choose_victim([old, young, calm], old) is young
    heavy = of("heavy", 4, 20, weight=2.0)
    assert choose_victim([old, young, heavy], old) is young
    assert choose_victim([old, heavy], old) is heavy


def test_having_been_preempted_does_not_pass_the_burden_to_another_tenant() -> None:
    old, young, calm = of("flood", 1, 6, preemptions=2), of("flood", 2, 6, preemptions=2), of("calm", 3, 4)
    assert choose_victim([old, young, calm], calm) is young


def test_the_first_of_the_tenant_with_fewest_blocks_can_finish() -> None:
    calm, group = of("calm", 2, 1), of("flood", 1, 9)
    assert choose_victim([group, calm], group) is group
    assert choose_victim([calm], calm) is None


def test_the_holder_of_a_turn_is_never_chosen() -> None:
    calm, group = of("calm", 2, 1), of("flood", 1, 9)
    assert choose_victim([group, calm], calm, group) is calm
    assert choose_victim([calm], calm, group) is None, "the holder has no blocks"


def test_a_tenant_grows_at_the_cost_of_the_one_above_its_share() -> None:
    world = World(config(10, assumed_answer_tokens=1, chunked_prefill_size=20))
    big = [world.go(prompt(BT, 1 + index), 3 * BT, tenant="flood") for index in range(3)]
    calm = world.go(prompt(BT, 9), 2 * BT, tenant="calm")
    while len(world.core.requests) == 4:
        world.step() if world.run is not None else world.end_io(min(world.ios))
    assert world.core.preempted.preemptions
    counts = {number: request.preemption.count for number, request in world.core.requests.items()}
    assert counts.get(calm, 0) == 0
    world.work()
    assert [len(world.answers[number]) for number in (*big, calm)] == [3 * BT] * 3 + [2 * BT]
    world.assert_at_rest()
    world.assert_reruns()


def test_a_tenant_within_its_share_is_admitted_whatever_another_expects_to_need() -> None:
    def asked(tenant: str) -> int | None:
        world = World(config(20, assumed_answer_tokens=4 * BT))
        for index in range(3):
            world.go(prompt(2 * BT, 1 + index), 4 * BT, tenant="flood")
        return world.reserve(prompt(BT, 9), 2 * BT, tenant=tenant)

    assert asked("calm") is not None
    assert asked("flood") is None


def test_a_preempted_request_above_its_tenants_share_is_restored_beside_a_stream_of_others() -> None:
    world = World(config(20, assumed_answer_tokens=1, watermark_blocks=0, chunked_prefill_size=400))
    big = world.go(prompt(12 * BT - 4, 1), 2 * BT, tenant="big")
    calm = [world.go(prompt(BT + 2, 2 + index), 8 + 2 * index, tenant="calm") for index in range(4)]
    while big in world.core.requests and len(calm) < 60:
        world.step()
        if sum(number in world.core.requests for number in calm) < 5:
            number = world.reserve(prompt(BT + 2, 2 + len(calm)), 14, tenant="calm")
            if number is not None:
                world.arrive(number)
                world.start(number)
                calm.append(number)
    assert world.core.preempted.preemptions, "there were too few blocks for all"
    assert len(world.answers[big]) == 2 * BT, "others that keep to their share never leave as many blocks"
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_nobody_leaves_for_a_request_that_was_preempted_for_another() -> None:
    world = World(config(13, max_num_seqs=3, assumed_answer_tokens=1, watermark_blocks=0))
    world.go(prompt(BT - 2, 1), 20, tenant="flood")
    flood(world, 2, answer=8)
    first, preempted = (
        world.reserve(prompt(BT, 4), 4, tenant="first"),
        world.reserve(prompt(8 * BT - 2, 5), 4, tenant="big"),
    )
    assert first is not None
    assert preempted is not None
    for number in (first, preempted):
        world.arrive(number)
    for _ in range(2):
        world.step()
    for number in (first, preempted):
        world.start(number)
    world.step()
    assert world.core.requests[preempted].status is RequestStatus.PREEMPTED, "the first needs a block"
    assert places(world) == {"first": 1, "flood": 2}
    world.work()
    world.assert_at_rest()
