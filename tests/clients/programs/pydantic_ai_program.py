"""PydanticAI: an agent with a tool, structured output in three ways, and a stream."""

import asyncio

from cells import MODEL, OPENAI_URL, QUESTION, URL, cell, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=OPENAI_URL, api_key="any")
model = OpenAIChatModel(MODEL, provider=provider)
LIMITS = {"max_tokens": 60, "temperature": 0.0, "timeout": 300}


class City(BaseModel):
    """A city."""

    is_capital: bool


@cell
def agent():
    check(Agent(model, model_settings=LIMITS).run_sync(QUESTION).output.strip())


@cell
def structured():
    for kind in (City, ToolOutput(City), NativeOutput(City)):
        check(isinstance(Agent(model, output_type=kind, model_settings=LIMITS).run_sync(QUESTION).output, City), kind)


@cell
def stream():
    async def text():
        async with Agent(model, model_settings=LIMITS).run_stream(QUESTION) as answer:
            return [piece async for piece in answer.stream_text(delta=True)]

    check("".join(asyncio.run(text())))


@cell
def tool():
    asked = []
    helped = Agent(model, output_type=[City], model_settings=LIMITS)

    @helped.tool_plain
    def weather() -> str:
        """The weather."""
        asked.append("weather")
        return "sunny"

    check(isinstance(helped.run_sync(QUESTION).output, City))


@cell
def responses():
    newer = OpenAIResponsesModel(MODEL, provider=provider)
    check(isinstance(Agent(newer, output_type=City, model_settings=LIMITS).run_sync(QUESTION).output, City))


@cell
def anthropic():
    claude = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="any"))
    settings = {"max_tokens": 60, "timeout": 300}
    check(Agent(claude, model_settings=settings).run_sync(QUESTION).output)


run()
