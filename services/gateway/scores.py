"""Log probabilities in OpenAI's and vLLM's forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moonpool.client import TokenLogprobs

LEAST = -9999.0
"""Stands for log probabilities that JSON has no number for, as vLLM does it."""
_REPLACEMENT = "\ufffd"


class Scores:
    """Spells tokens and their log probabilities.

    Args:
        spell: gives a token's text.
    """

    def __init__(self, spell: Callable[[int], str]) -> None:
        self._spell = spell
        self._texts: dict[int, str] = {}

    def chat(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = [
            {**self._token(it.token_id, it.logprob), "top_logprobs": [self._token(*pair) for pair in it.top]}
            for it in found
        ]
        return {"content": content, "refusal": None}

    def plain(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The `logprobs` of a plain completion's choice; `offset`: characters of the tokens before them."""
        texts, offsets = [self._text(it.token_id) for it in found], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_number(it.logprob) for it in found],
            "top_logprobs": [{self._text(token): _number(value) for token, value in _told(it)} for it in found],
            "text_offset": offsets,
        }

    def chars(self, found: Sequence[TokenLogprobs]) -> int:
        """Characters of some tokens."""
        return sum(len(self._text(it.token_id)) for it in found)

    def prompt(self, found: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """VLLM's `prompt_logprobs`: for each token itself and the likely ones by id; None for the first."""
        return [None if it is None else self._position(it) for it in found]

    def _position(self, it: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(it.top, 1)}
        ranked.setdefault(it.token_id, (it.logprob, it.rank))
        return {
            str(token): {"logprob": _number(value), "rank": rank, "decoded_token": self._text(token)}
            for token, (value, rank) in ranked.items()
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        spelled = None if _REPLACEMENT in text else list(text.encode())  # a part of a character has no text of its own
        return {"token": text, "logprob": _number(logprob), "bytes": spelled}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._spell(token)
        return self._texts[token]


def _told(it: TokenLogprobs) -> list[tuple[int, float]]:
    """The likely tokens, and the chosen one; none where none are wanted."""
    return [*it.top, (it.token_id, it.logprob)] if it.top else []


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
