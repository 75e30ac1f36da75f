"""TTFT and TPOT of an 8B shape at batch 1 and 64, beside vLLM and SGLang where they can be imported.

All get the same model and the same prompts, one engine after the other. Ours is measured through all services, the
others as libraries. An engine that cannot be imported or does not load the model is skipped, and says why.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine import Answers, Ask, same_tokens, through_services
from benchmarks.frame import Skipped
from benchmarks.peers.engines import NAMES, Environment, running
from moonpool.base.checkpoint import load_config
from tools.gpu_check.serving import (
    ENDING_S,
    LARGE,
    TINY_LLAMA,
    CheckedStack,
    Prompts,
    checkpoint,
    plan_of,
    run_until,
)
from tools.gpu_check.where import Figures, Where, stage_main

LIMIT_S = 300
STDERR = 2
OTHERS = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent together.

    Attributes:
        size: how many.
        prompt: each prompt's tokens.
        answer: each answer's tokens.
    """

    size: int
    prompt: int
    answer: int = 128


BATCHES, TINY_BATCHES = (Batch(1, 2048), Batch(64, 128)), (Batch(1, 64, 8), Batch(4, 32, 8))
ROUNDS, TINY_ROUNDS = 3, 1


def check(where: Where, figures: Figures) -> None:
    """Measure ours and each other engine; nothing is measured where there is none."""
    others = {}
    environment = Environment(where.out, print, packages={}, installed={})
    for name in OTHERS:
        try:
            others[name] = environment.python(name)
        except Skipped as reason:
            figures[NAMES[name]] = f"skipped: {reason}"
    if not others:
        return
    end = time.monotonic() + where.limit_s - ENDING_S
    served = TINY_LLAMA if where.tiny else LARGE
    model = checkpoint(where, served, figures)
    vocab_size, rounds = load_config(model).vocab_size, TINY_ROUNDS if where.tiny else ROUNDS
    batches = TINY_BATCHES if where.tiny else BATCHES
    with CheckedStack(plan_of(where, served, model, "beside-others"), end - time.monotonic()) as stack:

        def ours(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, Answers]:
            found: list[tuple[float, Answers]] = []

            async def asked() -> None:
                found.append(await through_services(stack.address, prompts, tokens))

            run_until(end - time.monotonic(), asked(), lambda: f"asking for {len(prompts)} answers")
            return found[0]

        answers = measure("Moonpool", ours, batches, rounds, Prompts(vocab_size), figures)
    stack.expect_ended_in_order()
    device, threads = "cuda" if where.on_gpu else "cpu", len(os.sched_getaffinity(0))
    for name, python in others.items():
        try:
            with running(name, python, model, threads, served.dtype, device, log=STDERR) as peer:
                figures[NAMES[name]] = peer.version
                found = measure(NAMES[name], peer.answer, batches, rounds, Prompts(vocab_size), figures)
            figures[f"{NAMES[name]}: share of Moonpool's tokens"] = round(same_tokens(answers, found), 3)
        except Skipped as reason:
            figures[NAMES[name]] = f"skipped: {reason}"


def measure(
    name: str, ask: Ask, batches: tuple[Batch, ...], rounds: int, prompts: Prompts, figures: Figures
) -> Answers:
    """Tell medians of rounds, the first round left out; return all answers.

    A batch's TTFT is the time of answers of one token. TPOT is the further time that whole answers take, a token.
    """
    answers: Answers = []
    for batch in batches:
        first_s, tpot_s = [], []
        for _ in range(rounds + 1):
            short, _ = ask([prompts(batch.prompt) for _ in range(batch.size)], 1)
            whole, found = ask([prompts(batch.prompt) for _ in range(batch.size)], batch.answer)
            first_s.append(short)
            tpot_s.append((whole - short) / (batch.answer - 1))
            answers += found
        about = f"{name}, batch {batch.size} of {batch.prompt} tokens"
        figures[f"{about}: TTFT, ms"] = round(1e3 * statistics.median(first_s[1:]), 2)
        figures[f"{about}: TPOT, ms"] = round(1e3 * statistics.median(tpot_s[1:]), 3)
    return answers


if __name__ == "__main__":
    stage_main("other_engines", check)
