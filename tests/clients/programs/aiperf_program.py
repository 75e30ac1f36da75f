"""NVIDIA's load program, which counts inter-token latencies from the stream."""

import json
import os
from pathlib import Path

from cells import MODEL, QUESTION, URL, cell, check, command, run


@cell
def profile():
    Path("prompts.jsonl").write_text(f"{json.dumps({'text': QUESTION})}\n" * 4, encoding="utf-8")
    words = ("--url", URL, "--model", MODEL, "--endpoint-type", "chat", "--streaming", "--ui", "none")
    given = ("--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn", "--extra-inputs", "max_tokens:8")
    asked = ("--request-count", "4", "--concurrency", "2", "--tokenizer", os.environ["CLIENTS_TOKENIZER"])
    command("aiperf", "profile", *words, *given, *asked, "--output-artifact-dir", "told")
    (told,) = Path("told").rglob("profile_export_aiperf.json")
    found = json.loads(told.read_text(encoding="utf-8"))
    check(found["request_count"]["avg"] == 4, found)
    check(found["inter_token_latency"]["avg"] > 0, found)


run()
