"""Instructor by functions and by JSON schemas."""

import instructor
import openai
from cells import MODEL, OPENAI_URL, QUESTION, cell, check, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=OPENAI_URL, api_key="any", timeout=300)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "temperature": 0}


class City(BaseModel):
    """A city."""

    is_capital: bool


@cell
def tools():
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    check(patched.chat.completions.create(**ASK, response_model=City, max_retries=0).is_capital in (True, False))


@cell
def json_schema():
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    check(patched.chat.completions.create(**ASK, response_model=City, max_retries=0).is_capital in (True, False))


@cell
def partial_stream():
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    pieces = list(patched.chat.completions.create_partial(**ASK, response_model=City))
    check(pieces and pieces[-1].is_capital in (True, False), pieces)


run()
