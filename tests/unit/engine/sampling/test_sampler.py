"""The sampler: greedy, each parameter, the counter-based draw, log probabilities, and that rows are independent.

Distributions, and the rule by which a number becomes a token, are in test_random_sampler.py.
"""

import math
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.engine.sampling.logprobs import compute_logprobs, top_candidates
from moonpool.engine.sampling.random_sampler import uniform
from moonpool.engine.sampling.sampler import NOT_FINITE, NOTHING_LEFT, sample


def spec(
    temperature: float = 0.0,
    *,
    position: int = 0,
    history: bytes | None = None,
    prompt_tokens: int = 0,
    banned: tuple[int, ...] = (),
    **options: Any,
) -> SampleSpec:
    params = SamplingParams(temperature=temperature, **options)
    return SampleSpec(params, 1, position=position, history=history, prompt_tokens=prompt_tokens, banned=banned)


LOGITS = torch.tensor([0.0, 3.0, 1.0, 3.0, -1.0])


def sampled(logits: Tensor, how: SampleSpec) -> int:
    [[token]], *_ = sample(logits.clone()[None], [how])
    return token


def drawn(logits: Tensor, how: SampleSpec, count: int = 400) -> Counter[int]:
    specs = [replace(how, position=position) for position in range(count)]
    return Counter(token for [token] in sample(logits.repeat(count, 1), specs)[0])


def test_greedy_is_the_lowest_of_equals() -> None:
    assert sampled(LOGITS, spec()) == 1
    assert sample(torch.zeros(2, 7), [spec(), spec(temperature=1e-9)])[0] == [[0], [0]]
    assert sample(torch.empty(0, 7), []) == ([], {}, {})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_choose_nothing(bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    tokens, told, failed = sample(logits, [spec(logprobs=1), spec(logprobs=1)])
    assert tokens == [[], [1]], "the other row does not notice"
    assert (list(told), failed) == ([1], {0: NOT_FINITE})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_left_fails_alone(temperature: float) -> None:
    """What a mask leaves is banned."""
    logits = torch.zeros(3, 256)
    how = [spec(temperature), spec(temperature, banned=(3, 4), logprobs=0), spec(temperature, banned=(4,))]
    tokens, told, failed = sample(logits, how, {1: bytes([0b11000]) + bytes(31), 2: bytes([0b11000]) + bytes(31)})
    assert (len(tokens[0]), tokens[1], tokens[2]) == (1, [], [3])
    assert (told, failed) == ({}, {1: NOTHING_LEFT})


def test_bias_and_bans() -> None:
    assert sampled(LOGITS, spec(logit_bias={4: 5.0})) == 4
    assert sampled(LOGITS, spec(banned=(1,))) == 3
    assert sampled(LOGITS, spec(banned=(1, 3))) == 2
    assert 1 not in drawn(LOGITS, spec(temperature=1.0, banned=(1,)))


def test_penalties() -> None:
    history = array("i", [1, 3, 3]).tobytes()
    assert sampled(LOGITS, spec(history=history, prompt_tokens=1, presence_penalty=0.5)) == 1
    assert sampled(LOGITS, spec(history=history, prompt_tokens=0, presence_penalty=2.5)) == 2
    assert sampled(LOGITS, spec(history=history, prompt_tokens=0, frequency_penalty=0.5)) == 1
    assert sampled(LOGITS, spec(history=history, prompt_tokens=3, frequency_penalty=9.0)) == 1
    assert sampled(LOGITS, spec(history=history, prompt_tokens=3, repetition_penalty=4.0)) == 2
    lowered = torch.tensor([-1.0, -1.5])
    assert sampled(lowered, spec(history=array("i", [0]).tobytes(), prompt_tokens=1, repetition_penalty=2.0)) == 1


def test_the_uniform_numbers_are_fixed() -> None:
    """Golden values: streams are continued by other releases."""
    assert uniform(1, 0) == 0.6752455415961466
    assert uniform(2**64 - 1, 5) == uniform(-1, 5)
    values = torch.tensor([uniform(7, position) for position in range(2000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert len({uniform(seed, at) for seed in (1, 2, 3, 4) for at in (0, 1)}) == 8


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log()
    counts = drawn(logits, spec(1.0), 3000)
    assert [counts[token] / 3000 for token in range(3)] == pytest.approx([0.1, 0.2, 0.7], abs=0.03)
    sharper = drawn(logits, spec(temperature=0.5), 3000)
    assert sharper[2] / 3000 == pytest.approx(0.49 / 0.54, abs=0.03)


def test_top_k_top_p_min_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(drawn(logits, spec(1.0, top_k=2))) == {0, 1}
    assert set(drawn(logits, spec(1.0, top_p=0.65))) == {0, 1}
    assert set(drawn(logits, spec(1.0, top_p=0.75))) == {0, 1, 2}
    assert set(drawn(logits, spec(1.0, min_p=0.6))) == {0, 1}
    assert set(drawn(logits, spec(1.0, top_k=3, top_p=0.5))) == {0, 1}  # 0.4 / 0.9 < 0.5
    assert set(drawn(logits, spec(1.0, top_p=1e-6))) == {0}
    assert set(drawn(torch.zeros(4), spec(1.0, top_k=2))) == {0, 1}


def test_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    specs = [spec(), spec(1.0), spec(temperature=1.0, top_k=5), spec(banned=(0,)), spec(), spec(min_p=0.5)]
    specs = [replace(how, position=row) for row, how in enumerate(specs)]
    together, *_ = sample(logits.clone(), specs)
    assert together == [[sampled(logits[row], how)] for row, how in enumerate(specs)]
    order = [3, 1, 5, 0, 4, 2]
    assert sample(logits[order].clone(), [specs[row] for row in order])[0] == [together[row] for row in order]


@pytest.mark.parametrize("how", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}, {}])
def test_each_of_several_samples_is_that_of_its_seed(how: dict[str, Any]) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5))
    [together], *_ = sample(logits.clone(), [replace(spec(**how), seed=2**64 - 2, samples=5)])
    seeds = [2**64 - 2, 2**64 - 1, 0, 1, 2]
    alone = [sample(logits.clone(), [replace(spec(**how), seed=seed)])[0] for seed in seeds]
    assert alone == [[[token]] for token in together]
    assert len(set(together)) == (1 if not how else 5)


