"""OpenCode edits a file."""

import json
from pathlib import Path

from cells import MODEL, OPENAI_URL, TASK, cell, check_edit, run

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": OPENAI_URL, "apiKey": "any"},
    "models": {MODEL: {"name": MODEL, "tool_call": True}},
}
SETTINGS = {
    "provider": {"moonpool": PROVIDER},
    "model": f"moonpool/{MODEL}",
    "small_model": f"moonpool/{MODEL}",
    "autoupdate": False,
    "share": "disabled",
}


@cell
def edit():
    settings = Path("opencode.json").absolute()
    settings.write_text(json.dumps(SETTINGS), encoding="utf-8")
    check_edit("opencode", "run", TASK, OPENCODE_CONFIG=str(settings), OPENCODE_DISABLE_MODELS_FETCH="1")


run()
