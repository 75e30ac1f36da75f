"""SGLang's load program."""

import json
import os
import sys
from pathlib import Path

from cells import MODEL, URL, cell, check, command, run


def bench(backend):
    """Four requests, two at a time."""
    where = ("--backend", backend, "--base-url", URL, "--model", MODEL, "--tokenizer", os.environ["CLIENTS_TOKENIZER"])
    asked = (
        "--dataset-name",
        "random-ids",
        "--random-input-len",
        "16",
        "--random-output-len",
        "8",
        "--random-range-ratio",
        "1",
    )
    counted = ("--num-prompts", "4", "--max-concurrency", "2", "--disable-tqdm", "--output-file", f"{backend}.jsonl")
    command(sys.executable, "-m", "sglang.bench_serving", *where, *asked, *counted, HF_HUB_OFFLINE="1")
    told = json.loads(Path(f"{backend}.jsonl").read_text(encoding="utf-8"))
    check((told["completed"], told["total_output_tokens"]) == (4, 32), told)


@cell
def chat():
    bench("sglang-oai-chat")


@cell
def completions():
    bench("sglang-oai")


run()
