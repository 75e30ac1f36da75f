"""Pictures through all services: answers are those of transformers, and KV is found again for the same picture only."""

import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client, GenerateResult, InvalidRequest, Message, MessagePart, Picture
from tests.integration.conftest import BLOCK, small_plan, with_flags
from tests.integration.reference import GAP_TOLERANCE, LOGPROB_TOLERANCE
from tests.integration.stack import CheckedStack
from tests.pictures import PictureReference, add_weights, picture_file, picture_model

pytestmark = pytest.mark.slow  # stacks of its own
pytest.importorskip("PIL")
GREEDY = SamplingParams(max_tokens=BLOCK + 5, temperature=0.0, ignore_eos=True, logprobs=1)
Parts = list[str | Picture]


def picture(width: int, height: int, seed: int = 0, detail: str = "") -> Picture:
    return Picture(picture_file(width, height, seed), width, height, detail)


CAT, DOG = picture(40, 30, 1), picture(40, 30, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(picture_model(tmp_path_factory.mktemp("model") / "tiny-smolvlm"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PictureReference:
    return PictureReference(folder)


@pytest.fixture(scope="module", params=["two engines", "one engine"])
def stack(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckedStack]:
    """Prompts in steps of 64 tokens; decode guesses, and gives sequences up that it computes again."""
    plan = dataclasses.replace(small_plan(folder, tmp_path_factory.mktemp("stack")), http_port=0)
    plan = with_flags(plan, "decode", "--speculative", "suffix")
    if request.param == "one engine":
        plan = dataclasses.replace(plan, engines="one")
    else:
        plan = with_flags(plan, "decode", "--set", "preempt_every=7", "--set", "preemption=recompute")
    with CheckedStack(plan) as found:
        yield found


def turn(role: str, parts: Parts) -> Message:
    found: list[MessagePart] = [{"text": part} if isinstance(part, str) else {"picture": part} for part in parts]
    return {"role": role, "content": "", "parts": found}


def check(reference: PictureReference, messages: list[Message], result: GenerateResult) -> None:
    """Each token is transformers' best one, with its log probability."""
    files = [part["picture"].content for message in messages for part in message.get("parts", ()) if "picture" in part]
    inputs = reference.inputs(reference.text_of(messages), files)
    assert result.usage.prompt_tokens == inputs["input_ids"].shape[1]
    for choice in result.choices:
        logits = reference.logits(inputs, list(choice.token_ids))[:-1]
        chosen = logits.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= GAP_TOLERANCE * logits.abs().max()
        right = logits.log_softmax(1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        told = torch.tensor([token.logprob for token in choice.logprobs])
        assert (told - right).abs().max() < 10 * LOGPROB_TOLERANCE


def ask(stack: CheckedStack, messages: list[Message], sampling: SamplingParams = GREEDY) -> GenerateResult:
    with Client(stack.address) as client:
        return client.generate(messages=messages, sampling=sampling)


CASES: dict[str, Parts] = {
    "one": [CAT, "What is this?"],
    "behind a text": ["Look at this: ", CAT],
    "two": [picture(70, 20, 3), "and", picture(20, 70, 4), "differ?"],
    "odd": [picture(1, 1, 5), picture(3, 200, 6), picture(129, 127, 7)],
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(stack: CheckedStack, reference: PictureReference, case: str) -> None:
    messages = [turn("user", CASES[case])]
    check(reference, messages, ask(stack, messages))


def test_a_text_is_never_a_picture(stack: CheckedStack) -> None:
    plain = ask(stack, [{"role": "user", "content": "What is this? <image> <global-img>?"}])
    assert plain.usage.prompt_tokens < 60
    seen = ask(stack, [turn("user", ["What is this? <image> <global-img>?", CAT])])
    assert seen.usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.parametrize("before", range(BLOCK))
def test_each_place_in_a_block(stack: CheckedStack, reference: PictureReference, before: int) -> None:
    messages = [turn("user", ["a " * before, picture(50, 50, 9), "?"])]
    check(reference, messages, ask(stack, messages))


def test_another_picture_in_the_same_place_is_never_a_hit_and_the_same_is_one(
    stack: CheckedStack, reference: PictureReference
) -> None:
    results = []
    for seen in (CAT, DOG, CAT):
        messages = [turn("user", ["Tell me about the following picture, please: ", seen, "What is this?"])]
        results.append(ask(stack, messages))
        check(reference, messages, results[-1])
    first, other, again = results
    assert other.usage.cached_tokens <= 3 * BLOCK, "what stands before the picture"
    assert again.usage.cached_tokens > other.usage.cached_tokens
    assert again.usage.prompt_tokens - again.usage.cached_tokens <= BLOCK
    assert again.token_ids == first.token_ids != other.token_ids


def test_a_second_turn_goes_on_from_the_cache(stack: CheckedStack, reference: PictureReference) -> None:
    messages = [turn("user", [picture(64, 64, 11), "Describe it."])]
    first = ask(stack, messages)
    messages += [{"role": "assistant", "content": first.text}, turn("user", ["Why? ", picture(30, 30, 12)])]
    second = ask(stack, messages)
    check(reference, messages, second)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens // BLOCK * BLOCK - BLOCK


def test_several_answers_to_a_picture(stack: CheckedStack, reference: PictureReference) -> None:
    messages = [turn("user", ["Twice: ", picture(33, 80, 13)])]
    result = ask(stack, messages, dataclasses.replace(GREEDY, n=2))
    assert len(result.choices) == 2
    check(reference, messages, result)


def test_restarted_engines_find_a_picture_in_the_store(stack: CheckedStack, reference: PictureReference) -> None:
    messages = [turn("user", ["Remember: ", picture(100, 60, 14), "?"])]
    first = ask(stack, messages)
    engines = [name for name in stack.services if name.startswith(("prefill", "decode", "engine"))]
    stored = first.usage.prompt_tokens - 2 * BLOCK
    again = stack.ask_restarted(
        engines, lambda: ask(stack, messages), lambda found: found.usage.cached_tokens >= stored
    )
    check(reference, messages, again)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens >= stored

    elsewhere = [turn("user", ["Behind another text: ", picture(100, 60, 14), "?"])]
    other = ask(stack, elsewhere)
    check(reference, elsewhere, other)
    with Client(stack.address) as client:
        attempt = client.explain(other.request_id).attempts[0]
    assert attempt.rows_tokens > 0, "the encoded picture is the store's"


def test_a_picture_that_is_not_what_it_says_is_refused_by_the_engine(stack: CheckedStack) -> None:
    for wrong in (dataclasses.replace(CAT, width=41), dataclasses.replace(CAT, content=CAT.content[:-30])):
        with pytest.raises(InvalidRequest, match="media"):
            ask(stack, [turn("user", [wrong])])


def test_pictures_over_http(stack: CheckedStack, reference: PictureReference) -> None:
    data = base64.b64encode(CAT.content).decode()
    url = f"data:image/png;base64,{data}"
    chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    told = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is this?"}]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    right = ask(stack, [turn("user", [CAT, "What is this?"])], dataclasses.replace(GREEDY, max_tokens=8)).text
    with httpx2.Client(base_url=f"http://{stack.http_address}", timeout=120) as http:
        answers = [
            http.post("/v1/chat/completions", json={
                "messages": [{"role": "user", "content": chat}], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            }).json()["choices"][0]["message"]["content"],
            http.post("/v1/responses", json={
                "input": [{"role": "user", "content": told}], "max_output_tokens": 8, "temperature": 0,
                "ignore_eos": True,
            }).json()["output"][-1]["content"][0]["text"],
            http.post("/v1/messages", json={
                "messages": [{"role": "user", "content": [block, {"type": "text", "text": "What is this?"}]}],
                "max_tokens": 8, "temperature": 0,
            }).json()["content"][0]["text"],
        ]  # fmt: skip
    assert answers[:2] == [right, right]
    assert right.startswith(answers[2])
