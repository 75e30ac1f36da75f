"""Prompts that are computed here: the rest behind what is held, beside the batch, with the first token."""

import random

import pytest

from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks, ReturnBlocks
from moonpool.engine.decode.core.actions import StartRun, StoreBlock
from moonpool.engine.decode.core.events import ComputePrompt, StreamOpened, TransferOpened
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config

REFUSED = "the prompt cannot be computed here now"


def holding(blocks: int, **settings: object) -> World:
    """A world whose pool has so many blocks of the prompts of seed 0."""
    world = World(config(40, **settings))
    world.go(prompt(blocks * BT), 1)
    world.work()
    world.actions.clear()
    return world


def asked(world: World, length: int, answer: int = 4, **options: object) -> int:
    number = world.reserve(prompt(length), answer, **options)  # type: ignore[arg-type]
    assert number is not None
    return number


def chunks(world: World) -> list[tuple[int, int, bool]]:
    """All chunks so far: from where, how many tokens, and whether a token is sampled behind them."""
    runs = [action for action in world.actions if isinstance(action, StartRun)]
    return [(chunk.start, chunk.count, chunk.sample) for run in runs for chunk in run.chunks]


@pytest.mark.parametrize(
    ("held", "length", "computed"),
    [
        (3, 3 * BT + 5, [(48, 5, True)]),
        (3, 3 * BT, [(47, 1, True)]),
        (1, BT, [(15, 1, True)]),
        (0, 5, [(0, 5, True)]),
        (1, 4 * BT, [(16, 20, False), (36, 20, False), (56, 8, True)]),
        (2, 5 * BT + 1, [(32, 20, False), (52, 20, False), (72, 9, True)]),
    ],
)
def test_what_is_not_held_is_computed_and_gives_the_first_token(
    held: int, length: int, computed: list[tuple[int, int, bool]]
) -> None:
    world = holding(held, chunked_prefill_size=20) if held else World(config(40, chunked_prefill_size=20))
    number = asked(world, length)
    world.compute(number)
    assert world.core.requests[number].status is RequestStatus.RECOMPUTING
    world.work()
    assert chunks(world) == computed
    assert len(world.answers[number]) == 4
    assert world.core.planner.recomputed_tokens == 0
    assert world.core.planner.starts.begun == 1
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize(
    ("length", "computed"),
    [(3 * BT, [(15, 20, False), (35, 13, True)]), (3 * BT + 1, [])],
)
def test_a_token_is_not_computed_behind_its_own_recurrent_state(
    length: int, computed: list[tuple[int, int, bool]]
) -> None:
    """Decode has the state behind the last block alone, and goes back to where there is one, here to the begin."""
    world = holding(3, chunked_prefill_size=20, recurrent=True, window_blocks=1, window_slots=12, states_alone=True)
    others = [asked(world, 5), asked(world, 5)]
    number = asked(world, length)
    for other in (*others, number):
        world.compute(other)
    world.work()
    assert [chunk for chunk in chunks(world) if chunk[0]] == computed
    assert len(world.answers[number]) == 4
    world.assert_at_rest()
    world.assert_reruns()


@pytest.mark.parametrize(
    ("length", "held", "start"),
    [
        (4 * BT + 3, 4, 4 * BT),
        (3 * BT + 3, 2, 0),
        (2 * BT + 3, 1, 0),
    ],
)
def test_a_prompt_is_computed_behind_a_block_with_a_window(length: int, held: int, start: int) -> None:
    """Of the four blocks that came, only the last one has the slices of layers with a window."""
    world = holding(4, chunked_prefill_size=100, window_blocks=1, window_slots=40)
    number = asked(world, length)
    assert world.held[number] == held
    world.compute(number)
    world.work()
    assert chunks(world) == [(start, length - start, True)]
    world.assert_at_rest()
    world.assert_reruns()


