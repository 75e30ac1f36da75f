"""Requests at the engine: promises of memory, answers that the engine generates, and the conductors that read them."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.base import world
from moonpool.base.contracts import logprobs_to_proto
from moonpool.base.errors import Internal, MoonpoolError, Unavailable
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import stream_seed
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.request import IncomingRequest
from moonpool.engine.subscriber import Subscriber
from moonpool.interop.adapter.base import EngineClient, EnginePrompt
from moonpool.v1 import kv_pb2, prefill_pb2

FINISHES = {"stop": kv_pb2.FINISH_REASON_STOP, "length": kv_pb2.FINISH_REASON_LENGTH}
MEETS = "bootstrap_room"
"""A transfer with this names no KV that is there, but where both engines of a pair meet."""
TOKEN_TIMEOUT_S = 60.0
"""Seconds without a token after which an answer is placed at another engine."""
log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class EngineAnswer:
    """One answer, as far as the engine has generated the answer.

    Attributes:
        prompt: what the engine was asked for.
        changed: called when tokens have come, or the answer is over.
        told_cached: see `EnginePart`.
        tokens: generated so far.
        logprobs: the tokens' log probabilities, if wanted.
        finish: why the answer has ended; unspecified while the answer continues.
        error: why the engine cannot go on.
        transfer: names the prompt's KV for another engine, if it was kept.
        began, first_at, last_at: times of the order and of the first and last tokens, seconds.
    """

    prompt: EnginePrompt
    changed: Callable[["EngineAnswer"], None]
    told_cached: Callable[[int], None]
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: Logprobs = field(default_factory=Logprobs)
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    error: MoonpoolError | None = None
    transfer: Mapping[str, Any] | None = None
    began: float = field(default_factory=world.monotonic)
    first_at: float = 0.0
    last_at: float = 0.0
    task: "asyncio.Task[None] | None" = None

    @property
    def over(self) -> bool:
        """Whether no more output comes."""
        return bool(self.finish) or self.error is not None

    def start(self, client: EngineClient) -> None:
        """Asks the engine."""
        self.task = asyncio.create_task(self._run(client))

    def stop(self) -> None:
        """No more output is wanted; may be called again."""
        if self.task is not None and not self.task.done():
            self.task.cancel()

    async def _run(self, client: EngineClient) -> None:
        outputs = client.generate(self.prompt)
        try:
            while True:
                async with asyncio.timeout(TOKEN_TIMEOUT_S):
                    output = await anext(outputs, None)
                if output is None:
                    break
                if output.cached_tokens is not None:
                    self.told_cached(output.cached_tokens)
                if not output.token_ids and not output.finish:
                    continue
                self.last_at = world.monotonic()
                self.first_at = self.first_at or self.last_at
                self.tokens.extend(output.token_ids)
                self.transfer = output.transfer
                if output.logprobs is not None:
                    self.logprobs.extend(output.logprobs)
                if output.finish:
                    self.finish = FINISHES[output.finish]
                self.changed(self)
            if not self.finish:
                raise Unavailable("the engine ended an answer without a reason")
        except TimeoutError:
            self._failed(Unavailable(f"the engine gave no token for {TOKEN_TIMEOUT_S:g} s"))
        except MoonpoolError as error:
            self._failed(error)
        except Exception:
            log.exception("an answer of the engine cannot be read")
            self._failed(Internal("a defect: an answer of the engine cannot be read"))
        finally:
            await outputs.aclose()

    def _failed(self, error: MoonpoolError) -> None:
        if not self.finish:  # output behind the last token is ignored
            self.error = error
            self.changed(self)


@dataclass(slots=True, eq=False)
class EnginePart:
    """What a request's answers are made of.

    Args:
        client: the engine's client.
        incoming: the request.
        salt: the prompt's salt.
        rank: rank that holds most of the prompt.
        told_cached: called with the prompt tokens that the engine had cached, if the engine tells them.
        ordered: called with each prompt that the engine gets.
        uses_kvstores: the engine keeps KV in kvstores.
        lora: see `EnginePrompt`.
    """

    client: EngineClient
    incoming: IncomingRequest
    salt: str
    rank: int
    told_cached: Callable[[int], None]
    ordered: Callable[[EnginePrompt], None]
    uses_kvstores: bool = False
    lora: str = ""

    def meetings(self, width: int) -> Sequence[Mapping[str, Any]] | None:
        """For each answer, where both engines of a pair meet; None if they are asked one after the other."""
        found = [self.client.meeting(self._prompt(choice, (), alone=True, keep=True)) for choice in range(width)]
        return [one for one in found if one is not None] if all(found) else None

    def answer(
        self,
        choice: int,
        known: Sequence[int],
        changed: Callable[[EngineAnswer], None],
        *,
        alone: bool = False,
        keep: bool = False,
        transfer: Mapping[str, Any] | None = None,
    ) -> EngineAnswer:
        """Begins an answer after the known tokens; `alone`: only the first token is wanted. See `EnginePrompt`."""
        prompt = self._prompt(choice, known, alone=alone, keep=keep, transfer=transfer)
        found = EngineAnswer(prompt, changed, self.told_cached)
        self.ordered(prompt)
        found.start(self.client)
        return found

    def _prompt(
        self,
        choice: int,
        known: Sequence[int],
        *,
        alone: bool,
        keep: bool,
        transfer: Mapping[str, Any] | None = None,
    ) -> EnginePrompt:
        incoming = self.incoming
        sampling, params = incoming.sampling, incoming.sampling.params
        tokens = incoming.token_ids + array("i", known)
        generated = len(tokens) - sampling.prompt_tokens
        return EnginePrompt(
            f"{incoming.request_id}/{choice}",
            tokens,
            params,
            stream_seed(params.seed or 0, choice),
            1 if alone else params.max_tokens - generated,
            0 if alone else max(0, params.min_tokens - generated),
            tuple(sorted(sampling.end_token_ids)),
            self.salt,
            incoming.spec.priority,
            self.rank,
            incoming.spec.tenant if self.uses_kvstores else None,
            keep,
            transfer,
            self.lora,
        )


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
        """Answers that are wanted."""
        return self.part.incoming.spec.width

    @property
    def context_tokens(self) -> int:
        """Tokens in all running answers, with their prompts."""
        return sum([len(it.prompt.token_ids) + len(it.tokens) for it in self.answers if not it.over])

    def compute(self, transfers: Sequence[Mapping[str, Any] | None] | None = None) -> None:
        """Begins all answers; `transfers` name their prompt's KV at another engine."""
        places = transfers or [None] * self.width
        self.answers = [
            self.part.answer(choice, (), self._changed, transfer=place) for choice, place in enumerate(places)
        ]
        base = len(self.part.incoming.token_ids) - self.part.incoming.sampling.prompt_tokens
        self.positions, self.sent = [base] * self.width, [0] * self.width

    def start(self, subscriber: Subscriber, known: Sequence[Sequence[int]]) -> None:
        """Sends what comes behind the known tokens of each answer; an answer with others is begun anew."""
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
        """Begins the answers behind the first tokens, once both tokens and KV are there."""
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
        """Ends all answers; may be called again."""
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
        """Waits until each answer has a token.

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


def first_token_message(
    answers: Sequence[EngineAnswer], cached_tokens: int, loaded_tokens: int
) -> prefill_pb2.FirstToken:
    """The conductor's message once each answer has a first token.

    `cached_tokens` of the prompt were held before, `loaded_tokens` behind them came from kvstores.
    """
    first, prompt = answers[0], answers[0].prompt
    logprobs = Logprobs()
    for answer in answers if prompt.params.logprobs is not None else ():
        logprobs.extend(answer.logprobs.part(0, 1))
    return prefill_pb2.FirstToken(
        token_id=first.tokens[0],
        further_token_ids=[answer.tokens[0] for answer in answers[1:]],
        logprobs=logprobs_to_proto(logprobs) if len(logprobs) else None,
        local_tokens=cached_tokens,
        loaded_tokens=loaded_tokens,
        computed_tokens=len(prompt.token_ids) - cached_tokens - loaded_tokens,
        prefill_s=first.first_at - first.began,
    )
