"""What a storm's clients ask: requests over every interface, with every feature, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.client import Message, MessagePart, Picture, SamplingParams, Slo

TENANTS = ("ann", "bob", "eve")
FLOODING = "flood"
"""The tenant of floods."""
Interface = Literal["stream", "generate", "completions", "chat", "responses", "messages"]
"""The SDK's two calls, and the paths of the gateway."""
SDK: tuple[Interface, ...] = ("stream", "generate")
INTERFACES: Mapping[Interface, int] = {
    "stream": 5, "generate": 2, "completions": 3, "chat": 3, "responses": 1, "messages": 1,
}  # fmt: skip
BATCHES: tuple[Interface, ...] = ("completions", "chat")
"""Interfaces of batches."""
CHATS: tuple[Interface, ...] = ("chat", "responses", "messages")
TEXTS: tuple[Interface, ...] = ("responses", "messages")
"""Interfaces that tell no tokens: their answers are greedy, and compared as text."""
Feature = Literal["greedy", "drawn", "penalised", "several", "logprobs", "scored", "schema", "regex", "beams", "tools"]
FEATURES: Mapping[Feature, int] = {
    "greedy": 6, "drawn": 3, "several": 3, "penalised": 1, "logprobs": 2, "scored": 1, "schema": 2, "regex": 2,
    "beams": 2, "tools": 2,
}  # fmt: skip
EMULATED: tuple[Feature, ...] = ("greedy", "drawn", "several")
"""Features that an emulated engine has."""
OF: Mapping[Interface, tuple[Feature, ...]] = {
    "stream": tuple(FEATURES)[:-1],
    "generate": tuple(FEATURES)[:-1],
    "completions": ("greedy", "drawn", "several", "penalised", "logprobs", "scored", "schema", "regex"),
    "chat": ("greedy", "drawn", "several", "logprobs", "schema", "regex", "tools"),
    "responses": ("greedy", "schema", "tools"),
    "messages": ("greedy", "schema", "tools"),
}
Ending = Literal["stay", "leave", "leave after tokens", "deadline", "read late"]
ENDINGS: Mapping[Ending, int] = {"stay": 24, "leave": 3, "leave after tokens": 2, "deadline": 1, "read late": 2}
Flood = Literal["answers", "prompts", "bodies"]
"""What there is too much of: KV of running answers, KV of prompts, or bodies at the gateway."""
FLOODS: tuple[Flood, ...] = get_args(Flood)
FLOOD = 6
"""Requests with too many answers; of the other floods there are `FLOOD_MORE` times as many."""
FLOOD_MORE = 4
PADDING = 24_000
"""Bytes that make a body large."""
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["x", "yy"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
REGEX = "[a-c]{3,9}(-[0-9]{2}){2}"
TOOL = "tide"
OPTIONS = ("seed", "presence_penalty", "prompt_logprobs")
"""Of a body, under the same name as the SDK's."""
JSON = SamplingParams(max_tokens=60, temperature=0.0, response_format="json_schema", grammar=json.dumps(SCHEMA))
LONGEST = 700
"""Tokens of a prompt."""
WORDS = ("tide", "moon", "pool", "is", "high", "and", "low", "no", "ship", "has", "seen", "the", "far", "shore")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and what its client will do.

    Attributes:
        number: of the request.
        tenant: who asks.
        interface: how.
        feature: what is special about it.
        how: how tokens are chosen.
        tokens: the prompt behind the context; empty for a chat.
        chat: the prompt of a chat; with pictures also over the SDK.
        streamed: whether an HTTP answer is streamed.
        ending: whether the client stays, or leaves after `limit` seconds or tokens, or has only `limit` seconds, or
            reads nothing for `limit` seconds after an answer's begin.
        limit: see `ending`.
        priority: among the tenant's requests.
        salt: of the cache.
        slo: limits, or None.
        session: or None.
        context: id of a context before the tokens; "" for none.
    """

    number: int
    tenant: str
    interface: Interface
    feature: Feature
    how: SamplingParams
    tokens: tuple[int, ...] = ()
    chat: tuple[Message, ...] = ()
    streamed: bool = True
    ending: Ending = "stay"
    limit: float = 0.0
    priority: int = 0
    salt: str = ""
    slo: Slo | None = None
    session: SessionTurn | None = None
    context: str = ""
    padding: int = 0
    """Bytes of a body that mean nothing."""

    def __str__(self) -> str:
        shown = ", pictures" if self.pictures else ""
        return f"request {self.number} ({self.tenant}, {self.interface}, {self.feature}, {self.ending}{shown})"

    @property
    def pictures(self) -> list[bytes]:
        """Files of the pictures in the chat."""
        return [part["picture"].content for turn in self.chat for part in turn.get("parts", ()) if "picture" in part]

    def body(self) -> dict[str, Any]:
        """The body of an HTTP request."""
        match self.interface:
            case "completions":
                return self._openai() | {"prompt": list(self.tokens)}
            case "chat":
                return self._openai() | {"messages": list(self.chat), **self._chat_tools()}
            case "responses":
                return self._responses()
        return self._messages()

    def _openai(self) -> dict[str, Any]:
        how, chat = self.how, self.interface == "chat"
        body: dict[str, Any] = {
            "max_tokens": how.max_tokens, "temperature": how.temperature, "n": how.n, "stream": self.streamed,
            "return_token_ids": True, "priority": self.priority,
        }  # fmt: skip
        if how.ignore_eos:
            body["ignore_eos"] = True
        body |= {
            name: getattr(how, name) for name in ("seed", "presence_penalty", "prompt_logprobs") if _set(how, name)
        }
        if how.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": how.logprobs} if chat else {"logprobs": how.logprobs}
        if self.salt:
            body["cache_salt"] = self.salt
        if self.padding:
            body["user"] = "x" * self.padding
        if self.streamed:
            body["stream_options"] = {"include_usage": True}
        if self.feature == "schema":
            schema = {"name": "answer", "schema": SCHEMA, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.feature == "regex":
            body["structured_outputs"] = {"regex": REGEX}
        return body

    def _chat_tools(self) -> dict[str, Any]:
        if self.feature != "tools":
            return {}
        function = {"name": TOOL, "parameters": SCHEMA, "strict": True}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}

    def _responses(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "input": list(self.chat), "max_output_tokens": self.how.max_tokens, "temperature": 0,
            "stream": self.streamed, "priority": self.priority,
        }  # fmt: skip
        if self.feature == "schema":
            body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
        if self.feature == "tools":
            body["tools"] = [{"type": "function", "name": TOOL, "parameters": SCHEMA, "strict": True}]
            body["tool_choice"] = "required"
        return body

    def _messages(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": list(self.chat), "max_tokens": self.how.max_tokens, "temperature": 0, "stream": self.streamed,
            "priority": self.priority,
        }  # fmt: skip
        if self.feature == "schema":
            body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        if self.feature == "tools":
            body["tools"] = [{"name": TOOL, "input_schema": SCHEMA, "strict": True}]
            body["tool_choice"] = {"type": "any"}
        return body


def _set(how: SamplingParams, name: str) -> bool:
    return bool(getattr(how, name) != getattr(SamplingParams(), name))


PATHS: Mapping[Interface, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass(slots=True)
class Asks:
    """Draws requests one after the other; number n is the same for the same seed.

    Attributes:
        seed: of all draws.
        computes: whether the engine computes, and so has all features.
        pictures: of which some requests over the SDK show some, each beside a text.
        contexts: ids of contexts, by tenant.
    """

    seed: int
    computes: bool
    pictures: Sequence[Picture] = ()
    contexts: dict[str, str] = field(default_factory=dict)
    _number: int = 0

    def document(self, tenant: str, which: int) -> list[int]:
        """A beginning that several prompts share. Number 0 is the same for all tenants."""
        numbers = random.Random(f"document {self.seed} {tenant if which else ''} {which}")
        return [numbers.randrange(8, 250) for _ in range(LONGEST)]

    def batch(self, tenant: str, interface: Interface) -> list[Ask]:
        """The lines of a batch."""
        lines = [
            self.next(interface) for _ in range(random.Random(f"batch {self.seed} {self._number}").randrange(2, 7))
        ]
        return [replace(line, tenant=tenant, streamed=False, ending="stay") for line in lines]

    def next(self, interface: Interface | None = None) -> Ask:
        """The next request, over some interface or this one."""
        number = self._number
        self._number += 1
        drawn = random.Random(f"ask {self.seed} {number}")
        interface = interface or _weighed(drawn, INTERFACES)
        features = [each for each in OF[interface] if self.computes or each in EMULATED]
        feature = _weighed(drawn, {each: FEATURES[each] for each in features})
        ask = Ask(number, drawn.choice(TENANTS), interface, feature, self._how(drawn, interface, feature))
        ask = replace(ask, streamed=interface not in SDK and feature != "scored" and drawn.random() < 0.6)
        if interface in CHATS:
            words = drawn.choices(WORDS, k=drawn.randrange(3, 60))
            ask = replace(ask, chat=({"role": "user", "content": " ".join(words)},))
        else:
            ask = replace(ask, tokens=tuple(self._prompt(drawn, ask.tenant)))
        ask = self._ending(drawn, ask)
        if drawn.random() < 0.3:
            ask = replace(ask, priority=drawn.randrange(-5, 6))
        if interface in (*SDK, "completions") and drawn.random() < 0.15:
            ask = replace(ask, salt=drawn.choice("xy"))
        elif interface in SDK and drawn.random() < 0.15 and ask.tenant in self.contexts and feature != "scored":
            ask = replace(ask, context=self.contexts[ask.tenant], tokens=ask.tokens[-40:])
        if interface in SDK and drawn.random() < 0.08:
            ask = replace(ask, slo=Slo(ttft_s=drawn.choice((1e-3, 0.5, 5.0))))
        if self.pictures and interface in SDK and feature == "greedy":
            parts = list[MessagePart]()
            for picture in drawn.choices(self.pictures, k=drawn.randrange(1, 4)):
                parts += [{"text": " ".join(drawn.choices(WORDS[:3], k=drawn.randrange(9)))}, {"picture": picture}]
            ask = replace(ask, chat=({"role": "user", "content": "", "parts": parts},), tokens=(), context="")
        return ask

    def flood(self, kind: Flood) -> list[Ask]:
        """Requests that want more memory together than decode, prefill or the gateway has."""
        asks = list[Ask]()
        for _ in range(FLOOD if kind == "answers" else FLOOD_MORE * FLOOD):
            number = self._number
            self._number += 1
            drawn = random.Random(f"flood {self.seed} {number}")
            tokens = tuple(drawn.randrange(8, 250) for _ in range(LONGEST))
            seed = drawn.getrandbits(31)
            how = SamplingParams(max_tokens=60, temperature=1.0, seed=seed, n=4, ignore_eos=True)
            ask = Ask(number, FLOODING, "generate", "several", how, tokens)
            if kind != "answers":
                ask = replace(ask, feature="greedy", how=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            if kind == "bodies":
                ask = replace(ask, interface="completions", padding=PADDING, tokens=tokens[:20])
            asks.append(ask)
        return asks

    def _prompt(self, drawn: random.Random, tenant: str) -> list[int]:
        length = int(LONGEST ** drawn.uniform(0.2, 1.0))
        shared = drawn.randrange(length) if drawn.random() < 0.75 else 0
        own = [drawn.randrange(8, 250) for _ in range(max(1, length - shared))]
        return self.document(tenant, drawn.randrange(3))[:shared] + own

    def _how(self, drawn: random.Random, interface: Interface, feature: Feature) -> SamplingParams:
        tokens, seed = int(60 ** drawn.uniform(0.1, 1.0)), drawn.getrandbits(31)
        how = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=interface not in TEXTS)
        match feature:
            case "drawn":
                return replace(how, temperature=1.0, seed=seed)
            case "penalised":
                return replace(how, temperature=0.7, seed=seed, presence_penalty=0.5)
            case "several":
                return replace(how, temperature=1.0, seed=seed, n=drawn.randrange(2, 5))
            case "logprobs":
                return replace(how, logprobs=drawn.randrange(1, 4))
            case "scored":
                return replace(how, prompt_logprobs=1)
            case "schema" | "tools":
                return SamplingParams(
                    max_tokens=60, temperature=0.0, response_format="json_schema", grammar=json.dumps(SCHEMA)
                )
            case "regex":
                return SamplingParams(max_tokens=60, temperature=0.0, response_format="regex", grammar=REGEX)
            case "beams":
                return SamplingParams(max_tokens=min(tokens, 12), beam_width=3, n=2, ignore_eos=True)
        return how

    def _ending(self, drawn: random.Random, ask: Ask) -> Ask:
        ending = _weighed(drawn, ENDINGS)
        if ending == "leave after tokens" and ask.interface != "stream":
            ending = "leave"
        if ending == "deadline" and ask.interface not in SDK:
            ending = "stay"
        if ending == "read late" and ask.interface != "stream" and not ask.streamed:
            ending = "stay"
        limit = {
            "stay": 0.0,
            "leave": drawn.uniform(0.02, 2.0),
            "leave after tokens": drawn.randrange(1, 1 + ask.how.max_tokens),
            "deadline": drawn.uniform(0.05, 1.0),
            "read late": drawn.uniform(0.5, 5.0),
        }[ending]
        return replace(ask, ending=ending, limit=float(limit))


def _weighed(drawn: random.Random, weights: Mapping[Any, int]) -> Any:
    return drawn.choices(list(weights), list(weights.values()))[0]


def tool_arguments(interface: Interface, answer: Mapping[str, Any]) -> Sequence[Any]:
    """Arguments of an answer's calls of the tool, as they came."""
    match interface:
        case "chat":
            calls = answer["choices"][0]["message"].get("tool_calls") or ()
            return [call["function"]["arguments"] for call in calls if call["function"]["name"] == TOOL]
        case "responses":
            return [
                each["arguments"]
                for each in answer["output"]
                if each["type"] == "function_call" and each["name"] == TOOL
            ]
    return [each["input"] for each in answer["content"] if each["type"] == "tool_use" and each["name"] == TOOL]
