"""vLLM's load program, as `vllm bench serve` runs it; that command itself needs CUDA's packages to be imported."""

import json
import os
import sys
from pathlib import Path

from cells import MODEL, URL, cell, check, command, run

SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TOKENS = 8


def bench(backend, path):
    """Four requests, two at a time. Each chunk but the first has a latency; half a character makes no chunk."""
    where = ("--backend", backend, "--base-url", URL, "--endpoint", path, "--model", MODEL)
    asked = ("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", str(TOKENS))
    kept = ("--save-result", "--save-detailed", "--result-filename", "told.json", "--disable-tqdm")
    counted = ("--tokenizer", os.environ["CLIENTS_TOKENIZER"], "--num-prompts", "4", "--max-concurrency", "2")
    command(sys.executable, "-c", SERVE, *where, *asked, *counted, *kept, seconds=420, HF_HUB_OFFLINE="1")
    told = json.loads(Path("told.json").read_text(encoding="utf-8"))
    check((told["completed"], told["failed"]) == (4, 0), told["errors"])
    chunks = [len(each) + 1 for each in told["itls"]]
    counts = list(zip(chunks, told["output_lens"], strict=True))
    check(all(1 < chunk <= length for chunk, length in counts), counts)


@cell
def chat():
    bench("openai-chat", "/v1/chat/completions")


@cell
def completions():
    bench("openai", "/v1/completions")


run()
