"""OpenAI's SDK: every interface, whole and streamed."""

import asyncio
import json
import time

import openai
from cells import MODEL, OPENAI_URL, QUESTION, SCHEMA, WEATHER, cell, check, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=OPENAI_URL, api_key="any", max_retries=0, timeout=300)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
ENDPOINT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": WEATHER}]


class City(BaseModel):
    city: str
    is_capital: bool


@cell
def chat():
    answer = client.chat.completions.create(**ASK)
    check(answer.choices[0].message.content.strip(), answer)
    check(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage)


@cell
def stream():
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    check(text == client.chat.completions.create(**ASK).choices[0].message.content, text)
    check(chunks[-1].usage.completion_tokens > 0, chunks[-1])
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    check(len(reasons) == 1, reasons)


@cell
def several_answers():
    ask = {**ASK, "temperature": 0.7}
    chunks = list(client.chat.completions.create(**ask, n=2, stop=["\n"], stream=True))
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    check(sorted(ends) == [0, 1], ends)


@cell
def logprobs():
    content = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    check(content and len(content[0].top_logprobs) == 2, content)


@cell
def tools():
    ask = {**ASK, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"}
    message = client.chat.completions.create(**ask).choices[0].message
    (call,) = message.tool_calls
    check(json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call)
    history = [*ASK["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    check(client.chat.completions.create(**{**ASK, "messages": history, "tools": TOOLS}).choices[0].finish_reason)
    with client.chat.completions.stream(**ask) as events:
        final = events.get_final_completion().choices[0].message
    check(final.tool_calls[0].function.arguments == call.function.arguments, final)


@cell
def structured():
    parsed = client.chat.completions.parse(**{**ASK, "max_tokens": 60}, response_format=City).choices[0].message.parsed
    check(isinstance(parsed, City), parsed)
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    text = client.chat.completions.create(**{**ASK, "max_tokens": 60}, response_format=schema)
    check(json.loads(text.choices[0].message.content)["city"] in ("Paris", "Rome"), text)


@cell
def completions():
    ask = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**ask, echo=True, logprobs=1).choices[0]
    check(whole.text.startswith(ask["prompt"]) and "Paris" in whole.text, whole.text)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
    check(ask["prompt"] + text == whole.text, text)


@cell
def embeddings():
    found = client.embeddings.create(model=MODEL, input=["a river", "a house"])
    check(len(found.data) == 2 and abs(sum(x * x for x in found.data[0].embedding) - 1) < 1e-3)


@cell
def responses():
    ask = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(**ask, input=QUESTION)
    check(first.output_text.strip(), first)
    with client.responses.stream(**ask, input="Where is it?", previous_response_id=first.id) as events:
        second = next(event.response for event in events if event.type in ("response.completed", "response.incomplete"))
    check(second.previous_response_id == first.id, second)
    check(second.usage.input_tokens > first.usage.input_tokens, second.usage)
    check(client.responses.retrieve(first.id).output_text == first.output_text)
    client.responses.delete(first.id)


@cell
def background():
    ask = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "background": True}
    response = client.responses.create(**ask, input=QUESTION)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.2)
        response = client.responses.retrieve(response.id)
    check(response.output_text.strip(), response)
    ended = client.responses.cancel(client.responses.create(**{**ask, "max_output_tokens": 2000}, input=QUESTION).id)
    check(ended.status == "cancelled", ended)


@cell
def conversations():
    conversation = client.conversations.create()
    ask = {"model": MODEL, "max_output_tokens": 8, "temperature": 0, "conversation": conversation.id}
    for question in (QUESTION, "And of Italy?"):
        client.responses.create(**ask, input=question)
    check(len(client.conversations.items.list(conversation.id).data) == 4)


@cell
def responses_tools():
    function = {"type": "function", **WEATHER, "strict": True}
    ask = {"model": MODEL, "max_output_tokens": 60, "temperature": 0, "tools": [function]}
    (call,) = client.responses.create(**ask, input=QUESTION, tool_choice="required").output
    check(json.loads(call.arguments)["city"] in ("Paris", "Rome"), call)
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, max_output_tokens=60)
    check(isinstance(parsed.output_parsed, City), parsed)


@cell
def asyncio_client():
    async def many():
        async with openai.AsyncOpenAI(base_url=OPENAI_URL, api_key="any", timeout=300) as many_at_once:
            return await asyncio.gather(*(many_at_once.chat.completions.create(**ASK) for _ in range(4)))

    check(len({answer.choices[0].message.content for answer in asyncio.run(many())}) == 1)


@cell
def models():
    check(MODEL in [model.id for model in client.models.list()])


@cell
def batches():
    lines = [{"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": ASK} for number in range(3)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    until = time.monotonic() + 300
    while batch.status not in ("completed", "failed"):
        check(time.monotonic() < until, batch)
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    check((batch.status, batch.request_counts.completed) == ("completed", 3), batch)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    check([answer["custom_id"] for answer in answers] == ["0", "1", "2"], answers)
    check(all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers), answers)
    check(batch.id in [each.id for each in client.batches.list()])
    check(all(client.files.delete(each).deleted for each in (file.id, batch.output_file_id)))


run()
