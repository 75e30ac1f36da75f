"""From a client's message to a valid request: chat rendered, every field checked, every default set.

`RequestValidator` does so on worker threads, as the prompt is tokenised.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, TypeVar

from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from moonpool.base import world
from moonpool.base.checkpoint import ChatOptions, ModelConfig, RenderedChat, Tokenizer
from moonpool.base.contracts import sampling_from_proto, sampling_to_proto
from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.grammar import check_grammar
from moonpool.base.kv.keys import MAX_SALT_CHARS, BlockKey, block_keys, chain_root, pack_keys, tokens_to_bytes
from moonpool.base.kv.layout import KVLayout
from moonpool.base.sampling_params import MAX_BAD_WORD_CHARS, SamplingParams, lora_option
from moonpool.base.scheduling.fair_share import check_priority
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.core.request_spec import ATTEMPT_MARK, DecodeReservation, RequestSpec, ResumeState, SloLimits
from moonpool.conductor.core.tenant_activity import OTHER_TENANTS
from moonpool.conductor.loras import LoraAdapters
from moonpool.conductor.proto_conversion import reservation_proto
from moonpool.conductor.registry import Checkpoint, Registry
from moonpool.v1 import conductor_pb2, kv_pb2


def chat_chars(chat: conductor_pb2.ChatPrompt) -> int:
    """Number of the client's characters that go into the chat template."""
    calls = (call for turn in chat.messages for call in turn.tool_calls)
    called = sum(len(call.name) + len(call.arguments) for call in calls)
    written = sum(len(turn.role) + len(turn.content) + len(turn.reasoning_content) for turn in chat.messages)
    return called + len(chat.tools) + len(chat.template_kwargs) + written


def render_chat(chat: conductor_pb2.ChatPrompt, tokenizer: Tokenizer) -> RenderedChat:
    """The prompt as written by the chat template.

    Raises:
        InvalidRequest: names the field that is wrong, or that the chat template does not take.
    """
    kwargs = _json_field("chat_template_kwargs", chat.template_kwargs or "{}")
    if not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs", "must be a JSON object")
    options = ChatOptions(continue_final_message=chat.continue_final_message, template_kwargs=kwargs)
    return tokenizer.render_chat(list(map(_chat_turn, chat.messages)), _chat_tools(chat.tools), options)


def _chat_turn(turn: conductor_pb2.ChatMessage) -> dict[str, Any]:
    """A message for the template. Absent fields are left out: templates test whether a field is there."""
    if unknown := UnknownFieldSet(turn):
        raise InvalidRequest("messages", f"has field number {unknown[0].field_number}, which is not known here")
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        found["tool_calls"] = [_chat_tool_call(call) for call in turn.tool_calls]
    if turn.tool_call_id:
        found["tool_call_id"] = turn.tool_call_id
    if turn.reasoning_content:
        found["reasoning_content"] = turn.reasoning_content
    return found


