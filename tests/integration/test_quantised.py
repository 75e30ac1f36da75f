"""Quantised KV through all services: answers are those of the torch stage over KV of that type, which is stored alike
wherever it was computed: cached or not, moved to a decode instance, swapped out after every token, read from the store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from moonpool.base.kv.layout import QUANTISED
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, GenerateResult
from moonpool.engine.kernels import kv_quantization
from moonpool.engine.kernels.choice import VARIABLE
from tests.integration.conftest import BLOCK, small_plan, tokens, with_flags
from tests.integration.stack import CheckedStack
from tests.unit.engine.models.forward import Runner, Sequence_

pytestmark = pytest.mark.slow
ANSWER = 2 * BLOCK + 5
GAP = 0.02
"""Of logits whose spread is about 1: sums in another order let a number in a thousand be stored one step away."""


@dataclass(frozen=True)
class Served:
    """A running stack whose decode instance preempts after every token."""

    stack: CheckedStack
    client: Client
    reference: Runner

    def ask(self, prompt: list[int]) -> GenerateResult:
        how = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        result = self.client.generate(token_ids=prompt, sampling=how)
        assert len(result.token_ids) == ANSWER
        return result

    def check(self, prompt: list[int], output: list[int]) -> None:
        """Each token is the reference's choice."""
        context = [*prompt, *output[:-1]]
        with torch_kernels():
            rows = self.reference.step([(Sequence_(context), len(context))])[-len(output) :]
        chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float((rows.amax(1) - chosen).max()) <= GAP


@contextmanager
def torch_kernels() -> Iterator[None]:
    """In here stages run in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "torch")
        yield


@pytest.fixture(
    scope="module",
    params=[*((name, (1, 1)) for name in QUANTISED), ("int8", (2, 2)), ("fp8", (2, 1))],
    ids=lambda each: f"{each[0]}-ranks{each[1][0]}to{each[1][1]}",
)
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name, ranks = request.param
    plan = replace(small_plan(checkpoint, tmp_path_factory.mktemp("stack")), kv_cache_dtype=name)
    for kind, its in zip(("prefill", "decode"), ranks, strict=True):
        plan = with_flags(plan, kind, "--set", f"tensor_parallel_size={its}")
    # A step is a token without guesses, so each token is a place of preemption.
    plan = with_flags(plan, "decode", "--speculative", "off", "--set", "preempt_every=1", "--set", "preemption=swap")
    with torch_kernels():
        reference = Runner(checkpoint, torch.float32, blocks=256, stored=kv_quantization.DTYPES[QUANTISED[name]])
    with CheckedStack(plan, invariants="decode") as stack, Client(stack.address) as client:
        yield Served(stack, client, reference)


@pytest.mark.parametrize("length", [1, BLOCK, 5 * BLOCK + 3])
def test_cached_or_not_moved_and_swapped(served: Served, length: int) -> None:
    prompt = tokens(length, f"quantised {length}")
    before = served.stack.gauge("decode-", "preemptions_total")
    first = served.ask(prompt)
    served.check(prompt, first.token_ids)
    assert served.stack.gauge("decode-", "preemptions_total") - before >= ANSWER - 3
    again = served.ask(prompt)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens >= (length - 1) // BLOCK * BLOCK


def test_from_the_store_after_a_restart(served: Served) -> None:
    prompt = tokens(6 * BLOCK, "quantised, stored")
    first = served.ask(prompt)
    again = served.stack.ask_restarted(
        ["prefill-0"], lambda: served.ask(prompt), lambda found: found.usage.cached_tokens >= 5 * BLOCK
    )
    assert again.usage.cached_tokens >= 5 * BLOCK
    assert again.token_ids == first.token_ids
