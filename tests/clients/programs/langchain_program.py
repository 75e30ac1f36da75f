"""LangChain's models of OpenAI and Anthropic, and an agent's loop."""

from cells import MODEL, OPENAI_URL, QUESTION, URL, cell, check, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

model = ChatOpenAI(base_url=OPENAI_URL, api_key="any", model=MODEL, temperature=0, max_tokens=40, timeout=300)


class City(BaseModel):
    """A city."""

    city: str
    is_capital: bool


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@cell
def invoke():
    check(model.invoke(QUESTION).content.strip())


@cell
def stream():
    check("".join(chunk.content for chunk in model.stream(QUESTION)) == model.invoke(QUESTION).content)


@cell
def batch():
    check(len(model.batch([QUESTION, QUESTION])) == 2)


@cell
def structured():
    for method in ("json_schema", "function_calling"):
        check(isinstance(model.with_structured_output(City, method=method).invoke(QUESTION), City), method)


@cell
def tools():
    forced = model.bind_tools([weather], tool_choice="any").invoke([HumanMessage(QUESTION)])
    (call,) = forced.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    check(model.bind_tools([weather]).invoke([HumanMessage(QUESTION), forced, result]).response_metadata)


@cell
def responses():
    newer = ChatOpenAI(base_url=OPENAI_URL, api_key="any", model=MODEL, use_responses_api=True, max_tokens=40)
    first = newer.invoke(QUESTION)
    again = newer.invoke("Where is it?", previous_response_id=first.response_metadata["id"])
    check(again.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"], again.usage_metadata)


@cell
def anthropic():
    claude = ChatAnthropic(base_url=URL, api_key="any", model=MODEL, max_tokens=40, timeout=300)
    check("".join(chunk.text for chunk in claude.stream(QUESTION)))
    check(claude.bind_tools([weather], tool_choice="any").invoke(QUESTION).tool_calls)


@cell
def embeddings():
    found = OpenAIEmbeddings(base_url=OPENAI_URL, api_key="any", model=MODEL, check_embedding_ctx_length=False)
    check(len(found.embed_documents(["a river", "a house"])) == 2)


run()
