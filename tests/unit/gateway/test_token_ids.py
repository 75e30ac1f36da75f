"""vLLM's `return_token_ids`: tokens of prompts and of answers, whole and streamed."""

import json
from typing import Any

from moonpool.client.testing import FakeConductor

from .fakes import CHAT, PLAIN, TURNS, Answers, answering, tokenizer

CHATTED = tokenizer().apply_chat_template([{"role": "user", "content": "hi"}])


async def streamed(gateway: Answers, path: str, **body: Any) -> list[dict[str, Any]]:
    text = (await gateway.http.post(path, json={"stream": True, "return_token_ids": True, **body})).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_chat(gateway: Answers) -> None:
    whole = (await gateway.chat(return_token_ids=True)).json()
    assert whole["prompt_token_ids"] == CHATTED
    assert whole["choices"][0]["token_ids"] == [1, 2, 3]
    assert "token_ids" not in (await gateway.chat()).json()["choices"][0]


async def test_chat_stream(gateway: Answers) -> None:
    """The first event has the prompt's; the answer's come with the text of each."""
    first, *others = await streamed(gateway, CHAT, messages=TURNS)
    assert first["prompt_token_ids"] == CHATTED
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("prompt_token_ids" in event for event in others)
    assert [token for event in others for token in event["choices"][0]["token_ids"]] == [1, 2, 3]


async def test_completions(gateway: Answers) -> None:
    """Each choice has those of its prompt, in whatever form it was given."""
    texts = [tokenizer().encode(text, add_special=True) for text in ("hi", "ho")]
    whole = (await gateway.plain(prompt=["hi", "ho"], return_token_ids=True)).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == texts
    whole = (await gateway.plain(prompt=[5, 6], return_token_ids=True)).json()
    assert (whole["choices"][0]["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([5, 6], [1, 2, 3])


async def test_completion_stream(gateway: Answers) -> None:
    first, *others = await streamed(gateway, PLAIN, prompt=[5, 6])
    assert first["choices"][0]["prompt_token_ids"] == [5, 6]
    assert [token for event in others for token in event["choices"][0]["token_ids"]] == [1, 2, 3]


async def test_another_model_is_served() -> None:
    """This gateway's tokenizer is not the conductor's then; tokens as a prompt need none."""
    fake = FakeConductor()
    async with answering(fake) as gateway:
        fake.state.model.name = "other"
        refused = await gateway.plain(prompt="hi", return_token_ids=True)
        assert "this gateway has the tokenizer of 'tiny'" in refused.json()["error"]["message"]
        assert (await gateway.plain(prompt=[5], return_token_ids=True)).status_code == 200
