"""Models with windows or states through all services: conversations, preempted, and behind the loss of all pools."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import BLOCK, small_plan, tokens, with_flags
from tests.integration.reference import GAP_TOLERANCE, Reference
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow  # `test_parity` and `test_hybrids` have windows and states; the core, losses of pools
SEED = 11
MODELS: Mapping[str, Mapping[str, Any]] = {
    "tiny-gemma3": {},  # windows of 48 tokens in every other layer
    "tiny-mistral": {"sliding_window": 48},  # in every layer
    "tiny-qwen3-next": {},
}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: str = request.param
    folder = tmp_path_factory.mktemp(shape) / "model"
    return create(shape, folder, seed=SEED, dtype="float32", overrides=MODELS[shape])


@pytest.fixture(scope="module")
def stack(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckedStack]:
    """Every running sequence is preempted in every fifth step."""
    flags = ["--set", "preempt_every=5", "--set", "chunked_prefill_size=40", "--set", f"preemption={request.param}"]
    plan = with_flags(small_plan(model, tmp_path_factory.mktemp(request.param)), "decode", *flags)
    with CheckedStack(plan, invariants="decode") as stack:
        yield stack


@pytest.mark.parametrize(
    ("model", "stack"),
    [
        ("tiny-gemma3", "recompute"),
        ("tiny-gemma3", "swap"),
        ("tiny-mistral", "recompute"),
        ("tiny-qwen3-next", "recompute"),
    ],
    indirect=True,
)
def test_a_conversation(stack: CheckedStack, model: Path) -> None:
    """Each turn finds the turns before in the pools, and in the store when the pools are gone."""
    reference, history, known = Reference(model), tokens(9 * BLOCK + 5, SEED), 0
    with Client(stack.address) as client:
        for turn in range(3):
            how = SamplingParams(max_tokens=3 * BLOCK, temperature=0.0, ignore_eos=True, n=1 + turn % 2)
            result = client.generate(token_ids=history, sampling=how)
            for choice in result.choices:
                reference.assert_greedy(history, choice.token_ids, GAP_TOLERANCE)
            print(f"turn {turn}: {result.usage.cached_tokens} of {len(history)} tokens were cached")
            assert result.usage.cached_tokens >= known - BLOCK
            known = len(history) + 3 * BLOCK
            history = [*history, *result.token_ids, *tokens(7, f"{SEED} {turn}")]
            stack.check_at_rest()
            if turn == 1:
                stack.restart("prefill-0")
                stack.restart("decode-0")
    assert stack.gauge("decode-", "preemptions_total") > 0
