"""From a client's message to a request in the domain: every field checked, every default set.

Owns what is valid. It tokenises, hence is meant to run on a worker thread; it knows neither grpc nor instances.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.checkpoint import ModelConfig, Tokenizer
from moonpool.errors import InvalidRequest
from moonpool.kv.keys import BlockKey, block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.kv.layout import KVLayout
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.admission import Slo

DEFAULT_MAX_TOKENS = 128
MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIASES = 1024
MAX_PENALTY = 2.0
ATTEMPT_MARK = "~"
"""Separates a request's id from the number of the attempt in the ids that engines see."""


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are checked against: the conductor's checkpoint and what the engines agreed on."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    namespace: bytes
    layout: KVLayout
    max_tokens: int
    """Longest sequence, prompt and answer together."""


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request. `sampling` has every field set; `end_token_ids` end the generation."""

    id: str
    tenant: str
    prompt: array[int]
    sampling: kv_pb2.Sampling
    stops: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    slo: Slo
    chain_root: bytes
    prompt_keys: tuple[BlockKey, ...]
    block_tokens: int

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.sampling.max_tokens

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

    def sequence(self, wire_id: str, generated: array[int], keys: list[BlockKey]) -> kv_pb2.SequenceSpec:
        """The engines' form of it, when `generated` tokens of the answer are known already."""
        return kv_pb2.SequenceSpec(
            request_id=wire_id,
            token_ids=tokens_to_bytes(self.prompt + generated),
            prompt_tokens=len(self.prompt),
            block_keys=pack_keys(keys),
            sampling=self.sampling,
            end_token_ids=self.end_token_ids,
            tenant=self.tenant,
            chain_root=self.chain_root,
        )


def read_request(
    message: conductor_pb2.GenerateRequest, served: Served, request_id: str, draw_seed: Callable[[], int]
) -> Request:
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
    root = chain_root(served.namespace, message.tenant)
    ends = () if sampling.ignore_eos else served.config.eos_token_ids
    return Request(
        id=request_id,
        tenant=message.tenant,
        prompt=prompt,
        sampling=sampling,
        stops=tuple(sampling.stop),
        end_token_ids=tuple(dict.fromkeys((*ends, *sampling.stop_token_ids))),
        slo=_read_slo(message.slo),
        chain_root=root,
        prompt_keys=tuple(block_keys(root, prompt, served.layout.block_tokens)),
        block_tokens=served.layout.block_tokens,
    )


def _check_envelope(message: conductor_pb2.GenerateRequest, served: Served) -> None:
    _require("request_id", len(message.request_id) <= MAX_ID_CHARS, f"at most {MAX_ID_CHARS} characters")
    printable = message.request_id.isprintable() and ATTEMPT_MARK not in message.request_id
    _require("request_id", printable, f"printable characters other than {ATTEMPT_MARK!r} only")
    _require("tenant", len(message.tenant) <= MAX_TENANT_CHARS, f"at most {MAX_TENANT_CHARS} characters")
    _require("model", message.model in ("", served.name), f"{message.model!r} is not served, {served.name!r} is")
    _require("from_position", message.from_position == 0, "taking up a broken stream is not supported yet")


def _read_prompt(message: conductor_pb2.GenerateRequest, served: Served) -> array[int]:
    kind = message.WhichOneof("prompt")
    match kind:
        case "text":
            _require("prompt", message.text != "", "must not be empty")
            tokens = array("i", served.tokenizer.encode(message.text))
        case "tokens":
            tokens = array("i", message.tokens.token_ids)
        case "chat":
            _require("messages", len(message.chat.messages) > 0, "must not be empty")
            turns = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
            tokens = array("i", served.tokenizer.apply_chat_template(turns))
        case _:
            raise InvalidRequest("prompt", "one of text, tokens and chat must be set")
    field = {"text": "prompt", "tokens": "token_ids", "chat": "messages"}[kind]
    _require(field, len(tokens) > 0, "the prompt has no tokens")
    vocabulary = served.config.vocab_size
    _require(field, min(tokens) >= 0 and max(tokens) < vocabulary, f"token ids must be in [0, {vocabulary})")
    _require(
        field,
        len(tokens) < served.max_tokens,
        f"the prompt has {len(tokens)} tokens; prompt and answer together may have {served.max_tokens}",
    )
    return tokens


