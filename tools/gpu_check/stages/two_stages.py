"""Prefill in two pipeline stages on one GPU gives the same tokens as one stage; hidden states go through the host."""

import time
from collections.abc import Sequence

from moonpool.base.checkpoint import load_config
from moonpool.client import AsyncClient
from tools.gpu_check.serving import (
    ENDING_S,
    EXACT,
    TINY_EXACT,
    Answer,
    CheckedStack,
    Prompts,
    ask,
    checkpoint,
    greedy,
    known_part,
    plan_of,
    run_until,
)
from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 200
BESIDE_NEXT = True
"""What is right must be right also while other processes use the GPU."""
ANSWER = 24
LEAST_KNOWN = 0.5
"""Of all tokens, this share must be told apart from the second best, or the comparison says little."""


def check(where: Where, figures: Figures) -> None:
    """Ask the same with one stage and with two."""
    end = time.monotonic() + where.limit_s - ENDING_S
    served = TINY_EXACT if where.tiny else EXACT
    model = checkpoint(where, served, figures)
    lengths = (40, 300) if where.tiny else (100, 700, 2048, 2048, 2048)
    prompts = list(map(Prompts(load_config(model).vocab_size), lengths))
    # Chunks have the same borders in both, also where steps take more tokens by default. Graphs take time to capture.
    extra = {"prefill": ["--max-num-batched-tokens", "512"], "decode": ["--set", "cuda_graphs=off"]}
    plan = plan_of(where, served, model, "two-stages", extra)
    with CheckedStack(plan, end - time.monotonic()) as stack:
        in_one = asked(stack, prompts, "one stage", end, figures)
        began, devices = time.monotonic(), ",".join([f"{where.device}:0"] * 2)
        restart(stack, "prefill-0", ["--pipeline-parallel-size", "2", "--device", devices], end)
        figures["start of two stages, s"] = round(time.monotonic() - began, 1)
        in_two = asked(stack, prompts, "two stages", end, figures)
    stack.expect_ended_in_order()
    compare(prompts, in_one, in_two, figures)


def compare(prompts: Sequence[list[int]], in_one: Sequence[Answer], in_two: Sequence[Answer], figures: Figures) -> None:
    """Compare answers token by token, as far as the first answers are certain.

    Raises:
        CheckError: they differ, or too few tokens are certain.
    """
    known = [known_part(answer.result) for answer in in_one if answer.result is not None]
    figures["tokens compared"] = sum(map(len, known))
    for prompt, tokens, answer in zip(prompts, known, in_two, strict=True):
        expect(
            answer.tokens[: len(tokens)] == tokens,
            f"a prompt of {len(prompt)} tokens: one gave {tokens}, two gave {answer.tokens}",
        )
    share = sum(map(len, known)) / (ANSWER * len(prompts))
    expect(share > LEAST_KNOWN, f"only {share:.0%} of the tokens are certain")


def asked(stack: CheckedStack, prompts: Sequence[list[int]], name: str, end: float, figures: Figures) -> list[Answer]:
    """Ask one after the other; with a salt, so that no KV is cached."""
    answers: list[Answer] = []

    async def all_of_them() -> None:
        async with AsyncClient(stack.address) as client:
            for prompt in prompts:
                answers.append(await ask(client, prompt, greedy(ANSWER, logprobs=2), cache_salt=name))

    run_until(end - time.monotonic(), all_of_them(), lambda: f"answer {len(answers) + 1} with {name}")
    figures[f"TTFT {len(prompts[-1])} with {name}, ms"] = round(min(answer.ttft_ms for answer in answers[-2:]), 2)
    return answers


def restart(stack: CheckedStack, service: str, arguments: Sequence[str], end: float) -> None:
    """Start a service of the stack again, with further arguments, and wait until it has joined."""
    old = stack.services[service]
    expect(stack.stop_one(old.id) == 0, f"{old.id} did not end in order\n{old.log_tail()}")
    stack.spawn(old.kind, old.id, [*old.arguments, *arguments]).wait_ready(end - time.monotonic())
    stack.wait_joined(end - time.monotonic())


if __name__ == "__main__":
    stage_main("two_stages", check)
