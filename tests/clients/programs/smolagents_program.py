"""smolagents' model, with and without tools."""

from cells import MODEL, OPENAI_URL, QUESTION, cell, check, run
from smolagents import OpenAIModel, tool

model = OpenAIModel(model_id=MODEL, api_base=OPENAI_URL, api_key="any", temperature=0, max_tokens=60)
ASK = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: name of the city.
    """
    return f"sunny in {city}"


@cell
def generate():
    check(model.generate(ASK).content.strip())


@cell
def stream():
    check("".join(piece.content or "" for piece in model.generate_stream(ASK)))


@cell
def tools():
    (call,) = model.generate(ASK, tools_to_call_from=[weather]).tool_calls
    check(call.function.name == "weather", call)


run()