def _chat_tool_call(call: conductor_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_tools(text: str) -> list[dict[str, Any]]:
    tools = _json_field("tools", text or "[]")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", "must be a JSON list of objects")
    return tools


def _json_field(name: str, text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(name, f"invalid JSON: {error}") from None


MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 256
MAX_PROMPT_SCORES = 1 << 18
"""Most log probabilities for one prompt: 2 MiB, which fits one message."""
SECRET_LENGTHS = range(16, 65)
"""Bytes in the secret that a client shows to resume the request."""
MAX_SEQUENCE_CHARS = 256
_ATTEMPT = re.compile(r"(?:(\d{1,10})\.)?\d{1,10}", re.ASCII)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, against which requests are checked: the checkpoint, and what the engines agreed on."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    namespace: bytes
    layout: KVLayout
    max_tokens: int
    """Longest sequence, prompt and answer together."""
    queue_s: float
    """Seconds that requests may wait for a placement if they set no `slo.queue_s`."""
    suggested: Mapping[str, float | int]
    """Sampling parameters for requests that do not set them."""
    weights: Mapping[str, float]
    """Shares of tenants, as `ConductorConfig.tenant_weights` has them."""
    lora: Callable[[str], kv_pb2.LoraAdapter | None] = lambda name: None
    """The LoRA adapter of a name."""


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """How much of one choice a client already has: tokens, and text characters."""

    tokens: array[int]
    text_chars: int


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """How far the client of a resumed request is.

    Attributes:
        choices: the client's progress, per choice.
        point: the resume point that the client got last. The secret proves that the client is the same.
        state: the core's part.
        unscored: the client wants the prompt's log probabilities or embedding, and has not got them.
    """

    choices: tuple[ClientProgress, ...]
    point: conductor_pb2.ResumePoint
    state: ResumeState
    unscored: bool = False


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A checked request.

    The request never changes, except that the dispatcher fills in `spec.number` and `spec.resumed`.

    Attributes:
        spec: what the core knows of the request: lengths, limits, tenant, times; no tokens.
        prompt: token ids.
        sampling: with a seed, unless the answers are deferred.
        stops: stop strings.
        end_token_ids: tokens that end the generation.
        chain_root: the root of the prompt's block keys.
        prompt_keys: keys of the prompt's full blocks, `block_size` tokens each.
        bad_tokens: runs of tokens; a run's last token is never chosen after the others.
        whole: the client reads the answer only at the end.
        resume: the client's progress, if the client resumes the request.
        cache_salt: the salt in `chain_root`; "" for none.
        lora: the LoRA adapter in `chain_root`; None = the base model.
    """

    spec: RequestSpec
    prompt: array[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    chain_root: bytes
    prompt_keys: tuple[BlockKey, ...]
    block_size: int
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    whole: bool = False
    resume: ResumeRequest | None = None
    cache_salt: str = ""
    lora: kv_pb2.LoraAdapter | None = None

    def ends_with(self, token_id: int, generated: int) -> bool:
        """Whether `token_id`, as the `generated`-th token of a choice, is the choice's regular end."""
        return token_id in self.end_token_ids and generated >= self.sampling.min_tokens

    def keys_with(self, generated: array[int]) -> list[BlockKey]:
        """Keys for all full blocks in prompt and generated tokens; only blocks beyond the prompt's are hashed."""
        known = list(self.prompt_keys)
        start = len(known) * self.block_size
        if len(self.prompt) + len(generated) < start + self.block_size:
            return known
        return known + block_keys(
            known[-1] if known else self.chain_root, self.prompt[start:] + generated, self.block_size
        )

    def sequence(
        self, sequence_id: str, generated: array[int], keys: list[BlockKey], *, scored: bool = False
    ) -> kv_pb2.SequenceSpec:
        """The sequence that engines compute.

        Args:
            sequence_id: the id that engines see.
            generated: tokens of the answer that are known already.
            keys: keys for all full blocks in prompt and `generated`.
            scored: the prompt's log probabilities, or the prompt's embedding, are wanted.
        """
        sampling = self.sampling if scored else replace(self.sampling, prompt_logprobs=None, embedding=False)
        return kv_pb2.SequenceSpec(
            request_id=sequence_id,
            token_ids=tokens_to_bytes(self.prompt + generated),
            prompt_tokens=len(self.prompt),
            block_keys=pack_keys(keys),
            sampling=sampling_to_proto(sampling),
            end_token_ids=self.end_token_ids,
            tenant=self.spec.tenant,
            chain_root=self.chain_root,
            cache_salt=self.cache_salt,
            lora=self.lora,
            bad_tokens=[kv_pb2.TokenRun(token_ids=run) for run in self.bad_tokens],
            priority=self.spec.priority,
            weight=self.spec.weight,
        )


class RequestValidator:
    """Checks and tokenises requests on worker threads.

    Args:
        checkpoint: the conductor's checkpoint.
        registry: knows what the engines serve.
        loras: the LoRA adapters.
        tokenizing: the worker threads.
        checking: one thread for grammars, so that costly grammars delay only each other.
        config: the conductor's settings.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        registry: Registry,
        loras: LoraAdapters,
        tokenizing: Executor,
        checking: Executor,
        config: ConductorConfig,
    ) -> None:
        self._checkpoint = checkpoint
        self._registry = registry
        self._loras = loras
        self._tokenizing = tokenizing
        self._checking = checking
        self._config = config

    def served(self) -> ServedModel:
        """What requests are checked against.

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
            self._config.tenant_weights,
            self._loras.get,
        )

    def model_name(self, asked: str) -> str:
        """The name of the model or LoRA adapter that a client asks for; "" asks for the model.

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
        served = served or self.served()
        name = request_id or world.random_hex(8)
        seed = lambda: world.random_bits(64)  # noqa: E731
        found = await self.run(partial(read_request, message, served, name, arrived, deadline, seed))
        if found.sampling.response_format:
            await asyncio.get_running_loop().run_in_executor(self._checking, check_grammar, found.sampling)
        return found

    async def run(self, work: Callable[[], T]) -> T:
        """Run work with the tokenizer on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)


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
    prompt = _read_prompt(message, served)
    sampling = _read_sampling(message.sampling, served, len(prompt), draw_seed)
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
        prompt_key=block_keys(root, prompt, len(prompt))[0],
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
    )
    return ValidRequest(
        spec=spec,
        prompt=prompt,
        sampling=sampling,
        stops=tuple(sampling.stop),
        end_token_ids=end_token_ids,
        chain_root=root,
        prompt_keys=tuple(block_keys(root, prompt, served.layout.block_size)),
        block_size=served.layout.block_size,
        bad_tokens=bad_tokens,
        whole=message.whole,
        resume=resume,
        cache_salt=message.cache_salt,
        lora=lora,
    )


