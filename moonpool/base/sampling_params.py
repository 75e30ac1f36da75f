"""Sampling parameters of a request: names, defaults and limits, the same everywhere. Torch-free.

A field in `SamplingParams` declares all that services need to know about an option: default, check, whether the option
goes with beam search and with a response format, and whether the OpenAI endpoints take the option. The steps to add an
option are in docs/extend/sampling_option.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, get_args

from moonpool.base.errors import InvalidRequest
from moonpool.base.logprobs import MAX_LOGPROBS

MAX_CHOICES = 64
MAX_BEAMS = 16
MAX_CANDIDATES = 4096
MAX_LENGTH_PENALTY = 10.0
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
SCORED_TOKEN_COST = 10
"""Tokens that a prompt token with log probabilities counts as, in budgets and in steps, for the longer time."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_SUPPRESSED_TOKENS = 4096
"""Tokens that a checkpoint may forbid in every answer."""
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_GRAMMAR_BYTES = 1 << 16
MAX_THINKING_BUDGET = 1 << 30
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0


UNCOMMON = (
    "bad_words", "beam_width", "embedding", "logprobs", "n", "prompt_logprobs", "response_format", "thinking_budget",
)  # fmt: skip
"""Options that engines other than Moonpool's may lack. Instances say which ones they do not have as they join."""
LORA = "lora"
"""What instances that take no LoRA adapters say beside these options."""


def lora_option(lora: bytes) -> str:
    """Return the option of a request for the LoRA adapter with this id."""
    return f"{LORA}:{lora.hex()}"


_BEAM_OPTIONS = ("length_penalty", "early_stopping")
_TOKEN_BYTES = 4


class Unset(float):
    """Neutral value of a parameter that was not given. The served checkpoint's suggestion replaces this value."""


class UnsetInt(int):
    """As `Unset`, of an integer."""


Check = tuple[Callable[[Any], bool], str]
"""Whether a value is right, and the message if not."""


def _option(
    check: Check | None = None,
    *,
    max_items: int | None = None,
    http: type | None = None,
    with_beams: bool = True,
    with_format: bool = True,
) -> dict[str, Any]:
    """Return the metadata of a field.

    Args:
        check: the value's check.
        max_items: most items in a list or a mapping.
        http: the JSON type in which the OpenAI endpoints take the option, under the same name; None: they have another
            form, or do not take the option.
        with_beams: whether allowed with a beam search.
        with_format: whether allowed with a response format.
    """
    return {
        "check": check, "max_items": max_items, "http": http, "with_beams": with_beams, "with_format": with_format
    }  # fmt: skip


def _in(low: float, high: float) -> Check:
    return lambda value: low <= value <= high, f"must be in [{low:g}, {high:g}]"


def _in_or_none(low: int, high: int) -> Check:
    return lambda value: value is None or low <= value <= high, f"must be in [{low}, {high}]"


