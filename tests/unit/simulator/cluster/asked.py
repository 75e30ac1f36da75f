"""Requests of a trace with tokens: the simulator knows their lengths and keys, the conductor's shell hashes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.kv.keys import BlockKey, block_keys
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.core.events import RequestSpec
from services.conductor.request import resume_point
from simulator.clock import ps
from simulator.cluster.requests import Request, answer_key
from simulator.traces.mooncake import TraceRequest

FIRST, COUNT = 3, 4000
"""Token ids that are words: so many from the first one on."""
SECRET = bytes(16)
"""Of all clients."""


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


@dataclass(frozen=True, slots=True)
class Coming:
    """A request as it comes to a conductor, as `ask` for its core; its client has `had` tokens of each answer."""

    asked: Asked
    ask: RequestSpec
    had: tuple[int, ...]

    @property
    def begins(self) -> int:
        """Tokens of the answer that its first placement here begins behind."""
        return self.ask.resumed.tokens if self.ask.resumed is not None else 0

    def message(self, told: conductor_pb2.ResumePoint | None = None) -> conductor_pb2.GenerateRequest:
        """As its client tells it, by what it was `told` of its placement; None = another conductor told that."""
        asked, slo, resumed = self.asked, self.ask.slo, self.ask.resumed
        message = conductor_pb2.GenerateRequest(
            request_id=asked.id,
            tokens=conductor_pb2.TokenPrompt(token_ids=asked.prompt),
            sampling=kv_pb2.Sampling(max_tokens=self.ask.max_tokens, n=self.ask.choices, temperature=0.0, seed=1),
            slo=conductor_pb2.Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s),
        )
        if resumed is not None:
            message.from_position = self.had[0]
            first, *further = [answer[:had] for answer, had in zip(asked.answers, self.had, strict=True)]
            point = told or resume_point(SECRET, conductor_pb2.Placement(), resumed.sequence, resumed.target)
            message.resume.CopyFrom(
                conductor_pb2.Resume(
                    point=point,
                    token_ids=first,
                    count=resumed.fence,
                    further=[conductor_pb2.AnswerSoFar(token_ids=answer) for answer in further],
                )
            )
        return message


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
