"""What sampling parameters are valid."""

import math

import pytest

from moonpool.errors import InvalidRequest
from moonpool.sched.limits import check_end_tokens, check_sampling, with_defaults
from moonpool.v1 import kv_pb2

VOCABULARY = 10


def fault(**values: object) -> str:
    try:
        check_sampling(with_defaults(kv_pb2.Sampling(**values)), VOCABULARY, "s")  # type: ignore[arg-type]
    except InvalidRequest as error:
        return error.field
    return ""


def test_defaults_are_set_where_nothing_is_and_pass() -> None:
    sampling = with_defaults(kv_pb2.Sampling(temperature=0.0, logit_bias={3: 1.0}))
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (128, 0.0, 1.0)
    assert (sampling.repetition_penalty, sampling.n, sampling.HasField("seed")) == (1.0, 1, False)
    assert dict(sampling.logit_bias) == {3: 1.0}
    check_sampling(sampling, VOCABULARY)


def test_borders() -> None:
    assert not fault(
        max_tokens=1, min_tokens=1, top_p=1e-6, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0, top_k=99
    )
    assert not fault(
        repetition_penalty=0.01, logit_bias={0: -100.0, 9: 100.0}, stop_token_ids=[0, 9], stop=["a" * 1024]
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", 1.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {VOCABULARY: 0.0}),
        ("logit_bias", {0: math.nan}),
        ("logit_bias", {0: 101.0}),
        ("stop_token_ids", [VOCABULARY]),
        ("stop_token_ids", [0] * 1025),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("n", 2),
        ("logprobs", 0),
        ("response_format", "json"),
    ],
)
def test_names_what_is_wrong(name: str, value: object) -> None:
    assert fault(**{name: value}) == f"s.{name}"


def test_end_tokens_are_known_and_leave_something_to_choose() -> None:
    everything = frozenset(range(VOCABULARY))
    check_end_tokens(everything, 0, VOCABULARY, "ends")
    check_end_tokens(everything - {4}, 5, VOCABULARY, "ends")
    for tokens, min_tokens in ((frozenset({-1}), 0), (frozenset({VOCABULARY}), 0), (everything, 1)):
        with pytest.raises(InvalidRequest, match="ends: "):
            check_end_tokens(tokens, min_tokens, VOCABULARY, "ends")
