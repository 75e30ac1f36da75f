"""Anthropic's SDK."""

import anthropic
from cells import MODEL, QUESTION, SCHEMA, URL, cell, check, run

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=300)
ASK = {
    "model": MODEL,
    "max_tokens": 12,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}
TOOL = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}


@cell
def messages():
    answer = client.messages.create(**ASK)
    check(answer.content[0].text.strip(), answer)


@cell
def stream():
    with client.messages.stream(**ASK) as events:
        final = events.get_final_message()
    check(final.content[0].text == client.messages.create(**ASK).content[0].text, final)
    check(final.usage.output_tokens > 0, final.usage)


@cell
def tools():
    ask = {**ASK, "max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "any"}}
    answer = client.messages.create(**ask)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    check(call.input["city"] in ("Paris", "Rome") and answer.stop_reason == "tool_use", answer)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    check(client.messages.create(**{**ASK, "messages": history, "tools": [TOOL]}).stop_reason)


@cell
def structured():
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    text = client.messages.create(**{**ASK, "max_tokens": 60}, output_config=config).content[0].text
    check("Paris" in text or "Rome" in text, text)


@cell
def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=ASK["messages"]).input_tokens
    usage = client.messages.create(**ASK).usage
    check(counted == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage))


@cell
def models():
    check(client.models.list().data[0].id == MODEL)


run()
