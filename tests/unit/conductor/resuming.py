"""Clients of a conductor by the contract: calls of `Generate`, and how they are resumed."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moonpool.base.contracts import sampling_to_proto
from moonpool.base.sampling_params import SamplingParams
from moonpool.client.transport import GrpcTransport
from moonpool.v1 import conductor_pb2 as pb

from .fakes import ScriptedDecode, ScriptedPrefill
from .stack import WAIT_S, Stack, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@asynccontextmanager
async def two(p: ScriptedPrefill, d: ScriptedDecode, **settings: Any) -> AsyncIterator[tuple[Stack, Stack]]:
    """Two conductors that both instances have joined; the first one with these settings."""
    async with stack(p, d, **settings) as first, stack() as second:
        for member in (p, d):
            hello = pb.JoinHello(instance=member.instance, total_blocks=member.total_blocks, model=second.model())
            await second.follow(member, hello)
            await second.joined(member)
        yield first, second


def request(sampling: SamplingParams = GREEDY, request_id: str = "r") -> pb.GenerateRequest:
    tokens = pb.TokenPrompt(token_ids=PROMPT)
    return pb.GenerateRequest(request_id=request_id, tokens=tokens, sampling=sampling_to_proto(sampling), tenant="t")


class Call:
    """A Generate call, and what came."""

    def __init__(self, at: Stack, message: pb.GenerateRequest) -> None:
        self.transport = GrpcTransport(at.address)
        self.call = self.transport.generate(message, WAIT_S)
        self.placed: list[pb.Placed] = []
        self.answers: defaultdict[int, list[int]] = defaultdict(list)
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.logprobs: list[float] = []
        self.scored: list[pb.PromptLogprobs] = []
        self.finished: pb.Finished | None = None

    @property
    def tokens(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0]

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.texts[0]

    async def read(self, tokens: int = 1 << 30, choices: int = 1) -> None:
        """Until there are so many tokens of each answer, or to the end."""
        while min(len(self.answers[choice]) for choice in range(choices)) < tokens:
            if not await self.step():
                return

    async def step(self) -> bool:
        """Reads a message; returns False at the end."""
        try:
            message = await anext(aiter(self.call))
        except StopAsyncIteration:
            return False
        if message.HasField("placed"):
            self.placed.append(message.placed)
        elif message.HasField("delta"):
            self.answers[message.delta.choice] += message.delta.token_ids
            self.texts[message.delta.choice] += message.delta.text
            self.logprobs += message.delta.logprobs.logprobs
        elif message.HasField("prompt_logprobs"):
            self.scored.append(message.prompt_logprobs)
        else:
            self.finished = message.finished
        return True

    def resume(self, message: pb.GenerateRequest, count: int = 1) -> pb.GenerateRequest:
        """The request with which a client goes on behind what it has."""
        again = pb.GenerateRequest()
        again.CopyFrom(message)
        again.sampling.seed, again.from_position = self.placed[-1].seed, len(self.tokens)
        first, *further = [
            pb.AnswerSoFar(token_ids=self.answers[choice], text_chars=len(self.texts[choice]))
            for choice in range(max(1, message.sampling.n))
        ]
        again.resume.CopyFrom(
            pb.Resume(
                point=self.placed[-1].resume,
                token_ids=first.token_ids,
                text_chars=first.text_chars,
                count=count,
                further=further,
                prompt_scored=bool(self.scored),
            )
        )
        return again
