"""Tokens of Gemma 3's pictures, beside transformers' processor; what the template writes around them."""

import json
from pathlib import Path

import pytest

from moonpool.base.checkpoint import ChatOptions, Tokenizer
from moonpool.base.checkpoint.chat_template import RenderedChat
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.pictures.gemma3 import Gemma3Rule
from tests.pictures import SQUARE_ROWS, square_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return square_model(tmp_path_factory.mktemp("model"))


def test_each_picture_has_as_many_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    rule = read_rule(folder, lambda: tokenizer)
    assert isinstance(rule, Gemma3Rule), rule
    assert rule.mark == tokenizer.special_id("<image_soft_token>")
    assert {rule.grid(width, height, "") for width, height in ((1, 1), (5000, 3), (64, 64))} == {(1, 1)}
    assert list(rule.tokens((1, 1))) == [rule.mark] * SQUARE_ROWS


def test_what_stands_around_a_picture_is_tokenised_with_the_text_beside_it(folder: Path) -> None:
    """As transformers' processor does, which changes the text. A user's text is no picture."""
    tokenizer = Tokenizer.load(folder)
    rule = read_rule(folder, lambda: tokenizer)
    assert isinstance(rule, Gemma3Rule)
    assert rule.written is not None
    parts = [{"type": "text", "text": "a\n<start_of_image>"}, {"type": "image"}, {"type": "text", "text": "\nb"}]
    chat = tokenizer.render_chat([{"role": "user", "content": parts}], (), ChatOptions()).with_text(*rule.written)
    assert chat.text == "[INST]a\n<start_of_image>\n\n<start_of_image><image_soft_token><end_of_image>\n\n\nb[/INST]"
    tokens = tokenizer.encode_chat(chat)
    begin = tokens.index(rule.mark)
    assert tokens.count(rule.mark) == 1
    assert tokens[begin - 1] == tokenizer.special_id("<start_of_image>")
    assert tokens[begin + 2 : -1] == tokenizer.encode("\n\n\nb", False)
    assert tokens.count(tokens[begin - 1]) == 1, "the user's is text"


@pytest.mark.parametrize(
    ("text", "literals", "found"),
    [
        ("x", (), ("x", ())),
        ("<a>", (), ("-<a>", ())),
        ("<a><b><a>", ((0, 3),), ("<a><b>-<a>", ((0, 3),))),
        ("<a><a>y<b><a>", ((3, 6), (7, 10)), ("-<a><a>y<b>-<a>", ((4, 7), (8, 11)))),
    ],
)
def test_only_what_the_template_wrote_is_replaced(
    text: str, literals: tuple[tuple[int, int], ...], found: tuple[str, tuple[tuple[int, int], ...]]
) -> None:
    assert RenderedChat(text, literals).with_text("<a>", "-<a>") == RenderedChat(*found)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("processor_config.json", {"image_seq_length": 9}, "image_seq_length"),
        ("config.json", {"image_token_id": 3}, "image_token_id"),
        ("config.json", {"vision_config": 5}, "vision_config must be an object"),
        ("preprocessor_config.json", {"size": [64]}, "size must be an object"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, file: str, change: dict[str, object], why: str) -> None:
    path = square_model(tmp_path) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = read_rule(tmp_path, lambda: Tokenizer.load(tmp_path))
    assert isinstance(found, str)
    assert why in found
