"""Tokenizers of folders with tiktoken's vocabulary instead of `tokenizer.json`: Kimi K2 and its relations.

Such a folder brings code of its own that reads the vocabulary. Nothing of this code runs: here are its pattern and its
rule for special tokens (`tokenization_kimi.py` of Kimi K2). The file has a line for each token: the token's bytes in
base64, and its id, by which two neighbouring parts become one, the lowest id first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from moonpool.base.errors import CheckpointError

TIKTOKEN = "tiktoken.model"
RESERVED = 256
"""Special tokens behind the vocabulary: those that `added_tokens_decoder` names, and names with numbers for others."""
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTERS}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_LETTERS}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi K2 splits text before merging."""


def tiktoken_tokenizer(file: Path, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """Return the tokenizer of the vocabulary `file`; `added`: the folder's special tokens, by id.

    Raises:
        CheckpointError: the file is no vocabulary, or ids are missing.
    """
    ranks = _ranks(file)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the ids of {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    spelled = _spellings()
    vocabulary = {"".join(map(spelled.__getitem__, token)): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(vocabulary), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    reserved = range(len(ranks), len(ranks) + RESERVED)
    backend.add_tokens([added.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True) for i in reserved])
    return backend


def _ranks(file: Path) -> dict[bytes, int]:
    """Return each token's id."""
    try:
        parts = [line.split() for line in file.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in parts}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a vocabulary of tiktoken: {error}") from None


def _merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs that make a token, by the token's id: tiktoken merges any two neighbours that make one."""
    return [
        (token[:at], token[at:])
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]


def _spellings() -> dict[int, str]:
    """Return the character by which byte-level BPE spells each byte: a printable one for every byte (as GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(others)}
