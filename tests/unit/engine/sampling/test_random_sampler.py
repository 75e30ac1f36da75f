"""The rule by which a number becomes a token, against a plain sort, and distributions over many draws."""

import itertools
import math
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.native import library
from moonpool.engine.sampling.random_sampler import scale_of, uniform
from moonpool.engine.sampling.random_sampler import weights_of as all_weights
from moonpool.engine.sampling.sampler import sample
from tests.unit.engine.sampling.draws import draw

DRAWS, PER_POSITION = 50_000, 10_000
SINGLE_DRAWS = 10_000
"""One for each seed or position."""
LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(11)) * 1.5
HISTORY = [3, 5, 5, 5, 8, 13, 21, 21]
PROMPT = 4
ENDS = {2, 30}
BAD_WORDS = ((17,), (21, 21, 7), (13, 21, 21, 33), (21, 13, 9))
"""All have begun but the last."""
ALLOWED = {*range(1, 40, 3), 0, 39}
"""What the mask lets through."""

FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "top_k and top_p": {"top_k": 12, "top_p": 0.8},
    "all three": {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "all penalties": {"presence_penalty": -0.5, "frequency_penalty": 0.9, "repetition_penalty": 0.7},
    "logit_bias": {"logit_bias": {0: 2.0, 17: -3.0, 39: 1.0}},
    "mask": {},
    "min_tokens": {"min_tokens": 5},
    "bad_words": {},
    "mask, bad_words and the rest": {
        "min_tokens": 5,
        "top_k": 9,
        "top_p": 0.9,
        "repetition_penalty": 1.4,
        "logit_bias": {2: 9.0},
    },
}
EXCLUDED = {
    "mask": {*range(40)} - ALLOWED,
    "min_tokens": ENDS,
    "bad_words": {17, 7, 33},
    "mask, bad_words and the rest": {*range(40)} - ALLOWED | ENDS | {17, 7, 33},
}
"""Tokens that must not be chosen."""
NATIVE = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")


def weights_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """The kept weights by a stable sort of everything: the rule as it is written down."""
    weights = all_weights(logits[None], torch.tensor([scale_of(params)]))[0, : len(logits)]
    ordered = weights.sort(descending=True, stable=True)
    kept = ordered.indices[: params.top_k or None]
    values = weights[kept].double()
    before = values.cumsum(0) - values
    kept = kept[(before < params.top_p * values.sum()) & (weights[kept] >= params.min_p)]
    return torch.zeros_like(weights).index_copy(0, kept, weights[kept])


def plain_draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    sums = weights_of(logits, params).double().cumsum(0)
    return int(torch.searchsorted(sums, min(number * sums[-1], torch.nextafter(sums[-1], -sums[-1])), right=True))


