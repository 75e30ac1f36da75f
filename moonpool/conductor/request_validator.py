"""From a client's message to a valid request: every field checked, every default set.

`RequestValidator` does so on worker threads, as the prompt is tokenised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import isfinite
from typing import TypeVar

from google.protobuf.unknown_fields import UnknownFieldSet

from moonpool.base import world
from moonpool.base.checkpoint.config import AnswerRules
from moonpool.base.contracts import sampling_from_proto
from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.grammar import check_grammar
from moonpool.base.kv.keys import MAX_SALT_CHARS, block_keys, chain_root
from moonpool.base.kv.media import MediaItem
from moonpool.base.kv.picture_rows import row_keys
from moonpool.base.pictures.rule import check_pictures, with_pictures
from moonpool.base.rpc.messages import MESSAGE_BYTES
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.base.sampling_params import MAX_BAD_WORD_CHARS, SamplingParams, lora_option
from moonpool.base.scheduling.fair_share import check_priority
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.thinking import MAX_MARK_TOKENS
from moonpool.conductor.chat_prompt import chat_chars, chat_pictures, render_chat
from moonpool.conductor.checkpoint import Checkpoint
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.core.request_spec import ATTEMPT_MARK, RequestSpec, SloLimits
from moonpool.conductor.core.tenant_activity import OTHER_TENANTS
from moonpool.conductor.loras import LoraAdapters
from moonpool.conductor.registry import Registry
from moonpool.conductor.resume import read_resume
from moonpool.conductor.valid_request import ServedModel, ValidRequest, require
from moonpool.v1 import conductor_pb2, kv_pb2

MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 256
KEPT_SAMPLING_BYTES = 128
"""Longest encoded sampling parameters whose check is kept: without grammars and the like."""
SHORT_CHARS = 4096
"""Most characters, or tokens, of a prompt that the event loop reads itself: up to some 0.3 ms."""
MESSAGE_BYTES_PER_TOKEN, MAX_SEQUENCE_BYTES = 8, MESSAGE_BYTES - (64 << 10)
"""Bytes of a token in messages to engines, with its part of a key, and most bytes of tokens and pictures there."""
MAX_PROMPT_SCORES = 1 << 18
"""Most log probabilities for one prompt: 2 MiB, which fits one message."""
T = TypeVar("T")


class RequestValidator:
    """The checks of requests, and their tokens, made on worker threads.

    Args:
        checkpoint: the conductor's checkpoint.
        registry: knows what the engines serve.
        loras: the LoRA adapters.
        tokenizing: the worker threads, by turns of tenants.
        checking: one thread for grammars, so that costly grammars delay only each other, by turns of tenants.
        config: the conductor's settings.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        registry: Registry,
        loras: LoraAdapters,
        tokenizing: TenantTurns,
        checking: TenantTurns,
        config: ConductorConfig,
    ) -> None:
        self._checkpoint = checkpoint
        self._registry = registry
        self._loras = loras
        self._tokenizing = tokenizing
        self._checking = checking
        self._config = config

    def served(self) -> ServedModel:
        """Return what requests are checked against.

        Raises:
            Unavailable: no engine has joined.
        """
        model, layout, checkpoint = self._registry.model, self._registry.layout, self._checkpoint
        if model is None or layout is None:
            raise Unavailable("no prefill and no decode instance has joined")
        return ServedModel(
            checkpoint.name,
            checkpoint.config,
            checkpoint.tokenizer,
            model.namespace,
            layout,
            model.max_tokens,
            self._config.queue_deadline_s,
            checkpoint.config.default_sampling.given if self._config.generation_config == "auto" else {},
            checkpoint.config.answer_rules if self._config.generation_config == "auto" else AnswerRules(),
            self._config.tenant_weights,
            self._loras.get,
            checkpoint.pictures,
        )

    def model_name(self, asked: str) -> str:
        """Return the name of the model or LoRA adapter that a client asks for; "" asks for the model.

        Raises:
            InvalidRequest: neither has that name.
            Unavailable: no engine has joined.
        """
        served = self.served()
        return served.name if _read_model(asked, served) is None else asked

    @property
    def namespace(self) -> bytes:
        """The served KV's namespace; empty before the first engine."""
        model = self._registry.model
        return model.namespace if model is not None else b""

    async def read(
        self,
        message: conductor_pb2.GenerateRequest,
        served: ServedModel | None = None,
        request_id: str = "",
        arrived: float = 0.0,
        deadline: float = 0.0,
    ) -> ValidRequest:
        """Check and tokenise a message; see `read_request` and `check_grammar`. A request without an id gets one."""
        work = partial(self.read_now, message, served or self.served(), request_id, arrived, deadline)
        found = await self.run(message.tenant, work)
        if found.sampling.response_format:
            await self._checking.run(message.tenant, partial(check_grammar, found.sampling))
        return found

    def read_now(
        self,
        message: conductor_pb2.GenerateRequest,
        served: ServedModel,
        request_id: str,
        arrived: float,
        deadline: float,
    ) -> ValidRequest:
        """As `read`, on this thread, without a grammar's check."""
        name = request_id or world.random_hex(8)
        return read_request(message, served, name, arrived, deadline, lambda: world.random_bits(64))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run work with the tokenizer on a worker thread, in the tenant's turn."""
        return await self._tokenizing.run(tenant, work)


