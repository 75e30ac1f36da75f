"""What right answers are; of the emulated engine, those of its rule. `tests/world/plain.py` judges a checkpoint's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Protocol

import jsonschema

from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import SamplingParams, stream_seed
from moonpool.client import Message
from tests.world.cluster import answer


class Judge(Protocol):
    """Knows what the right tokens are."""

    def wrong(self, prompt: Sequence[int], output: Sequence[int], how: SamplingParams, index: int = 0) -> str:
        """What is wrong with answer `index`, or with its beginning; "" if nothing is."""
        ...

    def greedy(self, prompt: Sequence[int], count: int) -> list[int] | None:
        """The right greedy answer; None if two tokens are too near to each other to tell."""
        ...

    def picture_prompt(self, chat: Sequence[Message]) -> list[int]:
        """The prompt of a chat with pictures; a picture's tokens are numbers below 0, of that picture alone."""
        ...

    def wrong_logprobs(self, context: Sequence[int], found: Sequence[TokenLogprobs]) -> str:
        """What is wrong with the log probabilities of tokens that follow a context."""
        ...

    def wrong_score(self, prompt: Sequence[int], output: Sequence[int], score: float) -> str:
        """What is wrong with a hypothesis' score without length penalty, whose sum is over all tokens."""
        ...


class EmulatedJudge:
    """An emulated engine's answer is a function of its prompt and seed."""

    def wrong(self, prompt: Sequence[int], output: Sequence[int], how: SamplingParams, index: int = 0) -> str:
        right = answer(prompt, len(output), stream_seed(how.seed or 0, index) if how.temperature else None)
        return _first_difference(output, right)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int] | None:
        return answer(prompt, count)

    def picture_prompt(self, chat: Sequence[Message]) -> list[int]:
        raise AssertionError("an emulated engine sees no pictures")

    def wrong_logprobs(self, context: Sequence[int], found: Sequence[TokenLogprobs]) -> str:
        return "an emulated engine has no log probabilities"

    def wrong_score(self, prompt: Sequence[int], output: Sequence[int], score: float) -> str:
        return "an emulated engine has no beams"


def _first_difference(output: Sequence[int], right: Sequence[int]) -> str:
    for position, (token, wanted) in enumerate(zip(output, right, strict=True)):
        if token != wanted:
            return f"token {token} at position {position} of {len(output)} should be {wanted}"
    return ""


def wrong_format(how: SamplingParams, text: str) -> str:
    """What is wrong with the text of a whole answer that has to follow a format."""
    match how.response_format:
        case "regex":
            return "" if re.fullmatch(how.grammar, text) else f"{text!r} does not match {how.grammar}"
        case "json_schema" | "json_object":
            try:
                found = json.loads(text)
                jsonschema.validate(found, json.loads(how.grammar) if how.grammar else {"type": "object"})
            except (ValueError, jsonschema.ValidationError) as error:
                return f"{text!r}: {error}"
    return ""
