"""Each field of the bodies that clients send is honoured, ignored with a warning, or refused by name.

The fields are those of the SDKs of OpenAI and Anthropic, whose types are read here, and lists of the fields of vLLM,
SGLang, llama.cpp and Ollama.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal, Required, TypedDict, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_create
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import is_typeddict

from moonpool.base.grammar import check_grammar
from moonpool.base.json_schema import WHITESPACE
from moonpool.base.sampling_params import SamplingParams
from moonpool.gateway.endpoints.anthropic_messages import CountTokensBody, MessagesBody
from moonpool.gateway.endpoints.embeddings import EmbeddingsBody
from moonpool.gateway.endpoints.openai_chat import ChatBody
from moonpool.gateway.endpoints.openai_completions import CompletionBody
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.known_fields import KEPT_BY_CLIENTS
from moonpool.gateway.serving.structured_outputs import StructuredOutputsBody
from tools.gen_fields import PAGE, page

from .fakes import TURNS, Answers

SDK_BODIES: list[tuple[Any, type[Body]]] = [
    (chat_create_params.CompletionCreateParamsBase, ChatBody),
    (chat_create_params.CompletionCreateParamsStreaming, ChatBody),
    (completion_create_params.CompletionCreateParamsBase, CompletionBody),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingsBody),
    (response_create_params.ResponseCreateParamsBase, ResponsesBody),
    (response_create_params.ResponseCreateParamsStreaming, ResponsesBody),
    (message_create_params.MessageCreateParamsBase, MessagesBody),
    (message_create_params.MessageCreateParamsStreaming, MessagesBody),
    (beta_create.MessageCreateParamsBase, MessagesBody),
    (message_count_tokens_params.MessageCountTokensParams, CountTokensBody),
    (beta_count.MessageCountTokensParams, CountTokensBody),
]
VLLM = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
    add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern detokenize structural_tag
"""
VLLM_COMPLETION = "prompt suffix prompt_embeds best_of echo"
VLLM_EMBEDDINGS = """
    model input encoding_format dimensions user truncate_prompt_tokens truncation_side request_id priority
    mm_processor_kwargs cache_salt add_special_tokens embed_dtype endianness use_activation messages chat_template
"""
VLLM_RESPONSES = """
    background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text tool_choice
    tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key
    request_id mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
    previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs
"""
VLLM_STRUCTURED_OUTPUTS = """
    json regex choice grammar json_object structural_tag disable_any_whitespace disable_additional_properties
    whitespace_pattern disable_fallback
"""
SGLANG = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p user tools tool_choice
    parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_prompt_token_ids return_token_ids return_meta_info reasoning_effort task top_k
    min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
    continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning
    stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video images_config
    custom_logit_processor custom_params input_ids rid extra_key cache_salt ngram_corpus_id priority bootstrap_host
    bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank reasoning json_schema
    custom_labels
"""
LLAMA_CPP = """
    grammar json_schema mirostat mirostat_tau mirostat_eta typical_p tfs_z top_n_sigma xtc_probability xtc_threshold
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_range
    dynatemp_exponent repeat_penalty repeat_last_n samplers min_keep n_predict n_probs id_slot cache_prompt
    t_max_predict_ms lora timings_per_token return_tokens post_sampling_probs response_fields reasoning_format
    parse_tool_calls
"""
OLLAMA = "options format keep_alive think template system raw images"
LISTS: list[tuple[str, type[Body]]] = [
    (VLLM + SGLANG + LLAMA_CPP + OLLAMA, ChatBody),
    (VLLM_COMPLETION + LLAMA_CPP + OLLAMA + SGLANG, CompletionBody),
    (VLLM_RESPONSES, ResponsesBody),
    (VLLM_EMBEDDINGS, EmbeddingsBody),
]


def typed_dicts(annotation: Any) -> Iterator[Any]:
    """The typed dictionaries that an annotation has."""
    if is_typeddict(annotation):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from typed_dicts(inner)


def bodies(annotation: Any) -> Iterator[type[Body]]:
    """The bodies that an annotation has."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for inner in get_args(annotation):
        yield from bodies(inner)


