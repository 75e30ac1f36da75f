"""How many bytes of text one token can stand for: a text with more of them is too long, whatever the text is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

NFC_SHRINKS = 4
"""Bytes of a text over those of its NFC, at most (3.5, where a Greek letter is spelled with old marks)."""
_METASPACE = "▁"  # a space, in vocabularies of SentencePiece
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}


def most_token_bytes(backend: tokenizers.Tokenizer) -> int:
    """Bytes of UTF-8 text that a token stands for at most; 0 = unknown, because the tokenizer may drop text.

    Known for byte-pair encodings that spell each byte. Others make one unknown token of a long word, or drop spaces.
    """
    if not isinstance(backend.model, BPE):
        return 0
    try:
        normalizers, splits = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
    except (TypeError, ValueError):  # a part in Python
        return 0
    vocabulary, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    if not all(split["type"] in _KEEPING and split.get("behavior") != "Removed" for split in splits):
        return 0
    shrinks = 1
    for normalizer in normalizers:
        match normalizer:
            case {"type": "NFC"}:
                shrinks *= NFC_SHRINKS
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                return 0
    if any(split["type"] == "ByteLevel" for split in splits) and vocabulary.keys() >= set(ByteLevel.alphabet()):
        longest = max(map(len, vocabulary))
    elif backend.model.byte_fallback and vocabulary.keys() >= _BYTES:
        longest = max(len(token.replace(_METASPACE, " ").encode()) for token in vocabulary)
    else:
        return 0
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _parts(whole: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if whole is None:
        return
    steps = [json.loads(whole.__getstate__())]
    while steps:
        step = steps.pop()
        if step["type"] == "Sequence":
            steps += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            yield step
