"""Greedy output through the running services is a plain forward pass's, whatever the placement, cache and company.

In float32 each token is the reference's own choice. In bfloat16 its logit may fall short of the reference's best by a
small multiple of the error that `transformers` itself makes in bfloat16.
"""

import asyncio
import dataclasses
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint.named_models import named_model
from moonpool.base.sampling_params import SamplingParams, stream_seed
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult
from moonpool.engine.models.random_checkpoint import create
from tests.integration.reference import GAP_TOLERANCE, Reference, error_of
from tests.integration.stack import CheckedStack
from tests.integration.topologies import BF16, ON_GPU, REST, SELECTED, Topology, missing

SEED = 20_26
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
BLOCK = 16
TIMES_ERROR = 4.5
"""Largest gap in bfloat16, in root mean squares of the logits' error that `transformers` makes in bfloat16. Measured:
up to 4.5 for `transformers` itself, up to 2.8 for ours."""
DRAW_TOLERANCE = 0.05
"""How far outside of its share a bfloat16 draw may lie. Measured: up to 0.017."""
ANSWER_TOKENS, COMPANY_TOKENS = 32, 400


@dataclass(frozen=True)
class Served:
    """A running stack and the reference of its checkpoint.

    Attributes:
        topology: of the stack.
        stack: the running stack.
        client: of its conductor.
        reference: the checkpoint as `transformers` runs it in float32.
        tolerance: largest gap between the reference's best logit and a chosen token's.
        eos_prompt: after this prompt the checkpoint's end-of-sequence token is the greedy one, beyond the tolerance.
        prefills: instances that have answered so far.
    """

    topology: Topology
    stack: CheckedStack
    client: Client
    reference: Reference
    tolerance: float
    eos_prompt: list[int]
    prefills: set[str] = field(default_factory=set)

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Random token ids without special ones; `seed` is part of the test, so a failure can be repeated."""
        return prompt_tokens(self.reference, tokens, seed)

    def check(self, prompt: list[int], max_tokens: int = 12) -> GenerateResult:
        """Generates greedily and compares."""
        result = self.client.generate(
            token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        )
        self.prefills.add(result.placement.prefill)
        assert len(result.token_ids) == max_tokens
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.completion_tokens == max_tokens
        self.assert_greedy(prompt, result)
        return result

    def assert_greedy(self, prompt: list[int], result: GenerateResult) -> None:
        self.reference.assert_greedy(prompt, result.token_ids, self.tolerance)

    def same_prefill(self, *results: GenerateResult) -> bool:
        """Whether all went to one prefill instance, so that the later ones found what the first one left there."""
        return len({result.placement.prefill for result in results}) == 1

    async def gather(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[GenerateResult]:
        """Sends requests at once."""
        async with AsyncClient(self.stack.address) as client:
            calls = (client.generate(token_ids=prompt, sampling=sampling) for prompt, sampling in asked)
            results = await asyncio.gather(*calls)
        self.prefills.update(result.placement.prefill for result in results)
        return results


def prompt_tokens(reference: Reference, tokens: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    generator = random.Random(f"{SEED}/{seed}")
    return [generator.randrange(8, reference.model.config.vocab_size) for _ in range(tokens)]


def make_checkpoint(shape: str, folder: Path) -> None:
    """Writes a checkpoint with random weights, or copies the bundled one."""
    bundled = named_model(shape)
    if bundled is None:
        create(shape, folder, seed=SEED, dtype="float32")
    else:
        shutil.copytree(bundled, folder)


def end_with(folder: Path, eos: int) -> None:
    """Makes a token the checkpoint's end-of-sequence token."""
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))


def sharp_prompt(reference: Reference, tolerance: float) -> list[int]:
    """A prompt after which the best logit is far ahead of the second."""
    for seed in range(500, 600):
        prompt = prompt_tokens(reference, 20, seed)
        best, second = reference.logits(prompt)[-1].topk(2).values.tolist()
        if best - second > 3 * tolerance:
            return prompt
    raise AssertionError("no such prompt")


def tolerance_of(folder: Path, topology: Topology, reference: Reference) -> float:
    """The largest gap that the element type explains; in bfloat16 it must reject most third choices."""
    if topology.dtype != BF16:
        return GAP_TOLERANCE
    prompt = prompt_tokens(reference, 400, seed=900)
    tolerance = TIMES_ERROR * error_of(Reference(folder, torch.bfloat16), reference, prompt)
    best, _, third = reference.logits(prompt).topk(3).values.unbind(1)
    rejected = float((best - third > tolerance).float().mean())
    print(f"{topology}: tolerance {tolerance:.3f}, rejects the third choice at {rejected:.0%} of positions")
    assert rejected > 0.8
    return tolerance


