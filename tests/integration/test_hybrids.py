"""A hybrid model through the services: where prompts are continued, and what is left after services were killed.

Blocks have 64 tokens. `test_parity` compares other prompts, stages and transports.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, GenerateResult
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import SEED, small_plan, tokens, with_flags
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.shared.test_contexts import stored, until
from tests.integration.stack import CheckedStack
from tests.integration.test_faults import ENGINES, PATIENT

BLOCK = 64
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create("tiny-qwen3-next", tmp_path_factory.mktemp("hybrid") / "model", seed=SEED, dtype="float32")


@pytest.fixture(scope="module")
def reference(hybrid: Path) -> Reference:
    return Reference(hybrid)


@pytest.fixture(
    scope="module",
    params=["recompute", pytest.param("swap", marks=pytest.mark.slow)],
)
def stack(
    request: pytest.FixtureRequest, hybrid: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckedStack]:
    """One instance of each kind; decode preempts a request every third step, and a prompt takes several."""
    plan = small_plan(hybrid, tmp_path_factory.mktemp(request.param))
    plan = dataclasses.replace(plan, block_size=BLOCK, kv_cache_memory_bytes=64 << 20, dram_bytes=64 << 20)
    flags = ["--set", "preempt_every=3", "--set", "assumed_answer_tokens=4", "--set", "chunked_prefill_size=80"]
    flags += ["--set", f"preemption={request.param}"]
    plan = with_flags(with_flags(plan, "decode", *flags), "conductor", *PATIENT)
    with CheckedStack(plan, invariants="decode") as stack:
        yield stack


def asked(stack: CheckedStack, reference: Reference, prompt: list[int]) -> GenerateResult:
    with Client(stack.address) as client:
        result = client.generate(token_ids=prompt, sampling=GREEDY)
    reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)
    stack.check_at_rest()
    return result


def test_a_prompt_is_continued_at_block_borders(stack: CheckedStack, reference: Reference) -> None:
    prompt = tokens(200, "hybrid")
    assert asked(stack, reference, prompt).usage.cached_tokens == 0
    assert asked(stack, reference, prompt).usage.cached_tokens == 192
    assert asked(stack, reference, prompt[:150] + tokens(60, "branch")).usage.cached_tokens == 128


def test_states_come_back_from_the_store(stack: CheckedStack, reference: Reference) -> None:
    """All but the conductor are killed. The kvstore reads what it had written, and loading that saves ten steps."""
    prompt = tokens(10 * BLOCK + 8, "killed")
    first = asked(stack, reference, prompt)
    with Client(stack.address) as client:
        held = stored(client)
        stack.restart("kvstore-0", kill=True)
        until(lambda: stored(client) == held)
    again = stack.ask_restarted(
        ENGINES,
        lambda: asked(stack, reference, prompt),
        lambda found: found.usage.cached_tokens == 10 * BLOCK,
        kill=True,
    )
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 10 * BLOCK, again.placement
    assert again.placement.kvstore == "kvstore-0"
