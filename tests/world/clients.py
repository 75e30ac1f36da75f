"""A storm's clients: they send requests through the SDK and the gateway, and use a kvstore; and what came of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.errors import DeadlineExceeded, InvalidRequest, MoonpoolError, Overloaded, Unavailable
from moonpool.base.logprobs import TokenLogprobs
from moonpool.client import AsyncClient, GenerateResult
from moonpool.client.kv import AsyncKVClient
from moonpool.client.token_stream import AsyncTokenStream
from tests.world.asks import PATHS, SDK, Ask, Interface, tool_arguments
from tests.world.gateway import Exchange, Gateway
from tests.world.history import KINDS, Histories, Operation

TIMEOUT_S = 120.0
"""Longest time of a request whose client sets none."""
REFUSED = (429, 503, 504)
KEYS, VALUE_BYTES = 5, (100, 3000)


ToldLogprobs = tuple[str, float, dict[str, float]]


@dataclass(slots=True)
class Answer:
    """One of a request's answers, or its beginning.

    Attributes:
        tokens: as far as the interface tells them.
        text: of the answer.
        finish: why it ended; "" if it has not.
        logprobs: of the tokens, if they were wanted.
        score: of a beam search's hypothesis.
        told: the log probabilities over HTTP, which names tokens by texts: each token's text, its log probability, and
            those of the most likely ones.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    told: list[ToldLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        ask: the request.
        begin, end: seconds of the storm.
        place: among all outcomes; requests that are asked again, or that none has drawn, share their number.
        ended: "complete", "left", "late" (its own deadline), "refused" (in other words than its own limits), "limited"
            (by its own limits) or "failed".
        error: what the client was told.
        answers: by number.
        prompt: its tokens, where they are known.
        cached: tokens of the prompt that were not computed; None: not told.
        scored: log probabilities of the prompt.
        told_scores: the prompt's log probabilities over HTTP, by token, at each position; None at the first.
        arguments: of the tool's calls.
        resumes: times that a stream was resumed.
        placements: how often the request was placed.
        unexpected: what nobody may ever be told; "" for nothing.
    """

    ask: Ask
    begin: float
    end: float = 0.0
    ended: str = ""
    error: str = ""
    answers: list[Answer] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    cached: int | None = None
    scored: list[TokenLogprobs] = field(default_factory=list)
    told_scores: list[dict[int, float] | None] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)
    resumes: int = 0
    placements: int = 0
    unexpected: str = ""
    place: int = 0

    def answer(self, index: int) -> Answer:
        """Answer `index`, which begins if it has not."""
        while len(self.answers) <= index:
            self.answers.append(Answer())
        return self.answers[index]


Now = Callable[[], float]


async def ask_sdk(client: AsyncClient, ask: Ask, outcome: Outcome, now: Now) -> None:
    """Send a request through the SDK, and wait for what comes of it."""
    stream: AsyncTokenStream | None = None
    prompt = {"messages": ask.chat} if ask.chat else {"token_ids": ask.tokens}
    arguments: dict[str, Any] = {
        **prompt, "sampling": ask.how, "tenant": ask.tenant, "priority": ask.priority,
        "cache_salt": ask.salt, "slo": ask.slo, "session": ask.session, "context": ask.context,
        "request_id": f"{outcome.begin:.6f} {ask.number} {outcome.place}",
        "timeout_s": ask.limit if ask.ending == "deadline" else TIMEOUT_S,
    }  # fmt: skip
    try:
        async with asyncio.timeout(ask.limit if ask.ending == "leave" else None):
            if ask.interface == "generate":
                _take_result(outcome, await client.generate(**arguments))
            else:
                stream = client.stream(**arguments)
                await _follow(stream, ask, outcome)
        outcome.ended = outcome.ended or "complete"
    except TimeoutError:
        outcome.ended = "left"
    except DeadlineExceeded as error:
        outcome.ended, outcome.error = "late", str(error)
    except Overloaded as error:
        limited = ask.slo is not None and error.reason in ("ttft_slo", "tbt_slo")
        outcome.ended, outcome.error = "limited" if limited else "refused", f"{error.reason}: {error}"
    except Unavailable as error:
        outcome.ended, outcome.error = "failed", f"{type(error).__name__}: {error}"
    except MoonpoolError as error:
        outcome.ended = "failed"
        outcome.error = outcome.unexpected = f"{type(error).__name__}: {error}"


async def _follow(stream: AsyncTokenStream, ask: Ask, outcome: Outcome) -> None:
    late_s = ask.limit if ask.ending == "read late" else 0.0
    async for event in stream:
        await asyncio.sleep(late_s)
        late_s = 0.0
        found = outcome.answer(event.choice)
        if event.token_ids and event.position != len(found.tokens) and not ask.how.beam_width:
            outcome.unexpected = f"tokens at {event.position} after {len(found.tokens)}"
        found.tokens += event.token_ids
        found.text += event.text
        found.logprobs += event.logprobs
        outcome.scored += [prompt_logprob for prompt_logprob in event.prompt_logprobs if prompt_logprob is not None]
        if ask.ending == "leave after tokens" and sum(len(answer.tokens) for answer in outcome.answers) >= ask.limit:
            outcome.ended = "left"
            stream.cancel()
            return
    assert stream.result is not None, "a stream that has ended well has a result"
    told = [(answer.tokens, answer.text) for answer in outcome.answers]
    _take_result(outcome, stream.result)
    if not ask.how.beam_width and told != [(answer.tokens, answer.text) for answer in outcome.answers]:
        outcome.unexpected = "the result is not what the events told"


def _take_result(outcome: Outcome, result: GenerateResult) -> None:
    outcome.answers = [
        Answer(list(choice.token_ids), choice.text, choice.finish_reason, list(choice.logprobs), choice.score)
        for choice in result.choices
    ]
    outcome.cached = result.usage.cached_tokens
    outcome.scored = [prompt_logprob for prompt_logprob in result.prompt_logprobs if prompt_logprob is not None]
    outcome.resumes, outcome.placements = result.resumes, len(result.placements)


async def ask_http(gateway: Gateway, ask: Ask, outcome: Outcome, key: str) -> None:
    """Send a request through the gateway, and wait for what comes of it."""
    exchange = await gateway.ask("POST", PATHS[ask.interface], ask.body(), key)
    if ask.ending == "read late":
        exchange.pause()
        await asyncio.sleep(ask.limit)
        exchange.read_on()
    try:
        async with asyncio.timeout(ask.limit if ask.ending == "leave" else TIMEOUT_S):
            await exchange.ended.wait()
    except TimeoutError:
        exchange.leave()
        outcome.ended = "left"
        if ask.ending != "leave":
            outcome.unexpected = "no end"
    _read(ask, exchange, outcome)
    if outcome.ended:
        return
    if exchange.status in REFUSED:
        outcome.ended, outcome.error = "refused", exchange.content.decode()
    elif not exchange.whole:
        outcome.ended, outcome.error = "failed", "the gateway is lost"
    elif exchange.status != 200:
        outcome.ended, outcome.error = "failed", exchange.content.decode()
        outcome.unexpected = f"{exchange.status} {outcome.error}"
    else:
        outcome.ended = "complete"


def _read(ask: Ask, exchange: Exchange, outcome: Outcome) -> None:
    """Read what has come of a response."""
    if exchange.status != 200:
        return
    if not ask.streamed:
        if exchange.whole:
            read_answer(ask, exchange.answer, outcome)
        return
    for event in exchange.events:
        if "error" in event or event.get("type") in ("error", "response.failed"):
            outcome.ended, outcome.error = "failed", str(event)
            return
        _read_event(ask.interface, event, outcome)
    if exchange.whole and ask.interface in ("completions", "chat") and b"data: [DONE]" not in exchange.content:
        outcome.unexpected = "a stream without its last line"


def _read_event(interface: Interface, event: dict[str, Any], outcome: Outcome) -> None:
    match interface:
        case "completions" | "chat":
            outcome.prompt = outcome.prompt or event.get("prompt_token_ids") or []
            for choice in event["choices"]:
                outcome.prompt = outcome.prompt or choice.get("prompt_token_ids") or []
                found = outcome.answer(choice["index"])
                found.tokens += choice.get("token_ids") or ()
                found.text += choice["text"] if interface == "completions" else choice["delta"].get("content") or ""
                found.finish = choice.get("finish_reason") or found.finish
                found.told += _told(interface, choice)
                for call in choice["delta"].get("tool_calls") or () if interface == "chat" else ():
                    if call["index"] == len(outcome.arguments):
                        outcome.arguments.append("")
                    outcome.arguments[call["index"]] += call["function"].get("arguments", "")
            _read_usage(event.get("usage"), outcome)
        case "responses":
            if event["type"] == "response.output_text.delta":
                outcome.answer(0).text += event["delta"]
            elif event["type"] == "response.function_call_arguments.done":
                outcome.arguments.append(event["arguments"])
            elif event["type"] in ("response.completed", "response.incomplete"):
                streamed, arguments = outcome.answer(0).text, list(tool_arguments("responses", event["response"]))
                _read_whole_response(event["response"], outcome)
                if streamed != outcome.answer(0).text:
                    outcome.unexpected = "the response's text is not that of its events"
                if arguments != outcome.arguments:
                    outcome.unexpected = "the response's calls are not those of its events"
        case _:
            if event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                outcome.answer(0).text += event["delta"]["text"]
            elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                outcome.arguments.append("")
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                outcome.arguments[-1] += event["delta"]["partial_json"]
            elif event["type"] == "message_delta":
                outcome.answer(0).finish = event["delta"]["stop_reason"]
                outcome.cached = event["usage"].get("cache_read_input_tokens")


def _told(interface: Interface, choice: dict[str, Any]) -> list[ToldLogprobs]:
    """The log probabilities of a choice, or of a piece."""
    found = choice.get("logprobs")
    if not found:
        return []
    if interface == "chat":
        return [
            (each["token"], each["logprob"], {top["token"]: top["logprob"] for top in each["top_logprobs"]})
            for each in found["content"]
        ]
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))


def read_answer(ask: Ask, answer: dict[str, Any], outcome: Outcome) -> None:
    """Note a whole answer over HTTP, which came in order."""
    if ask.feature == "tools":
        outcome.arguments = list(tool_arguments(ask.interface, answer))
    match ask.interface:
        case "completions" | "chat":
            outcome.prompt = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids") or []
            for choice in answer["choices"]:
                found = outcome.answer(choice["index"])
                found.tokens = choice.get("token_ids") or []
                told = choice["text"] if ask.interface == "completions" else choice["message"].get("content")
                found.text, found.finish = told or "", choice["finish_reason"]
                found.told = _told(ask.interface, choice)
            for scores in answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs") or ():
                by_token = None if scores is None else {int(token): score["logprob"] for token, score in scores.items()}
                outcome.told_scores.append(by_token)
            _read_usage(answer.get("usage"), outcome)
        case "responses":
            _read_whole_response(answer, outcome)
        case _:
            found = outcome.answer(0)
            found.text = "".join(each["text"] for each in answer["content"] if each["type"] == "text")
            found.finish = answer["stop_reason"]
            outcome.cached = answer["usage"].get("cache_read_input_tokens")


def _read_whole_response(answer: dict[str, Any], outcome: Outcome) -> None:
    messages = [each for each in answer["output"] if each["type"] == "message"]
    found = outcome.answer(0)
    found.text = "".join(part["text"] for message in messages for part in message["content"])
    found.finish = {"completed": "stop", "incomplete": "length"}.get(answer["status"], answer["status"])
    outcome.cached = answer["usage"]["input_tokens_details"]["cached_tokens"]


def _read_usage(usage: dict[str, Any] | None, outcome: Outcome) -> None:
    if usage and usage.get("prompt_tokens_details"):
        outcome.cached = usage["prompt_tokens_details"]["cached_tokens"]


async def use_stores(
    addresses: dict[str, str], tenant: str, seed: object, histories: Histories, now: Now, until: float
) -> None:
    """Put, read and delete values of a few keys at all stores, until a time; each value is new."""
    drawn, number = random.Random(f"values {seed} {tenant}"), 0
    clients = {
        store: AsyncKVClient(address, namespace="storm", tenant=tenant, timeout_s=5.0, transports="grpc")
        for store, address in addresses.items()
    }
    while now() < until:
        await asyncio.sleep(drawn.expovariate(6.0))
        store, key = drawn.choice(list(clients)), b"key %d" % drawn.randrange(KEYS)
        client, kind = clients[store], drawn.choices(KINDS, (4, 5, 2))[0]
        number += 1
        value = f"{tenant}/{number}/".ljust(drawn.choice(VALUE_BYTES), "v") if kind == "put" else ""
        operation = Operation(kind, value, now())
        histories.add(store, tenant, key, operation)
        try:
            if kind == "put":
                operation.changed = await client.put(key, value.encode())
            elif kind == "delete":
                operation.changed = await client.delete(key)
            else:
                found = await client.get(key)
                operation.value = "" if found is None else found.decode(errors="replace")
                operation.changed = False
        except (MoonpoolError, InvalidRequest):
            continue
        operation.end = now()
    for client in clients.values():
        await client.aclose()


def is_sdk(ask: Ask) -> bool:
    """Whether the request goes past the gateway."""
    return ask.interface in SDK