def penalised(logits: Tensor, params: SamplingParams) -> Tensor:
    """Bias and penalties token by token, as vLLM documents them."""
    changed = logits.tolist()
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    for token in set(HISTORY):
        value = changed[token]
        changed[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(HISTORY[PROMPT:]).items():
        changed[token] -= params.presence_penalty + params.frequency_penalty * count
    return torch.tensor(changed)


def spec_of(feature: str, params: SamplingParams) -> SampleSpec:
    """As an instance has it for the token after the history."""
    bad = BAD_WORDS if "bad_words" in feature else ()
    return SequenceSampling.of(params, PROMPT, ENDS, bad).at(array("i", HISTORY))


def probabilities_of(logits: Tensor, params: SamplingParams) -> list[float]:
    weights = weights_of(logits, params).double()
    probabilities: list[float] = (weights / weights.sum()).tolist()
    return probabilities


def follows(counts: Counter[int], probabilities: list[float]) -> bool:
    """Whether these are likely counts of draws; prints how likely."""
    value, bound = chi_square(counts, probabilities)
    print(f"chi-square {value:.1f}, bound {bound:.1f}, {len(counts)} tokens")
    return all(probabilities[token] for token in counts) and value < bound


def chi_square(counts: Counter[int], probabilities: list[float]) -> tuple[float, float]:
    """The statistic, and its bound at four standard deviations (Wilson and Hilferty's approximation)."""
    total = sum(counts.values())
    possible = [token for token, share in enumerate(probabilities) if share * total >= 1]
    value = sum(
        (counts[possible_token] - probabilities[possible_token] * total) ** 2 / (probabilities[possible_token] * total)
        for possible_token in possible
    )
    freedom = len(possible) - 1
    scale = 2 / (9 * freedom)
    return value, freedom * (1 - scale + 4 * math.sqrt(scale)) ** 3


@pytest.mark.parametrize("feature", FEATURES)
def test_draws_follow_the_distribution(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native sampler's draws; torch draws the same tokens."""
    params = SamplingParams(**FEATURES[feature])
    spec = replace(spec_of(feature, params), seed=4711, samples=PER_POSITION)
    mask = sum(1 << token for token in ALLOWED).to_bytes(5, "little")

    def drawn(mode: str, position: int) -> list[int]:
        monkeypatch.setenv(VARIABLE, mode)
        at = replace(spec, position=position)
        [tokens], *_ = sample(LOGITS.clone()[None], [at], {0: mask} if "mask" in feature else {})
        return tokens

    mode = "torch" if library.get() is None else "native"
    draws = [drawn(mode, position) for position in range(DRAWS // PER_POSITION)]
    assert drawn("torch", 0) == draws[0]
    logits = penalised(LOGITS, params)
    logits[list(EXCLUDED.get(feature, ()))] = -torch.inf
    assert follows(Counter(itertools.chain(*draws)), probabilities_of(logits, params))


@pytest.mark.parametrize("along", ["seeds", "positions"])
@NATIVE
def test_draws_of_many_seeds_or_positions_follow_the_distribution(along: str) -> None:
    """One draw each: those of any seeds, and those along one answer, are as independent as those of samples."""
    params = SamplingParams(**FEATURES["all three"])
    pairs = [(number, 7) if along == "seeds" else (4711, number) for number in range(SINGLE_DRAWS)]
    [by_torch] = draw(LOGITS[None], [params], [[uniform(*pair) for pair in pairs]])
    natively: list[int] = []
    for begin in range(0, SINGLE_DRAWS, PER_POSITION):
        specs = [SampleSpec(params, seed, position=at) for seed, at in pairs[begin : begin + PER_POSITION]]
        natively += [token for [token] in sample(LOGITS.repeat(PER_POSITION, 1), specs).tokens]
    assert natively == by_torch
    assert follows(Counter(natively), probabilities_of(LOGITS, params))


def test_weights_are_exponentials() -> None:
    logits = torch.cat((torch.linspace(-60, 0, 10_001), torch.tensor([-torch.inf, -500.0])))
    for temperature in (0.3, 1.0, 2.5):
        exact = (logits.double() / temperature).exp().tolist()
        found = all_weights(logits[None], torch.tensor([scale_of(SamplingParams(temperature=temperature))]))
        assert found[0, : len(logits)].tolist() == pytest.approx(exact, rel=2e-5, abs=2e-38)
        assert found[0, 10_000] == 1
        assert found[0, 10_001:].tolist() == [0.0] * (found.shape[1] - 10_001)


def test_the_chi_square_test_can_fail() -> None:
    [tokens], *_ = sample(LOGITS.clone()[None], [SampleSpec(SamplingParams(temperature=1.05), 1, samples=DRAWS)])
    assert not follows(Counter(tokens), probabilities_of(LOGITS, SamplingParams()))
    [tokens], *_ = sample(LOGITS.clone()[None], [SampleSpec(SamplingParams(), 1, samples=DRAWS)])
    assert follows(Counter(tokens), probabilities_of(LOGITS, SamplingParams()))


MIXED = [
    SamplingParams(),
    SamplingParams(top_k=7),
    SamplingParams(top_k=400, temperature=1.5),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.95, temperature=1.5),
    SamplingParams(top_p=0.9999),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(top_p=0.8, min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("vocabulary", [3, 128, 500, 5000])
@pytest.mark.parametrize("shape", ["many equal values", "flat", "peaked", "with bans"])
def test_it_is_the_rule_as_a_full_sort_follows_it(vocabulary: int, shape: str) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(MIXED), vocabulary, generator=generator)
    if shape == "many equal values":
        logits = logits.bfloat16().float().round(decimals=1)
    elif shape == "flat":
        logits.zero_()
    elif shape == "peaked":
        logits *= 12
    else:
        logits[:, ::3] = -torch.inf
        logits[:, 1] = 0.5
    numbers = torch.rand(len(MIXED), 9, generator=generator, dtype=torch.float64).tolist()
    for row in numbers:
        row += [0.0, 1 - 2**-53]
    found = draw(logits, MIXED, numbers)
    for row, params in enumerate(MIXED):
        assert found[row] == [plain_draw(logits[row], params, number) for number in numbers[row]], params


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(len(MIXED), 777, generator=torch.Generator().manual_seed(1))
    numbers = [[0.1 * row, 0.37] for row in range(len(MIXED))]
    together = draw(logits, MIXED, numbers)
    for row, params in enumerate(MIXED):
        assert draw(logits[row : row + 1], [params], [numbers[row]]) == [together[row]]