def test_a_single_token_behind_what_is_held_needs_no_chunk() -> None:
    world = holding(2)
    number = asked(world, 2 * BT + 1)
    world.compute(number)
    assert world.run == StartRun(world.core.planner.steps, (number,))
    world.work()
    assert len(world.answers[number]) == 4
    world.assert_at_rest()


def test_the_batch_goes_on_beside_it() -> None:
    world = World(config(40, chunked_prefill_size=20))
    running = world.go(prompt(BT, 1), 30)
    number = asked(world, 2 * BT + 8)
    world.compute(number)
    before = len(world.answers[running])
    for _ in range(3):
        world.step()
    assert len(world.answers[running]) == before + 3
    assert world.core.requests[number].status is RequestStatus.RUNNING
    assert len(world.answers[number]) == 1
    world.work()
    world.assert_at_rest()


def test_its_blocks_are_found_by_others_and_written_to_the_kvstores() -> None:
    """What was held is presumed to be there; the last block of a prompt is full with the chunk that samples."""
    world = holding(1)
    number = asked(world, 4 * BT, stores=2)
    world.compute(number)
    world.work()
    stores = [(action.index, action.store) for action in world.actions if isinstance(action, StoreBlock)]
    assert stores == [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0), (3, 1)]
    other = asked(world, 4 * BT + 3)
    assert len(world.core.requests[other].blocks) == 4


@pytest.mark.parametrize(("slo", "patient"), [(0.0, True), (1e3, False)])
def test_the_steps_behind_it_are_patient_where_nobody_waits(slo: float, patient: bool) -> None:
    world = World(config(40))
    number = asked(world, BT + 3, slo=slo)
    world.answers[number] = []
    world.post(ComputePrompt(number, 1, patient=True))
    world.work()
    runs = [action for action in world.actions if isinstance(action, StartRun)]
    assert [run.patient for run in runs] == [False, patient, patient, patient]
    world.assert_at_rest()


def test_a_full_hit_writes_no_block_and_nothing_to_the_kvstores() -> None:
    """Two at once, while another instance reads the same blocks: all refer to those that are there."""
    world = holding(3)
    numbers = [asked(world, 3 * BT, stores=1) for _ in range(2)]
    reading = world.post(LendBlocks(1, world.asked[numbers[0]].request.keys))
    [lent] = [action.blocks for action in reading if isinstance(action, BlocksLent)]
    for number in numbers:
        world.compute(number)
    world.step()
    world.step()
    for number in numbers:
        [member] = world.core.requests[number].sequences
        assert tuple(member.table.blocks[:3]) == lent
        assert (member.keys, member.stored) == (list(world.asked[number].request.keys), [3])
    world.post(ReturnBlocks(1))
    world.work()
    assert not [action for action in world.actions if isinstance(action, StoreBlock)]
    world.assert_at_rest()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("way", Preemption)
def test_a_full_hit_that_is_preempted_before_its_token_comes_back(way: Preemption, recurrent: bool) -> None:
    world = holding(2, preemption=way, swap_blocks=10, preempt_every=1, recurrent=recurrent)
    older = world.go(prompt(BT, 1), BT)
    number = asked(world, 2 * BT, stores=1)
    world.compute(number)
    world.work()
    assert [len(world.answers[which]) for which in (older, number)] == [BT, 4]
    assert not recurrent or all(start != 2 * BT - 1 for start, _, _ in chunks(world))
    world.assert_at_rest()
    world.assert_reruns()


