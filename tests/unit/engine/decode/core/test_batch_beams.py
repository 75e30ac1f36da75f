"""Beams: the step they take, how they share blocks, and that no preemption changes what they find."""

import itertools

import pytest

from moonpool.engine.decode.core.actions import AnswersRanked, ForkSequences, RequestFreed, StartRun
from moonpool.engine.decode.core.beam_search import BeamSearch, Hypothesis
from moonpool.engine.decode.core.events import AbortRequest, Candidates, SearchRules
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.plain_beams import ENDS, following, plain_search
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import WAYS, World, config

EARLY: tuple[bool | str, ...] = (False, True, "never")
RULES = list(itertools.starmap(SearchRules, itertools.product((1.0, 0.0, 0.6, 2.0, -1.0), EARLY)))
PLAIN = SearchRules(1.0, False)


def search(width: int, longest: int = 10, rules: SearchRules = PLAIN) -> BeamSearch:
    return BeamSearch(width, longest, rules)


def go(*log_probabilities: float) -> Candidates:
    """None of them ends."""
    return tuple((log_probability, False) for log_probability in log_probabilities)


# --- the step --------------------------------------------------------------------------------------------------------


def test_the_best_go_on_whoever_their_parents_are() -> None:
    beam_search = search(2)
    assert beam_search.step([go(-1.0, -2.0, -3.0)]) == ([(0, 0), (0, 1)], [])
    assert beam_search.step([go(-3.0, -4.0, -5.0), go(-0.5, -0.75, -9.0)]) == ([(1, 0), (1, 1)], [])
    assert (beam_search.length, beam_search.scores, beam_search.kept, beam_search.over) == (2, [-2.5, -2.75], [], False)


def test_only_the_best_of_all_beams_may_end() -> None:
    """The third candidate ends too, but is not among the best two: it is dropped, and does not go on either."""
    beam_search = search(2)
    found: Candidates = ((-1.0, True), (-2.0, False), (-3.0, True), (-4.0, False))
    assert beam_search.step([found]) == ([(0, 1), (0, 3)], [(0, 0, 0)])
    assert (beam_search.kept, beam_search.scores, beam_search.ended) == ([Hypothesis(0, -1.0)], [-2.0, -4.0], 1)


def test_a_score_is_over_the_length_to_the_penalty() -> None:
    beam_search = search(1, rules=SearchRules(2.0, "never"))
    beam_search.step([go(-1.0)])
    beam_search.step([((-3.0, True), (-5.0, False))])
    assert beam_search.kept == [Hypothesis(0, -4.0 / 2**2)]
    assert not beam_search.over, "at ten tokens -6 is -0.06"


def test_a_better_hypothesis_takes_the_place_of_the_worst() -> None:
    beam_search = search(2, rules=SearchRules(0.0, "never"))
    beam_search.step([((-0.5, False), (-1.0, True), (-1.5, False))])
    assert beam_search.step([((-2.0, True), (-9.0, False)), ((-0.125, True), (-8.0, False))]) == ([], [(1, 1, 0)])
    assert (beam_search.kept, beam_search.ended) == ([Hypothesis(0, -1.0), Hypothesis(1, -1.625)], 3)
    assert beam_search.over, "the best beam is at -9.5"


def test_equals_are_taken_in_the_order_of_beams_and_candidates_and_the_earlier_hypothesis_is_better() -> None:
    beam_search = search(2, rules=SearchRules(0.0, "never"))
    assert beam_search.step([((-1.0, True), (-1.0, False), (-1.0, False), (-1.0, False))])[0] == [(0, 1), (0, 2)]
    tied: Candidates = ((0.0, True), (-1.0, False), (-1.0, False))
    assert beam_search.step([tied, tied]) == ([], [(1, 0, 0)])
    assert beam_search.kept == [Hypothesis(0, -1.0), Hypothesis(1, -1.0)]


