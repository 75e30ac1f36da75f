"""The native sampler beside torch's, which is its reference: the same tokens, failures, ranks and likely tokens."""

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moonpool.base.native import build
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceSampling
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.native.library import Library
from moonpool.engine.sampling.native_sampler import NativeRows
from moonpool.engine.sampling.random_sampler import scale_of, uniform, weights_of
from moonpool.engine.sampling.sampler import Sampler, SamplerOutput, sample
from tests.unit.engine.sampling.batches import some_logits, some_mask, some_specs
from tests.unit.engine.sampling.draws import draw

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")


OTHERS = [name for name, (needed, _) in build.TARGETS.items() if needed <= build.processor_flags()][1:]


class Both:
    """Samples by both, and compares."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def by(self, mode: str, logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, bytes]) -> SamplerOutput:
        self._patch.setenv(VARIABLE, mode)
        torch.set_num_threads(2 if mode == "native" else 1)
        try:
            return sample(logits.clone(), specs, masks)
        finally:
            torch.set_num_threads(1)

    def run(self, mode: str, table: Tensor, specs: Sequence[SampleSpec], last: list[int]) -> list[list[int]]:
        """20 tokens of each, behind its last one, by one sampler that goes on from step to step."""
        self._patch.setenv(VARIABLE, mode)
        sampler, tokens = Sampler(specs, table.shape[1], table.device, 20), [last]
        for step in range(20):
            tokens.append([token for [token] in sampler.sample(table[tokens[-1]]).tokens])
            if step < 19:
                sampler.advance(tokens[-1])
        return [list(by_row) for by_row in zip(*tokens[1:], strict=True)]

    def __call__(
        self, logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, bytes] | None = None
    ) -> SamplerOutput:
        mine, theirs = (self.by(mode, logits, specs, masks or {}) for mode in ("native", "torch"))
        assert mine.tokens == theirs.tokens
        assert mine.failed == theirs.failed
        assert mine.logprobs.keys() == theirs.logprobs.keys()
        for row, told in mine.logprobs.items():
            other = theirs.logprobs[row]
            assert (told.ranks, told.top_token_ids) == (other.ranks, other.top_token_ids)
            assert told.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-5)
            assert told.top_logprobs.tolist() == pytest.approx(other.top_logprobs.tolist(), abs=1e-5)
        return mine


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(monkeypatch)


@pytest.mark.parametrize("vocabulary", [3, 127, 128, 129, 1000, 4096, 20_011])
def test_anything_that_a_request_may_ask_for(vocabulary: int, both: Both) -> None:
    chosen = random.Random(vocabulary)
    for _ in range(3 if vocabulary < 1000 else 1):
        rows = 12
        logits = some_logits(chosen, rows, vocabulary)
        specs = some_specs(chosen, rows, vocabulary)
        masks = {row: some_mask(chosen, vocabulary) for row in range(rows) if chosen.random() < 0.4}
        both(logits, specs, masks)


def test_a_large_vocabulary(both: Both) -> None:
    """Of a size that is in use, and no multiple of anything."""
    logits = torch.randn(4, 151_937, generator=torch.Generator().manual_seed(2)) * 2
    ways: list[dict[str, Any]] = [{"top_p": 0.95, "logprobs": 20}, {"top_k": 50}, {}, {"top_p": 0.5, "min_p": 1e-4}]
    both(
        logits, [SampleSpec(SamplingParams(temperature=0.8, **way), seed, samples=50) for seed, way in enumerate(ways)]
    )


def spread(kind: str, vocabulary: int) -> Tensor:
    """Logits whose weight lies in all tokens, in some runs of them, in few, or far apart."""
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(1, vocabulary, generator=generator) * 0.5
    if kind == "runs":
        logits[:, 1000:1700] += 9
    elif kind == "few":
        logits[:, torch.randperm(vocabulary, generator=generator)[:60]] += 14
    elif kind == "rounded":
        logits = logits.bfloat16().float()
    elif kind == "far apart":  # sums of what is kept are rounded
        logits = logits * 0.01 - 28
        logits[:, 77] = 0
    return logits


@pytest.mark.parametrize("kind", ["flat", "rounded", "runs", "few", "far apart"])
def test_top_p_finds_its_border_wherever_the_weight_lies(kind: str, both: Both) -> None:
    logits = spread(kind, 30_011).repeat(6, 1)
    logits[3:, :15_000] = -math.inf
    shares = [0.05, 0.95, 1 - 1e-9, 0.4, 0.95, 0.999]
    both(logits, [SampleSpec(SamplingParams(top_p=share), seed, samples=40) for seed, share in enumerate(shares)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite(bad: float, both: Both) -> None:
    logits = torch.zeros(4, 300)
    logits[0, 299] = logits[1, 5] = bad
    logits[2] = bad
    both(logits, [SampleSpec(SamplingParams(logprobs=2)), SampleSpec(), SampleSpec(), SampleSpec()])
    mask = bytearray(b"\xff" * 38)
    mask[0] = 0b11011111
    both(logits, [SampleSpec()] * 4, {0: bytes(mask), 1: bytes(mask), 3: bytes(38)})


@pytest.mark.parametrize("target", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_number_at_the_border_of_two_tokens_is_the_same_token(target: str | None) -> None:
    """Weights and sums are the same to the last bit, by any instructions: so are borders."""
    native, params = Library(build.build(target)), SamplingParams(temperature=0.7)
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(9)) * 3
    weights = weights_of(logits, torch.tensor([scale_of(params)]))[0].double()
    sums = weights.cumsum(0) / weights.sum()
    zero, unit = torch.zeros(1).double(), torch.ones(1).double()
    borders = torch.stack((sums, torch.nextafter(sums, zero), torch.nextafter(sums, unit)))[:, :-1].flatten().tolist()
    theirs = draw(logits.clone(), [params], [borders])
    spec = SampleSpec(params, samples=len(borders))
    mine = NativeRows(native, 3000, [spec], [scale_of(params)]).sample(logits.clone(), {}, borders)
    assert mine.tokens == theirs
    assert len(set(theirs[0])) > 1000


def test_a_share_that_rounding_puts_behind_all_that_it_keeps() -> None:
    """Half of the weights are alike and small; the share is the others' sum, to the last bits, whatever their order."""
    rows, vocab, params = 40, 4000, SamplingParams()
    generator = torch.Generator().manual_seed(1)
    logits = torch.rand(rows, vocab, generator=generator) * -16.0
    small = torch.rand(rows, vocab, generator=generator) < 0.5
    small[:, 0], small[:, -1] = False, True
    logits[:, 0], logits[small] = 0.0, -30.0
    weights = weights_of(logits, torch.full((rows,), scale_of(params)))[:, :vocab].double()
    shares = (weights * ~small).sum(-1) / weights.sum(-1)
    nearby = [share + step * math.ulp(share) for share in shares.tolist() for step in range(-6, 7)]
    specs = [SampleSpec(replace(params, top_p=share)) for share in nearby]
    number = math.nextafter(1.0, 0.0)  # of the last token that is kept
    rows_ = NativeRows(Library(build.build()), vocab, specs, [scale_of(params)] * len(specs))
    found = rows_.sample(logits.repeat_interleave(13, 0), {}, [number] * len(specs))
    assert [vocab - 1] not in found.tokens, "of the small ones, the first at most"