class TestRefused:
    def refused(self, world: World, number: int) -> None:
        world.compute(number)
        assert world.failed == {number: REFUSED}
        world.work()
        world.assert_at_rest()

    def test_where_a_step_has_no_place_for_it(self) -> None:
        world = World(config(40, max_num_seqs=1))
        world.go(prompt(BT, 1), 10)
        self.refused(world, asked(world, BT))

    def test_where_the_last_place_is_kept_for_one_that_was_promised_a_time(self) -> None:
        world = World(config(40, max_num_seqs=1))
        slow = asked(world, BT)
        quick = asked(world, BT, slo=1.0)
        world.compute(slow)
        assert world.failed == {slow: REFUSED}
        world.compute(quick)
        world.work()
        assert len(world.answers[quick]) == 4
        world.assert_at_rest()

    def test_several_answers(self) -> None:
        world = World(config(40))
        number = world.reserve(prompt(BT), (3, 3))
        assert number is not None
        self.refused(world, number)

    def test_a_conductor_without_a_stream(self) -> None:
        world = World(config(40))
        number = asked(world, BT)
        world.compute(number, stream=7)
        assert world.failed == {number: REFUSED}

    @pytest.mark.parametrize("whole", [False, True])
    def test_one_whose_kv_has_begun_to_come(self, whole: bool) -> None:
        """Its conductor hears of it at once, not when the lease ends."""
        world = World(config(40))
        number = asked(world, BT)
        if whole:
            world.arrive(number)
        else:
            world.post(TransferOpened(number))
        world.compute(number)
        assert world.failed == {number: "its KV has begun to come: the prompt is not computed here"}
        world.work()
        world.assert_at_rest()


@pytest.mark.parametrize("way", Preemption)
def test_one_that_is_preempted_before_its_first_token_comes_back(way: Preemption) -> None:
    world = World(config(7, preemption=way, swap_blocks=10, chunked_prefill_size=2, assumed_answer_tokens=1))
    older = world.go(prompt(BT, 1), 5 * BT)
    number = world.reserve(prompt(4 * BT), 2 * BT, stores=1)
    assert number is not None
    world.compute(number)
    while not world.core.preempted.preemptions:
        world.step()
    assert (world.answers[number], world.core.requests[number].preemption.count) == ([], 1)
    world.work()
    assert [len(world.answers[which]) for which in (older, number)] == [5 * BT, 2 * BT]
    world.assert_at_rest()
    world.assert_reruns()


def test_its_next_conductor_gets_the_first_token() -> None:
    world = World(config(40, chunked_prefill_size=8))
    world.post(StreamOpened(2, "other"))
    number = asked(world, 3 * BT, conductor="conductor", resumable=True)
    world.compute(number)
    world.step()
    world.close(1)
    world.adopt(number, 2, fence=1)
    world.work()
    assert world.heard[number] == world.answers[number]
    assert len(world.answers[number]) == 4
    world.assert_at_rest()


@pytest.mark.parametrize("way", Preemption)
def test_random_walks(way: Preemption) -> None:
    """Prompts that come and prompts that are computed, of four kinds that share beginnings, in a crowded pool."""
    rng = random.Random(f"prompts {way}")
    world = World(config(18, preemption=way, swap_blocks=40, chunked_prefill_size=24, assumed_answer_tokens=20))
    left, computed = 40, 0
    while left or world.core.requests:
        promised = [n for n, request in world.core.requests.items() if request.status is RequestStatus.PROMISED]
        draw = rng.random()
        if left and draw < 0.2:
            start = prompt(rng.choice((rng.randint(1, 4 * BT), rng.randint(1, 4) * BT)), rng.randrange(4))
            left -= world.reserve(start, rng.randint(2, 6 * BT), total=17 * BT, stores=1) is not None
        elif promised and draw < 0.4:
            number = rng.choice(promised)
            if rng.random() < 0.3:
                world.arrive(number)
                world.start(number)
            else:
                world.compute(number)
                computed += number not in world.failed
        elif world.ios and draw < 0.7:
            world.end_io(rng.choice(sorted(world.ios)))
        elif world.run is not None:
            world.step()
    while world.ios:
        world.end_io(min(world.ios))
    world.assert_at_rest()
    world.assert_reruns()
    assert set(world.failed.values()) <= {REFUSED}
    print(f"{way}: {computed} computed, {len(world.failed)} refused, {world.core.preempted.preemptions} preemptions")
    assert computed > 10
    assert world.core.preempted.preemptions > 0