def _read_sampling(
    given: kv_pb2.Sampling, served: Served, prompt_tokens: int, draw_seed: Callable[[], int]
) -> kv_pb2.Sampling:
    """Return the parameters with all defaults set; `max_tokens` is cut to what the model's length leaves."""
    sampling = kv_pb2.Sampling()
    sampling.CopyFrom(given)
    for name, default in (("max_tokens", DEFAULT_MAX_TOKENS), ("temperature", 1.0), ("top_p", 1.0)):
        if not given.HasField(name):  # type: ignore[arg-type]
            setattr(sampling, name, default)
    if not given.HasField("repetition_penalty"):
        sampling.repetition_penalty = 1.0
    if not given.HasField("seed"):
        sampling.seed = draw_seed()
    if not given.HasField("n"):
        sampling.n = 1
    _check_lengths(sampling)
    _check_numbers(sampling)
    _check_tokens(sampling, served.config.vocab_size)
    _check_unsupported(sampling)
    sampling.max_tokens = min(sampling.max_tokens, served.max_tokens - prompt_tokens)
    sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
    return sampling


def _check_lengths(sampling: kv_pb2.Sampling) -> None:
    _require("sampling.max_tokens", sampling.max_tokens >= 1, "must be at least 1")
    _require("sampling.min_tokens", sampling.min_tokens >= 0, "must not be negative")
    _require("sampling.min_tokens", sampling.min_tokens <= sampling.max_tokens, "must not exceed max_tokens")
    _require("sampling.stop", len(sampling.stop) <= MAX_STOPS, f"at most {MAX_STOPS} texts")
    for stop in sampling.stop:
        _require("sampling.stop", 0 < len(stop) <= MAX_STOP_CHARS, f"each needs 1 to {MAX_STOP_CHARS} characters")


def _check_numbers(sampling: kv_pb2.Sampling) -> None:
    s = sampling
    _require("sampling.temperature", _finite(s.temperature) and s.temperature >= 0, "must be finite and at least 0")
    _require("sampling.top_p", 0 < s.top_p <= 1, "must be in (0, 1]")
    _require("sampling.top_k", s.top_k >= 0, "must be at least 0 (0 = all)")
    _require("sampling.min_p", 0 <= s.min_p <= 1, "must be in [0, 1]")
    _require("sampling.presence_penalty", abs(s.presence_penalty) <= MAX_PENALTY, "must be in [-2, 2]")
    _require("sampling.frequency_penalty", abs(s.frequency_penalty) <= MAX_PENALTY, "must be in [-2, 2]")
    _require(
        "sampling.repetition_penalty",
        _finite(s.repetition_penalty) and s.repetition_penalty > 0,
        "must be finite and above 0",
    )


def _check_tokens(sampling: kv_pb2.Sampling, vocabulary: int) -> None:
    bounds = f"token ids must be in [0, {vocabulary})"
    _require("sampling.stop_token_ids", all(0 <= token < vocabulary for token in sampling.stop_token_ids), bounds)
    _require("sampling.logit_bias", len(sampling.logit_bias) <= MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES} tokens")
    _require("sampling.logit_bias", all(0 <= token < vocabulary for token in sampling.logit_bias), bounds)
    _require("sampling.logit_bias", all(_finite(bias) for bias in sampling.logit_bias.values()), "must be finite")


def _check_unsupported(sampling: kv_pb2.Sampling) -> None:
    _require("sampling.n", sampling.n == 1, "only 1 sample is supported yet")
    _require("sampling.logprobs", not sampling.HasField("logprobs"), "log-probabilities are not supported yet")
    _require("sampling.response_format", not sampling.response_format, "answer formats are not supported yet")


def _read_slo(slo: conductor_pb2.Slo) -> Slo:
    ttft = slo.ttft_s if slo.HasField("ttft_s") else None
    tbt = slo.tbt_s if slo.HasField("tbt_s") else None
    _require("slo.ttft_s", ttft is None or ttft > 0, "must be above 0")
    _require("slo.tbt_s", tbt is None or tbt > 0, "must be above 0")
    return Slo(ttft, tbt)


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(field: str, condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(field, message)