def is_short(message: conductor_pb2.GenerateRequest) -> bool:
    """Return whether reading a message takes less time than handing the message to another thread and back."""
    if message.HasField("chat") or message.HasField("resume"):
        return False
    sampling = message.sampling
    plain = not (sampling.response_format or sampling.bad_words or sampling.thinking_marks)
    return plain and len(message.text) <= SHORT_CHARS and len(message.tokens.token_ids) <= SHORT_CHARS


def read_request(
    message: conductor_pb2.GenerateRequest,
    served: ServedModel,
    request_id: str,
    arrived: float,
    deadline: float,
    draw_seed: Callable[[], int],
) -> ValidRequest:
    """Check a message, except the grammar, and make a request from the message. The request has no number yet.

    Args:
        message: the client's message.
        served: what the message is checked against.
        request_id: the request's id, drawn by the caller if the message has none.
        arrived: when the message came, seconds of the core's clock.
        deadline: when the request fails.
        draw_seed: gives a seed in [0, 2^64) if the message has none.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    _check_envelope(message)
    lora = _read_model(message.model, served)
    prompt, media = _read_prompt(message, served)
    sampling = _read_sampling(message.sampling, served, len(prompt), draw_seed)
    for option, wanted in (
        ("prompt_logprobs", sampling.prompt_logprobs is not None),
        ("embedding", sampling.embedding),
    ):
        require(f"sampling.{option}", not (media and wanted), "is not built for prompts with pictures")
    root = chain_root(served.namespace, message.tenant, message.cache_salt, b"" if lora is None else lora.id)
    vocabulary = served.config.vocab_size
    end_token_ids = _read_end_tokens(sampling, served)
    slo, bad_tokens = _read_slo(message.slo, served.queue_s), _read_bad_words(sampling, served, len(end_token_ids))
    resume = read_resume(message, sampling, vocabulary)
    spec = RequestSpec(
        number=0,
        id=request_id,
        prompt_tokens=len(prompt),
        max_tokens=sampling.max_tokens,
        prompt_key=block_keys(root, prompt, len(prompt), media)[0],
        slo=slo,
        arrived=arrived,
        deadline=deadline,
        choices=sampling.width,
        deferred=sampling.deferred,
        tenant=message.tenant,
        scored=sampling.scores_prompt if resume is None else resume.unscored,
        resumed=None if resume is None else resume.state,
        priority=message.priority,
        weight=weight_of(message.tenant, served.weights),
        needs=sampling.uncommon if lora is None else (*sampling.uncommon, lora_option(lora.id)),
        session=session_from_proto(message.session) if message.HasField("session") else None,
        expected_tokens=min(message.expected_output_tokens, sampling.max_tokens),
        pictures=tuple((item.begin, item.end) for item in media),
        row_keys=tuple(row_keys(served.namespace, message.tenant, item.digest, 1)[0] for item in media),
    )
    return ValidRequest(
        spec=spec,
        prompt=prompt,
        sampling=sampling,
        stops=tuple(sampling.stop),
        end_token_ids=end_token_ids,
        chain_root=root,
        prompt_keys=tuple(block_keys(root, prompt, served.layout.block_size, media)),
        block_size=served.layout.block_size,
        bad_tokens=bad_tokens,
        suppressed=served.rules.suppressed,
        thinking=_read_thinking(sampling, served, prompt),
        whole=message.whole,
        resume=resume,
        cache_salt=message.cache_salt,
        lora=lora,
        media=media,
    )


def _read_model(name: str, served: ServedModel) -> kv_pb2.LoraAdapter | None:
    """Return the LoRA adapter that a request asks for; None = the base model."""
    if name in ("", served.name):
        return None
    lora = served.lora(name)
    if lora is None:
        raise InvalidRequest(
            "model", f"only {served.name!r} is served, not {name!r}; no LoRA adapter of that name is loaded"
        )
    return lora


def _read_end_tokens(sampling: SamplingParams, served: ServedModel) -> tuple[int, ...]:
    """Return the tokens that end the generation: the model's, and those of the request."""
    vocabulary = served.config.vocab_size
    ends = () if sampling.ignore_eos else [token for token in served.config.eos_token_ids if token < vocabulary]
    end_token_ids = tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
    sampling.check_end_tokens(frozenset(end_token_ids), vocabulary, "sampling.stop_token_ids")
    require("sampling.response_format", not sampling.response_format or bool(ends), "this model has no end token")
    return end_token_ids


