"""Requests of a trace with tokens: the simulator knows their lengths and keys, the conductor's shell hashes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.kv.keys import BlockKey, block_keys
from simulator.cluster.requests import Request, answer_key
from simulator.kernel.clock import ps
from simulator.traces.mooncake import TraceRequest

FIRST, COUNT = 3, 4000
"""Token ids that are words: so many from the first one on."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        request: as the simulator has it; its prompt's keys are those of the tokens.
        prompt, answers: tokens; the last one of each answer is the end token.
        chains: keys of all full blocks of the prompt and each answer.
    """

    request: Request
    prompt: array[int]
    answers: tuple[array[int], ...]
    chains: tuple[tuple[BlockKey, ...], ...]

    @property
    def id(self) -> str:
        """As its conductor knows it."""
        return f"r{self.request.number}"

    @property
    def key_of(self) -> dict[bytes, bytes]:
        """Keys of the answers' blocks by those that the simulator has for them."""
        known = len(self.request.keys)
        return {
            answer_key(self.request, index, choice): key
            for choice, chain in enumerate(self.chains)
            for index, key in enumerate(chain[known:], known)
        }


def asked(trace: Sequence[TraceRequest], root: bytes, block_tokens: int, end_token: int) -> list[Asked]:
    """The requests of a trace, with tokens by their blocks' ids and their numbers."""
    return [_asked(number, one, root, block_tokens, end_token) for number, one in enumerate(trace, 1)]


def _asked(number: int, one: TraceRequest, root: bytes, block_tokens: int, end_token: int) -> Asked:
    words = [FIRST + (block * block_tokens + at) % COUNT for block in one.hash_ids for at in range(block_tokens)]
    prompt = array("i", words[: one.input_length])
    answers = tuple([_answer(number, choice, one.output_length, end_token) for choice in range(one.choices)])
    chains = tuple([tuple(block_keys(root, prompt + answer, block_tokens)) for answer in answers])
    own = chains[0][: one.input_length // block_tokens]
    whole = b"" if own else block_keys(root, prompt, len(prompt))[0]
    lengths = one.input_length, one.output_length
    request = Request(number, ps(one.timestamp / 1000), *lengths, own, choices=one.choices, prompt_key=whole)
    return Asked(request, prompt, answers, chains)


def _answer(number: int, choice: int, length: int, end_token: int) -> array[int]:
    words = [FIRST + (number * 37 + choice * 1009 + at * 11) % COUNT for at in range(length - 1)]
    return array("i", [*words, end_token])