def _read_model(name: str, served: ServedModel) -> kv_pb2.LoraAdapter | None:
    """The LoRA adapter that a request asks for; None = the base model."""
    if name in ("", served.name):
        return None
    lora = served.lora(name)
    if lora is None:
        raise InvalidRequest(
            "model", f"only {served.name!r} is served, not {name!r}; no LoRA adapter of that name is loaded"
        )
    return lora


def _read_end_tokens(sampling: SamplingParams, served: ServedModel) -> tuple[int, ...]:
    """Tokens that end the generation: the model's, and those of the request."""
    vocabulary = served.config.vocab_size
    ends = () if sampling.ignore_eos else [token for token in served.config.eos_token_ids if token < vocabulary]
    end_token_ids = tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
    sampling.check_end_tokens(frozenset(end_token_ids), vocabulary, "sampling.stop_token_ids")
    _require("sampling.response_format", not sampling.response_format or bool(ends), "this model has no end token")
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
    _require(field, all(len(run) <= MAX_BAD_WORD_CHARS + 1 for run in runs), "a word has too many tokens")
    _require(field, all(run and max(run) < vocabulary for run in runs), "a word has no tokens, or unknown ones")
    _require(field, not runs or len(runs) + ends < vocabulary, "no token is left to choose")
    return tuple(runs)


def _check_envelope(message: conductor_pb2.GenerateRequest) -> None:
    # If a newer client's field were ignored, the answer would be to another request.
    for field, part in (
        ("", message), ("sampling", message.sampling), ("slo", message.slo), ("messages", message.chat),
        ("session", message.session),
    ):  # fmt: skip
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(field, f"has field number {unknown[0].field_number}, which is not known here")
    _require("request_id", len(message.request_id) <= MAX_ID_CHARS, f"at most {MAX_ID_CHARS} characters")
    printable = message.request_id.isprintable() and ATTEMPT_MARK not in message.request_id
    _require("request_id", printable, f"printable characters other than {ATTEMPT_MARK!r} only")
    _require("tenant", len(message.tenant) <= MAX_TENANT_CHARS, f"at most {MAX_TENANT_CHARS} characters")
    _require("tenant", message.tenant.isprintable(), "printable characters only")
    salt = message.cache_salt
    _require("cache_salt", len(salt) <= MAX_SALT_CHARS, f"at most {MAX_SALT_CHARS} characters")
    unsalted = not (salt and message.HasField("context"))
    _require("cache_salt", unsalted, "is not allowed with a context, whose KV has no salt")
    check_priority(message.priority, "priority")


def session_from_proto(message: conductor_pb2.SessionTurn) -> SessionTurn:
    """What a client says of a session.

    Raises:
        InvalidRequest: a value is wrong; names the field.
    """
    session = SessionTurn(**{field.name: value for field, value in message.ListFields()})
    session.check()
    return session


