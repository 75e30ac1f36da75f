"""Structural tags in xgrammar's two forms become grammars that take what the tags describe, and nothing else."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import LIMITS, Grammar, check_grammar
from moonpool.base.sampling_params import SamplingParams
from moonpool.gateway.serving.structural_tags import tag_grammar, tag_text

from .fakes import Answers

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
BEGIN, END = "<function=weather>", "</function>"
STRUCTURE = {"begin": BEGIN, "schema": SCHEMA, "end": END}
OLDER = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<function="]}
TAG = {"begin": BEGIN, "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": END}
CALL = BEGIN + '{"city": "Paris"}' + END
BYTES = LLTokenizer("byte")


def follows(tag: Any, answer: str) -> bool:
    grammar = tag_grammar("f", tag_text("f", tag), lambda text: None)
    check_grammar(SamplingParams(response_format="lark", grammar=grammar))
    matcher = LLMatcher(BYTES, Grammar("lark", grammar).compiled(), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(answer.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and bool(matcher.is_accepting())


def triggered(**more: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<function="], "tags": [TAG], **more}}


def of(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **members}


@pytest.mark.parametrize(
    ("tag", "fits", "fails"),
    [
        (
            OLDER,
            ["", "text", CALL, f"I look.\n{CALL}", f"{CALL} and {CALL}.", "a < b"],
            [BEGIN + "{}" + END, "<function=other>", BEGIN + '{"city": 5}' + END, CALL[:-1]],
        ),
        (triggered(), ["", f"a{CALL}b"], [BEGIN]),
        (triggered(at_least_one=True), [CALL, f"a{CALL}b{CALL}"], ["", "a"]),
        (triggered(stop_after_first=True), ["a", f"a{CALL}"], [f"{CALL}a", f"{CALL}{CALL}"]),
        (triggered(at_least_one=True, stop_after_first=True), [CALL, f"a{CALL}"], ["a", f"{CALL}a"]),
        ({"format": of("const_string", value='a"<b>\\n')}, ['a"<b>\\n'], ["a", ""]),
        ({"format": of("json_schema", json_schema={"enum": [1, "x"]})}, ["1", '"x"'], ["2"]),
        ({"format": of("json_schema", json_schema=True)}, ['{"a": [1]}'], ["a"]),
        ({"format": of("regex", pattern=r"\d+/x")}, ["12/x"], ["/x", "\u0663/x"]),
        ({"format": of("any_text")}, ["", "a\nb"], []),
        (
            {
                "format": of(
                    "sequence",
                    elements=[
                        of("tag", begin="<think>", content=of("any_text"), end="</think>"),
                        of("optional", content=of("const_string", value="\n")),
                        of("json_schema", json_schema=SCHEMA),
                    ],
                )
            },
            ['<think>hm\n</think>\n{"city": "a"}', '<think></think>{"city": "a"}'],
            ['{"city": "a"}', "<think>hm</think>"],
        ),
        (
            {"format": of("or", elements=[of("const_string", value="yes"), of("regex", pattern="no+")])},
            ["yes", "noo"],
            ["", "maybe"],
        ),
        ({"format": of("plus", content=of("const_string", value="ab"))}, ["ab", "abab"], ["", "a"]),
        ({"format": of("star", content=of("const_string", value="ab"))}, ["", "abab"], ["aba"]),
        (
            {"format": of("tags_with_separator", tags=[TAG], separator=",\n", at_least_one=True)},
            [CALL, f"{CALL},\n{CALL}"],
            ["", f"{CALL}{CALL}", f"{CALL},"],
        ),
        (
            {"format": of("tags_with_separator", tags=[TAG], separator=",", stop_after_first=True)},
            ["", CALL],
            [f"{CALL},{CALL}"],
        ),
        (
            {"format": of("tag", begin="<a>", content=of("any_text"), end=["</a>", "</b>"])},
            ["<a>x</b>", "<a></a>"],
            ["<a>x"],
        ),
    ],
    ids=lambda value: value.get("format", value).get("type") if isinstance(value, dict) else "",
)
def test_a_tag_takes_what_the_tag_describes(tag: dict[str, Any], fits: list[str], fails: list[str]) -> None:
    for answer in fits + fails:
        assert follows(tag, answer) == (answer in fits), answer


def test_special_tokens_are_tokens() -> None:
    ids = {"<tool_call>": 7, "</tool_call>": 8}
    tag = {"begin": "<tool_call>\n", "content": of("json_schema", json_schema=SCHEMA), "end": "\n</tool_call>"}
    given = {"format": of("triggered_tags", triggers=["<tool_call>"], tags=[tag])}
    grammar = tag_grammar("f", tag_text("f", given), ids.get)
    assert "<[7]>" in grammar
    assert "<[8]>" in grammar
    assert "tool_call" not in grammar


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ("{", "f"),
        ([1], "f"),
        ({}, "f"),
        ({"structures": [5], "triggers": []}, "f.structures.0"),
        ({"format": 5}, "f.format"),
        ({"format": of("qwen_xml_parameter")}, "f.format.type"),
        ({"format": of("const_string")}, "f.format.value"),
        ({"format": of("or", elements=[of("any_text"), of("regex")])}, "f.format.elements.1.pattern"),
        ({"format": of("sequence", elements=[of("any_text"), of("any_text")])}, "f.format.elements.0"),
        ({"format": of("json_schema", json_schema={"not": {}, "enum": [2**60 + 1]})}, "f.format.json_schema"),
        ({"format": of("tag", begin="a", content=of("any_text"), end="")}, "f.format.content"),
        ({"format": of("triggered_tags", triggers=["<x"], tags=[TAG])}, "f.format.tags.0.begin"),
        ({"format": of("triggered_tags", triggers=["<function=", "<x"], tags=[TAG])}, "f.format.triggers.1"),
        ({"structures": [{"begin": 1, "schema": {}, "end": "x"}], "triggers": ["a"]}, "f.format.tags.0.begin"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(tag: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tag_grammar("f", tag_text("f", tag), lambda text: None)
    assert refused.value.field == place


def test_depth_and_number_are_bounded() -> None:
    deep: dict[str, Any] = of("any_text")
    for _ in range(40):
        deep = of("or", elements=[deep])
    for given in (deep, of("or", elements=[of("any_text")] * 600)):
        with pytest.raises(InvalidRequest, match="more than"):
            tag_grammar("f", tag_text("f", {"format": given}), lambda text: None)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": OLDER},
        {"response_format": {"type": "structural_tag", **triggered()}},
        {"structured_outputs": {"structural_tag": json.dumps(triggered())}},
        {"structured_outputs": {"structural_tag": triggered()}},
        {"structural_tag": json.dumps(OLDER)},
    ],
)
async def test_tags_of_requests(gateway: Answers, fields: dict[str, Any]) -> None:
    answered = await gateway.chat(**fields)
    assert answered.status_code == 200, answered.text
    asked = gateway.asked.sampling
    assert (asked.response_format, asked.skip_special_tokens) == ("lark", False)
    expected = tag_grammar("f", tag_text("f", triggered()), lambda text: None)
    assert asked.grammar == expected


async def test_a_tag_that_is_wrong_is_400(gateway: Answers) -> None:
    refused = await gateway.chat(response_format={"type": "structural_tag", "format": of("dispatch")})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.format.type")
    refused = await gateway.chat(response_format=OLDER, structured_outputs={"regex": "a"})
    assert refused.status_code == 400
