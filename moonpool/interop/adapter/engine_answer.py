"""Answers that the engine generates."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moonpool.base import world
from moonpool.base.contracts import logprobs_to_proto
from moonpool.base.errors import Internal, MoonpoolError, Unavailable
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import stream_seed
from moonpool.base.scheduling.thinking import ThinkingBudget
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.request import IncomingRequest
from moonpool.interop.adapter.base import EngineClient, EngineOutput, EnginePrompt
from moonpool.v1 import kv_pb2, prefill_pb2

FINISHES = {"stop": kv_pb2.FINISH_REASON_STOP, "length": kv_pb2.FINISH_REASON_LENGTH}
TOKEN_TIMEOUT_S = 60.0
"""Seconds without a token after which an answer is placed at another engine."""
log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class EngineAnswer:
    """One answer, as far as the engine has generated the answer.

    Where a thinking budget forces a token that the engine did not choose, the engine is asked anew behind the tokens
    that end the thinking; the engine's cache has what is before.

    Attributes:
        prompt: what the engine was asked for at first.
        changed: called when tokens have come, or the answer is over.
        told_cached: see `EnginePart`.
        thinking: how many tokens the answer may think; None = any number.
        prompt_tokens: leading tokens of `prompt` that are the request's prompt; an answer that moved has more.
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
    thinking: ThinkingBudget | None = None
    prompt_tokens: int = 0
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: Logprobs = field(default_factory=Logprobs)
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    error: MoonpoolError | None = None
    transfer: Mapping[str, Any] | None = None
    began: float = field(default_factory=world.monotonic)
    first_at: float = 0.0
    last_at: float = 0.0
    task: "asyncio.Task[None] | None" = None
    _history: "array[int]" = field(default_factory=lambda: array("i"))  # with a budget: the prompt and the answer
    _steady_until: int = 0  # so long a history has no forced token behind

    @property
    def over(self) -> bool:
        """Whether no more output comes."""
        return bool(self.finish) or self.error is not None

    def start(self, client: EngineClient) -> None:
        self.task = asyncio.create_task(self._run(client))

    def stop(self) -> None:
        """No more output is wanted; may be called again."""
        if self.task is not None and not self.task.done():
            self.task.cancel()

    async def _run(self, client: EngineClient) -> None:
        try:
            prompt: EnginePrompt | None = self.prompt
            while prompt is not None:
                prompt = await self._read(client, prompt)
            if not self.finish:
                raise Unavailable("the engine ended an answer without a reason")
        except TimeoutError:
            self._failed(Unavailable(f"the engine gave no token for {TOKEN_TIMEOUT_S:g} s"))
        except MoonpoolError as error:
            self._failed(error)
        except Exception:
            log.exception("an answer of the engine cannot be read")
            self._failed(Internal("a defect: an answer of the engine cannot be read"))

    async def _read(self, client: EngineClient, prompt: EnginePrompt) -> EnginePrompt | None:
        """Take what the engine generates for a prompt; return what to ask next, or None if the answer is over."""
        outputs, loop = client.generate(prompt), asyncio.get_running_loop()
        latest = loop.time() + TOKEN_TIMEOUT_S  # of the next token, whatever else the engine says meanwhile
        try:
            while True:
                async with asyncio.timeout_at(latest):
                    output = await anext(outputs, None)
                if output is None:
                    return None
                if output.cached_tokens is not None:
                    self.told_cached(output.cached_tokens)
                if not output.token_ids and not output.finish:
                    continue
                latest = loop.time() + TOKEN_TIMEOUT_S
                if self._take(output):
                    return None if self.finish else self._behind_thinking()
        finally:
            await outputs.aclose()

    def _take(self, output: EngineOutput) -> bool:
        """Take an output; return whether the budget has ended the thinking, so that nothing more of it counts."""
        forced = None if self.thinking is None else self._forced(output.token_ids)
        self.last_at = world.monotonic()
        self.first_at = self.first_at or self.last_at
        self.transfer = output.transfer
        if forced is None:
            self.tokens.extend(output.token_ids)
            if output.logprobs is not None:
                self.logprobs.extend(output.logprobs)
            if output.finish:
                self.finish = FINISHES[output.finish]
        else:
            self.tokens.extend(forced)
            if len(self.tokens) == self.prompt.max_tokens:
                self.finish = FINISHES["length"]
        self.changed(self)
        return forced is not None

    def _behind_thinking(self) -> EnginePrompt:
        """What is asked for behind the tokens so far."""
        done = len(self.tokens)
        return replace(
            self.prompt,
            token_ids=self.prompt.token_ids + self.tokens,
            max_tokens=self.prompt.max_tokens - done,
            min_tokens=max(0, self.prompt.min_tokens - done),
        )

    def _forced(self, token_ids: Sequence[int]) -> list[int] | None:
        """Return the next tokens where the budget forces others than the engine's; None = the engine's are right."""
        if not self._history:
            self._history.extend(self.prompt.token_ids)
        for at, token in enumerate(token_ids):
            if self.thinking is None:
                break
            if len(self._history) >= self._steady_until:
                forced = self.thinking.forced(self._history, self.prompt_tokens)
                if forced is not None and forced != token:
                    return [*token_ids[:at], *self._end_of_thinking(self.prompt.max_tokens - len(self.tokens) - at)]
                free = self.thinking.steady(self._history, self.prompt_tokens)
                if free is None:  # nothing will be forced
                    self.thinking = None
                    break
                self._steady_until = len(self._history) + free
            self._history.append(token)
        return None

    def _end_of_thinking(self, most: int) -> list[int]:
        """Return the tokens that are forced now, one behind the other."""
        assert self.thinking is not None
        found = list[int]()
        while len(found) < most and (forced := self.thinking.forced(self._history, self.prompt_tokens)) is not None:
            found.append(forced)
            self._history.append(forced)
        return found

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
        return [place for place in found if place is not None] if all(found) else None

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
        """Begin an answer after the known tokens; `alone`: only the first token is wanted. See `EnginePrompt`."""
        prompt = self._prompt(choice, known, alone=alone, keep=keep, transfer=transfer)
        sampling = self.incoming.sampling
        found = EngineAnswer(prompt, changed, self.told_cached, sampling.thinking, sampling.prompt_tokens)
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
            media=incoming.media,
        )


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
