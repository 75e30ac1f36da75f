"""A budget of thinking is exact, wherever a run or a moved sequence begins, and nothing else is forced."""

import random
from array import array
from collections.abc import Callable

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.base.scheduling.thinking import BEGINS_WITHIN, ThinkingBudget

BEGIN, END = 7, 8
PROMPT = [1, 2, 3]
MODEL_TOKENS = 500
Model = Callable[[list[int]], int]
"""The token that a model would choose after the others."""


def budget(tokens: int, *, begin: tuple[int, ...] = (BEGIN,), end: tuple[int, ...] = (END,), is_open: bool = False):  # type: ignore[no-untyped-def]
    return ThinkingBudget(tokens, begin, end, is_open)


def sampling(thinking: ThinkingBudget | None, max_tokens: int = 60) -> SequenceSampling:
    return SequenceSampling.of(SamplingParams(max_tokens=max_tokens), len(PROMPT), (), (), thinking)


def answer(model: Model, thinking: ThinkingBudget | None, run_steps: int = 1, max_tokens: int = 60) -> list[int]:
    """An answer in runs of at most `run_steps` steps, of which only the first is told what is forced."""
    how, tokens = sampling(thinking, max_tokens), array("i", PROMPT)
    while len(tokens) < how.total_tokens(MODEL_TOKENS):
        forced = how.at(tokens).forced
        for _ in range(min(run_steps, how.steady(tokens, MODEL_TOKENS))):
            tokens.append(model(tokens.tolist()) if forced is None else forced)
            forced = None
    return tokens.tolist()[len(PROMPT) :]


def says(text: list[int]) -> Model:
    """A model that says a text, then 99, whatever comes between."""
    return lambda tokens: [*text, *[99] * 200][len(tokens) - len(PROMPT)]


@pytest.mark.parametrize("tokens", [0, 1, 5, 20])
def test_the_end_comes_behind_so_many_tokens(tokens: int) -> None:
    thought = answer(says([BEGIN, *range(100, 160)]), budget(tokens))
    assert thought[: tokens + 3] == [BEGIN, *range(100, 100 + tokens), END, 100 + tokens + 1]
    assert thought.count(END) == 1
    opened = answer(says(list(range(100, 160))), budget(tokens, is_open=True))
    assert opened[: tokens + 2] == [*range(100, 100 + tokens), END, 100 + tokens + 1]


def test_what_ends_in_time_is_left_alone() -> None:
    for text in ([BEGIN, 5, 6, END, 9, 10], [9, 10, 11], [BEGIN, 5, 6, 9, END, BEGIN, 9], [END, 5, 9]):
        assert answer(says(text), budget(4)) == answer(says(text), None)


def test_the_thinking_begins_soon_or_not_at_all() -> None:
    late = [5] * (BEGINS_WITHIN + 1) + [BEGIN, *range(100, 140)]
    assert END not in answer(says(late), budget(3))
    assert END in answer(says(late[2:]), budget(3))


def test_a_mark_of_several_tokens() -> None:
    begin, end = (20, 21), (30, 31, 30, 32)
    text = [20, 21, *range(100, 160)]
    thinking = budget(6, begin=begin, end=end)
    assert answer(says(text), thinking)[:13] == [20, 21, *range(100, 106), *end, 110]
    # The mark that the model has begun when the budget is used up goes on.
    text = [20, 21, 100, 101, 102, 103, 30, 31, *range(200, 240)]
    assert answer(says(text), thinking)[:10] == [20, 21, 100, 101, 102, 103, *end]
    text = [20, 21, 100, 101, 102, 103, 104, 30, 31, 30, 32, *range(200, 240)]
    assert answer(says(text), thinking) == answer(says(text), None)
    text = [20, 5, 6, 20, 22, 20, 21, *range(100, 140)]
    assert answer(says(text), thinking)[:17] == [*text[:13], *end]


@pytest.mark.parametrize("seed", range(60))
def test_runs_and_moved_sequences_think_as_single_steps(seed: int) -> None:
    drawn = random.Random(seed)
    few = drawn.choice([3, 5, 40])

    def model(tokens: list[int]) -> int:
        return random.Random(f"{seed} {tokens}").randrange(few)

    begin = tuple(drawn.randrange(few) for _ in range(drawn.choice([1, 1, 2, 3])))
    end = tuple(drawn.randrange(few) for _ in range(drawn.choice([1, 1, 2, 4])))
    thinking = ThinkingBudget(drawn.choice([0, 1, 2, 7, 30]), begin, end, drawn.random() < 0.5)
    single = answer(model, thinking)
    for steps in (2, 3, 8, 100):
        assert answer(model, thinking, steps) == single
    how = sampling(thinking)
    tokens = array("i", [*PROMPT, *single])
    for length in range(len(PROMPT), len(tokens)):  # each instance begins anew from the tokens alone
        forced = how.at(tokens[:length]).forced
        assert tokens[length] == (model(tokens[:length].tolist()) if forced is None else forced)
        assert how.steady(tokens[:length], MODEL_TOKENS) >= 1


def test_what_is_forced_is_not_banned() -> None:
    how = SequenceSampling.of(SamplingParams(min_tokens=5), 3, [END], [(END,)], budget(0, is_open=True))
    spec = how.at(array("i", PROMPT))
    assert (spec.forced, spec.banned, spec.after(END).forced) == (END, (), None)
