"""What a body may cost: its parts are counted before it is read, and of many faults one is told."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moonpool.errors import InvalidRequest
from services.gateway.endpoints.anthropic_messages import MessagesBody
from services.gateway.endpoints.context_caching import CacheCreateBody
from services.gateway.endpoints.openai_chat import ChatBody
from services.gateway.endpoints.openai_completions import CompletionBody
from services.gateway.endpoints.openai_responses import ResponsesBody
from services.gateway.endpoints.tokenization import DetokenizeBody
from services.gateway.serving.json_body import Body, JsonPartCounts, check_json_parts, count_json_parts, validate_body

MANY = 1000
CHARACTERS = 'ab"\\{}[],:\n\x00é'
RESULT, PLACE = {"type": "tool_result", "content": [{"type": "text"}] + [{}] * MANY}, "messages.0.content.0.content"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(CHARACTERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(CHARACTERS), inner, max_size=4),
    max_leaves=30,
)


def parts_of(value: Any) -> JsonPartCounts:
    if isinstance(value, str):
        return JsonPartCounts(0, 0, 0, 1, 0)
    if not isinstance(value, dict | list):
        return JsonPartCounts(0, 0, 0, 0, 0)
    members = len(value) if isinstance(value, dict) else 0
    own = JsonPartCounts(
        int(isinstance(value, dict)), int(isinstance(value, list)), members, members, max(0, len(value) - 1)
    )
    inner = [parts_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    return JsonPartCounts(*map(sum, zip(own, *inner, strict=True)))


@settings(max_examples=100, deadline=None)
@given(VALUES, st.booleans())
def test_parts_are_counted_as_they_are_read(value: Any, ascii_only: bool) -> None:
    assert count_json_parts(json.dumps(value, ensure_ascii=ascii_only).encode()) == parts_of(value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 1_000_000, "16384 arrays"),
        (b"[" + b"[]," * 1_100_000 + b"[]]", "16384 arrays"),
        (b'{"a":' * 100_000, "16384 objects"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(70_000)) + b"}", "65536 members"),
        (b"[" + b'"",' * 140_000 + b'""]', "131072 strings"),
        (b'"' * (8 << 20), "131072 strings"),
        (b"[" + b"1," * 1_100_000 + b"1]", "1048576 items"),
    ],
    ids=range(7),
)
def test_too_many_parts_are_refused_before_anything_is_read(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {says}"):
        check_json_parts(raw)


def test_what_texts_contain_does_not_count() -> None:
    check_json_parts(json.dumps({"prompt": 'x = {"a": [1, 2], "b": "\\"}, ' * 100_000}).encode())


@pytest.mark.parametrize(
    ("cls", "body"),
    [
        (DetokenizeBody, {"tokens": ["x"] * MANY}),
        (CompletionBody, {"prompt_token_ids": [0.5] * MANY}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [None] * MANY}),
        (CompletionBody, {"prompt": "a", "bad_words": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(number): None for number in range(2 * MANY)}}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [], "tools": [{}] * MANY}),
        (CacheCreateBody, {"metadata": {str(number): None for number in range(2 * MANY)}}),
    ],
    ids=range(8),
)
def test_of_many_faults_few_are_found(cls: type[Body], body: dict[str, Any]) -> None:
    """Each costs memory, and a million of them seconds."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(body)
    assert caught.value.error_count() <= 5


@pytest.mark.parametrize(
    ("cls", "body", "field"),
    [
        (CompletionBody, {"prompt": ["x"] * MANY + [1]}, "prompt"),
        (CompletionBody, {"prompt": [1] * MANY + ["x"]}, "prompt"),
        (CompletionBody, {"prompt": [[1] * MANY] * MANY + [["x"]]}, "prompt"),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content.0.type"),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": [RESULT]}]}, f"{PLACE}.1.type"),
        (ResponsesBody, {"input": [{"role": "user", "content": [{}] * MANY}]}, "input.0.content.0.type"),
    ],
    ids=range(6),
)
def test_where_a_field_has_several_forms_each_tells_its_first_fault(
    cls: type[Body], body: dict[str, Any], field: str
) -> None:
    """And the clearest of them is told, however deep it is."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(body)
    assert caught.value.error_count() <= 5
    with pytest.raises(InvalidRequest) as told:
        validate_body(cls, body)
    assert told.value.field == field