def test_the_most_likely_tokens_come_with_their_log_probabilities() -> None:
    tokens, scores = top_candidates(LOGITS.clone(), SampleSpec(best=4))
    assert tokens == [1, 3, 2, 0], "equal ones in order of the token"
    assert scores == [pytest.approx(value, abs=1e-6) for value in torch.log_softmax(LOGITS, 0)[tokens].tolist()]


def test_what_is_banned_is_not_among_the_most_likely_and_makes_no_other_likelier() -> None:
    tokens, scores = top_candidates(LOGITS.clone(), SampleSpec(best=9, banned=(1, 0)))
    assert tokens == [3, 2, 4]
    assert scores == [pytest.approx(value, abs=1e-6) for value in torch.log_softmax(LOGITS, 0)[tokens].tolist()]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_most_likely_of_what_is_not_finite_are_none(bad: float) -> None:
    assert top_candidates(torch.tensor([0.0, bad]), SampleSpec(best=1)) == ([], [])
    assert top_candidates(torch.tensor([0.0, 1.0]), SampleSpec(best=1, banned=(0, 1))) == ([], [])


def test_log_probabilities_are_those_before_everything_else() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3))
    plain = torch.log_softmax(logits, dim=-1)
    hot = spec(0.5, logprobs=3, logit_bias={7: 50.0}, top_k=1)
    tokens, told, _ = sample(logits.clone(), [hot, spec(1.0), replace(spec(1.0, logprobs=0), samples=2)])
    assert tokens[0] == [7]
    assert sorted(told) == [0, 2]
    [row] = told[0].of(tokens[0])
    assert row.logprob == pytest.approx(float(plain[0, 7]), abs=1e-5)
    assert row.rank == 1 + int((logits[0] > logits[0, 7]).sum())
    assert [token for token, _ in row.top] == logits[0].topk(3).indices.tolist()
    assert [value for _, value in row.top] == pytest.approx(plain[0].topk(3).values.tolist(), abs=1e-5)
    both = list(told[2].of(tokens[2]))
    assert [logprobs_.logprob for logprobs_ in both] == pytest.approx(
        [float(plain[2, token]) for token in tokens[2]], abs=1e-5
    )
    assert [logprobs_.top for logprobs_ in both] == [(), ()]


@pytest.mark.parametrize("vocabulary", [5, 127, 4096, 5001])
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("decimals", [1, 3, 7])
def test_the_likely_tokens_are_those_of_a_stable_sort(vocabulary: int, count: int, decimals: int) -> None:
    """Many logits are equal, some are, or none; ranks are those of all tokens, likely or not."""
    drawn = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(4, vocabulary, generator=drawn).round(decimals=decimals)
    ordered = torch.log_softmax(logits, -1).sort(dim=-1, descending=True, stable=True)
    tokens = [[int(logits[0].argmax())], [1, 2], [3], [4]]
    for row, found in enumerate(compute_logprobs(logits, tokens, count)):
        size = len(tokens[row])
        assert found.ranks.tolist() == [1 + int((logits[row] > logits[row, token]).sum()) for token in tokens[row]]
        assert found.top_token_ids.tolist() == ordered.indices[row, :count].tolist() * size
        assert found.top_logprobs.tolist() == pytest.approx(ordered.values[row, :count].tolist() * size, abs=1e-5)
        assert found.consistent
