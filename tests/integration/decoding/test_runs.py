"""Runs of several steps, with blocks granted ahead, in a pool too small for all: answers do not depend on preemption.

Elsewhere sequences are preempted in every step, so that each step is ordered by itself. The walks of
`tests/unit/engine/decode/core` have such runs in every `make test`, and `tests/unit/engine/test_step_run.py` their
steps.
"""

import asyncio
from pathlib import Path

import pytest

from moonpool.base.runtime.journal import journal_files, rerun
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import AsyncClient, GenerateResult
from moonpool.engine.decode.core.events import RunProgress
from tests.integration.conftest import BLOCK, tokens
from tests.integration.decoding.conftest import DecodeWith
from tests.integration.reference import GAP_TOLERANCE, Reference

POOL = 26
ANSWER = 10 * BLOCK + 5
"""Of three sequences at once it takes more than there is, so they need not begin together."""
WAYS = {"swap": "swaps_total", "recompute": "recomputed_tokens_total"}
"""Ways of preemption, and what counts that they were taken."""


CROWDED = ("--set", "assumed_answer_tokens=4", "--set", "chunked_prefill_size=40", "--set", f"blocks={POOL}")


def borders(folder: Path) -> int:
    """Blocks that became full within runs, by the journal of a decode instance: the next one had been granted ahead."""
    events: list[object] = []
    for path in journal_files(folder):
        rerun(path, lambda _, entry, __: events.append(entry.event))
    return sum(len(event.filled) for event in events if isinstance(event, RunProgress))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_runs_go_on_around_preemption(decode_with: DecodeWith, reference: Reference, way: str) -> None:
    """Eight sequences grow to four times the pool; each greedy answer is that of a plain forward pass."""
    stack = decode_with(*CROWDED, "--set", f"preemption={way}")
    journal = stack.journals["decode-0"]
    prompts = [tokens(5 + 6 * number, f"{way} runs {number}") for number in range(8)]
    assert sum(-(-(len(prompt) + ANSWER) // BLOCK) for prompt in prompts) > 3.5 * POOL
    how = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)

    async def ask() -> list[GenerateResult]:
        async with AsyncClient(stack.address) as client:
            return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=how) for prompt in prompts))

    for prompt, result in zip(prompts, asyncio.run(ask()), strict=True):
        assert len(result.token_ids) == ANSWER
        reference.assert_greedy(prompt, result.token_ids, GAP_TOLERANCE)
    assert min(stack.gauge("decode-", "preemptions_total"), stack.gauge("decode-", WAYS[way])) > 0
    stack.restart("decode-0")  # its journal is whole
    assert borders(journal) > 0
