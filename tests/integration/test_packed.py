"""Packed weights, and a file's own codes, through all services: answers are those of the dequantised weights.

Cached or not, moved to a decode instance, swapped out after each token, from the store; prefill in stages and ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.peers.gguf_files import write_gguf
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, GenerateResult
from tests.integration.conftest import BLOCK, small_plan, tokens, with_flags
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack
from tests.unit.engine.models.gguf_files import make_folder
from tests.unit.engine.models.packed_reference import GAP, pack

ANSWER = 2 * BLOCK + 5


@dataclass(frozen=True)
class Served:
    """A running stack whose decode instance preempts after every token."""

    stack: CheckedStack
    client: Client
    reference: Reference

    def ask(self, prompt: list[int]) -> GenerateResult:
        how = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        result = self.client.generate(token_ids=prompt, sampling=how)
        assert len(result.token_ids) == ANSWER
        return result


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(each, marks=pytest.mark.slow) for each in (("int8", 1, 1), ("int4", 2, 1), ("int4", 2, 2))),
        ("auto", 2, 1),
    ],
    ids=lambda each: f"{each[0]}-stages{each[1]}-ranks{each[2]}",
)
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    quantization, stages, ranks = request.param
    folder = tmp_path_factory.mktemp("stack")
    if quantization == "auto":  # a file with codes
        checkpoint = write_gguf("llama", make_folder("llama", folder / "llama"), folder / "model.gguf", "Q4_0")
    plan = replace(small_plan(checkpoint, folder / "data"), pipeline_parallel_size=stages)
    plan = with_flags(plan, "decode", "--set", "preempt_every=1", "--set", "preemption=swap")
    for kind in ("prefill", "decode"):
        plan = with_flags(plan, kind, "--set", f"quantization={quantization}")
    plan = with_flags(plan, "prefill", "--set", f"tensor_parallel_size={ranks}")
    reference = Reference(checkpoint)
    pack(reference.model, quantization)
    with CheckedStack(plan, invariants="decode") as stack, Client(stack.address) as client:
        yield Served(stack, client, reference)


@pytest.mark.parametrize("length", [1, 5 * BLOCK + 3])
def test_cached_or_not_moved_and_swapped(served: Served, length: int) -> None:
    prompt = tokens(length, f"packed {length}")
    before = served.stack.gauge("decode-", "preemptions_total")
    first = served.ask(prompt)
    served.reference.assert_greedy(prompt, first.token_ids, GAP)
    assert served.stack.gauge("decode-", "preemptions_total") - before >= ANSWER - 3
    again = served.ask(prompt)
    served.reference.assert_greedy(prompt, again.token_ids, GAP)
    assert again.usage.cached_tokens >= (length - 1) // BLOCK * BLOCK


def test_from_the_store_after_a_restart(served: Served) -> None:
    prompt = tokens(6 * BLOCK, "packed, stored")
    served.ask(prompt)
    again = served.stack.ask_restarted(
        ["prefill-0"], lambda: served.ask(prompt), lambda found: found.usage.cached_tokens >= 5 * BLOCK
    )
    assert again.usage.cached_tokens >= 5 * BLOCK
    served.reference.assert_greedy(prompt, again.token_ids, GAP)
