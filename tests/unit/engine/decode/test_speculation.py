"""Guesses that steps check: answers are those without guesses, and cost fewer steps where text repeats itself."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.keys import block_keys
from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.decode.config import DecodeConfig
from moonpool.engine.decode.service import core_settings
from moonpool.engine.decode.speculation import (
    GRAM,
    KEPT_IN_COMMON,
    DraftingSequence,
    DraftPlanner,
    LookupDrafter,
    RightGuesses,
)
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation
from tests.unit.instances import BLOCK, decoding, prompt, spec

SEED = 20_26
MANY = 4 * BLOCK
FEW = 2
"""Different tokens of answers that repeat themselves, and differ soon after."""
FREE, DEAR = Speeds(decode_base_s=1.0), Speeds(decode_base_s=1e-3, decode_per_sequence_s=1.0)


def drafter(text: list[int], most_tokens: int = 4096) -> "tuple[LookupDrafter, array[int]]":
    tokens = array("i", text)
    return LookupDrafter(tokens, most_tokens, RightGuesses(KEPT_IN_COMMON)), tokens


def guessed(found: LookupDrafter, most: int) -> list[int]:
    return [token for token, _ in found.guess(most)]


@pytest.mark.parametrize("before", [0, 5, 3000])
def test_a_guess_is_what_followed_before(before: int) -> None:
    """Also where the prompt is read together, and where its end is the place."""
    text = [1000 + number for number in range(before)]
    found, tokens = drafter([*text, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert guessed(found, 4) == []
    tokens.append(3)
    assert guessed(found, 4) == [4, 5, 6, 7]
    assert [token for token, likely in found.guess(9) if 0 < likely < 1] == [4, 5, 6, 7, 8, 9, 1, 2, 3]


def test_the_last_place_counts_and_a_loop_goes_on() -> None:
    assert guessed(drafter([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3])[0], 2) == [5, 9]
    assert guessed(drafter([9, 7, 7, 7, 7])[0], 5) == [7] * 5
    assert guessed(drafter([1, 2, 1, 2, 1, 2])[0], 5) == [1, 2, 1, 2, 1]


def test_behind_a_replaced_token_the_text_goes_on() -> None:
    found, tokens = drafter([*range(1, 30), 1, 2, 3, 4])
    assert guessed(found, 1) == [5]
    tokens.append(77)
    assert guessed(found, 2) == [6, 7]


def test_guesses_are_the_same_however_the_text_came() -> None:
    """Token for token, in parts or at once; with a table for few places, fewer of them are known."""
    generator = random.Random(SEED)
    print(f"seed {SEED}")
    text = [generator.randrange(4) for _ in range(700)]
    whole, _ = drafter(text)
    grown, tokens = drafter([])
    for token in text:
        tokens.append(token)
        grown.guess(1)
    assert guessed(whole, 1) == guessed(grown, 1) != []
    small, _ = drafter(text, 8)
    assert all(len({*drafter.guess(5)}) <= 5 for drafter in (small, whole))


def test_how_often_guesses_are_right_is_learnt_without_checking_any() -> None:
    found, tokens = drafter(list(range(100, 160)))
    first = RightGuesses(KEPT_IN_COMMON).rate(GRAM)
    for start in range(100, 150, 2):  # three tokens of the text, then another one
        tokens.extend([start, start + 1, start + 2])
        found.guess(1)
        tokens.append(7 + start)
        found.guess(1)
    tokens.extend([151, 152, 153])
    [(token, likely)] = found.guess(1)
    assert token == 154
    assert likely < first / 2


def text_of(found: LookupDrafter, tokens: int) -> DraftingSequence:
    return DraftingSequence(found, tokens, 9)


def test_only_what_pays_is_checked() -> None:
    text = [*range(1, 60), *range(1, 50)]
    found, _ = drafter(text)
    always = DraftPlanner(4, lambda: DEAR, always=True)
    for speeds, planner, wanted in (
        (FREE, DraftPlanner(4, lambda: FREE), 4),
        (DEAR, DraftPlanner(4, lambda: DEAR), 0),
        (DEAR, always, 4),
    ):
        [guess] = planner.plan([text_of(found, len(text))], 99)
        assert guess == list(range(50, 50 + wanted)), speeds
    assert always.plan([text_of(found, len(text))] * 2, 5) == [[50, 51, 52], [50, 51]]
    assert DraftPlanner(4, lambda: FREE).plan([text_of(found, len(text))], 0) == [[]]
    assert DraftPlanner(4, lambda: FREE).may_pay(64, 9999)
    assert not DraftPlanner(4, lambda: DEAR).may_pay(1, 9)
    assert always.may_pay(64, 9999)
    assert DraftPlanner(4, lambda: FREE).plan([DraftingSequence(found, len(text), 0)], 9) == [[]]
    assert DraftPlanner(4, lambda: FREE).plan([DraftingSequence(None, 5, 9)], 9) == [[]]


def test_the_time_around_a_step_counts() -> None:
    found, _ = drafter([*range(1, 60), *range(1, 50)])
    planner = DraftPlanner(2, lambda: FREE)
    assert planner.plan([text_of(found, 108)], 9) == [[50, 51]]
    for _ in range(100):
        planner.observe_overhead(2.5)
    assert planner.plan([text_of(found, 108)], 9) == [[]]


@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 3}, {"run_steps": MANY}])
@pytest.mark.parametrize("count", [1, 3])
async def test_answers_are_the_same(flags: dict[str, Any], count: int) -> None:
    """The engine's tokens are a function of all KV before them: KV of a wrong guess would change them."""
    prompts = {name: prompt(BLOCK + 3 * seed, seed) for seed, name in enumerate("abc"[:count])}
    answers = {name: continuation(tokens, MANY, FEW) for name, tokens in prompts.items()}
    async with (
        decoding(speculative="ngram", num_speculative_tokens=5, **flags) as decode,
        conducting(decode) as conductor,
    ):
        decode.engine.different = FEW
        for name, tokens in prompts.items():
            target = await reserve(decode, spec(name, tokens, max_tokens=MANY))
            await transfer(decode, target, tokens)
            await conductor.start(name, target, answers[name][0])
        await conductor.until(lambda: len(conductor.reasons) == count)
        for name in prompts:
            assert conductor.tokens[name] == answers[name][1:]
            assert conductor.reasons[name] == kv_pb2.FINISH_REASON_LENGTH
        await decode.rest()
        planner = decode.service.core.planner
        assert planner.drafted_tokens > planner.accepted_tokens > 0
        assert len(decode.engine.steps) < count * (MANY - 1)
        keys = {
            key for name, other in prompts.items() for key in block_keys(ROOT, [*other, *answers[name][:-1]], BLOCK)
        }
        assert set(decode.service.manager.keys()) <= keys


