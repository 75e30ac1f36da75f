"""A stack of one engine that computes prompts and answers: it answers as a plain forward pass, and as two engines."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from moonpool.base.checkpoint import load_config
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import StackPlan
from moonpool.client import Client, GenerateResult
from moonpool.engine.models.random_checkpoint import create_lora
from tests.integration.conftest import BLOCK, small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

pytestmark = pytest.mark.slow  # stacks of its own

ENGINE = "engine-0"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True, logprobs=1)
ONE_TOKEN = dataclasses.replace(GREEDY, max_tokens=1)


def one_engine(checkpoint: Path, folder: Path) -> StackPlan:
    """A small stack of one engine, with a gateway."""
    plan = small_plan(checkpoint, folder)
    return dataclasses.replace(plan, engines="one", http_port=0, extra={"decode": ["--max-num-seqs", "8"]})


@pytest.fixture(scope="module")
def one(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    with CheckedStack(one_engine(checkpoint, tmp_path_factory.mktemp("one"))) as stack:
        yield stack


@pytest.fixture(scope="module")
def split(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    with CheckedStack(small_plan(checkpoint, tmp_path_factory.mktemp("split"))) as stack:
        yield stack


def ask(stack: CheckedStack, prompt: list[int], sampling: SamplingParams = GREEDY) -> GenerateResult:
    with Client(stack.address) as client:
        return client.generate(token_ids=prompt, sampling=sampling)


def ask_at_once(stack: CheckedStack, asked: list[tuple[list[int], SamplingParams]]) -> list[GenerateResult]:
    with Client(stack.address) as client, ThreadPoolExecutor(len(asked)) as pool:
        running = [pool.submit(client.generate, token_ids=prompt, sampling=sampling) for prompt, sampling in asked]
        return [each.result() for each in running]


def test_there_is_one_engine_and_it_takes_both_parts(one: CheckedStack, reference: Reference) -> None:
    with Client(one.address) as client:
        kinds = {instance.id: instance.role for instance in client.cluster_state().instances}
    assert kinds == {"kvstore-0": "kvstore", ENGINE: "both"}
    result = ask(one, prompt := tokens(100, "one engine"))
    reference.assert_greedy(prompt, result.token_ids)
    assert (result.placement.prefill, result.placement.decode) == (ENGINE, ENGINE)
    assert result.usage.prompt_tokens == 100
    assert result.timing.ttft_s > 0


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 700])
@pytest.mark.parametrize("sampling", [GREEDY, ONE_TOKEN], ids=["answer", "one token"])
def test_prompts_of_any_length(one: CheckedStack, reference: Reference, size: int, sampling: SamplingParams) -> None:
    """Shorter than a block, whole blocks, and several steps long."""
    result = ask(one, prompt := tokens(size, f"length {size} {sampling.max_tokens}"), sampling)
    reference.assert_greedy(prompt, result.token_ids)
    assert len(result.token_ids) == sampling.max_tokens


def test_answers_are_those_of_two_engines(one: CheckedStack, split: CheckedStack) -> None:
    """Many at once, so that prompts are computed beside answers; several answers, beams, scored prompts."""
    kinds = (
        GREEDY,
        DRAWN,
        dataclasses.replace(DRAWN, n=2),
        dataclasses.replace(GREEDY, beam_width=3),
        dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=2),
        dataclasses.replace(ONE_TOKEN, prompt_logprobs=0),
    )
    asked = [(tokens(20 + 40 * number, f"both {number}"), kind) for number, kind in enumerate(kinds * 2)]
    for ours, theirs in zip(*(ask_at_once(stack, asked) for stack in (one, split)), strict=True):
        assert [choice.token_ids for choice in ours.choices] == [choice.token_ids for choice in theirs.choices]
        assert [choice.finish_reason for choice in ours.choices] == [choice.finish_reason for choice in theirs.choices]
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        for found, wanted in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                assert found.token_id == wanted.token_id
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_tokens_stream(one: CheckedStack, reference: Reference) -> None:
    prompt = tokens(50, "stream")
    with Client(one.address) as client:
        stream = client.stream(token_ids=prompt, sampling=dataclasses.replace(GREEDY, max_tokens=200))
        events = [event.token_ids for event in stream]
    assert len(events) > 1
    assert stream.result is not None
    assert [token for event in events for token in event] == list(stream.result.token_ids)
    reference.assert_greedy(prompt, stream.result.token_ids)


def test_a_stream_that_its_client_leaves_gives_everything_back(one: CheckedStack) -> None:
    """While its prompt is computed, and while its answer is; the fixture looks that all comes back."""
    long = dataclasses.replace(GREEDY, max_tokens=300)
    with Client(one.address) as client:
        for events in (0, 1):
            stream = client.stream(token_ids=tokens(150, f"left {events}"), sampling=long)
            with stream:
                for _ in range(events):
                    next(iter(stream))
    one.check_at_rest()


def test_a_second_turn_finds_the_first_one_in_the_pool(one: CheckedStack, reference: Reference) -> None:
    prompt = tokens(5 * BLOCK + 3, "turn 1")
    first = ask(one, prompt)
    second_prompt = [*prompt, *first.token_ids, *tokens(20, "turn 2")]
    second = ask(one, second_prompt)
    assert second.usage.cached_tokens == (len(prompt) + len(first.token_ids) - 1) // BLOCK * BLOCK
    reference.assert_greedy(second_prompt, second.token_ids)
    again = ask(one, whole := tokens(4 * BLOCK, "whole blocks"))
    assert ask(one, whole).token_ids == again.token_ids


def test_embeddings(one: CheckedStack, reference: Reference) -> None:
    client = openai.OpenAI(base_url=f"http://{one.http_address}/v1", api_key="none")
    prompts = [tokens(size, f"embedded {size}") for size in (1, BLOCK, 2 * BLOCK + 3)]
    found = client.embeddings.create(model="tiny-llama", input=prompts)
    for prompt, each in zip(prompts, found.data, strict=True):
        assert each.embedding == pytest.approx(reference.embedding(prompt), abs=1e-3)


def test_a_prefix_is_loaded_from_the_kvstore_after_a_restart(one: CheckedStack, reference: Reference) -> None:
    prompt = tokens(8 * BLOCK + 5, "kept")
    first, stored = ask(one, prompt), len(prompt) // BLOCK * BLOCK
    second = one.ask_restarted([ENGINE], lambda: ask(one, prompt), lambda found: found.usage.cached_tokens == stored)
    assert second.token_ids == first.token_ids
    assert second.usage.cached_tokens == stored
    assert second.placement.kvstore == "kvstore-0"
    reference.assert_greedy(prompt, second.token_ids)


def test_an_engine_that_is_killed_comes_back(one: CheckedStack, reference: Reference) -> None:
    """A stack with nowhere else to go refuses meanwhile, and serves on afterwards; its log is one file."""
    one.restart(ENGINE, kill=True)
    result = ask(one, prompt := tokens(60, "after the kill"))
    reference.assert_greedy(prompt, result.token_ids)
    assert (one.plan.data_dir / "logs" / f"{ENGINE}.log").exists()


def test_adapters_and_speculation_work(checkpoint: Path, tmp_path: Path) -> None:
    """Flags of `moonpool serve` for LoRA and for guesses reach the one engine, and answers are those of two engines."""
    create_lora(tmp_path / "adapter", load_config(checkpoint), seed=5)
    extra = {
        "conductor": ["--set", f"lora_modules=mine={tmp_path / 'adapter'}"],
        "prefill": ["--set", "max_loras=1"],
        "decode": ["--set", "max_loras=1", "--set", "speculative=ngram"],
    }
    found: list[list[tuple[int, ...]]] = []
    prompt = tokens(30, "repeated") * 4
    for name, plan in (
        ("one", one_engine(checkpoint, tmp_path / "one")),
        ("split", small_plan(checkpoint, tmp_path / "split")),
    ):
        with CheckedStack(dataclasses.replace(plan, extra=extra)) as stack, Client(stack.address) as client:
            results = [client.generate(token_ids=prompt, sampling=GREEDY, model=model) for model in ("", "mine")]
            found.append([tuple(result.token_ids) for result in results])
            assert stack.plan.engines == name
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "the adapter changes nothing"