def literals(annotation: Any) -> set[Any]:
    """The values that an annotation allows, if it says which."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for inner in get_args(annotation) for value in literals(inner)}


def refused_by_kind(given: dict[str, Any], body: type[Body]) -> bool:
    """Whether a body refuses a typed dictionary as a whole, for its `type` or `role`."""
    for name in ("type", "role"):
        wanted = literals(given.get(name))
        field = body.model_fields.get(name)
        known = set(getattr(body, "kinds", ())) if name == "type" else set()
        known = known or (literals(field.annotation) if field is not None else set())
        if wanted and known and not wanted & known:
            return True
    return False


def unclassified(given: Any, body: type[Body], place: str, seen: frozenset[Any]) -> Iterator[str]:
    """Places of the members of a typed dictionary that a body has in no list."""
    members = get_type_hints(given, include_extras=True)
    if refused_by_kind(members, body) or (given, body) in seen:
        return
    contract = body.contract()
    fields = {field.alias or name: field for name, field in body.model_fields.items()}
    for name, annotation in members.items():
        if name not in contract.honoured | contract.ignored | contract.refused.keys():
            yield f"{place}{name}"
        elif name in contract.honoured:
            for inner in typed_dicts(annotation):
                for part in bodies(fields[name].annotation):
                    yield from unclassified(inner, part, f"{place}{name}.", seen | {(given, body)})


@pytest.mark.parametrize(
    ("given", "body"), SDK_BODIES, ids=[f"{given.__module__}.{given.__name__}" for given, _ in SDK_BODIES]
)
def test_every_field_of_the_sdks_is_classified(given: Any, body: type[Body]) -> None:
    assert sorted(set(unclassified(given, body, "", frozenset()))) == []


def test_a_field_that_nobody_has_classified_is_found() -> None:
    class Inner(TypedDict, total=False):
        type: Required[Literal["json_schema"]]
        novel: int

    class Given(TypedDict, total=False):
        model: str
        response_format: Inner
        also_novel: int

    assert sorted(unclassified(Given, ChatBody, "", frozenset())) == ["also_novel", "response_format.novel"]


@pytest.mark.parametrize(("names", "body"), LISTS, ids=[body.__name__ for _, body in LISTS])
def test_every_field_of_other_servers_is_classified(names: str, body: type[Body]) -> None:
    contract = body.contract()
    assert set(names.split()) - contract.honoured - contract.ignored - contract.refused.keys() == set()


def test_the_page_lists_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.gen_fields writes the page"


def test_every_member_of_structured_outputs_is_classified() -> None:
    contract = StructuredOutputsBody.contract()
    assert set(VLLM_STRUCTURED_OUTPUTS.split()) <= contract.honoured | contract.ignored | contract.refused.keys()


def body_classes(body: type[Body], seen: set[type[Body]]) -> set[type[Body]]:
    """The bodies within a body, and the body itself."""
    if body not in seen:
        seen.add(body)
        for field in body.model_fields.values():
            for part in bodies(field.annotation):
                body_classes(part, seen)
    return seen


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountTokensBody])
def test_no_field_is_in_two_lists(body: type[Body]) -> None:
    for part in body_classes(body, set()):
        for base in part.__mro__:
            if issubclass(base, Body):
                assert set(base.ignored) & base.refused.keys() == set(), (part, base)


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}},
            "response_format.json_schema.foo",
        ),
        ({"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regexp": "x"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "x", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"tools": [TOOL | {"name": "g"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "function": FUNCTION | {"stricter": True}}]}, "tools.0.function.stricter"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
            "tool_choice.function.x",
        ),
        ({"slo": {"what": 1}}, "slo.what"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"lora_path": "x"}, "lora_path"),
        ({"detokenize": False}, "detokenize"),
        ({"stop_regex": "x"}, "stop_regex"),
        ({"mirostat": 1}, "mirostat"),
        ({"mirostat": True}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"options": {"temperature": 0}}, "options"),
        ({"extra_key": "x"}, "extra_key"),
        ({"messages": [{"role": "user", "content": "x", "tools": [TOOL]}]}, "messages.0.tools"),
    ],
)
async def test_what_would_change_the_answer_is_refused_with_its_place(
    gateway: Answers, body: dict[str, Any], place: str
) -> None:
    refused = await gateway.chat(**body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, place)
    assert gateway.fake.requests == []


@pytest.mark.parametrize(
    "body",
    [
        {"mirostat": 0, "typical_p": 1.0, "detokenize": True, "lora_path": None, "options": {}, "stop_regex": []},
        {"kv_transfer_params": None, "custom_params": {}, "best_of": 1, "suffix": "", "length_penalty": 1},
    ],
)
async def test_a_value_that_asks_for_what_happens_anyway_is_accepted(gateway: Answers, body: dict[str, Any]) -> None:
    answered = await gateway.chat(**body)
    assert answered.status_code == 200, answered.text
    assert "warning" not in answered.headers


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OBJECTS_OF_HISTORIES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "assistant", "content": "a"}, *TURNS]}, "messages.0"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [*TURNS, {"role": "assistant", "tool_calls": [CALL]}]}, "messages.1.tool_calls.0"),
    (CHAT, {"messages": [*TURNS, {"role": "assistant", "tool_calls": [CALL]}]}, "messages.1.tool_calls.0.function"),
    (RESPONSES, {"input": [{"type": "message", "role": "user", "content": "a"}]}, "input.0"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "input.0.content.0"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, "input.0"),
    (MESSAGES, {"messages": TURNS}, "messages.0"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "messages.0.content.0"),
    (
        MESSAGES,
        {
            "messages": [
                *TURNS,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {}}]},
            ]
        },
        "messages.1.content.0",
    ),
]
"""Path, body and the place of an object in it."""


def with_member(body: dict[str, Any], place: str, member: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body, whose object at `place` has a member more."""
    copy = json.loads(json.dumps({"max_tokens": 4, **body}))
    found = copy
    for step in place.split("."):
        found = found[int(step) if step.isdecimal() else step]
    found |= member
    return dict(copy)


