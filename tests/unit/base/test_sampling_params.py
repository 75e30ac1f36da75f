"""Sampling parameters: defaults, limits, pickling, and the way through the contract."""

import math
import pickle
from array import array
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest

from moonpool.base.contracts import sampling_from_proto, sampling_to_proto
from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.v1 import kv_pb2

VOCABULARY = 10
EVERY_FIELD_SET = SamplingParams(
    max_tokens=7,
    min_tokens=1,
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    min_p=0.125,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    stop=("a", "b"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    seed=2**64 - 1,
    logit_bias={3: -1.0},
    logprobs=1,
    n=2,
    response_format="json_schema",
    grammar="{}",
    beam_width=4,
    length_penalty=0.5,
    early_stopping="never",
    bad_words=("x", "y z"),
    prompt_logprobs=0,
    skip_special_tokens=False,
    thinking_budget=0,
    thinking_marks=("<think>", "</think>"),
    embedding=True,
)


def fault(**values: Any) -> str:
    try:
        SamplingParams(**values).check(VOCABULARY, "s")
    except InvalidRequest as error:
        return error.field
    return ""


def test_the_contract_has_the_same_fields() -> None:
    assert {f.name for f in fields(SamplingParams)} == {f.name for f in kv_pb2.Sampling.DESCRIPTOR.fields}


def test_every_field_travels_through_the_contract_and_through_a_pickle() -> None:
    for f in fields(SamplingParams):
        value, default = getattr(EVERY_FIELD_SET, f.name), getattr(SamplingParams(), f.name)
        assert value != default, f"{f.name}: give it another value here"
        message = sampling_to_proto(replace(SamplingParams(), **{f.name: value}))
        assert [descriptor.name for descriptor, _ in message.ListFields()] == [f.name]
    assert sampling_from_proto(sampling_to_proto(EVERY_FIELD_SET)) == EVERY_FIELD_SET
    assert pickle.loads(pickle.dumps(EVERY_FIELD_SET)) == EVERY_FIELD_SET


def test_a_default_stays_unset_in_the_contract_and_comes_back_from_it() -> None:
    assert sampling_to_proto(SamplingParams()) == kv_pb2.Sampling()
    assert sampling_from_proto(kv_pb2.Sampling()) == SamplingParams()
    given = kv_pb2.Sampling(temperature=0.0, top_p=0.0, max_tokens=0)
    params = sampling_from_proto(given)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.0, 0)
    assert sampling_to_proto(params) == given


def test_what_is_given_is_told_from_what_is_not_also_where_it_is_neutral() -> None:
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    given = sampling_to_proto(SamplingParams(**neutral))  # type: ignore[arg-type]
    assert {descriptor.name for descriptor, _ in given.ListFields()} == neutral.keys()
    wanted = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    assert sampling_from_proto(given).suggested(wanted) == SamplingParams()
    assert SamplingParams().suggested(wanted) == SamplingParams(**wanted)  # type: ignore[arg-type]
    assert SamplingParams(temperature=0.0).suggested({"temperature": 0.7, "top_k": 2}) == SamplingParams(
        temperature=0.0, top_k=2
    )
    assert SamplingParams(beam_width=2).suggested(wanted) == SamplingParams(beam_width=2)
    plain = SamplingParams().suggested({})
    assert {type(getattr(plain, name)) for name in neutral} == {float, int}


def test_none_is_the_default_and_one_stop_text_a_list_of_one() -> None:
    nothing: dict[str, Any] = {f.name: None for f in fields(SamplingParams)}
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(bad_words="end").bad_words == ("end",)


def test_any_sequence_of_stop_tokens_will_do() -> None:
    assert list(sampling_to_proto(SamplingParams(stop_token_ids=array("i", [4, 5]))).stop_token_ids) == [4, 5]
    assert list(sampling_to_proto(SamplingParams(stop_token_ids=range(2))).stop_token_ids) == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("max_tokens", 1 << 40), ("seed", -1), ("stop", [5]), ("logit_bias", {"a": 1.0})],
)
def test_what_does_not_fit_the_contract_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_to_proto(SamplingParams(**{name: value}), "s")
    assert caught.value.field == f"s.{name}"


def test_the_defaults_are_valid() -> None:
    assert not fault()


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
        ("n", 0),
        ("n", 65),
        ("beam_width", -1),
        ("beam_width", 17),
        ("length_penalty", 0.5),
        ("early_stopping", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 257),
        ("response_format", "json"),
        ("grammar", "{}"),
    ],
)
def test_names_what_is_wrong(name: str, value: object) -> None:
    assert fault(**{name: value}) == f"s.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", math.nan),
        ("length_penalty", -10.1),
        ("early_stopping", "always"),
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 1),
        ("min_p", 0.5),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 2.0),
        ("stop", ["a"]),
        ("seed", 0),
        ("logit_bias", {0: 1.0}),
        ("n", 5),
        ("logprobs", 1),
        ("bad_words", ["a"]),
    ],
)
def test_what_beams_cannot_have_is_named(name: str, value: object) -> None:
    assert fault(beam_width=4, **{name: value}) == f"s.{name}"


def test_what_beams_can_have() -> None:
    for early in (False, True, "never"):
        assert not fault(beam_width=4, n=4, early_stopping=early, length_penalty=-10.0, min_tokens=3, temperature=0.0)


@pytest.mark.parametrize(("width", "ends", "wrong"), [(4, 6, False), (4, 7, True), (0, 10, False)])
def test_beams_need_tokens_to_go_on_with(width: int, ends: int, wrong: bool) -> None:
    params = SamplingParams(beam_width=width)
    with pytest.raises(InvalidRequest, match=r"s\.beam_width") if wrong else nullcontext():
        params.check_end_tokens(frozenset(range(ends)), VOCABULARY, "ends", "s")


def test_beams_with_very_many_end_tokens_are_refused() -> None:
    params = SamplingParams(beam_width=16)
    params.check_end_tokens(frozenset(range(240)), 100_000, "ends", "s")
    with pytest.raises(InvalidRequest, match=r"s\.beam_width"):
        params.check_end_tokens(frozenset(range(241)), 100_000, "ends", "s")


def test_an_unknown_rule_of_stopping_from_the_contract_is_refused() -> None:
    params = sampling_from_proto(kv_pb2.Sampling(beam_width=2, early_stopping=7))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"s\.early_stopping"):
        params.check(VOCABULARY, "s")


def test_end_tokens_are_known_and_leave_something_to_choose() -> None:
    everything = frozenset(range(VOCABULARY))
    SamplingParams().check_end_tokens(everything, VOCABULARY, "ends")
    SamplingParams(min_tokens=5).check_end_tokens(everything - {4}, VOCABULARY, "ends")
    for tokens, min_tokens in ((frozenset({-1}), 0), (frozenset({VOCABULARY}), 0), (everything, 1)):
        with pytest.raises(InvalidRequest, match="ends: "):
            SamplingParams(min_tokens=min_tokens).check_end_tokens(tokens, VOCABULARY, "ends")


def test_a_given_min_p_of_zero_is_no_suggestion() -> None:
    for given, suggested in (
        (SamplingParams(), 0.5),
        (SamplingParams(min_p=0.0), 0.0),
        (SamplingParams(min_p=0.25), 0.25),
    ):
        sent = sampling_from_proto(sampling_to_proto(given))
        assert sent.suggested({"min_p": 0.5}).min_p == suggested
        assert sampling_from_proto(sampling_to_proto(sent.suggested({}))).suggested({"min_p": 0.5}).min_p == given.min_p
