"""Turns of a conversation of which decode computes the new part itself: the answer is that of a plain forward pass."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client
from tests.integration.conftest import BLOCK, small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow  # a stack of its own

ANSWER = 25 * BLOCK
"""So long that prefill, which does not hold the answers, would compute many times what decode does."""


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    folder = tmp_path_factory.mktemp("rests")
    plan = small_plan(checkpoint, folder)
    extra = {**plan.extra, "conductor": ["--set", "decode_prompt_tokens=64"]}
    with CheckedStack(replace(plan, kvstore=0, extra=extra)) as stack:
        yield stack


def test_later_turns_are_computed_at_decode_and_greedy_output_is_the_same(
    served: CheckedStack, reference: Reference
) -> None:
    history: list[int] = []
    with Client(served.address) as client:
        for turn in range(3):
            history += tokens(11 + 5 * turn, f"turn {turn}")
            sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
            result = client.generate(token_ids=history, sampling=sampling)
            reference.assert_greedy(history, result.token_ids)
            assert result.placement.prefill == ("decode-0" if turn else "prefill-0")
            assert result.usage.cached_tokens == (len(history) - 11 - 5 * turn - 1) // BLOCK * BLOCK * bool(turn)
            explained = client.explain(result.request_id)
            assert {candidate.instance for candidate in explained.candidates} == {"prefill-0", "decode-0"}
            history += result.token_ids
    assert served.gauge("decode-", "prompts_computed_total") == 2
