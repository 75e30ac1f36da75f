"""The next turn's beginning is computed ahead where the template writes past turns in another way."""

import functools
from typing import Any

import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.serving.next_turn import When
from moonpool.v1 import conductor_pb2 as pb

from .fakes import CHAT, answering

FORGETS = """{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set last.user = loop.index %}{% endif %}{% endfor %}{% for m in messages %}[{{ m.role }}]\
{% if m.reasoning_content and loop.index > last.user %}<think>{{ m.reasoning_content }}</think>{% endif %}\
{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}[end]{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
"""Thinking before the last user's message is left out, as Qwen3's template does."""
KEEPS = FORGETS.replace(" and loop.index > last.user", "")
ASK: Any = [{"role": "user", "content": "2 + 2?"}]
SAID = " ".join(str(number) for number in range(200))
HINT = {"nvext": {"agent_hints": {"speculative_prefill": True}}}


@functools.cache
def texts(template: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": template})


def says(text: str, template: str) -> FakeConductor:
    """Answers each chat with a text; what is computed ahead with a token."""
    tokens = texts(template).encode(text, add_special=False)

    def script(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        if request.sampling.max_tokens == 1:
            return answer([1], request_id="ahead")
        messages, stream = answer(tokens, request_id="r1"), texts(template).stream()
        for message, token in zip(messages[1:-1], tokens, strict=True):
            message.delta.text = stream.push([token])
        return messages

    return FakeConductor(script)


async def ahead(template: str, text: str, when: When = "asked", **body: Any) -> tuple[str, pb.GenerateRequest | None]:
    """What was computed ahead behind an answer, as text and as the request; "" = nothing."""
    fake = says(text, template)
    async with answering(fake, texts(template), speculative_prefill=when) as gateway:
        fake.state.model.max_tokens = 4096
        assert (await gateway.http.post(CHAT, json={"messages": ASK, **HINT, **body})).status_code == 200
        await gateway.next_turns.settle()
    if len(fake.requests) == 1:
        return "", None
    _, request = fake.requests
    return texts(template).decode(list(request.tokens.token_ids)), request


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_next_prompt_has_without_its_thinking(*, stream: bool) -> None:
    found, request = await ahead(FORGETS, f"<think>Hm.</think>{SAID}", stream=stream, cache_salt="s")
    assert found == f"[user]2 + 2?[end][assistant]{SAID}[end][user]"
    assert request is not None
    assert (request.priority, request.cache_salt, request.sampling.max_tokens) == (100, "s", 1)


@pytest.mark.parametrize(
    ("template", "text", "body"),
    [
        (KEEPS, f"<think>Hm.</think>{SAID}", {}),
        (FORGETS, SAID, {}),
        (FORGETS, "<think>Hm.</think>Four.", {}),
        (FORGETS, f"<think>Hm.</think>{SAID}", {"nvext": {}}),
        (FORGETS, f"<think>Hm.</think>{SAID}", {"n": 2}),
    ],
    ids=["thinking stays", "no thinking", "too short", "not wanted", "two answers"],
)
async def test_nothing_is_computed_ahead_where_it_would_be_there(template: str, text: str, body: Any) -> None:
    assert await ahead(template, text, **body) == ("", None)


@pytest.mark.parametrize("hint", [None, True, False])
@pytest.mark.parametrize("when", ["asked", "auto", "none"])
async def test_the_setting_says_when_a_turn_is_begun_ahead(when: When, hint: bool | None) -> None:
    """With `auto` also behind answers with thinking of requests that say nothing."""
    wanted = {"asked": hint is True, "auto": hint is not False, "none": False}[when]
    nvext = {"nvext": {"agent_hints": {} if hint is None else {"speculative_prefill": hint}}}
    assert bool((await ahead(FORGETS, f"<think>Hm.</think>{SAID}", when, **nvext))[0]) == wanted
    assert await ahead(FORGETS, SAID, when, **nvext) == ("", None)


async def test_nothing_is_computed_ahead_while_requests_wait() -> None:
    fake = says(f"<think>Hm.</think>{SAID}", FORGETS)
    async with answering(fake, texts(FORGETS)) as gateway:
        fake.state.model.max_tokens = 4096
        fake.state.queue.for_room = 1
        await gateway.http.post(CHAT, json={"messages": ASK, **HINT})
        await gateway.next_turns.settle()
        assert len(fake.requests) == 1
