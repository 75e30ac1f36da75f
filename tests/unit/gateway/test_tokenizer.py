"""What the gateway asks its tokenizer: how many tokens of an answer or a prompt stand before a place."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import ChatOptions, Tokenizer
from moonpool.base.errors import InvalidRequest
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client import Message
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
