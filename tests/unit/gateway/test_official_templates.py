"""Published chat templates against the table of formats, if there is a folder of them.

`MOONPOOL_CHAT_TEMPLATES=FOLDER python -m pytest tests/unit/gateway/test_official_templates.py` reads every `*.jinja`
below the folder. A template writes past calls as its model does, so what it writes must be read as calls.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import ChatOptions, Tokenizer
from moonpool.base.errors import InvalidRequest
from moonpool.gateway.serving.answer_parser import AnswerParser, AnswerReading, AnswerToolCall
from moonpool.gateway.serving.tokenizer import ParserNames, chosen_format
from moonpool.gateway.serving.tool_set import ToolSet, tool_definition

from .spoken import SPOKEN

FOLDER = os.environ.get("MOONPOOL_CHAT_TEMPLATES", "")
FILES = sorted(Path(FOLDER).rglob("*.jinja")) if FOLDER else []
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name."}, "days": {"type": "integer", "description": "n"}},
    "required": ["city"],
}
DEFINITIONS = [tool_definition("tools.0", "weather", "The weather.", PARAMETERS)]
ARGUMENTS = {"city": "a </parameter> b\nc", "days": 2}
USER = {"role": "user", "content": "How is the weather?"}
CALL = {"id": "abcDEF123", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}


SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


def tokenizer_of(source: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    return Tokenizer(backend, {"default": source}, SPECIAL)


def past_call(made: Tokenizer) -> str:
    """What a template writes for an assistant's turn that is a call, and for what follows.

    Raises:
        InvalidRequest: the template refuses such a turn.
    """
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "SUNNY"}
    whole = made.render_chat([USER, turn, result], DEFINITIONS).text
    asked = made.render_chat([USER], DEFINITIONS).text
    if not whole.startswith(asked):  # the prompt of an answer opens thinking, or says that there is none
        asked = made.render_chat([USER], DEFINITIONS, ChatOptions(add_generation_prompt=False)).text
    same = next((at for at, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
    return whole[same:].partition("SUNNY")[0]


def read_calls(made: Tokenizer, text: str) -> list[tuple[str, Any]]:
    """The calls in a text of the template's model."""
    found = chosen_format(made, ParserNames())
    assert found.row is not None, found.note
    parser = AnswerParser(AnswerReading(ToolSet(DEFINITIONS), found.row, found.reasoning))
    parser.start("r1")
    parts = parser.parse_full(text, 0)
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, AnswerToolCall)]


@pytest.mark.parametrize("name", SPOKEN)
def test_what_a_template_writes_is_read(name: str) -> None:
    """The short templates of the tests, as the published ones."""
    made = tokenizer_of(SPOKEN[name].template)
    assert read_calls(made, past_call(made)) == [("weather", ARGUMENTS)]


@pytest.mark.skipif(not FILES, reason="needs a folder of chat templates: MOONPOOL_CHAT_TEMPLATES")
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_published_template_is_of_the_table(path: Path) -> None:
    made = tokenizer_of(path.read_text(encoding="utf-8"))
    try:
        text = past_call(made)
    except InvalidRequest as error:
        pytest.skip(f"refuses a call: {error}")
    if "weather" not in text:
        pytest.skip("shows no past calls")
    assert read_calls(made, text) == [("weather", ARGUMENTS)], text