def _read_prompt(message: conductor_pb2.GenerateRequest, served: ServedModel) -> array[int]:
    kind = message.WhichOneof("prompt")
    match kind:
        case "text":
            field = "prompt"
            _require(field, message.text != "", "must not be empty")
            _check_chars(field, len(message.text), served)
            _check_longer(field, message.text, served)
            tokens = array("i", served.tokenizer.encode(message.text))
        case "tokens":
            field = "token_ids"
            _check_length(field, len(message.tokens.token_ids), served)
            tokens = array("i", message.tokens.token_ids)
        case "chat":
            field = "messages"
            _require(field, 0 < len(message.chat.messages) <= served.max_tokens, f"1 to {served.max_tokens} turns")
            _check_chars(field, chat_chars(message.chat), served)
            chat = render_chat(message.chat, served.tokenizer)
            _check_longer(field, chat.text, served)
            tokens = array("i", served.tokenizer.encode_chat(chat))
        case _:
            raise InvalidRequest("prompt", "one of text, tokens and chat must be set")
    _check_length(field, len(tokens), served)
    vocabulary = served.config.vocab_size
    _require(field, min(tokens) >= 0 and max(tokens) < vocabulary, f"token ids must be in [0, {vocabulary})")
    return tokens


def _check_length(field: str, tokens: int, served: ServedModel) -> None:
    _require(field, tokens > 0, "the prompt has no tokens")
    room = f"prompt and answer together may have {served.max_tokens}"
    _require(field, tokens < served.max_tokens, f"the prompt has {tokens} tokens; {room}")


def _check_longer(field: str, text: str, served: ServedModel) -> None:
    """Refuse a text that is too long before the text costs more than the longest valid text."""
    longer = served.tokenizer.is_longer(text, served.max_tokens)
    _require(field, not longer, f"the prompt has more than {served.max_tokens} tokens, the model's length")


def _check_chars(field: str, chars: int, served: ServedModel) -> None:
    """Refuse text that is too long whatever the tokens are, before tokenising."""
    limit = served.max_tokens * served.tokenizer.longest_token_chars
    _require(field, chars <= limit, f"{chars} characters make more than {served.max_tokens} tokens, the model's length")


def _read_sampling(
    given: kv_pb2.Sampling, served: ServedModel, prompt_tokens: int, draw_seed: Callable[[], int]
) -> SamplingParams:
    """The checked parameters. `max_tokens` is cut to the model's length; deferred answers have no seed."""
    params = sampling_from_proto(given).suggested(served.suggested)
    params.check(served.config.vocab_size)
    max_tokens = min(params.max_tokens, served.max_tokens - prompt_tokens)
    scores = 0 if params.prompt_logprobs is None else prompt_tokens * (1 + params.prompt_logprobs)
    many = f"{scores} log probabilities of {prompt_tokens} tokens are too many, at most {MAX_PROMPT_SCORES}"
    _require("sampling.prompt_logprobs", scores <= MAX_PROMPT_SCORES, many)
    return replace(
        params,
        seed=draw_seed() if params.seed is None and not params.deferred else params.seed,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
    )


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    """A tenant's weight in fair sharing."""
    return weights.get(tenant, weights.get(OTHER_TENANTS, 1.0))


def _read_slo(slo: conductor_pb2.Slo, queue_s: float) -> SloLimits:
    ttft = slo.ttft_s if slo.HasField("ttft_s") else None
    tbt = slo.tbt_s if slo.HasField("tbt_s") else None
    _require("slo.ttft_s", ttft is None or ttft > 0, "must be above 0")
    _require("slo.tbt_s", tbt is None or tbt > 0, "must be above 0")
    queue = slo.queue_s if slo.HasField("queue_s") else queue_s
    _require("slo.queue_s", queue >= 0 and isfinite(queue), "must be a number of seconds, 0 or more")
    return SloLimits(ttft, tbt, queue)