async def posted(gateway: Answers, path: str, body: dict[str, Any]) -> Any:
    if path == RESPONSES:
        del body["max_tokens"]
    return await gateway.http.post(path, json=body)


@pytest.mark.parametrize(("path", "body", "place"), OBJECTS_OF_HISTORIES)
async def test_an_unknown_member_of_a_history_is_refused_with_its_place(
    gateway: Answers, path: str, body: dict[str, Any], place: str
) -> None:
    refused = await posted(gateway, path, with_member(body, place, {"novel": 1}))
    assert refused.status_code == 400
    assert f"{place}.novel" in refused.text
    null = await posted(gateway, path, with_member(body, place, {"novel": None}))
    assert null.status_code == 200, null.text


@pytest.mark.parametrize(("path", "body", "place"), OBJECTS_OF_HISTORIES)
@pytest.mark.parametrize("name", KEPT_BY_CLIENTS)
async def test_what_clients_keep_beside_a_history_is_warned_of(
    gateway: Answers, path: str, body: dict[str, Any], place: str, name: str
) -> None:
    value = {"type": "ephemeral"} if name == "cache_control" else "kept"
    answered = await posted(gateway, path, with_member(body, place, {name: value}))
    assert answered.status_code == 200, answered.text


async def test_a_part_that_is_no_text_is_refused_for_its_type(gateway: Answers) -> None:
    part = {"type": "video_url", "video_url": {"url": "data:,"}}
    refused = await gateway.chat(messages=[{"role": "user", "content": [part]}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.0")
    assert "'video_url'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("strict", [True, False])
async def test_strict_closes_the_objects_of_a_schema(gateway: Answers, strict: bool) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}}}
    closed = {"additionalProperties": False}
    expected = schema if not strict else {
        **schema, "properties": {"a": {"type": "array", "items": inner | closed}}, **closed
    }  # fmt: skip
    answered = await gateway.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
    )
    assert answered.status_code == 200
    assert "warning" not in answered.headers
    assert json.loads(gateway.asked.sampling.grammar) == expected


