"""A gateway in front of a scripted model, which edits a file as coding agents ask: real HTTP, no weights.

`python -m tests.clients.scripted --ready FILE` writes the address to FILE and serves until it is stopped. The model
looks at the functions it is offered. It calls the first one that it knows, then says that it is done. It writes as a
family of models does, which `--speaks` names: thoughts, calls and text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.config import GatewayConfig
from moonpool.gateway.http_server import http_serving
from moonpool.gateway.routes import make_app
from moonpool.gateway.service import allowed_hosts, body_reader, gateway_context, response_store
from moonpool.gateway.serving.tokenizer import GatewayTokenizer, ParserNames
from moonpool.v1 import conductor_pb2 as pb
from tests.unit.gateway.spoken import SPOKEN, Call

MODEL, MODEL_TOKENS = "scripted", 1_000_000
FILE, WRONG, RIGHT = "greet.py", "helo", "hello"
"""The file that agents are asked to mend, and what is wrong in it."""
COMMAND = f"sed -i s/{WRONG}/{RIGHT}/ {FILE}"
SEARCH_REPLACE = (
    f"{FILE}\n```python\n<<<<<<< SEARCH\nprint('{WRONG}')\n=======\nprint('{RIGHT}')\n>>>>>>> REPLACE\n```\n"
)
DONE = "Done: the greeting is right now."
_PIECE_CHARS = 12

Arguments = dict[str, Any]
CALLS: dict[str, Callable[[str], Arguments]] = {
    "exec_command": lambda folder: {"cmd": COMMAND, "workdir": folder},  # Codex
    "shell_command": lambda folder: {"command": COMMAND, "workdir": folder},
    "shell": lambda folder: {"command": ["bash", "-c", COMMAND], "workdir": folder},
    "Edit": lambda folder: {"file_path": f"{folder}/{FILE}", "old_string": WRONG, "new_string": RIGHT},  # Claude Code
    "edit": lambda folder: {"filePath": f"{folder}/{FILE}", "oldString": WRONG, "newString": RIGHT},  # OpenCode
    "bash": lambda folder: {"command": COMMAND},  # mini-swe-agent
}
"""Arguments of the functions that the model knows, by name. Agents want a file read before it is edited (`READS`)."""
READS: dict[str, tuple[str, Callable[[str], Arguments]]] = {
    "Edit": ("Read", lambda folder: {"file_path": f"{folder}/{FILE}"}),
    "edit": ("read", lambda folder: {"filePath": f"{folder}/{FILE}"}),
}
FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent is told that its task is done."""


SPEAKS = ("hermes", "qwen3_coder", "kimi_k2", "glm45", "openai")
"""Families of models: rows of the table of formats."""
THOUGHT = "I look at the file first."


def says(chat: pb.ChatPrompt, folder: str, family: str = SPEAKS[0]) -> str:
    """What the model answers to a conversation."""
    answer = _answer(chat, folder)
    spoken = SPOKEN[family]
    begin, end = spoken.thought or ("", "")
    thought = f"{begin}{THOUGHT}{end}" if begin else ""
    before, behind = spoken.text
    return thought + (f"{before}{answer}{behind}" if isinstance(answer, str) else spoken.write([answer]))


def _answer(chat: pb.ChatPrompt, folder: str) -> str | Call:
    """A text, or a call."""
    tools = json.loads(chat.tools) if chat.tools else []
    names = [tool["function"]["name"] for tool in tools]
    known = next((name for name in CALLS if name in names), "")
    made = [call.name for turn in chat.messages for call in turn.tool_calls]
    if known in READS and READS[known][0] not in made:
        name, arguments = READS[known]
        return name, arguments(folder)
    if known and known not in made:
        return known, CALLS[known](folder)
    if known == "bash" and made.count("bash") == 1 and any("COMPLETE_TASK" in turn.content for turn in chat.messages):
        return "bash", {"command": FINISH}
    if any("SEARCH" in turn.content and "REPLACE" in turn.content for turn in chat.messages):
        return SEARCH_REPLACE
    return DONE


def scripted_conductor(folder: str, family: str) -> FakeConductor:
    """A conductor whose model edits the file in `folder`, and speaks as a family does."""

    def script(request: pb.GenerateRequest) -> Sequence[pb.GenerateResponse]:
        pieces = re.findall(rf"(?s).{{1,{_PIECE_CHARS}}}", says(request.chat, folder, family))
        messages = answer(range(1, len(pieces) + 1), request_id=request.request_id, prompt_tokens=7)
        for message, piece in zip(messages[1:-1], pieces, strict=True):
            message.delta.text = piece
        return messages

    fake = FakeConductor(script)
    fake.state.model.name, fake.state.model.max_tokens = MODEL, MODEL_TOKENS
    return fake


async def serve(folder: str, ready: Path, family: str) -> None:
    """Serve until SIGTERM."""
    config = GatewayConfig(conductor="scripted:1", model=MODEL, listen="127.0.0.1:0")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    with ThreadPoolExecutor(1) as threads, response_store(config) as responses:
        backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
        texts = GatewayTokenizer(
            MODEL, Tokenizer(backend, {"default": SPOKEN[family].template}), threads, ParserNames()
        )
        client = scripted_conductor(folder, family).async_client()
        bodies = body_reader(config, threads)
        context = gateway_context(config, client, texts, PrometheusMetrics("gateway"), responses, bodies, threads)
        app = make_app(context, allowed_hosts(config))
        async with http_serving(app, config) as (_, port):
            written = ready.with_suffix(".new")
            written.write_text(f"http://127.0.0.1:{port}")
            written.rename(ready)
            await stopping.wait()


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready", type=Path, required=True, help="file that gets the address")
    parser.add_argument("--folder", required=True, help="folder with the file that is edited")
    parser.add_argument("--speaks", choices=SPEAKS, default=SPEAKS[0], help="the family that the model is of")
    options = parser.parse_args(arguments)
    asyncio.run(serve(options.folder, options.ready, options.speaks))


if __name__ == "__main__":
    main(sys.argv[1:])
