"""The sampler in torch: the host waits for nothing between logits and tokens, and a GPU gives what a CPU gives.

Tensors of the device `meta` hold nothing: whoever looks at what one holds, lets a shape depend on it, or mixes it
with a tensor of the host, fails.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.sampling.ops import keep_top_k, keep_top_p, running_sums
from moonpool.engine.sampling.random_sampler import scale_of, weights_of
from moonpool.engine.sampling.sampler import Sampler, SamplerOutput
from moonpool.engine.sampling.torch_sampler import TorchRows
from tests.unit.engine.sampling.batches import some_logits, some_mask, some_specs
from tests.unit.engine.sampling.draws import draw

NOTHING = torch.device("meta")
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that go from the host to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and args and isinstance(args[0], Tensor) and args[0].device != found.device:
            assert found.device == NOTHING, "the host looks at what the device has found"
            self.nbytes += args[0].nbytes
        return found


def rows_of(specs: list[SampleSpec], vocabulary: int, device: torch.device) -> TorchRows:
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature]
    return TorchRows(specs, drawn, vocabulary, device)


@pytest.mark.parametrize("vocabulary", [100, 128, 30_011])
def test_nothing_is_looked_at_between_logits_and_tokens(vocabulary: int) -> None:
    chosen = random.Random(vocabulary)
    specs = some_specs(chosen, 40, vocabulary)
    masks = {row: some_mask(chosen, vocabulary) for row in range(0, 40, 3)}
    with torch.inference_mode(), Sent():
        rows = rows_of(specs, vocabulary, NOTHING)
        for _ in range(3):
            pending = rows.begin(torch.empty(40, vocabulary, device=NOTHING), masks)
            rows.advance([1] * 40)
    assert pending.tokens.shape == (sum(spec.samples for spec in specs),)
    assert {pending.tokens.device, pending.highest.device} == {NOTHING}
    assert pending.logprobs is not None
    assert {logprob.device for logprob in pending.logprobs} == {NOTHING}


@pytest.mark.parametrize(
    "look",
    [torch.nonzero, torch.Tensor.tolist, lambda tensor: tensor[tensor > 0], lambda tensor: tensor + torch.ones(3)],
)
def test_looking_at_nothing_fails(look: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.empty(3, device=NOTHING))


def test_a_further_step_sends_its_numbers_its_tokens_and_its_masks_as_they_are() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5, logit_bias={1: 1.0})
    specs = [SampleSpec(params, row, history=bytes(4000), prompt_tokens=10) for row in range(8)]
    with torch.inference_mode():
        rows = rows_of(specs, 1600, NOTHING)
        rows.begin(torch.empty(8, 1600, device=NOTHING), {})
        rows.advance([7] * 8)
        with Sent() as sent:
            rows.begin(torch.empty(8, 1600, device=NOTHING), {3: bytes(200)})
    assert sent.nbytes == 8 * 8 + 8 * 8 + (8 + 200)


def reference(weights: Tensor, goal: float, *, share: bool) -> Tensor:
    """By a stable sort of one row."""
    ordered = weights.sort(descending=True, stable=True)
    values = ordered.values.double()
    before = values.cumsum(0) - values if share else torch.arange(len(weights))
    kept = ordered.indices[before < (goal * values.sum() if share else goal)]
    return torch.zeros_like(weights).index_copy_(0, kept, weights[kept])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [False, True])
def test_a_border_is_that_of_a_sort(share: bool, device: str) -> None:
    chosen = random.Random(5)
    logits = some_logits(chosen, 60, 3000)
    weights = weights_of(logits, torch.full((60,), 1.0))
    goals = [chosen.choice((1e-9, 0.1, 0.5, 0.9, 0.999) if share else (1, 2, 17, 300, 2999)) for _ in range(60)]
    found = weights.to(device, copy=True)
    (keep_top_p if share else keep_top_k)(found, torch.tensor(goals, dtype=torch.float64, device=device))
    for row, goal in enumerate(goals):
        assert torch.equal(found[row].cpu(), reference(weights[row], goal, share=share)), (row, goal)


@pytest.mark.parametrize("rows", [1, 2, 70])
@pytest.mark.parametrize("device", DEVICES)
def test_running_sums_have_one_order(rows: int, device: str) -> None:
    values = torch.rand(rows, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    expected = []
    for row in values.tolist():
        expected.append([0.0])
        for value in row:
            expected[-1].append(expected[-1][-1] + value)
    assert running_sums(values.to(device)).tolist() == [row[1:] for row in expected]


@contextmanager
def never_waiting() -> Iterator[None]:
    """Fails where the host waits for a GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_of(specs: list[SampleSpec], steps: list[Tensor], masks: dict[int, bytes], device: str) -> list[SamplerOutput]:
    """So many steps of one run."""
    sampler, found = Sampler(specs, steps[0].shape[1], torch.device(device), len(steps)), []
    for logits in steps:
        found.append(sampler.sample(logits.to(device, copy=True), masks))
        sampler.advance([token[0] if token else 0 for token in found[-1].tokens])
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocabulary", [3, 128, 1000, 30_011])
def test_a_gpu_samples_what_a_cpu_samples(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(vocabulary)
    specs = some_specs(chosen, 40, vocabulary)
    steps = [some_logits(chosen, 40, vocabulary) for _ in range(4)]
    masks = {row: some_mask(chosen, vocabulary) for row in range(0, 40, 3)}
    on_gpu = run_of(specs, steps, masks, "cuda")
    monkeypatch.setenv(VARIABLE, "torch")
    on_cpu = run_of(specs, steps, masks, "cpu")
    for mine, theirs in zip(on_gpu, on_cpu, strict=True):
        assert (mine.tokens, mine.failed) == (theirs.tokens, theirs.failed)
        for row, told in mine.logprobs.items():
            other = theirs.logprobs[row]
            assert (told.ranks, told.top_token_ids) == (other.ranks, other.top_token_ids)
            assert told.top_logprobs.tolist() == pytest.approx(other.top_logprobs.tolist(), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_waits_for_a_gpu_only_when_it_reads() -> None:
    chosen, device = random.Random(8), torch.device("cuda")
    rows = rows_of(some_specs(chosen, 40, 1000), 1000, device)
    logits = some_logits(chosen, 40, 1000).to(device)
    with torch.inference_mode():
        rows.begin(logits.clone(), {})
        with never_waiting():
            rows.advance([1] * 40)
            pending = rows.begin(logits, {2: some_mask(chosen, 1000)})
        assert len(rows.read(pending).tokens) == 40


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_borders_between_tokens_are_the_same_on_a_gpu(device: str) -> None:
    params = SamplingParams(temperature=0.7)
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(9)) * 3
    weights = weights_of(logits, torch.tensor([scale_of(params)]))[0].double()
    sums = (weights.cumsum(0) / weights.sum())[:-1]
    numbers = [sums.tolist(), torch.nextafter(sums, torch.zeros(1).double()).tolist()]
    alike = [replace(params)] * 2
    assert draw(logits.to(device).repeat(2, 1), alike, numbers) == draw(logits.repeat(2, 1), alike, numbers)
