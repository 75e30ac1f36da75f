"""Which sampling parameters are valid: one place for the conductor, which says so early, and for the engines.

An engine samples for many requests in one step, so parameters that make no sense for one must never get there. Pure.
"""

import math

from moonpool.errors import InvalidRequest
from moonpool.v1 import kv_pb2

DEFAULT_MAX_TOKENS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0


def with_defaults(given: kv_pb2.Sampling) -> kv_pb2.Sampling:
    """A copy in which all is set that has a default other than 0; `seed` stays as it is."""
    sampling = kv_pb2.Sampling(max_tokens=DEFAULT_MAX_TOKENS, temperature=1.0, top_p=1.0, repetition_penalty=1.0, n=1)
    sampling.MergeFrom(given)
    return sampling


def check_sampling(sampling: kv_pb2.Sampling, vocab_size: int, field: str = "sampling") -> None:
    """Checks parameters that have their defaults (`with_defaults`).

    Raises:
        InvalidRequest: names the first one that is wrong, as "FIELD.NAME".
    """
    check = _Checker(field)
    _check_lengths(sampling, check)
    _check_numbers(sampling, check)
    _check_tokens(sampling, vocab_size, check)
    check("n", sampling.n == 1, "only 1 sample is supported yet")
    check("logprobs", not sampling.HasField("logprobs"), "log-probabilities are not supported yet")
    check("response_format", not sampling.response_format, "answer formats are not supported yet")


class _Checker:
    """Raises for one field what does not hold."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, name: str, condition: bool, message: str) -> None:
        if not condition:
            raise InvalidRequest(f"{self._prefix}.{name}", message)


def _check_lengths(sampling: kv_pb2.Sampling, check: _Checker) -> None:
    check("max_tokens", sampling.max_tokens >= 1, "must be at least 1")
    check("min_tokens", sampling.min_tokens >= 0, "must not be negative")
    check("min_tokens", sampling.min_tokens <= sampling.max_tokens, "must not exceed max_tokens")
    check("stop", len(sampling.stop) <= MAX_STOPS, f"at most {MAX_STOPS} texts")
    for stop in sampling.stop:
        check("stop", 0 < len(stop) <= MAX_STOP_CHARS, f"each needs 1 to {MAX_STOP_CHARS} characters")


def _check_numbers(sampling: kv_pb2.Sampling, check: _Checker) -> None:
    s = sampling
    check("temperature", 0 <= s.temperature < math.inf, "must be finite and at least 0")
    check("top_p", 0 < s.top_p <= 1, "must be in (0, 1]")
    check("top_k", s.top_k >= 0, "must be at least 0 (0 = all)")
    check("min_p", 0 <= s.min_p <= 1, "must be in [0, 1]")
    for name in ("presence_penalty", "frequency_penalty"):
        check(name, abs(getattr(s, name)) <= MAX_PENALTY, f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    # Beyond these a logit overflows, and what is left of the distribution is no longer the model's.
    bounds = f"must be in [{MIN_REPETITION:g}, {MAX_REPETITION:g}]"
    check("repetition_penalty", MIN_REPETITION <= round(s.repetition_penalty, 6) <= MAX_REPETITION, bounds)


def _check_tokens(sampling: kv_pb2.Sampling, vocab_size: int, check: _Checker) -> None:
    known = f"token ids must be in [0, {vocab_size})"
    stops, biases = sampling.stop_token_ids, sampling.logit_bias
    check("stop_token_ids", len(stops) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} tokens")
    check("stop_token_ids", all(0 <= token < vocab_size for token in stops), known)
    check("logit_bias", len(biases) <= MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES} tokens")
    check("logit_bias", all(0 <= token < vocab_size for token in biases), known)
    bounds = f"must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
    check("logit_bias", all(abs(bias) <= MAX_LOGIT_BIAS for bias in biases.values()), bounds)


def check_end_tokens(end_token_ids: frozenset[int], min_tokens: int, vocab_size: int, field: str) -> None:
    """Checks the tokens that end a sequence, and that something can be chosen while they are banned.

    Raises:
        InvalidRequest: names `field`.
    """
    if not all(0 <= token < vocab_size for token in end_token_ids):
        raise InvalidRequest(field, f"token ids must be in [0, {vocab_size})")
    if min_tokens and len(end_token_ids) >= vocab_size:
        raise InvalidRequest(field, "no token is left that does not end the answer before min_tokens")