def _read_bad_words(sampling: SamplingParams, served: ServedModel, ends: int) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, with and without a leading space if that changes the first token; as vLLM does."""
    runs: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        plain, spaced = (tuple(served.tokenizer.encode(text, False)) for text in (word, " " + word.lstrip()))
        runs[plain] = None
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            runs[spaced] = None
    vocabulary, field = served.config.vocab_size, "sampling.bad_words"
    require(field, all(len(run) <= MAX_BAD_WORD_CHARS + 1 for run in runs), "a word has too many tokens")
    require(field, all(run and max(run) < vocabulary for run in runs), "a word has no tokens, or unknown ones")
    never = ends + len(served.rules.suppressed)
    require(field, not runs or len(runs) + never < vocabulary, "no token is left to choose")
    return tuple(runs)


def _read_thinking(sampling: SamplingParams, served: ServedModel, prompt: array[int]) -> kv_pb2.ThinkingBudget | None:
    """Return the budget of the answer's thinking, with the marks as tokens; None = none."""
    if sampling.thinking_budget is None:
        return None
    tokenizer, vocabulary = served.tokenizer, served.config.vocab_size
    marks = []
    for mark in sampling.thinking_marks:
        special = tokenizer.special_id(mark)
        tokens = tokenizer.encode(mark, False) if special is None else [special]
        known = 0 < len(tokens) <= MAX_MARK_TOKENS and max(tokens) < vocabulary
        require("sampling.thinking_marks", known, f"{mark!r} is not 1 to {MAX_MARK_TOKENS} tokens of the model")
        marks.append(tokens)
    end = tokenizer.decode(prompt[-MAX_MARK_TOKENS:], skip_special=False)
    return kv_pb2.ThinkingBudget(
        tokens=sampling.thinking_budget,
        begin_token_ids=marks[0],
        end_token_ids=marks[1],
        is_open=end.rstrip().endswith(sampling.thinking_marks[0]),
    )


def _check_envelope(message: conductor_pb2.GenerateRequest) -> None:
    # If a newer client's field were ignored, the answer would be to another request.
    for field, part in (
        ("", message), ("sampling", message.sampling), ("slo", message.slo), ("messages", message.chat),
        ("session", message.session),
    ):  # fmt: skip
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(field, f"has field number {unknown[0].field_number}, which is not known here")
    require("request_id", len(message.request_id) <= MAX_ID_CHARS, f"at most {MAX_ID_CHARS} characters")
    printable = message.request_id.isprintable() and ATTEMPT_MARK not in message.request_id
    require("request_id", printable, f"printable characters other than {ATTEMPT_MARK!r} only")
    require("tenant", len(message.tenant) <= MAX_TENANT_CHARS, f"at most {MAX_TENANT_CHARS} characters")
    require("tenant", message.tenant.isprintable(), "printable characters only")
    salt = message.cache_salt
    require("cache_salt", len(salt) <= MAX_SALT_CHARS, f"at most {MAX_SALT_CHARS} characters")
    unsalted = not (salt and message.HasField("context"))
    require("cache_salt", unsalted, "is not allowed with a context, whose KV has no salt")
    check_priority(message.priority, "priority")


def session_from_proto(message: conductor_pb2.SessionTurn) -> SessionTurn:
    """Return what a client says of a session.

    Raises:
        InvalidRequest: a value is wrong; names the field.
    """
    session = SessionTurn(**{field.name: value for field, value in message.ListFields()})
    session.check()
    return session


