"""Log probabilities in the formats of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moonpool.base.logprobs import TokenLogprobs
from moonpool.client import ClusterState
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.tokenizer import GatewayTokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. vLLM uses the same value."""
_REPLACEMENT = "\ufffd"


class LogprobsFormatter:
    """Writes log probabilities in the formats of OpenAI and vLLM.

    Args:
        decode: returns the text of a token.
    """

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}  # by token id

    @classmethod
    def of(cls, tokenizer: GatewayTokenizer, body: GenerateBody, state: ClusterState) -> LogprobsFormatter:
        """Make a formatter with the gateway's tokenizer.

        Raises:
            Mismatch: `body` asks for log probabilities of another model than the tokenizer's.
        """
        if body.wants_logprobs():
            tokenizer.check_model(state.model)
        return cls(lambda token: tokenizer.decode_now([token], skip_special=False))

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` for a chat completion's choice."""
        content = [
            {**self._token(token.token_id, token.logprob), "top_logprobs": [self._token(*pair) for pair in token.top]}
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def plain(self, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """`logprobs` for a completion's choice. `offset` is the number of characters before the first token."""
        texts, offsets = [self._text(token.token_id) for token in logprobs], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite_logprob(token.logprob) for token in logprobs],
            "top_logprobs": [
                {self._text(token_id): _finite_logprob(value) for token_id, value in _top_logprobs(token)}
                for token in logprobs
            ],
            "text_offset": offsets,
        }

    def echoed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`logprobs` of a prompt that a completion repeats. The first token has none."""
        first, scored_tokens = self._text(token_ids[0]), [token for token in logprobs[1:] if token is not None]
        scored = self.plain(scored_tokens, len(first))
        return {
            "tokens": [first, *scored["tokens"]],
            "token_logprobs": [None, *scored["token_logprobs"]],
            "top_logprobs": [None, *scored["top_logprobs"]],
            "text_offset": [0, *scored["text_offset"]],
        }

    def chars(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """Number of characters in tokens."""
        return sum(len(self._text(token.token_id)) for token in logprobs)

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """VLLM's `prompt_logprobs`: for each token, the token and the top ones by id. The first token has None."""
        return [None if token is None else self._position(token) for token in logprobs]

    def _position(self, token: TokenLogprobs) -> dict[str, Any]:
        ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(token.top, 1)}
        ranked.setdefault(token.token_id, (token.logprob, token.rank))
        return {
            str(token_id): {"logprob": _finite_logprob(value), "rank": rank, "decoded_token": self._text(token_id)}
            for token_id, (value, rank) in ranked.items()
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        encoded = None if _REPLACEMENT in text else list(text.encode())  # the token is a part of a character
        return {"token": text, "logprob": _finite_logprob(logprob), "bytes": encoded}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]


def _top_logprobs(token: TokenLogprobs) -> list[tuple[int, float]]:
    """The top tokens and the chosen one; empty if no top tokens were asked for."""
    return [*token.top, (token.token_id, token.logprob)] if token.top else []


def _finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
