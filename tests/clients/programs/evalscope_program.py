"""EvalScope's load program."""

from pathlib import Path

from cells import MODEL, OPENAI_URL, QUESTION, cell, check, command, run


@cell
def perf():
    Path("prompts.txt").write_text(f"{QUESTION}\n" * 4, encoding="utf-8")
    words = ("--url", f"{OPENAI_URL}/chat/completions", "--model", MODEL, "--api", "openai", "--number", "4")
    given = ("--dataset", "line_by_line", "--dataset-path", "prompts.txt", "--max-tokens", "8", "--parallel", "2")
    told = command("evalscope", "perf", *words, *given, "--outputs-dir", "perf")
    check("100" in told, told[-300:])


run()
