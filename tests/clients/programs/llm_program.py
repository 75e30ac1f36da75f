"""llm, the command line."""

import os
from pathlib import Path

from cells import MODEL, OPENAI_URL, QUESTION, cell, check, command, run

models = Path("llm")
models.mkdir(exist_ok=True)
(models / "extra-openai-models.yaml").write_text(
    f"- model_id: served\n  model_name: {MODEL}\n  api_base: {OPENAI_URL}\n", encoding="utf-8"
)


@cell
def prompt():
    environment = {"LLM_USER_PATH": os.path.abspath("llm"), "OPENAI_API_KEY": "any"}
    bounded = ("-o", "max_tokens", "12", "-o", "temperature", "0")
    told = command("llm", "-m", "served", *bounded, QUESTION, **environment)
    check(told.strip(), told)


run()