@pytest.mark.parametrize("at", [MANY // 2, MANY - 3])
async def test_an_answer_ends_within_accepted_guesses(at: int) -> None:
    """An end token, or the last token, may lie among them: nothing behind is told."""
    tokens = prompt(BLOCK)
    answer = continuation(tokens, MANY, 1)
    async with decoding(speculative="ngram") as decode, conducting(decode) as conductor:
        decode.engine.different = 1
        target = await reserve(decode, spec("a", tokens, max_tokens=at))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == answer[1:at]
        assert decode.service.core.planner.accepted_tokens > at // 2
        assert decode.service.core.planner.accepted_tokens + len(decode.engine.steps) == at - 1


async def test_no_guess_is_checked_where_speculation_is_off() -> None:
    tokens = prompt(BLOCK)
    async with decoding(speculative="off") as decode, conducting(decode) as conductor:
        decode.engine.different = 1
        target = await reserve(decode, spec("a", tokens, max_tokens=MANY))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, 8)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert (decode.service.core.planner.drafted_tokens, len(decode.engine.steps)) == (0, MANY - 1)


@pytest.mark.parametrize(("recurrent", "emulated"), [(True, None), (False, "a profile")])
def test_guesses_are_refused_by_name_where_none_can_be_checked(*, recurrent: bool, emulated: str | None) -> None:
    layout: Any = SimpleNamespace(
        block_size=16, block_bytes=1, recurrent=recurrent, states_alone=False, window_blocks=0, windowed_bytes=0
    )
    pool = SimpleNamespace(slots=0)
    engine: Any = SimpleNamespace(blocks=9, speeds=Speeds(), run_steps=1, max_num_batched_tokens=512, pool=pool)
    setup: Any = SimpleNamespace(layout=layout, spec=SimpleNamespace(emulated=emulated))
    context: Any = SimpleNamespace(setup=setup, engine=engine, speeds=engine.speeds)
    config = DecodeConfig(conductor="127.0.0.1:1", model="fake", speculative="ngram")
    with pytest.raises(ConfigError) as refused:
        core_settings(context, config)
    assert refused.value.field == "speculative"
    assert core_settings(context, config.model_copy(update={"speculative": "auto"})).draft_tokens == 0
    with pytest.raises(ConfigError) as refused:
        core_settings(context, config.model_copy(update={"speculative": "auto", "draft_model": "small"}))
    assert refused.value.field == "draft_model"


async def test_a_group_guesses_within_the_blocks_that_it_has() -> None:
    tokens = prompt(BLOCK - 2)
    firsts = (8, 9, 8)
    async with (
        decoding(speculative="ngram", preemption="swap", preempt_every=4) as decode,
        conducting(decode) as conductor,
    ):
        decode.engine.different = FEW
        target = await reserve(decode, spec("a", tokens, max_tokens=MANY, n=3))
        await transfer(decode, target, tokens)
        await conductor.start("a", target, *firsts)
        await conductor.until(lambda: len(conductor.reasons) == 3)
        for name, first in zip(("a", "a/1", "a/2"), firsts, strict=True):
            assert conductor.tokens[name] == continuation([*tokens, first], MANY - 1, FEW)
        assert decode.service.core.planner.accepted_tokens > 0
        await decode.rest()


@pytest.mark.parametrize("flags", [{}, {"preemption": "swap", "preempt_every": 3}, {"run_steps": 9}])
@pytest.mark.parametrize(("budget", "end"), [(1, (30,)), (5, (30,)), (37, (30, 31))])
async def test_thinking_ends_where_its_budget_does_with_guesses_and_runs(
    flags: dict[str, Any], budget: int, end: tuple[int, ...]
) -> None:
    """Guesses and runs go up to the forced tokens; these are computed as any others."""
    tokens, first = prompt(BLOCK + 3), 8
    wanted = [first]
    while len(wanted) < MANY:
        behind = len(wanted) - budget
        natural = continuation([*tokens, *wanted], 1, FEW)[0]
        wanted.append(end[behind] if 0 <= behind < len(end) else natural)
    async with (
        decoding(speculative="ngram", num_speculative_tokens=5, **flags) as decode,
        conducting(decode) as conductor,
    ):
        decode.engine.different = FEW
        sequence = spec("a", tokens, max_tokens=MANY)
        sequence.thinking.CopyFrom(
            kv_pb2.ThinkingBudget(tokens=budget, begin_token_ids=[29], end_token_ids=end, is_open=True)
        )
        target = await reserve(decode, sequence)
        await transfer(decode, target, tokens)
        await conductor.start("a", target, first)
        await conductor.until(lambda: "a" in conductor.reasons)
        assert conductor.tokens["a"] == wanted[1:]
        await decode.rest()


def test_tokens_of_pictures_are_not_guessed() -> None:
    tokens = array("i", [1, 2, 3, 4, 9, 9, 5, 6, 7, 8, 1, 2, 3])
    found = LookupDrafter(tokens, 4096, RightGuesses(KEPT_IN_COMMON), media=((4, 6),))
    assert guessed(found, 4) == [4]
    tokens.append(4)
    assert guessed(found, 4) == [], "the text goes on with a picture"
    tokens.extend([5, 6, 7])
    assert guessed(found, 2) == [8, 1]