def test_the_frequency_penalty_is_a_rounded_product(both: Both) -> None:
    """A token that loses it is equal, to the last bit, to one that has what is left: the lower of both is chosen."""
    logits = torch.rand(400, generator=torch.Generator().manual_seed(6)) * 5 + 1
    times, penalty = 3, torch.tensor(0.3)
    left = logits - torch.tensor(float(times)) * penalty
    for lower, pair in enumerate(((logits, left), (left, logits))):
        history = array("i", [lower] * times).tobytes()
        spec = SampleSpec(SamplingParams(temperature=0.0, frequency_penalty=0.3), history=history)
        assert both(torch.stack(pair, 1), [spec] * 400).tokens == [[0]] * 400


def test_native_numbers_are_those_of_the_rule() -> None:
    chosen = random.Random(1)
    seeds = [0, 2**64 - 1, *(chosen.getrandbits(64) for _ in range(300))]
    positions = [0, 2**63, *(chosen.getrandbits(chosen.randrange(1, 64)) for _ in range(300))]
    numbers = np.empty(len(seeds))
    hashed = np.array([seeds, positions], np.uint64)
    Library(build.build()).uniform(hashed[0].ctypes.data, hashed[1].ctypes.data, 0, len(seeds), numbers.ctypes.data)
    assert numbers.tolist() == [uniform(seed, at) for seed, at in zip(seeds, positions, strict=True)]


def test_a_sequence_that_is_interrupted_goes_on_with_the_same_tokens(both: Both) -> None:
    """Preempted, computed anew, resumed elsewhere, in any company: a choice is a function of what a step brings."""
    chosen = random.Random(3)
    table = torch.randn(97, 97, generator=torch.Generator().manual_seed(4)) * 2
    ways: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"temperature": 1.3, "top_k": 30, "min_tokens": 12, "bad_words": ["x"]},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}},
    ]
    prompts = [array("i", (chosen.randrange(97) for _ in range(5))) for _ in ways]
    samplings = [
        SequenceSampling.of(SamplingParams(seed=70 + at, **way), len(prompt), [1, 2], [[7, 8]])
        for at, (way, prompt) in enumerate(zip(ways, prompts, strict=True))
    ]

    def generate(company: int, known: Sequence[Sequence[int]]) -> list[list[int]]:
        """Up to 20 tokens of each, those that are `known` are there already; in steps of some sequences at a time."""
        tokens = [prompt + array("i", by_row) for prompt, by_row in zip(prompts, known, strict=True)]
        while running := [at for at in range(3) if len(tokens[at]) < 25]:
            step = chosen.sample(running, min(company, len(running)))
            logits = torch.stack([table[tokens[at][-1]] for at in step])
            found = both(logits, [samplings[at].at(tokens[at]) for at in step])
            for at, [token] in zip(step, found.tokens, strict=True):
                tokens[at].append(token)
        return [token[5:].tolist() for token in tokens]

    whole = generate(1, [[], [], []])
    first, second, third = whole
    assert generate(3, [[], second[:7], third[:19]]) == whole
    assert generate(2, [first[:11], [], third[:1]]) == whole
    for mode in ("native", "torch"):
        specs = [samplings[at].at(prompts[at]) for at in (0, 2)]
        assert both.run(mode, table, specs, [prompts[0][-1], prompts[2][-1]]) == [first, third]
    assert not {1, 2} & set(whole[1][:12])


def test_options_of_a_row_are_parameters_by_name() -> None:
    """`SAMPLING_OPTIONS` of processors.h is all that packs them."""
    native = Library(build.build())
    assert set(native.sampling_options) <= {option.name for option in fields(SamplingParams)}
    assert native.sampling_row.names is not None
    assert set(native.sampling_options) <= set(native.sampling_row.names)
