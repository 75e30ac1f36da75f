"""GuideLLM, the vLLM project's load program."""

import json
import os
from pathlib import Path

from cells import MODEL, URL, cell, check, command, run


@cell
def concurrent():
    words = ("--backend", f"kind=openai_http,target={URL},model={MODEL}", "--profile", "kind=concurrent,streams=2")
    asked = (
        "--constraint",
        "kind=max_requests,count=4",
        "--data",
        "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
    )
    counted = ("--tokenizer", f"kind=hf_auto,model={os.environ['CLIENTS_TOKENIZER']}")
    command(
        "guidellm",
        "run",
        *words,
        *asked,
        *counted,
        "--output",
        "kind=json,path=told.json",
        "--disable-progress",
        seconds=600,
    )
    (told,) = json.loads(Path("told.json").read_text(encoding="utf-8"))["benchmarks"]
    check(told["metrics"]["request_totals"]["successful"] == 4, told["metrics"]["request_totals"])


run()
