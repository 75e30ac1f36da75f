"""Block tables grow by one block exactly when the last one is full; room is promised by what answers are expected."""

import pytest

from moonpool.engine.decode.core.actions import AppendBlock, ReservationGranted, StartRun, StoreBlock
from moonpool.engine.decode.core.output_lengths import FEW_LENGTHS, OutputLengths
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config


@pytest.mark.parametrize("length", [1, BT - 2, BT - 1, BT, BT + 1, 2 * BT])
def test_a_block_comes_with_the_first_token_that_needs_it(length: int) -> None:
    """The step that computes a block's first token has the block, the one before has not."""
    world = World(config(12))
    number = world.go(prompt(length), 2 * BT + 2)
    while world.run is not None:
        tokens = len(world.sequences[number].tokens)
        assert len(world.sequences[number].table) == -(-tokens // BT)
        world.step()
    grown = [action for action in world.actions if isinstance(action, AppendBlock)]
    assert len(grown) == -(-(length + 2 * BT + 1) // BT) - -(-length // BT)
    world.assert_at_rest()


def test_a_quiet_step_says_nothing_but_the_next_one() -> None:
    """Nobody needs a block and nobody ends: one event, one action, the same batch."""
    world = World(config(12))
    for seed in range(3):
        world.go(prompt(1, seed), BT)
    world.step()
    begun = len(world.actions)
    world.step()
    [run] = world.actions[begun:]
    assert isinstance(run, StartRun)
    assert run.batch == (1, 2, 3)


def test_unused_slots_are_those_of_the_last_block() -> None:
    world = World(config(200, max_num_seqs=64))
    for seed in range(20):
        world.go(prompt(5 + seed, seed), 40 + seed)
    for _ in range(38):
        world.step()
        tables = [len(sequence.table) * BT for sequence in world.sequences.values()]
        lengths = [len(sequence.tokens) - 1 for sequence in world.sequences.values()]
        assert sum(tables) - sum(lengths) <= len(tables) * (BT - 1)


def test_admission_counts_what_answers_are_expected_to_need() -> None:
    """Answers of 16 tokens where 4,096 are allowed: twelve prompts fit a pool that was good for none."""
    world = World(config(64, max_num_seqs=64, assumed_answer_tokens=BT))
    admitted = 0
    while world.reserve(prompt(2 * BT, admitted), BT, total=60 * BT) is not None:
        admitted += 1
    assert admitted == 64 // 3
    assert world.core.budget.promised == 2 * admitted
    assert world.core.budget.expected == admitted


def test_the_watermark_stays_free_unless_nobody_is_here() -> None:
    world = World(config(10, watermark_blocks=2, assumed_answer_tokens=1))
    assert world.reserve(prompt(9 * BT), 1) is not None
    assert world.reserve(prompt(1, 1), 1) is None
    world = World(config(10, watermark_blocks=2, assumed_answer_tokens=1))
    assert world.reserve(prompt(6 * BT), 1) is not None
    assert world.reserve(prompt(BT, 1), 1) is None, "6 and 1, 1 and 1 for the answers, and 2 would be 11"
    assert world.reserve(prompt(1, 1), 1) is not None


def test_expected_lengths() -> None:
    lengths = OutputLengths(100)
    assert (lengths.expected(0), lengths.expected(99), lengths.expected(150)) == (100, 198, 300)
    for length in range(FEW_LENGTHS):
        lengths.observe(10 * length)
    assert lengths.expected(0) == 120, "three quarters of those above 0 are no longer"
    assert lengths.expected(100) == 140
    assert lengths.expected(500) == 1001
    for _ in range(600):
        lengths.observe(7)
    assert lengths.expected(0) == 7


def test_what_the_client_expects_counts_until_the_answer_has_it() -> None:
    lengths = OutputLengths(100)
    assert [lengths.expected(made, told=30) for made in (0, 29, 30, 99)] == [30, 30, 100, 198]


@pytest.mark.parametrize(("told", "admitted"), [(0, 4), (1, 8), (6 * BT, 3)])
def test_room_is_kept_for_the_answer_that_the_client_expects(told: int, admitted: int) -> None:
    """24 blocks; prompts of two blocks, whose answers may become twelve blocks long."""
    world = World(config(24, assumed_answer_tokens=4 * BT))
    found = [world.reserve(prompt(2 * BT, number), 12 * BT, expected_tokens=told) for number in range(12)]
    assert sum(number is not None for number in found) == admitted


def test_a_prefix_is_shared_and_copied_by_nobody() -> None:
    """Sequences of one prompt refer to its full blocks; each has a last block of its own."""
    world = World(config(12))
    common = prompt(2 * BT + 3)
    first = world.go(common, 40)
    second = world.go(common, 40)
    assert [action.held for action in world.actions if isinstance(action, ReservationGranted)] == [0, 2]
    table, two = world.sequences[first].table, world.sequences[second].table
    assert table[:2] == two[:2]
    assert not set(table[2:]) & set(two[2:])
    assert world.core.blocks.ref_count(table[0]) == 2
    world.work()
    world.assert_at_rest()


def test_the_answers_blocks_are_prefixes_while_it_runs() -> None:
    """Each full block is registered, and stored, in the step that fills it."""
    world = World(config(12))
    number = world.go(prompt(BT - 5), 4 * BT, stores=2)
    for _ in range(2 * BT):
        world.step()
    sequence = world.sequences[number]
    whole = (len(sequence.tokens) - 1) // BT
    assert whole == 2
    stores = [action for action in world.actions if isinstance(action, StoreBlock)]
    assert [(action.index, action.store) for action in stores] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    turn = world.reserve([*sequence.tokens[:-1], 7], 4)
    assert turn is not None
    assert [action.held for action in world.actions if isinstance(action, ReservationGranted)][-1] == whole