async def test_strict_closes_the_parameters_of_a_forced_call(gateway: Answers) -> None:
    function = FUNCTION | {"strict": True}
    answered = await gateway.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert answered.status_code == 200, answered.text
    assert '"additionalProperties": false' in gateway.asked.sampling.grammar


@pytest.mark.parametrize(
    ("body", "format_", "grammar"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "lark", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "lark", 'root ::= "a"'),
        ({"json_schema": {"type": "integer"}}, "json_schema", {"type": "integer"}),
        ({"json_schema": '{"type": "integer"}'}, "json_schema", {"type": "integer"}),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "json_schema", {"type": "object"}),
        (
            {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
            "json_schema",
            {"type": "object", WHITESPACE: ""},
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            "json_schema",
            {"type": "object", WHITESPACE: " ?"},
        ),
        (
            {"guided_json": {"type": "object"}, "guided_whitespace_pattern": " "},
            "json_schema",
            {"type": "object", WHITESPACE: " "},
        ),
    ],
)
async def test_formats_of_other_servers_are_honoured(
    gateway: Answers, body: dict[str, Any], format_: str, grammar: Any
) -> None:
    answered = await gateway.chat(**body)
    assert answered.status_code == 200, answered.text
    asked = gateway.asked.sampling
    assert asked.response_format == format_
    assert (asked.grammar if isinstance(grammar, str) else json.loads(asked.grammar)) == grammar
    check_grammar(SamplingParams(response_format=asked.response_format, grammar=asked.grammar))  # type: ignore[arg-type]


async def test_add_special_tokens(gateway: Answers) -> None:
    """The prompt comes to the conductor as tokens where the conductor would make other tokens of the text."""
    tokens = (await gateway.http.post("/tokenize", json={"prompt": "hello world"})).json()["tokens"]
    for prompt, expected in (("hello world", tokens[1:]), ([5, 6], [5, 6])):
        await gateway.plain(prompt=prompt, add_special_tokens=False)
        assert list(gateway.asked.tokens.token_ids) == expected
        gateway.fake.requests.clear()
    await gateway.chat(add_special_tokens=True)
    chat = list(gateway.asked.tokens.token_ids)
    bare = (await gateway.http.post("/tokenize", json={"messages": TURNS})).json()["tokens"]
    assert chat == [tokens[0], *bare]
    gateway.fake.requests.clear()
    await gateway.plain(prompt="hello world", add_special_tokens=True)
    assert gateway.asked.text == "hello world"


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
            True,
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}, True),
    ],
)
async def test_allowed_tools_are_the_only_ones_that_may_be_called(
    gateway: Answers, choice: dict[str, Any], forced: bool
) -> None:
    tools = [{"type": "function", "function": FUNCTION | {"name": name}} for name in ("f", "g")]
    answered = await gateway.chat(tools=tools, tool_choice=choice)
    assert answered.status_code == 200, answered.text
    assert [tool["function"]["name"] for tool in json.loads(gateway.asked.chat.tools)] == ["g"]
    assert bool(gateway.asked.sampling.grammar) == forced
    choice = json.loads(json.dumps(choice).replace('"g"', '"h"'))
    refused = await gateway.chat(tools=tools, tool_choice=choice)
    assert refused.json()["error"]["param"] == "tool_choice.allowed_tools.tools"