ResponseFormat = Literal["", "json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and meaning are those of vLLM and OpenAI.

    A value that is None stands for the default. An unsupported or impossible value is refused by the server with
    `InvalidRequest`, which names the field.
    """

    max_tokens: int = 128
    """Tokens to generate at most; cut to what the model's length leaves."""
    min_tokens: int = field(default=0, metadata=_option(http=int, with_format=False))
    """No end token is chosen before so many tokens."""
    temperature: float = field(
        default=Unset(1.0),
        metadata=_option((lambda value: 0 <= value < math.inf, "must be finite and at least 0"), http=float),
    )
    """0 = greedy.

    If this option, the next three or `repetition_penalty` are not given, they are the checkpoint's own, if its
    `generation_config.json` has them and the conductor uses that file (docs/sampling.md).
    """
    top_p: float = field(
        default=Unset(1.0),
        metadata=_option((lambda value: 0 < value <= 1, "must be in (0, 1]"), http=float, with_beams=False),
    )
    """Smallest set of most likely tokens whose probability reaches `top_p`; 1 = all."""
    top_k: int = field(
        default=UnsetInt(0),
        metadata=_option((lambda value: value >= 0, "must be at least 0 (0 = all)"), with_beams=False),
    )
    """Number of most likely tokens considered; 0 = all."""
    min_p: float = field(default=Unset(0.0), metadata=_option(_in(0, 1), http=float, with_beams=False))
    """Least probability relative to the most likely token."""
    presence_penalty: float = field(
        default=0.0, metadata=_option(_in(-MAX_PENALTY, MAX_PENALTY), http=float, with_beams=False)
    )
    """Subtracted from the logit of each token generated already."""
    frequency_penalty: float = field(
        default=0.0, metadata=_option(_in(-MAX_PENALTY, MAX_PENALTY), http=float, with_beams=False)
    )
    """Subtracted from a token's logit for each time the token was generated."""
    repetition_penalty: float = field(
        default=Unset(1.0),
        # Beyond these bounds a logit overflows. Rounded: a bound that came as float32 is not exact.
        metadata=_option(
            (
                lambda value: MIN_REPETITION <= round(value, 6) <= MAX_REPETITION,
                f"must be in [{MIN_REPETITION:g}, {MAX_REPETITION:g}]",
            ),
            http=float,
            with_beams=False,
        ),
    )
    """Divides positive, multiplies negative logits of tokens in prompt or answer."""
    stop: str | Sequence[str] = field(default=(), metadata=_option(max_items=MAX_STOPS, with_beams=False))
    """The answer ends before any of these texts; a single text stands for a list with this text."""
    stop_token_ids: Sequence[int] = field(default=(), metadata=_option(max_items=MAX_STOP_TOKENS))
    """The answer ends with any of these tokens."""
    ignore_eos: bool = field(default=False, metadata=_option(http=bool, with_format=False))
    """The model's end tokens do not end the answer."""
    seed: int | None = field(default=None, metadata=_option(http=int, with_beams=False))
    """Seed of the sampling, 64 bits unsigned; drawn by the server and reported in the result when None."""
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata=_option(max_items=MAX_LOGIT_BIASES, with_beams=False)
    )
    """Added to the logits of single tokens."""
    bad_words: str | Sequence[str] = field(
        default=(), metadata=_option(max_items=MAX_BAD_WORDS, with_beams=False, with_format=False)
    )
    """Texts that the answer must not have, as vLLM means this: for each text, and for the text after a space, the last
    token is not chosen after the others.
    """
    logprobs: int | None = field(default=None, metadata=_option(_in_or_none(0, MAX_LOGPROBS), with_beams=False))
    """Most likely tokens, at most 20, that are told beside each token with their log probabilities; None = not even the
    token's own. They are the model's own: before temperature, penalties, bias and bans."""
    prompt_logprobs: int | None = field(default=None, metadata=_option(_in_or_none(0, MAX_LOGPROBS), http=int))
    """The same for the prompt's tokens but the first. The whole prompt is computed: cached KV is not used."""
    n: int = field(default=1, metadata=_option(_in(1, MAX_CHOICES), http=int))
    """Number of answers (choices) to the prompt, at most 64 and as many as a decode instance has places in a step.

    Answer i equals a separate request's answer with seed `seed` + i (`stream_seed`).
    """
    response_format: ResponseFormat = field(default="", metadata=_option(with_beams=False))
    """What the answer looks like: "json_object" = any JSON object; "json_schema", "regex" and "lark" = what `grammar`
    describes; "" = anything. Tokens that do not fit are never chosen; the model's end token is chosen when, and only
    where, the answer may end."""
    grammar: str = ""
    """A JSON schema, a regular expression (the whole answer matches) or a grammar in Lark's notation, an EBNF."""
    beam_width: int = field(default=0, metadata=_option(_in(0, MAX_BEAMS)))
    """Beams of a beam search, at most 16; 0 = none.

    The `n` best hypotheses are the answers, best first, and come at the search's end. No token is drawn, and only bans
    change the model's distribution.
    """
    length_penalty: float = field(default=1.0, metadata=_option(_in(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)))
    """A hypothesis' score is the sum of the tokens' log probabilities over (number of tokens ^ length_penalty)."""
    early_stopping: bool | Literal["never"] = field(
        default=False,
        metadata=_option((lambda value: value in (False, True, "never"), "must be False, True or 'never'")),
    )
    """When a search that has as many hypotheses as beams ends: True = at once; False = when the best beam's score at
    its present length is not better than the worst hypothesis'; "never" = when no beam can become better. As in
    `transformers`.
    """
    skip_special_tokens: bool = field(default=True, metadata=_option(http=bool))
    """The answer's text leaves out special tokens. Some models mark calls of functions with them."""
    thinking_budget: int | None = field(
        default=None, metadata=_option(_in_or_none(0, MAX_THINKING_BUDGET), with_beams=False)
    )
    """Tokens that the answer may think, at most; then what ends the thinking is forced. None = any number."""
    thinking_marks: Sequence[str] = field(default=(), metadata=_option(max_items=2, with_beams=False))
    """With `thinking_budget`: the model's two texts, before and behind its thinking. The thinking begins within the
    answer's first 16 tokens, or has begun at the prompt's end."""
    embedding: bool = field(default=False, metadata=_option(with_beams=False, with_format=False))
    """The result has the prompt's embedding: the last token's hidden state after the last norm, scaled to length 1;
    what a checkpoint for embeddings makes of the prompt; or a classifier's raw values, one for each label."""

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None and default is not None:
                object.__setattr__(self, name, default)
        for name in ("stop", "bad_words"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, (text,))

    def __reduce__(self) -> tuple[object, ...]:
        # Each step carries the parameters to the engine process; this takes half the time of dataclasses' own way.
        return _restore, _VALUES(self)

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def scores_prompt(self) -> bool:
        """Whether the result has a part about the prompt, which only prefill computes."""
        return self.prompt_logprobs is not None or self.embedding

    @property
    def deferred(self) -> bool:
        """Whether no token is final before the end: the answers come whole, and log probabilities choose them."""
        return self.beam_width > 0

    @property
    def given(self) -> tuple[str, ...]:
        """Names of all options whose value is not the default."""
        return tuple([option.name for option in fields(self) if getattr(self, option.name) != default_of(option)])

    @property
    def uncommon(self) -> tuple[str, ...]:
        """Names of set options in `UNCOMMON`."""
        return tuple([name for name in UNCOMMON if getattr(self, name) != _DEFAULTS[name]])

    @property
    def width(self) -> int:
        """Sequences that run together for the request: the beams, or the answers."""
        return self.beam_width or self.n

    def suggested(self, values: Mapping[str, float | int]) -> SamplingParams:
        """Return these parameters with all given: from `values`, else neutral. A beam search takes no values."""
        own = {} if self.beam_width else values
        unsaid = (name for name in _NEUTRAL if isinstance(getattr(self, name), Unset | UnsetInt))
        given: dict[str, Any] = {name: own.get(name, _NEUTRAL[name]) for name in unsaid}
        return replace(self, **given) if given else self

    def check(self, vocab_size: int, field_prefix: str = "sampling") -> None:
        """Check that an engine can sample with these parameters.

        Raises:
            InvalidRequest: names the first field that is wrong, as "FIELD_PREFIX.NAME".
        """
        require = partial(_require, field_prefix)
        for name, limit in ITEM_LIMITS.items():
            require(name, len(getattr(self, name)) <= limit, f"at most {limit}")
        self._check_lengths(require)
        for name, (right, message) in _CHECKS.items():
            require(name, right(getattr(self, name)), message)
        self._check_tokens(require, vocab_size)
        self._check_format(require)
        self._check_beams(require)
        self._check_thinking(require)
        require("embedding", not self.embedding or self.prompt_logprobs is None, "has no place for prompt_logprobs")

    def check_end_tokens(
        self, end_token_ids: frozenset[int], vocab_size: int, field: str, field_prefix: str = "sampling"
    ) -> None:
        """Check the tokens that end a sequence, and that enough others can be chosen.

        Raises:
            InvalidRequest: names `field`, or "FIELD_PREFIX.beam_width".
        """
        if not all(0 <= token < vocab_size for token in end_token_ids):
            raise InvalidRequest(field, f"token ids must be in [0, {vocab_size})")
        if self.min_tokens and len(end_token_ids) >= vocab_size:
            raise InvalidRequest(field, "no token is left that does not end the answer before min_tokens")
        width, ends, require = self.beam_width, len(end_token_ids), partial(_require, field_prefix)
        enough = f"{width} beams with {ends} end tokens need as many tokens, of {vocab_size}"
        require("beam_width", not width or width + ends <= vocab_size, enough)
        many = f"{width} beams with {ends} end tokens are too many: more than {MAX_CANDIDATES} candidates in a step"
        require("beam_width", width * (width + ends) <= MAX_CANDIDATES, many)

    def _check_format(self, require: partial[None]) -> None:
        formats = get_args(ResponseFormat)
        require(
            "response_format", self.response_format in formats, f"must be one of {', '.join(filter(None, formats))}"
        )
        described = self.response_format not in ("", "json_object")
        require("grammar", bool(self.grammar) == described, f"must {'' if described else 'not '}be given")
        require("grammar", len(self.grammar) <= MAX_GRAMMAR_BYTES, f"at most {MAX_GRAMMAR_BYTES} bytes")
        for name in _NOT_WITH_FORMAT if self.response_format else ():
            unset = getattr(self, name) == _DEFAULTS[name]
            require(name, unset, "has no meaning with response_format, which says where the answer may end")

    def _check_thinking(self, require: partial[None]) -> None:
        marks = 0 if self.thinking_budget is None else 2
        named = "must name what is before and what is behind the thinking" if marks else "needs thinking_budget"
        require("thinking_marks", len(self.thinking_marks) == marks and all(self.thinking_marks), named)
        few = f"each needs at most {MAX_STOP_CHARS} characters"
        require("thinking_marks", all(len(mark) <= MAX_STOP_CHARS for mark in self.thinking_marks), few)

    def _check_lengths(self, require: partial[None]) -> None:
        require("max_tokens", self.max_tokens >= 1, "must be at least 1")
        require("min_tokens", self.min_tokens >= 0, "must not be negative")
        require("min_tokens", self.min_tokens <= self.max_tokens, "must not exceed max_tokens")
        for stop in self.stop:
            require("stop", 0 < len(stop) <= MAX_STOP_CHARS, f"each needs 1 to {MAX_STOP_CHARS} characters")
        for word in self.bad_words:
            chars = f"each needs 1 to {MAX_BAD_WORD_CHARS} characters"
            require("bad_words", 0 < len(word) <= MAX_BAD_WORD_CHARS, chars)

    def _check_beams(self, require: partial[None]) -> None:
        for name in _BEAM_OPTIONS if not self.beam_width else _NOT_WITH_BEAMS:
            unset = getattr(self, name) == _DEFAULTS[name]
            require(name, unset, f"has no meaning with{'' if self.beam_width else 'out'} beam_width")
        if self.beam_width:
            require("temperature", self.temperature in (0, 1), "must be 0 or 1 with beam_width: nothing is drawn")
            require("n", self.n <= self.beam_width, "must not exceed beam_width")

    def _check_tokens(self, require: partial[None], vocab_size: int) -> None:
        known = f"token ids must be in [0, {vocab_size})"
        stops, biases = self.stop_token_ids, self.logit_bias
        require("stop_token_ids", all(0 <= token < vocab_size for token in stops), known)
        require("logit_bias", all(0 <= token < vocab_size for token in biases), known)
        bounds = f"must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
        require("logit_bias", all(abs(bias) <= MAX_LOGIT_BIAS for bias in biases.values()), bounds)


