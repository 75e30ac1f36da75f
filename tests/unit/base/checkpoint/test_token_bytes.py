"""Bytes of text that a token stands for at most, where that is certain."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from moonpool.base.checkpoint import Tokenizer
from moonpool.base.checkpoint.token_bytes import NFC_SHRINKS, most_token_bytes
from tests.examples import examples

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
MERGES = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("Î", "¹"), ("Î¹", "Ì")]


def byte_level(*steps: normalizers.Normalizer) -> tokenizers.Tokenizer:
    """A vocabulary of all bytes and some longer tokens, the longest of 4 bytes."""
    words = [*sorted(ALPHABET), *("".join(pair) for pair in MERGES)]
    found = tokenizers.Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, MERGES))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if steps:
        found.normalizer = normalizers.Sequence(list(steps))
    return found


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece's kind: spaces are marked, and a character that is no word is its bytes."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "▁a▁a"]
    model = models.BPE(
        {word: at for at, word in enumerate(words)}, [("▁", "a"), ("▁a", "▁a")], byte_fallback=True, unk_token=words[0]
    )
    found = tokenizers.Tokenizer(model)
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return found


CERTAIN = {"byte level": byte_level(), "NFC": byte_level(normalizers.NFC()), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("name", CERTAIN)
@settings(max_examples=examples(40))
@given(
    text=st.text(
        st.sampled_from("a \n\0é가나ΐ≈\u0308\u0301\u1fbe\u2126\u1fef\u1112\u1161\u11ab")
        | st.characters(exclude_categories=["Cs"])
    )
)
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(name: str, text: str) -> None:
    backend = CERTAIN[name]
    most = most_token_bytes(backend)
    assert most > 0
    assert len(text.encode()) <= most * len(backend.encode(text, add_special_tokens=False).ids)


def test_a_vocabulary_of_the_bytes_alone_is_enough() -> None:
    model = models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True)
    assert most_token_bytes(tokenizers.Tokenizer(model)) > 0


def test_nfc_makes_no_text_shorter_than_said() -> None:
    """Of all characters: the longest spelling of each part of its decomposition."""
    longest: dict[str, int] = {}
    plain = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for char in plain:
        whole = unicodedata.normalize("NFC", char)
        longest[whole] = max(longest.get(whole, 0), len(char.encode()))
    for char in longest:
        parts = unicodedata.normalize("NFD", char)
        spelled = sum(longest.get(part, len(part.encode())) for part in parts)
        assert max(spelled, longest[char]) <= NFC_SHRINKS * len(char.encode()), hex(ord(char[0]))


def unknown_words() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return found


def takes_spaces(**sides: bool) -> tokenizers.Tokenizer:
    found = byte_level()
    found.add_special_tokens([AddedToken("<mask>", **sides)])
    return found


def drops_spaces() -> tokenizers.Tokenizer:
    found = byte_level()
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return found


def lacks_bytes() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return found


@pytest.mark.parametrize(
    ("make", "few"),
    [
        (unknown_words, " " * 50_000 + "b" * 50_000),
        (lambda: takes_spaces(lstrip=True), " " * 50_000 + "<mask>"),
        (lambda: takes_spaces(rstrip=True), "<mask>" + "\n" * 50_000),
        (drops_spaces, " " * 50_000 + "aaaa"),
        (lacks_bytes, "b" * 50_000 + "a"),
        (lambda: byte_level(normalizers.Replace(Regex(" +"), " ")), " " * 50_000),
        (lambda: byte_level(normalizers.Strip()), " " * 50_000 + "a"),
    ],
)
def test_a_text_of_many_bytes_and_few_tokens_is_not_too_long(
    make: Callable[[], tokenizers.Tokenizer], few: str
) -> None:
    tokenizer = Tokenizer(make())
    tokens = len(tokenizer.encode(few))
    assert tokens < 10
    assert not tokenizer.is_too_large(len(few.encode()), 100)
    assert not tokenizer.is_longer(few, 100)