def _read_prompt(
    message: conductor_pb2.GenerateRequest, served: ServedModel
) -> tuple[array[int], tuple[MediaItem, ...]]:
    """Return the prompt's tokens, and its pictures."""
    kind, media = message.WhichOneof("prompt"), tuple[MediaItem, ...]()
    match kind:
        case "text":
            field = "prompt"
            require(field, message.text != "", "must not be empty")
            _check_longer(field, message.text, served)
            tokens = array("i", served.tokenizer.encode(message.text))
        case "tokens":
            field = "token_ids"
            _check_length(field, len(message.tokens.token_ids), served)
            tokens = array("i", message.tokens.token_ids)
        case "chat":
            field = "messages"
            require(field, 0 < len(message.chat.messages) <= served.max_tokens, f"1 to {served.max_tokens} turns")
            too_large = served.tokenizer.is_too_large(chat_chars(message.chat), served.max_tokens)
            require(field, not too_large, _too_long(served))
            pictures, rule = chat_pictures(message.chat), served.pictures
            if pictures and isinstance(rule, str):
                raise InvalidRequest(field, f"{served.name} takes no pictures: {rule}")
            check_pictures(field, pictures)
            chat = render_chat(message.chat, served.tokenizer)
            if not isinstance(rule, str) and rule.written is not None:
                chat = chat.with_text(*rule.written)
            _check_longer(field, chat.text, served)
            tokens = array("i", served.tokenizer.encode_chat(chat))
            if not isinstance(rule, str):
                tokens, media = with_pictures(field, rule, tokens, pictures)
                nbytes = sum(len(item.content) for item in media) + MESSAGE_BYTES_PER_TOKEN * len(tokens)
                require(field, nbytes <= MAX_SEQUENCE_BYTES, "pictures and tokens together are too large to send")
        case _:
            raise InvalidRequest("prompt", "one of text, tokens and chat must be set")
    _check_length(field, len(tokens), served)
    vocabulary = served.config.vocab_size
    require(field, min(tokens) >= 0 and max(tokens) < vocabulary, f"token ids must be in [0, {vocabulary})")
    return tokens, media


def _check_length(field: str, tokens: int, served: ServedModel) -> None:
    require(field, tokens > 0, "the prompt has no tokens")
    room = f"prompt and answer together may have {served.max_tokens}"
    require(field, tokens < served.max_tokens, f"the prompt has {tokens} tokens; {room}")


def _check_longer(field: str, text: str, served: ServedModel) -> None:
    """Refuse a text that is too long before the text costs more than the longest valid text."""
    require(field, not served.tokenizer.is_longer(text, served.max_tokens), _too_long(served))


def _too_long(served: ServedModel) -> str:
    return f"the prompt has more than {served.max_tokens} tokens, the model's length"


def _checked_sampling(given: kv_pb2.Sampling, served: ServedModel) -> SamplingParams:
    """Return the parameters with the model's own defaults, checked. Requests repeat few kinds of them."""
    encoded = given.SerializeToString(deterministic=True)
    suggested, vocab_size = tuple(served.suggested.items()), served.config.vocab_size
    if len(encoded) <= KEPT_SAMPLING_BYTES:
        return _sampling_of(encoded, suggested, vocab_size)
    return _sampling_of.__wrapped__(encoded, suggested, vocab_size)


@lru_cache(maxsize=512)
def _sampling_of(encoded: bytes, suggested: tuple[tuple[str, float | int], ...], vocab_size: int) -> SamplingParams:
    params = sampling_from_proto(kv_pb2.Sampling.FromString(encoded)).suggested(dict(suggested))
    params.check(vocab_size)
    return params


def _read_sampling(
    given: kv_pb2.Sampling, served: ServedModel, prompt_tokens: int, draw_seed: Callable[[], int]
) -> SamplingParams:
    """Return the checked parameters. `max_tokens` is cut to the model's length; deferred answers have no seed."""
    params = _checked_sampling(given, served)
    pooling = served.config.pooling
    if pooling is not None and not pooling.generates and not params.embedding:
        what = "embeds texts" if pooling.task == "embed" else "classifies texts"
        raise InvalidRequest("sampling.embedding", f"must be set: {served.name!r} {what}, and writes no answers")
    max_tokens = min(params.max_tokens, served.max_tokens - prompt_tokens, served.rules.max_tokens or params.max_tokens)
    scores = 0 if params.prompt_logprobs is None else prompt_tokens * (1 + params.prompt_logprobs)
    many = f"{scores} log probabilities of {prompt_tokens} tokens are too many, at most {MAX_PROMPT_SCORES}"
    require("sampling.prompt_logprobs", scores <= MAX_PROMPT_SCORES, many)
    return replace(
        params,
        seed=draw_seed() if params.seed is None and not params.deferred else params.seed,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
    )


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    """Return a tenant's weight in fair sharing."""
    return weights.get(tenant, weights.get(OTHER_TENANTS, 1.0))


def _read_slo(slo: conductor_pb2.Slo, queue_s: float) -> SloLimits:
    ttft = slo.ttft_s if slo.HasField("ttft_s") else None
    tbt = slo.tbt_s if slo.HasField("tbt_s") else None
    require("slo.ttft_s", ttft is None or ttft > 0, "must be above 0")
    require("slo.tbt_s", tbt is None or tbt > 0, "must be above 0")
    queue = slo.queue_s if slo.HasField("queue_s") else queue_s
    require("slo.queue_s", queue >= 0 and isfinite(queue), "must be a number of seconds, 0 or more")
    return SloLimits(ttft, tbt, queue)
