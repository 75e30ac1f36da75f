"""From a client's message to a valid request: chat rendered, every field checked, every default set.

Tokenises the prompt, so it runs on a worker thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from moonpool.checkpoint import ModelConfig, Tokenizer
from moonpool.contracts import sampling_from_proto, sampling_to_proto
from moonpool.errors import InvalidRequest
from moonpool.grammar import check_grammar
from moonpool.kv.keys import BlockKey, block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.kv.layout import KVLayout
from moonpool.sampling_params import MAX_BAD_WORD_CHARS, SamplingParams, check_beams, check_end_tokens
from moonpool.scheduling.fair_share import check_priority
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.core.events import ATTEMPT_MARK
from services.conductor.core.latency_model import SloLimits


def chat_chars(chat: conductor_pb2.ChatPrompt) -> int:
    """Characters of the client's that the template is given."""
    calls = (call for turn in chat.messages for call in turn.tool_calls)
    called = sum(len(call.name) + len(call.arguments) for call in calls)
    return called + len(chat.tools) + sum(len(turn.role) + len(turn.content) for turn in chat.messages)


def render_chat(chat: conductor_pb2.ChatPrompt, tokenizer: Tokenizer) -> str:
    """Return the prompt's text.

    Raises:
        InvalidRequest: names what the chat template does not take, or what is wrong.
    """
    return tokenizer.render_chat(list(map(_chat_turn, chat.messages)), tools=_chat_tools(chat.tools))


def _chat_turn(turn: conductor_pb2.ChatMessage) -> dict[str, Any]:
    """What a turn does not have is left out: templates ask whether it is there."""
    if unknown := UnknownFieldSet(turn):
        raise InvalidRequest("messages", f"has field number {unknown[0].field_number}, which is not known here")
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        found["tool_calls"] = [_chat_tool_call(call) for call in turn.tool_calls]
    if turn.tool_call_id:
        found["tool_call_id"] = turn.tool_call_id
    return found


