"""A request with promised memory: the request's answers, and the conductor that reads them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.errors import Unavailable
from moonpool.engine.subscriber import Subscriber
from moonpool.interop.adapter.engine_answer import EngineAnswer, EnginePart
from moonpool.v1 import kv_pb2

MEETS = "bootstrap_room"
"""A transfer with this names no KV that is there, but where both engines of a pair meet."""


@dataclass(slots=True, eq=False)
class PromisedRequest:
    """A request with promised memory, the request's answers, and the conductor that reads them.

    Attributes:
        number: transfer id; the generation of the transfer is the same.
        part: begins the request's answers.
        conductor: identity of the conductor that asked.
        blocks: promised to the prompt.
        answers: by choice; empty before the prompt is computed.
        subscriber: gets the request's tokens; None before the start.
        sent: for each choice, tokens in the answer object that the conductor has; and the output position of the answer
            object's first token.
        held_tokens: leading tokens that were not to be computed when the prompt came.
        awaits_kv: the prompt is computed at another engine, and answers begin when its KV is there.
        known: for each choice, the tokens that the conductor has; empty before the start.
        transfers: for each choice, the prompt's KV at the other engine; empty before it is there.
        meets: the engines of the pair work at the same time.
    """

    number: int
    part: EnginePart
    conductor: str
    blocks: int
    ended: Callable[["PromisedRequest"], None]
    answers: list[EngineAnswer] = field(default_factory=list)
    subscriber: Subscriber | None = None
    sent: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    expiry: "asyncio.TimerHandle | None" = None
    held_tokens: int = 0
    awaits_kv: bool = False
    known: Sequence[Sequence[int]] = ()
    transfers: Sequence[Mapping[str, Any]] = ()
    meets: bool = False
    over: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        """The request's id at the conductor."""
        return self.part.incoming.request_id

    @property
    def width(self) -> int:
        return self.part.incoming.spec.width

    @property
    def context_tokens(self) -> int:
        """Tokens in all running answers, with their prompts."""
        return sum([len(answer.prompt.token_ids) + len(answer.tokens) for answer in self.answers if not answer.over])

    def compute(self, transfers: Sequence[Mapping[str, Any] | None] | None = None) -> None:
        """Begin all answers; `transfers` name their prompt's KV at another engine."""
        places = transfers or [None] * self.width
        self.answers = [
            self.part.answer(choice, (), self._changed, transfer=place) for choice, place in enumerate(places)
        ]
        base = len(self.part.incoming.token_ids) - self.part.incoming.sampling.prompt_tokens
        self.positions, self.sent = [base] * self.width, [0] * self.width

    def start(self, subscriber: Subscriber, known: Sequence[Sequence[int]]) -> None:
        """Send what comes behind the known tokens of each answer; an answer with others is begun anew."""
        self.subscriber = subscriber
        if self.meets and known:
            self.sent = [len(tokens) for tokens in known]  # both engines give the first token
            for answer in list(self.answers):
                self._changed(answer)
            return
        if self.awaits_kv and known:
            self.known = known
            self._go_on()
            return
        if not self.answers:
            self.compute()
        for choice, tokens in enumerate(known):
            answer = self.answers[choice]
            if len(tokens) == 1 and answer.error is None and answer.tokens[:1].tolist() == list(tokens):
                self.sent[choice] = 1
            elif tokens:
                answer.stop()
                # The client has other tokens than this engine has drawn: the answer is drawn anew behind them (ADR 60).
                self.positions[choice] += len(tokens)
                self.answers[choice] = self.part.answer(choice, tokens, self._changed)
        for answer in list(self.answers):
            self._changed(answer)

    def handed_over(self, transfers: Sequence[Mapping[str, Any]]) -> None:
        """The prompt's KV is at another engine, or will be: then both are at work, and both give the first token."""
        self.transfers = transfers
        self.meets = any(transfer.get(MEETS) for transfer in transfers)
        if self.meets:
            self.compute(transfers)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Begin the answers behind the first tokens, once both tokens and KV are there."""
        if not self.known or not self.transfers or self.answers:
            return
        base = len(self.part.incoming.token_ids) - self.part.incoming.sampling.prompt_tokens
        self.positions, self.sent = [base + len(tokens) for tokens in self.known], [0] * self.width
        self.answers = [
            self.part.answer(choice, tokens, self._changed, transfer=transfer)
            for choice, (tokens, transfer) in enumerate(zip(self.known, self.transfers, strict=True))
        ]

    def stop(self, choice: int) -> None:
        """One answer is complete for the conductor."""
        if choice < len(self.answers) and not self.answers[choice].over:
            self.answers[choice].stop()
            self.answers[choice].finish = kv_pb2.FINISH_REASON_STOP
            self._changed(self.answers[choice])

    def end(self) -> None:
        """End all answers; may be called again."""
        for answer in self.answers:
            if not answer.over:  # else the last output is on its way
                answer.stop()
        if self.expiry is not None:
            self.expiry.cancel()
        if not self.over:
            self.over = True
            self.wake.set()
            self.ended(self)

    def fail(self, why: str) -> None:
        """The request cannot go on here."""
        if self.subscriber is not None and not self.over:
            self.subscriber.failed(self.request_id, why)
        self.end()

    def _changed(self, answer: EngineAnswer) -> None:
        self.wake.set()
        # An answer that was begun anew is not in the list any more: what its former task says does not count.
        if self.subscriber is None or self.over or answer not in self.answers:
            return
        choice = self.answers.index(answer)
        if answer.error is not None:
            self.fail(str(answer.error))
            return
        new = answer.tokens[self.sent[choice] :].tolist()
        if (new or answer.finish) and choice not in self.told:
            position = self.positions[choice] + self.sent[choice]
            wanted = self.part.incoming.sampling.params.logprobs is not None
            logprobs = answer.logprobs.part(self.sent[choice]) if wanted and new else None
            self.sent[choice] += len(new)
            self.subscriber.tokens(self.request_id, position, new, answer.finish, choice, logprobs=logprobs)
            self.subscriber.flush()
            if answer.finish:
                self.told.add(choice)
        if len(self.told) == self.width:
            self.end()

    async def first_tokens(self) -> None:
        """Wait until each answer has a token.

        Raises:
            MoonpoolError: an answer cannot be generated, or the request was cancelled.
        """
        while True:
            failed = [answer.error for answer in self.answers if answer.error is not None]
            if failed:
                raise failed[0]
            if all(answer.tokens for answer in self.answers):
                return
            if self.over:
                raise Unavailable("the request was cancelled")
            self.wake.clear()
            await self.wake.wait()
