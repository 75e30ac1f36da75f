"""NVIDIA's load program, which times the tokens of a stream."""

import json
import os
from pathlib import Path

from cells import MODEL, QUESTION, URL, cell, check, command, run


@cell
def profile():
    Path("prompts.jsonl").write_text(f"{json.dumps({'text': QUESTION})}\n" * 4, encoding="utf-8")
    words = ("--url", URL, "--model", MODEL, "--endpoint-type", "chat", "--streaming", "--ui", "none")
    given = ("--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn", "--extra-inputs", "max_tokens:8")
    counted = ("--use-server-token-count", "--tokenizer", os.environ["CLIENTS_TOKENIZER"])
    asked = ("--request-count", "4", "--concurrency", "2", "--output-artifact-dir", "told")
    command("aiperf", "profile", *words, *given, *counted, *asked)
    (told,) = Path("told").rglob("profile_export_aiperf.json")
    found = json.loads(told.read_text(encoding="utf-8"))
    check(found["request_count"]["avg"] == 4, found)
    check(0 < found["time_to_first_token"]["avg"] <= found["request_latency"]["avg"], found)


run()
