"""OpenAI's Agents SDK by chats and by responses: an answer, structured output, a tool, a stored conversation."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import MODEL, OPENAI_URL, QUESTION, cell, check, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=60)


class City(BaseModel):
    is_capital: bool


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def asked(kind, question=QUESTION, session=None, streamed=False, **settings):
    async def conversation():
        async with AsyncOpenAI(base_url=OPENAI_URL, api_key="any", timeout=300) as client:
            agent = Agent(name="helper", model=kind(model=MODEL, openai_client=client), **settings)
            kept = session(client) if session is not None else None
            if streamed:
                result = Runner.run_streamed(agent, question)
                events = [event async for event in result.stream_events()]
                return result, events
            first = await Runner.run(agent, question, session=kept)
            return first, await Runner.run(agent, "And of Italy?", session=kept) if kept is not None else None

    return asyncio.run(conversation())


def answers(kind):
    check(asked(kind, model_settings=SETTINGS)[0].final_output.strip())
    check(isinstance(asked(kind, model_settings=SETTINGS, output_type=City)[0].final_output, City))
    check(asked(kind, model_settings=SETTINGS, streamed=True)[1])


def calls(kind):
    forced = ModelSettings(temperature=0, max_tokens=60, tool_choice="required")
    found = asked(kind, model_settings=forced, tools=[weather], tool_use_behavior="stop_on_first_tool")[0]
    check(found.final_output.startswith("sunny in "), found.final_output)


@cell
def chat():
    answers(OpenAIChatCompletionsModel)


@cell
def chat_tools():
    calls(OpenAIChatCompletionsModel)


@cell
def responses():
    answers(OpenAIResponsesModel)


@cell
def responses_tools():
    calls(OpenAIResponsesModel)


@cell
def conversation():
    kept = lambda client: OpenAIConversationsSession(openai_client=client)  # noqa: E731
    _, second = asked(OpenAIResponsesModel, session=kept, model_settings=SETTINGS)
    check(len(second.to_input_list()) >= 2, second)


run()