def _chat_tool_call(call: conductor_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_tools(text: str) -> list[dict[str, Any]]:
    if not text:
        return []
    try:
        tools = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("tools", f"invalid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", "must be a JSON list of objects")
    return tools


MAX_ID_CHARS = 128


MAX_TENANT_CHARS = 256


MAX_PROMPT_SCORES = 1 << 18
"""Log probabilities of one prompt: 2 MiB, which one message holds."""


OTHER_TENANTS = "*"
"""Stands for each tenant without a weight of its own."""


@dataclass(frozen=True, slots=True)
class ServedModelSpec:
    """What requests are checked against: the conductor's checkpoint and what the engines agreed on."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    namespace: bytes
    layout: KVLayout
    max_tokens: int
    """Longest sequence, prompt and answer together."""
    queue_s: float
    """How long requests that do not say it may wait instead of being refused."""
    suggested: Mapping[str, float | int]
    """Sampling parameters of requests that do not give them."""
    weights: Mapping[str, float]
    """Shares of tenants, as `ConductorConfig.tenant_weights` has them."""


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A valid request. `sampling` has a seed; `end_token_ids` end the generation."""

    id: str
    tenant: str
    prompt: array[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    slo: SloLimits
    chain_root: bytes
    prompt_keys: tuple[BlockKey, ...]
    block_tokens: int
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Of each the last token is not chosen after the others."""
    priority: int = 0
    weight: float = 1.0
    whole: bool = False
    """The client reads the answer at its end only."""

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.sampling.max_tokens

    @property
    def least_tokens(self) -> int:
        """Tokens that an answer has at least."""
        return self.sampling.min_tokens if self.end_token_ids or self.stops else self.max_tokens

    @property
    def choices(self) -> int:
        """Answers that are wanted."""
        return self.sampling.n

    @property
    def has_beams(self) -> bool:
        """Whether the answers are a beam search's."""
        return self.sampling.beam_width > 0

    @property
    def prompt_key(self) -> BlockKey:
        return block_keys(self.chain_root, self.prompt, len(self.prompt))[0]

    def ends_with(self, token_id: int, generated: int) -> bool:
        """Tell whether `token_id`, being the `generated`-th token of the answer, is its regular end."""
        return token_id in self.end_token_ids and generated >= self.sampling.min_tokens

    def keys_with(self, generated: array[int]) -> list[BlockKey]:
        """Keys of all full blocks of prompt and generated tokens; only blocks beyond the prompt's are hashed."""
        known = list(self.prompt_keys)
        start = len(known) * self.block_tokens
        if len(self.prompt) + len(generated) < start + self.block_tokens:
            return known
        return known + block_keys(
            known[-1] if known else self.chain_root, self.prompt[start:] + generated, self.block_tokens
        )

    def sequence(
        self, wire_id: str, generated: array[int], keys: list[BlockKey], *, scored: bool = False
    ) -> kv_pb2.SequenceSpec:
        """The engines' form of it, when `generated` tokens of the answer are known already.

        `scored`: the prompt's log probabilities are to be told.
        """
        sampling = self.sampling if scored else replace(self.sampling, prompt_logprobs=None)
        return kv_pb2.SequenceSpec(
            request_id=wire_id,
            token_ids=tokens_to_bytes(self.prompt + generated),
            prompt_tokens=len(self.prompt),
            block_keys=pack_keys(keys),
            sampling=sampling_to_proto(sampling),
            end_token_ids=self.end_token_ids,
            tenant=self.tenant,
            chain_root=self.chain_root,
            bad_tokens=[kv_pb2.TokenRun(token_ids=run) for run in self.bad_tokens],
            priority=self.priority,
            weight=self.weight,
        )


def read_request(
    message: conductor_pb2.GenerateRequest, served: ServedModelSpec, request_id: str, draw_seed: Callable[[], int]
) -> ValidRequest:
    """Check a message and make a request of it.

    Args:
        message: as the client sent it.
        served: what it is checked against.
        request_id: its id, drawn by the caller when the message has none.
        draw_seed: gives a seed in [0, 2^64) when the message has none.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    _check_envelope(message, served)
    prompt = _read_prompt(message, served)
    sampling = _read_sampling(message.sampling, served, len(prompt), draw_seed)
    root, vocabulary = chain_root(served.namespace, message.tenant), served.config.vocab_size
    ends = () if sampling.ignore_eos else [token for token in served.config.eos_token_ids if token < vocabulary]
    end_token_ids = tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
    check_end_tokens(frozenset(end_token_ids), sampling.min_tokens, vocabulary, "sampling.stop_token_ids")
    check_beams(sampling, frozenset(end_token_ids), vocabulary, "sampling")
    _require("sampling.response_format", not sampling.response_format or bool(ends), "this model has no end token")
    check_grammar(sampling)
    return ValidRequest(
        id=request_id,
        tenant=message.tenant,
        prompt=prompt,
        sampling=sampling,
        stops=tuple(sampling.stop),
        end_token_ids=end_token_ids,
        slo=_read_slo(message.slo, served.queue_s),
        chain_root=root,
        prompt_keys=tuple(block_keys(root, prompt, served.layout.block_tokens)),
        block_tokens=served.layout.block_tokens,
        bad_tokens=_read_bad_words(sampling, served, len(end_token_ids)),
        priority=message.priority,
        weight=weight_of(message.tenant, served.weights),
        whole=message.whole,
    )


def _read_bad_words(sampling: SamplingParams, served: ServedModelSpec, ends: int) -> tuple[tuple[int, ...], ...]:
    """Tokens of the words, and of each behind a space where that begins another token; as vLLM does it."""
    runs: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        plain, spaced = (tuple(served.tokenizer.encode(text, False)) for text in (word, " " + word.lstrip()))
        runs[plain] = None
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            runs[spaced] = None
    vocabulary, field = served.config.vocab_size, "sampling.bad_words"
    _require(field, all(len(run) <= MAX_BAD_WORD_CHARS + 1 for run in runs), "a word has too many tokens")
    _require(field, all(run and max(run) < vocabulary for run in runs), "a word has no tokens, or unknown ones")
    _require(field, not runs or len(runs) + ends < vocabulary, "no token is left to choose")
    return tuple(runs)


def _check_envelope(message: conductor_pb2.GenerateRequest, served: ServedModelSpec) -> None:
    # Ignoring a newer client's field would answer another request than the one asked.
    for field, part in (
        ("", message), ("sampling", message.sampling), ("slo", message.slo), ("messages", message.chat),
    ):  # fmt: skip
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(field, f"has field number {unknown[0].field_number}, which is not known here")
    _require("request_id", len(message.request_id) <= MAX_ID_CHARS, f"at most {MAX_ID_CHARS} characters")
    printable = message.request_id.isprintable() and ATTEMPT_MARK not in message.request_id
    _require("request_id", printable, f"printable characters other than {ATTEMPT_MARK!r} only")
    _require("tenant", len(message.tenant) <= MAX_TENANT_CHARS, f"at most {MAX_TENANT_CHARS} characters")
    _require("tenant", message.tenant.isprintable(), "printable characters only")
    check_priority(message.priority, "priority")
    _require("model", message.model in ("", served.name), f"only {served.name!r} is served, not {message.model!r}")


def _read_prompt(message: conductor_pb2.GenerateRequest, served: ServedModelSpec) -> array[int]:
    kind = message.WhichOneof("prompt")
    match kind:
        case "text":
            field = "prompt"
            _require(field, message.text != "", "must not be empty")
            _check_chars(field, len(message.text), served)
            tokens = _encode(field, message.text, served, add_special=True)
        case "tokens":
            field = "token_ids"
            _check_length(field, len(message.tokens.token_ids), served)
            tokens = array("i", message.tokens.token_ids)
        case "chat":
            field = "messages"
            _require(field, 0 < len(message.chat.messages) <= served.max_tokens, f"1 to {served.max_tokens} turns")
            _check_chars(field, chat_chars(message.chat), served)
            tokens = _encode(field, render_chat(message.chat, served.tokenizer), served, add_special=False)
        case _:
            raise InvalidRequest("prompt", "one of text, tokens and chat must be set")
    _check_length(field, len(tokens), served)
    vocabulary = served.config.vocab_size
    _require(field, min(tokens) >= 0 and max(tokens) < vocabulary, f"token ids must be in [0, {vocabulary})")
    return tokens


def _check_length(field: str, tokens: int, served: ServedModelSpec) -> None:
    _require(field, tokens > 0, "the prompt has no tokens")
    room = f"prompt and answer together may have {served.max_tokens}"
    _require(field, tokens < served.max_tokens, f"the prompt has {tokens} tokens; {room}")


def _encode(field: str, text: str, served: ServedModelSpec, *, add_special: bool) -> array[int]:
    """Tokenise a text; one that is too long is refused before it costs more than one that is not."""
    longer = served.tokenizer.is_longer(text, served.max_tokens)
    _require(field, not longer, f"the prompt has more than {served.max_tokens} tokens, the model's length")
    return array("i", served.tokenizer.encode(text, add_special))


def _check_chars(field: str, chars: int, served: ServedModelSpec) -> None:
    """Refuse text that is too long whatever its tokens are, before it is looked at."""
    limit = served.max_tokens * served.tokenizer.longest_token_chars
    _require(field, chars <= limit, f"{chars} characters make more than {served.max_tokens} tokens, the model's length")


def _read_sampling(
    given: kv_pb2.Sampling, served: ServedModelSpec, prompt_tokens: int, draw_seed: Callable[[], int]
) -> SamplingParams:
    """Return the checked parameters; `max_tokens` is cut to what the model's length leaves. Beams have no seed."""
    params = sampling_from_proto(given).suggested(served.suggested)
    params.check(served.config.vocab_size)
    max_tokens = min(params.max_tokens, served.max_tokens - prompt_tokens)
    scores = 0 if params.prompt_logprobs is None else prompt_tokens * (1 + params.prompt_logprobs)
    many = f"{scores} log probabilities of {prompt_tokens} tokens are too many, at most {MAX_PROMPT_SCORES}"
    _require("sampling.prompt_logprobs", scores <= MAX_PROMPT_SCORES, many)
    return replace(
        params,
        seed=draw_seed() if params.seed is None and not params.beam_width else params.seed,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
    )


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    """A tenant's share, relative to others'."""
    return weights.get(tenant, weights.get(OTHER_TENANTS, 1.0))


def _read_slo(slo: conductor_pb2.Slo, queue_s: float) -> SloLimits:
    ttft = slo.ttft_s if slo.HasField("ttft_s") else None
    tbt = slo.tbt_s if slo.HasField("tbt_s") else None
    _require("slo.ttft_s", ttft is None or ttft > 0, "must be above 0")
    _require("slo.tbt_s", tbt is None or tbt > 0, "must be above 0")
    queue = slo.queue_s if slo.HasField("queue_s") else queue_s
    _require("slo.queue_s", queue >= 0 and isfinite(queue), "must be a number of seconds, 0 or more")
    return SloLimits(ttft, tbt, queue)


def _require(field: str, condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(field, message)
