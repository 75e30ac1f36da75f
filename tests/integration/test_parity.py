"""Greedy float32 output through the running services equals a plain forward pass's, whatever the placement."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult, SamplingParams
from moonpool.model.create import create
from tests.integration.reference import Reference

SEED = 20_26
BLOCK = 16


@dataclass(frozen=True)
class Topology:
    """A checkpoint's shape and the stack that serves it."""

    shape: str
    prefill: int = 1
    decode: int = 1
    stages: int = 1


DEFAULT = [
    Topology("tiny-llama"),
    Topology("tiny-mistral", stages=2),
    Topology("tiny-qwen2", prefill=2, decode=2),
    Topology("tiny-qwen3", prefill=2, decode=2, stages=2),
]
REST = [
    Topology(shape, prefill, decode, stages)
    for shape in ("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")
    for prefill, decode in ((1, 1), (2, 2))
    for stages in (1, 2)
    if Topology(shape, prefill, decode, stages) not in DEFAULT
]


@dataclass(frozen=True)
class Served:
    """A running stack and its yardstick."""

    topology: Topology
    stack: LocalStack
    client: Client
    reference: Reference
    eos_prompt: list[int]
    """The checkpoint's end-of-sequence token is the greedy one after this prompt."""

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Random token ids without special ones; `seed` is part of the test, so a failure can be repeated."""
        return prompt_tokens(self.reference, tokens, seed)

    def check(self, prompt: list[int], max_tokens: int = 12) -> GenerateResult:
        """Generates greedily and compares."""
        result = self.client.generate(
            token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        )
        assert len(result.token_ids) == max_tokens
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.completion_tokens == max_tokens
        self.reference.assert_greedy(prompt, result.token_ids)
        return result


def prompt_tokens(reference: Reference, tokens: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    generator = random.Random(f"{SEED}/{seed}")
    return [generator.randrange(8, reference.model.config.vocab_size) for _ in range(tokens)]


def end_with(folder: Path, eos: int) -> None:
    """Makes a token the checkpoint's end-of-sequence token."""
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))


def identify(topology: Topology) -> str:
    return f"{topology.shape}-{topology.prefill}p{topology.decode}d-stages{topology.stages}"


@pytest.fixture(
    scope="module",
    params=[*DEFAULT, *(pytest.param(topology, marks=pytest.mark.slow) for topology in REST)],
    ids=lambda topology: identify(topology),
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    topology: Topology = request.param
    folder = tmp_path_factory.mktemp(topology.shape)
    create(topology.shape, folder / "model", seed=SEED, dtype="float32")
    reference = Reference(folder / "model")
    eos_prompt = prompt_tokens(reference, 20, seed=500)
    end_with(folder / "model", reference.first_token(eos_prompt))
    plan = StackPlan(
        model=str(folder / "model"),
        data_dir=folder,
        dtype="float32",
        prefill=topology.prefill,
        decode=topology.decode,
        stages=topology.stages,
        threads=1,
        block_tokens=BLOCK,
        kv_bytes=16 << 20,
        dram_bytes=16 << 20,
        extra={"prefill": ["--step-tokens", "64"]},
    )
    with LocalStack(plan) as stack, Client(stack.address) as client:
        yield Served(topology, stack, client, reference, eos_prompt)
        wait_at_rest(stack.address, timeout_s=20)


@pytest.mark.parametrize("tokens", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 203])
def test_prompt_lengths(served: Served, tokens: int) -> None:
    """Shorter than a block, exactly one, one over, and many chunks (a step takes 64 tokens)."""
    served.check(served.prompt(tokens, seed=tokens))


def test_same_prompt_twice(served: Served) -> None:
    """The second time all full blocks but the last token's are cached."""
    prompt = served.prompt(5 * BLOCK, seed=100)
    first = served.check(prompt)
    assert first.usage.cached_tokens == 0
    second = served.check(prompt)
    assert second.usage.cached_tokens == 4 * BLOCK
    assert second.token_ids == first.token_ids


def test_shared_prefix(served: Served) -> None:
    """Two prompts with a common beginning, then a second turn that continues prompt and answer."""
    common = served.prompt(3 * BLOCK, seed=200)
    served.check(common + served.prompt(21, seed=201))
    tail = served.prompt(30, seed=202)
    result = served.check(common + tail, max_tokens=20)
    assert result.usage.cached_tokens == 3 * BLOCK
    second_turn = [*common, *tail, *result.token_ids, *served.prompt(9, seed=203)]
    wait_at_rest(served.stack.address, timeout_s=20)
    again = served.check(second_turn)
    assert again.usage.cached_tokens >= (len(common) + len(tail)) // BLOCK * BLOCK


def test_sixteen_at_once(served: Served) -> None:
    """Mixed lengths in one continuous batch."""
    prompts = [served.prompt(3 + 13 * number, seed=300 + number) for number in range(16)]

    async def run() -> list[GenerateResult]:
        async with AsyncClient(served.stack.address) as client:
            sampling = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
            return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=sampling) for prompt in prompts))

    for prompt, result in zip(prompts, asyncio.run(run()), strict=True):
        assert len(result.token_ids) == 14
        served.reference.assert_greedy(prompt, result.token_ids)


def test_one_token(served: Served) -> None:
    """max_tokens = 1 needs no decode instance."""
    result = served.check(served.prompt(37, seed=400), max_tokens=1)
    assert result.placement.decode == ""


def test_eos_first(served: Served) -> None:
    """A prompt whose greedy first token is the end-of-sequence token gives that token alone and an empty text."""
    prompt = served.eos_prompt
    result = served.client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=8, temperature=0.0))
    assert result.token_ids == [served.reference.first_token(prompt)]
    assert result.text == ""
    assert result.finish_reason == "stop"


def test_sampling_does_not_depend_on_placement(served: Served) -> None:
    """With a seed, sampled output is the same cold, cached and in company."""
    prompt = served.prompt(50, seed=600)
    sampling = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, top_k=40, seed=7, ignore_eos=True)
    first = served.client.generate(token_ids=prompt, sampling=sampling)
    second = served.client.generate(token_ids=prompt, sampling=sampling)
    assert first.token_ids == second.token_ids


def test_stream_is_the_answer(served: Served) -> None:
    """Deltas add up to the result, tokens and text."""
    prompt = served.prompt(40, seed=700)
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    events = list(served.client.stream(token_ids=prompt, sampling=sampling))
    whole = served.client.generate(token_ids=prompt, sampling=sampling)
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert "".join(event.text for event in events) == whole.text


def test_work_is_spread(served: Served) -> None:
    """With two instances of a kind both are used: at once, or soon, where measured speeds seem to differ much."""
    if served.topology.prefill == 1:
        pytest.skip("one instance of a kind")

    async def run() -> list[GenerateResult]:
        async with AsyncClient(served.stack.address) as client:
            sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            prompts = [served.prompt(90, seed=800 + number) for number in range(8)]
            return await asyncio.gather(*(client.generate(token_ids=prompt, sampling=sampling) for prompt in prompts))

    prefills, decodes = set(), set()
    for _ in range(20):  # requests elsewhere until even a twenty times slower estimate is doubted
        results = asyncio.run(run())
        prefills |= {result.placement.prefill for result in results}
        decodes |= {result.placement.decode for result in results}
        if len(prefills) == len(decodes) == 2:
            break
    assert prefills == {"prefill-0", "prefill-1"}
    assert decodes == {"decode-0", "decode-1"}
