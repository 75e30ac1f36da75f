"""One engine on a CPU that behaves like a GPU answers as a plain forward pass and as two, for every kind of layer."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import StackPlan
from moonpool.client import Client, GenerateResult
from moonpool.engine.models.random_checkpoint import create
from tests.integration.conftest import BLOCK, small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow  # two stacks for each kind of layer
SEED = 45
KINDS = {
    "tiny-llama": "dense",
    "tiny-gemma3": "windows",
    "tiny-qwen3-next": "recurrent states",
    "tiny-deepseek-v32": "latent attention to chosen keys, experts",
    "tiny-mixtral": "experts",
}
CHUNK = 24
"""Tokens of prompts beside answers: no multiple of a block."""
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
DRAWN = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.9, seed=3)


@dataclass(frozen=True)
class Pair:
    """One engine and two engines with the same weights, and the plain forward pass."""

    one: CheckedStack
    split: CheckedStack
    reference: Reference


def staged(checkpoint: Path, folder: Path, engines: Literal["one", "split"]) -> StackPlan:
    device = ["--device", "staged:7"]
    prompts = ["--set", f"chunked_prefill_size={CHUNK}", "--set", "max_num_batched_tokens=96"]
    extra = {"decode": [*device, *(prompts if engines == "one" else [])]}
    if engines == "split":
        extra["prefill"] = [*device, "--max-num-batched-tokens", "64"]
        extra["conductor"] = ["--set", "decode_prompt_tokens=0"]
    return dataclasses.replace(small_plan(checkpoint, folder), engines=engines, extra=extra)


@pytest.fixture(scope="module", params=KINDS, ids=lambda shape: f"{shape}, {KINDS[shape]}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = create(request.param, folder / "model", seed=SEED, dtype="float32")
    plans = staged(model, folder / "one", "one"), staged(model, folder / "split", "split")
    with CheckedStack(plans[0]) as one, CheckedStack(plans[1]) as split:
        yield Pair(one, split, Reference(model))


def ask(stack: CheckedStack, asked: list[tuple[list[int], SamplingParams]]) -> list[GenerateResult]:
    """Sends requests at once: prompts are computed beside answers."""
    with Client(stack.address) as client, ThreadPoolExecutor(len(asked)) as pool:
        running = [pool.submit(client.generate, token_ids=prompt, sampling=how) for prompt, how in asked]
        return [each.result() for each in running]


def test_prompts_beside_answers(pair: Pair) -> None:
    """Of lengths around blocks and chunks; greedy, drawn, and several answers."""
    lengths = (1, BLOCK, CHUNK + 1, 4 * CHUNK, 5 * BLOCK + 3, 12 * BLOCK)
    kinds = (GREEDY, DRAWN, dataclasses.replace(GREEDY, n=2))
    asked = [(tokens(length, f"{SEED} {length}"), kinds[place % 3]) for place, length in enumerate(lengths * 2)]
    ours, theirs = ask(pair.one, asked), ask(pair.split, asked)
    for (prompt, how), found, wanted in zip(asked, ours, theirs, strict=True):
        assert found.placement.prefill == found.placement.decode == "engine-0"
        assert [choice.token_ids for choice in found.choices] == [choice.token_ids for choice in wanted.choices]
        if how.temperature == 0.0:
            for choice in found.choices:
                pair.reference.assert_greedy(prompt, choice.token_ids)


def test_a_conversation(pair: Pair) -> None:
    """Each turn finds the turn before in the pool, and the third one in the kvstore after a restart."""
    history = tokens(6 * BLOCK + 5, f"{SEED} turns")
    known = 0
    for turn in range(3):
        [result] = ask(pair.one, [(history, GREEDY)])
        pair.reference.assert_greedy(history, result.token_ids)
        assert result.usage.cached_tokens >= known - BLOCK
        known = (len(history) + len(result.token_ids) - 1) // BLOCK * BLOCK
        history = [*history, *result.token_ids, *tokens(9, f"{SEED} {turn}")]
        pair.one.check_at_rest()
        if turn == 1:
            pair.one.restart("engine-0")