@pytest.fixture(
    scope="module",
    params=[
        *SELECTED,
        *(pytest.param(topology, marks=pytest.mark.slow) for topology in REST),
        *(pytest.param(topology, marks=GPU) for topology in ON_GPU),
    ],
    ids=str,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    topology: Topology = request.param
    folder = tmp_path_factory.mktemp(topology.shape)
    make_checkpoint(topology.shape, folder / "model")
    reference = Reference(folder / "model")
    tolerance = tolerance_of(folder / "model", topology, reference)
    eos_prompt = sharp_prompt(reference, tolerance)
    end_with(folder / "model", reference.first_token(eos_prompt))
    transports = ["--kv-transports", topology.transport]
    flags = [
        "--device",
        topology.device,
        *(["--set", "deterministic=true"] if topology.deterministic else []),
        *transports,
    ]
    at_prefill, at_decode = (["--set", f"tensor_parallel_size={ranks}"] for ranks in topology.ranks)
    plan = StackPlan(
        model=str(folder / "model"),
        data_dir=folder,
        dtype=topology.dtype,
        prefill=topology.each,
        decode=topology.each,
        kvstore=int(topology.store),
        pipeline_parallel_size=topology.stages,
        threads=1,
        block_size=BLOCK,
        kv_cache_memory_bytes=16 << 20,
        dram_bytes=16 << 20,
        extra={
            "prefill": ["--max-num-batched-tokens", "64", *flags, *at_prefill],
            "decode": [*flags, *at_decode],
            "kvstore": transports,
            # Where there is a store, prefixes come from it; elsewhere from other instances' pools.
            # Prompts are computed at prefill, so that KV is moved: `test_rests` and `test_one_engine` have the others.
            "conductor": ["--set", "decode_prompt_tokens=0", *(["--set", "peers=false"] if topology.store else [])],
        },
    )
    with CheckedStack(plan) as stack, Client(stack.address) as client:
        yield Served(topology, stack, client, reference, tolerance, eos_prompt)


def covers(selected: Sequence[Topology]) -> bool:
    """Whether topologies have every value of each axis, every transport, and every kind of layer."""
    kinds = {"tiny-llama", "tiny-gemma3", "tiny-deepseek-v32", "tiny-qwen3-next"}
    found, shapes = {topology.transport for topology in selected}, {topology.shape for topology in selected}
    return not missing(selected) and found == {"local", "tcp", "grpc"} and kinds <= shapes


def test_the_selection_covers_every_value() -> None:
    assert covers(SELECTED)
    for topology in SELECTED:
        assert not covers([other for other in SELECTED if other != topology]), f"{topology} adds nothing"


@pytest.mark.parametrize("tokens", [1, 5, BLOCK, BLOCK + 1, 203])
def test_prompt_lengths(served: Served, tokens: int) -> None:
    """Shorter than a block, exactly one, one over, and many chunks (a step takes 64 tokens)."""
    served.check(served.prompt(tokens, seed=tokens))


@pytest.mark.parametrize("tokens", [5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
def test_same_prompt_twice(served: Served, tokens: int) -> None:
    """The second time all full blocks are cached; of a prompt of full blocks one token, or block, is computed."""
    prompt = served.prompt(tokens, seed=100 + tokens)
    first = served.check(prompt)
    assert first.usage.cached_tokens == 0
    second = served.check(prompt)
    cached = served.topology.reused(tokens, BLOCK)
    assert second.usage.cached_tokens == cached or not served.same_prefill(first, second)
    assert second.token_ids == first.token_ids or not served.topology.exact


def test_prefix_from_the_store(served: Served) -> None:
    """Prefill forgets what it computed, so that the prefix can only come from the kvstore.

    One prompt only: after a slow load the conductor may find computing quicker, until the engine is restarted.
    """
    if not served.topology.store or served.topology.each > 1:
        pytest.skip("no kvstore, or another prefill that has the prefix")
    prompt = served.prompt(6 * BLOCK + (3 if served.topology.stages > 1 else 0), seed=150)
    first, reused = served.check(prompt), served.topology.reused(len(prompt), BLOCK)
    second = served.stack.ask_restarted(
        ["prefill-0"], lambda: served.check(prompt), lambda found: found.usage.cached_tokens == reused
    )
    assert second.usage.cached_tokens == reused
    assert second.placement.kvstore == "kvstore-0"
    assert second.token_ids == first.token_ids or not served.topology.exact


def test_shared_prefix(served: Served) -> None:
    """Two prompts with a common beginning, then a second turn that continues prompt and answer."""
    common = served.prompt(3 * BLOCK, seed=200)
    first = served.check(common + served.prompt(21, seed=201))
    tail = served.prompt(30, seed=202)
    result = served.check(common + tail, max_tokens=20)
    assert result.usage.cached_tokens == 3 * BLOCK or not served.same_prefill(first, result)
    second_turn = [*common, *tail, *result.token_ids, *served.prompt(9, seed=203)]
    served.stack.check_at_rest()
    again = served.check(second_turn)
    if served.same_prefill(result, again):
        assert again.usage.cached_tokens >= (len(common) + len(tail)) // BLOCK * BLOCK


def test_sixteen_at_once(served: Served) -> None:
    """Mixed lengths in one continuous batch."""
    prompts = [served.prompt(3 + 13 * number, seed=300 + number) for number in range(16)]
    sampling = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    results = asyncio.run(served.gather([(prompt, sampling) for prompt in prompts]))
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 14
        served.assert_greedy(prompt, result)


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


def greedy_or_sampled(seed: int) -> SamplingParams:
    """Greedy for an even seed."""
    if seed % 2:
        return SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
    return SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


async def in_company(
    served: Served, asked: Sequence[tuple[list[int], SamplingParams]]
) -> tuple[list[GenerateResult], int]:
    """Sends requests at once, while others run, one after the other, for each decode instance; with the others' tokens
    that decode has made."""
    sampling, begun, over = SamplingParams(max_tokens=COMPANY_TOKENS, ignore_eos=True), asyncio.Event(), asyncio.Event()
    async with AsyncClient(served.stack.address) as client:

        async def others(number: int) -> int:
            tokens = 0
            while not over.is_set():
                async for event in client.stream(token_ids=served.prompt(20, seed=590 + number), sampling=sampling):
                    if event.position:  # the first token is prefill's
                        begun.set()
                tokens += COMPANY_TOKENS - 1
            return tokens

        async with asyncio.TaskGroup() as group:
            company = [group.create_task(others(number)) for number in range(served.topology.each)]
            await begun.wait()
            results = await served.gather(asked)
            over.set()
    return results, sum(task.result() for task in company)


def test_answers_are_the_same_alone_cached_and_in_company(served: Served) -> None:
    """Greedy and sampled requests alone, then all at once, when their prompts are cached and they share steps."""
    asked = [
        (served.prompt(30 + 11 * number, seed=600 + number), greedy_or_sampled(seed=number)) for number in range(6)
    ]
    alone = [asyncio.run(served.gather([each]))[0] for each in asked]
    before = served.stack.gauge("decode-", "steps_total")
    together, others = asyncio.run(in_company(served, asked))
    steps, decoded = served.stack.gauge("decode-", "steps_total") - before, others + len(asked) * (ANSWER_TOKENS - 1)
    print(f"{decoded} tokens in {steps:g} steps")
    assert steps < decoded, "no two requests shared a step"
    for (prompt, sampling), first, second in zip(asked, alone, together, strict=True):
        assert second.token_ids == first.token_ids or not served.topology.exact
        if sampling.seed is None:
            served.assert_greedy(prompt, second)
        else:
            missed = max(served.reference.misses(prompt, second.token_ids, sampling.seed))
            print(f"a draw lies at most {missed:.2e} outside of its share")
            assert missed <= (DRAW_TOLERANCE if served.topology.dtype == BF16 else GAP_TOLERANCE)


def test_several_answers_are_those_of_their_seeds(served: Served) -> None:
    """Sampled and greedy, beside the same requests one by one; a prompt that ends on and beside a block's border."""
    for length, temperature in ((2 * BLOCK, 1.0), (2 * BLOCK + 5, 1.0), (40, 0.0)):
        prompt = served.prompt(length, seed=650 + length)
        how = SamplingParams(max_tokens=BLOCK + 2, temperature=temperature, seed=2**64 - 1, n=3, ignore_eos=True)
        together = served.client.generate(token_ids=prompt, sampling=how)
        assert together.usage.completion_tokens == 3 * (BLOCK + 2)
        for index, choice in enumerate(together.choices):
            seed = stream_seed(how.seed or 0, index)
            alone = served.client.generate(token_ids=prompt, sampling=dataclasses.replace(how, n=1, seed=seed))
            assert (choice.token_ids, choice.text) == (alone.token_ids, alone.text) or not served.topology.exact
            if not temperature:
                served.assert_greedy(prompt, alone)


def test_stream_is_the_answer(served: Served) -> None:
    """Deltas add up to the result, tokens and text."""
    prompt = served.prompt(40, seed=700)
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    events = list(served.client.stream(token_ids=prompt, sampling=sampling))
    whole = served.client.generate(token_ids=prompt, sampling=sampling)
    tokens = [token for event in events for token in event.token_ids]
    assert len(tokens) == 10
    if served.topology.exact:
        assert tokens == whole.token_ids
        assert "".join(event.text for event in events) == whole.text


def test_work_is_spread(served: Served) -> None:
    """Both prefill instances are used: at once, or soon, where a measurement at the start makes one seem slow."""
    if served.topology.each == 1:
        pytest.skip("one instance of a kind")
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked = [(served.prompt(90, seed=800 + number), sampling) for number in range(8)]
    for _ in range(20):  # requests elsewhere until even a twenty times slower estimate is not believed
        if len(served.prefills) == 2:
            break
        asyncio.run(served.gather(asked))
    assert served.prefills == {"prefill-0", "prefill-1"}


def test_kv_took_its_transport_and_no_other(served: Served) -> None:
    result = served.check(served.prompt(70, seed=950), max_tokens=3)
    assert served.client.explain(result.request_id).transport == served.topology.transport
    for kind in ("decode", "kvstore") if served.topology.store else ("decode",):
        for transport in ("local", "tcp"):
            opened = served.stack.gauge(kind, f"transports_{transport}_opened_total")
            assert (opened > 0) == (transport == served.topology.transport), (kind, transport, opened)
        assert served.stack.gauge(kind, "transports_refused_total") == 0
    assert served.stack.gauge("prefill", "transport_failures_total") == 0
