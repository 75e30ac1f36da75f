"""LiteLLM by its providers of OpenAI's, Anthropic's and vLLM's form."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not fetched

import litellm
from cells import MODEL, OPENAI_URL, QUESTION, URL, WEATHER, cell, check, run

ASK = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 40,
    "temperature": 0,
    "api_key": "any",
    "timeout": 300,
}
TOOLS = [{"type": "function", "function": WEATHER}]


def by(provider):
    return {**ASK, "model": f"{provider}/{MODEL}", "api_base": OPENAI_URL}


@cell
def openai():
    check(litellm.completion(**by("openai")).choices[0].message.content.strip())


@cell
def hosted_vllm():
    chunks = list(litellm.completion(**by("hosted_vllm"), stream=True))
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@cell
def tools():
    (call,) = litellm.completion(**by("openai"), tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    check("city" in json.loads(call.function.arguments), call)


@cell
def text_completion():
    ask = {"model": f"text-completion-openai/{MODEL}", "api_base": OPENAI_URL, "api_key": "any"}
    check(litellm.text_completion(**ask, prompt="The capital of France is", max_tokens=4).choices[0].text)


@cell
def responses():
    ask = {"model": f"openai/{MODEL}", "api_base": OPENAI_URL, "api_key": "any", "max_output_tokens": 12}
    first = litellm.responses(**ask, input=QUESTION)
    check(litellm.responses(**ask, input="Where?", previous_response_id=first.id).usage.input_tokens > 0)


@cell
def anthropic():
    ask = {**ASK, "model": f"anthropic/{MODEL}", "api_base": URL}
    del ask["temperature"]
    check(litellm.completion(**ask).choices[0].message.content)


@cell
def embedding():
    found = litellm.embedding(model=f"openai/{MODEL}", input=["a river"], api_base=OPENAI_URL, api_key="any")
    check(found.data)


run()