@pytest.mark.parametrize(("early", "over"), [(True, True), (False, False), ("never", False)])
def test_when_a_search_with_enough_hypotheses_ends(early: bool | str, over: bool) -> None:
    """The beam's score is better than the hypothesis'."""
    beam_search = search(1, rules=SearchRules(1.0, early))
    beam_search.step([go(-1.0)])
    beam_search.kept.append(Hypothesis(0, -3.0))
    beam_search.ended = 1
    beam_search.step([go(-1.0)])
    assert beam_search.over == over


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_as_the_plain_search(rules: SearchRules, width: int) -> None:
    """It sees (width + end tokens) candidates of each beam, the plain one all."""
    for seed in range(6):
        beam_search, beams = search(width, 9, rules), [[seed]]
        hypotheses: dict[int, list[int]] = {}
        while not beam_search.over:
            found = [following(tokens)[: width + ENDS] for tokens in beams]
            last = beam_search.length + 1 == beam_search.longest
            chosen, ended = beam_search.step(
                [tuple((score, token < ENDS or last) for token, score in row) for row in found]
            )
            hypotheses |= {number: [*beams[beam], found[beam][which][0]] for number, beam, which in ended}
            beams = [[*beams[beam], found[beam][which][0]] for beam, which in chosen]
        answers = [(hypotheses[kept.number][1:], kept.score) for kept in beam_search.kept]
        assert answers == plain_search([seed], width, 9, rules)
        assert len(answers) == width


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_beams_fork_by_reference_and_what_is_dropped_is_let_go() -> None:
    world = World(config(12))
    number = world.go(prompt(2 * BT + 3), (8, 8), search=PLAIN)
    members = world.core.requests[number].sequences
    assert [member.table.blocks[:2] for member in members] == [members[0].table.blocks[:2]] * 2
    while (
        sum(
            isinstance(action, ForkSequences) and len({parent for parent, _ in action.forks}) == 1
            for action in world.actions
        )
        < 2
    ):
        world.step()  # until both come from one beam, once more than at the start
    assert world.run is not None
    [(source, block)] = world.run.copies
    assert sorted([source, block]) == sorted(member.table.blocks[2] for member in members)
    assert world.core.blocks.num_used == 4, "the other beam's last block is free"
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_a_search_may_end_with_the_first_step() -> None:
    world = World(config(12))
    number = world.go(prompt(5), (1, 1, 1), search=PLAIN)
    assert [len(answer) for answer, _ in world.searched[number]] == [1, 1, 1]
    assert not [action for action in world.actions if isinstance(action, StartRun)]
    world.assert_at_rest()


def test_candidates_wait_for_the_prompt() -> None:
    world = World(config(12))
    number = world.reserve(prompt(20), (6, 6), search=PLAIN)
    assert number is not None
    world.start(number)
    assert not [action for action in world.actions if isinstance(action, ForkSequences | StartRun)]
    world.arrive(number)
    world.work()
    assert list(world.searched) == [number]


def test_one_that_is_stopped_in_its_step_says_nothing_more() -> None:
    world = World(config(12))
    number = world.go(prompt(20), (6, 6), search=PLAIN)
    selected = len([action for action in world.actions if isinstance(action, ForkSequences)])
    world.post(AbortRequest(number, "cancelled"))
    world.work()
    assert len([action for action in world.actions if isinstance(action, ForkSequences)]) == selected
    assert not [action for action in world.actions if isinstance(action, AnswersRanked)]
    world.assert_at_rest()


@pytest.mark.parametrize("way", [*WAYS, Preemption.AUTO])
@pytest.mark.parametrize("length", [BT - 1, BT, 2 * BT + 3])
@pytest.mark.parametrize("width", [1, 3])
def test_no_preemption_changes_what_is_found(way: Preemption, length: int, width: int) -> None:
    """Preempted whole in every step, and forked anew with the blocks that come back; the world compares."""
    world = World(config(24, preemption=way, swap_blocks=24, preempt_every=1, chunked_prefill_size=20))
    number = world.go(prompt(length), (BT + 4,) * width, stores=1, search=SearchRules(1.0, "never"))
    world.work()
    assert list(world.searched) == [number]
    assert world.core.preempted.preemptions > BT / 2
    assert [action.id for action in world.actions if isinstance(action, RequestFreed)] == [number]
    world.assert_at_rest()
    world.assert_reruns()
