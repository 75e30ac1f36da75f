"""What the gateway asks its tokenizer: how many tokens of an answer or a prompt stand before a place."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import ChatOptions, Tokenizer
from moonpool.base.errors import InvalidRequest
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client import Message
from moonpool.gateway.serving import tokenizer as serving
from moonpool.gateway.serving.tokenizer import GatewayTokenizer, ParserNames

TEMPLATE = "{% for turn in messages %}{{ turn.content }}{% endfor %}!"


@pytest.fixture
def texts() -> Iterator[GatewayTokenizer]:
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": TEMPLATE})
    with ThreadPoolExecutor(1) as threads:
        yield GatewayTokenizer("tiny", made, TenantTurns(threads), ParserNames())


@pytest.mark.parametrize("text", ["a", "a t", "thought", "is over", "over", " at last", "t", "absent"])
async def test_tokens_through_a_text_end_with_the_first_token_that_completes_the_text(
    texts: GatewayTokenizer, text: str
) -> None:
    answer = "a thought that is over at last"
    tokens = await texts.encode("t", answer, 100, special=False)
    assert texts.decode_now(tokens, skip_special=False) == answer
    ends = (end for end in range(1, len(tokens) + 1) if text in texts.decode_now(tokens[:end], skip_special=False))
    assert texts.tokens_through(text, tokens) == next(ends, len(tokens))


async def test_tokens_behind_texts_of_which_one_begins_the_prompt(texts: GatewayTokenizer) -> None:
    turns: list[Message] = [{"role": "user", "content": "ab"}, {"role": "user", "content": "ab"}]
    behind = await texts.tokens_behind("t", turns, (), ChatOptions(), ["ab", "ab"], [0, 1])
    right = [len(await texts.encode("t", rest, 100, special=False)) for rest in ("ab!", "!")]
    assert behind == right
    assert right[0] > right[1]


async def test_a_template_that_refuses_begins_no_thinking(texts: GatewayTokenizer) -> None:
    """Nor does a model that does not think."""
    assert not await texts.thinks_at_once("t", {})
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    source = "{% if refuse %}{{ raise_exception('no') }}{% endif %}{% if think %}<think>{% endif %}"
    with ThreadPoolExecutor(1) as threads:
        made = GatewayTokenizer(
            "tiny", Tokenizer(backend, {"default": source}), TenantTurns(threads), ParserNames(reasoning="qwen3")
        )
        assert [await made.thinks_at_once("t", {name: True}) for name in ("refuse", "think", "else")] == [
            False, True, False,
        ]  # fmt: skip


async def test_chats_that_are_too_long_and_tokens_beside_the_vocabulary_are_refused(texts: GatewayTokenizer) -> None:
    turns: list[Message] = [{"role": "user", "content": "one two three"}]
    tokens = await texts.encode_chat("t", turns, (), 100, ChatOptions())
    assert await texts.encode_chat("t", turns, (), len("one two three!"), ChatOptions()) == tokens
    with pytest.raises(InvalidRequest, match="more than 100 tokens"):
        await texts.encode_chat("t", [{"role": "user", "content": "a b " * 100}], (), 100, ChatOptions())
    size = texts.info()["vocab_size"]
    assert await texts.decode("t", [size - 1])
    for wrong in (-1, size):
        with pytest.raises(InvalidRequest, match=r"must be in \[0, "):
            await texts.decode("t", [0, wrong])


async def test_a_pair_with_a_text_that_is_too_long_is_refused(texts: GatewayTokenizer) -> None:
    assert len(await texts.encode_pairs("t", "input", [("a b", "c")], 100)) == 1
    with pytest.raises(InvalidRequest, match="more than 100 tokens") as refused:
        await texts.encode_pairs("t", "input", [("a b", "c"), ("a", "b " * 1000)], 100)
    assert refused.value.field == "input"


class CountingThread(ThreadPoolExecutor):
    """One thread, whose works are counted."""

    count = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.count += 1
        return super().submit(*args, **kwargs)


async def test_of_a_few_variants_of_the_template_it_is_remembered_how_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many variants clients ask for, no more are kept."""
    monkeypatch.setattr(serving, "MAX_TEMPLATE_VARIANTS", 2)
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    made = Tokenizer(backend, {"default": "{% if think %}<think>{% endif %}"})
    with CountingThread(1) as threads:
        texts = GatewayTokenizer("tiny", made, TenantTurns(threads), ParserNames(reasoning="qwen3"))
        for number in (1, 2, 1, 2):
            assert await texts.thinks_at_once("t", {"think": number})
        assert threads.count == 2
        for number in (3, 1):
            assert await texts.thinks_at_once("t", {"think": number})
        assert threads.count == 4