def _require(prefix: str, name: str, condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(f"{prefix}.{name}", message)


def _restore(*values: object) -> SamplingParams:
    params = object.__new__(SamplingParams)
    for assign, value in zip(_SETTERS, values, strict=True):
        assign(params, value)
    return params


def _declared(name: str) -> dict[str, Any]:
    """Return what the fields' metadata says under a name, by field."""
    values = {option.name: option.metadata.get(name) for option in fields(SamplingParams)}
    return {field_name: value for field_name, value in values.items() if value is not None}


ITEM_LIMITS: dict[str, int] = _declared("max_items")
"""Most items of a list or mapping."""
HTTP_FIELDS: dict[str, type] = _declared("http")
"""Fields that the OpenAI endpoints take under the same name, with their JSON types."""
_CHECKS: dict[str, Check] = _declared("check")


def default_of(option: Field[Any]) -> Any:
    """Return the default of a field."""
    return option.default if option.default_factory is MISSING else option.default_factory()


_DEFAULTS: dict[str, Any] = {option.name: default_of(option) for option in fields(SamplingParams)}
_NEUTRAL: dict[str, float | int] = {
    name: float(value) if isinstance(value, Unset) else int(value)
    for name, value in _DEFAULTS.items()
    if isinstance(value, Unset | UnsetInt)
}
"""Of parameters that checkpoints suggest; plain numbers, which are pickled quickly."""
_NOT_WITH_BEAMS = [name for name, allowed in _declared("with_beams").items() if not allowed]
_NOT_WITH_FORMAT = [name for name, allowed in _declared("with_format").items() if not allowed]
_VALUES = attrgetter(*_DEFAULTS)
_SETTERS = [getattr(SamplingParams, name).__set__ for name in _DEFAULTS]


def stream_seed(seed: int, index: int) -> int:
    """Seed by which a request's sample of this index is drawn: (seed + index) mod 2^64.

    So sample `index` equals the single answer to a request with that seed.
    """
    return (seed + index) % (1 << 64)


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Everything that one sampled token is a function of, besides the logits."""

    params: SamplingParams = GREEDY
    seed: int = 0
    """Of the counter-based generator, 64 bits unsigned: the request's `stream_seed`."""
    samples: int = 1
    """Tokens that are drawn, each for another sample: the first with `seed`, the others with the seeds after `seed`."""
    best: int = 0
    """For beam search: how many of the most likely tokens are wanted, with log probabilities; then none is drawn."""
    position: int = 0
    """Output position of the token to be sampled, 0 for the first."""
    history: bytes | None = None
    """All tokens so far (prompt, then output), little-endian int32; only when penalties are active."""
    prompt_tokens: int = 0
    """How many of them are the prompt's."""
    banned: tuple[int, ...] = ()
    """Tokens that must not be chosen: end tokens while min_tokens is not reached, and those that end a bad word."""
    forced: int | None = None
    """The token that must be chosen, because the answer has thought enough; None = any may. A run has no next step."""
    answer: bytes = b""
    """The answer's tokens so far, little-endian int32; only with a response format."""

    def after(self, token: int) -> SampleSpec:
        """Parameters for the token after `token`, which has the position of these; the same tokens are banned."""
        encoded = token.to_bytes(_TOKEN_BYTES, "little")
        history = self.history + encoded if self.history is not None else None
        answer = self.answer + encoded if self.params.response_format else b""
        return replace(self, position=self.position + 1, history=history, answer=answer, forced=None)