def read_resume(
    message: conductor_pb2.GenerateRequest, sampling: SamplingParams, vocabulary: int
) -> ResumeRequest | None:
    """How far the client of a resumed request is; None for a new request.

    `sampling` is the request's, already checked; `vocabulary` the number of token ids.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    if not message.HasField("resume"):
        _require("from_position", message.from_position == 0, "must be 0 unless a stream is resumed")
        return None
    resume, point = message.resume, message.resume.point
    for name, part in (("resume", resume), ("resume.point", point)):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            raise InvalidRequest(name, f"has field number {unknown[0].field_number}, which is not known here")
    _require("request_id", message.request_id != "", "a stream is resumed by its request's id")
    seeded = message.sampling.HasField("seed") or sampling.deferred
    _require("sampling.seed", seeded, "must be the seed that the `placed` event has")
    _require("resume.count", resume.count >= 1, "must be at least 1")
    count, further = len(resume.token_ids), sampling.n - 1
    _require("from_position", message.from_position == count, f"must be {count}, as resume.token_ids has so many")
    _require("resume.further", len(resume.further) == further, f"must have {further}: one for each further answer")
    parts = [("resume.token_ids", resume.token_ids, resume.text_chars)]
    parts += [("resume.further.token_ids", it.token_ids, it.text_chars) for it in resume.further]
    choices = tuple([_read_progress(*part, sampling.max_tokens, vocabulary) for part in parts])
    least, most = SECRET_LENGTHS[0], SECRET_LENGTHS[-1]
    _require("resume.point.secret", len(point.secret) in SECRET_LENGTHS, f"must have {least} to {most} bytes")
    _check_sequence(point.sequence, message.request_id, resume.count)
    unscored = _lacks_scores(resume.prompt_scored, sampling, choices)
    alone = sampling.n == 1 and not sampling.deferred
    target = None if unscored else target_of(point)  # no decode instance has them
    state = ResumeState(count if alone else 0, resume.count, point.sequence, target)
    return ResumeRequest(choices, point, state, unscored)


def resume_point(
    secret: bytes, placement: conductor_pb2.Placement, sequence: str, target: DecodeReservation | None
) -> conductor_pb2.ResumePoint:
    """The point from which a client can resume the request, sent on placement."""
    point = conductor_pb2.ResumePoint(placement=placement, sequence=sequence, secret=secret)
    if target is not None:
        point.target.CopyFrom(reservation_proto(target))
    return point


def target_of(point: conductor_pb2.ResumePoint) -> DecodeReservation | None:
    """The reservation at decode, None without one. The client's word on the instance's address does not count."""
    if not point.HasField("target"):
        return None
    target, decode = point.target, point.target.decode
    _require(
        "resume.point.target.decode.id",
        1 <= len(decode.id) <= MAX_SEQUENCE_CHARS,
        f"1 to {MAX_SEQUENCE_CHARS} characters",
    )
    return DecodeReservation(decode.id, decode.epoch, "", target.transfer_id, target.generation, 0)


def _read_progress(
    field: str, token_ids: Sequence[int], text_chars: int, max_tokens: int, vocabulary: int
) -> ClientProgress:
    _require(field, len(token_ids) <= max_tokens, f"the answer has at most {max_tokens} tokens")
    known = not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary)
    _require(field, known, f"token ids must be in [0, {vocabulary})")
    return ClientProgress(array("i", token_ids), text_chars)


def _lacks_scores(scored: bool, sampling: SamplingParams, choices: Sequence[ClientProgress]) -> bool:
    """Whether the client lacks the prompt's log probabilities or embedding, which are sent before the first token."""
    wanted, begun = sampling.scores_prompt, any(it.tokens for it in choices)
    field = "resume.prompt_scored"
    _require(field, wanted or not scored, "only where sampling wants a prompt's log probabilities or embedding")
    _require(
        field,
        scored or not (wanted and begun),
        "must be set: a client that has tokens has got them before",
    )
    return wanted and not scored


def _check_sequence(sequence: str, request_id: str, count: int) -> None:
    """Check that a sequence is an earlier attempt at this request: the ids of later attempts must stay free."""
    name, mark, attempt = sequence.partition(ATTEMPT_MARK)
    match = _ATTEMPT.fullmatch(attempt)
    earlier = not mark or (match is not None and int(match[1] or 0) < count)
    _require("resume.point.sequence", name == request_id and earlier, "is not an earlier placement of this request")


def _require(field: str, condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(field, message)
