"""Under load with cancelled requests answers stay right; then no resource is held (`moonpool check`)."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import MoonpoolError, Overloaded
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.check import wait_at_rest
from moonpool.cli.load_generator.loops import RequestOutcome
from moonpool.cli.load_generator.summary import summarize
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
    gaps,
    gpu_memory_mib,
    greedy,
    known_part,
    plan_of,
    run_until,
)
from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 200
SEED = 60
CLIENTS, TINY_CLIENTS = 24, 4
LOAD_S, TINY_LOAD_S = 60.0, 3.0
LONGEST, TINY_LONGEST = 4000, 300
KNOWN, ANSWER = 8, 24
KNOWN_SHARE, CANCELLED_SHARE = 0.5, 0.3
REST_S = 15.0
MOST_WRONG = 5
"""So many faults end the load."""
KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.02, "ignore_eos": True},
    {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 3, "ignore_eos": True},
    {"temperature": 0.9, "response_format": "regex", "grammar": "[a-z]{4,40}"},
)
"""Sampling for requests with unknown answers: the ways through the sampler."""


@dataclass(slots=True)
class Load:
    """One run."""

    client: AsyncClient
    known: Sequence[tuple[list[int], list[int]]]
    """Prompts, and what their greedy answers begin with."""
    vocab_size: int
    longest: int
    until: float
    """By the clock of `time.monotonic`."""
    outcomes: list[RequestOutcome] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def worker(self, number: int) -> None:
        """Ask one request after the other."""
        draws = random.Random(f"{SEED}/{number}")
        while time.monotonic() < self.until and len(self.wrong) < MOST_WRONG:
            try:
                if draws.random() < KNOWN_SHARE:
                    await self._known(draws)
                else:
                    await self._other(draws)
            except Overloaded as refusal:
                self.counts["refused"] += 1
                await asyncio.sleep(refusal.retry_after_s)
            except MoonpoolError as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def _known(self, draws: random.Random) -> None:
        prompt, known = draws.choice(self.known)
        answer = await self._ask(draws, prompt, greedy(ANSWER))
        told = answer.tokens[: len(known)]
        self.counts["compared"] += len(told)
        if told != known[: len(told)]:
            self.wrong.append(f"a prompt of {len(prompt)} tokens: {told} instead of {known}, {answer.cached} cached")

    async def _other(self, draws: random.Random) -> None:
        """A prompt that begins as a known one, perhaps, sampled somehow."""
        kept = draws.choice(self.known)[0][: draws.randrange(self.longest)]
        tail = [draws.randrange(16, self.vocab_size) for _ in range(draws.randrange(1, 200))]
        kind = draws.choice(KINDS)
        sampling = SamplingParams(max_tokens=draws.randint(1, 3 * ANSWER), seed=draws.getrandbits(32), **kind)
        await self._ask(draws, kept + tail, sampling)

    async def _ask(self, draws: random.Random, prompt: list[int], sampling: SamplingParams) -> Answer:
        """Ask; some requests are cancelled at some moment, before their first token or later."""
        answer, begin = Answer(), time.monotonic()
        outcome = RequestOutcome(begin)
        asked = ask(self.client, prompt, sampling, answer)
        if draws.random() >= CANCELLED_SHARE:
            await asked
            self.counts["answered"] += 1
            outcome.ended, outcome.tokens = time.monotonic(), len(answer.tokens)
            outcome.first = begin + answer.ttft_ms / 1e3
            outcome.gaps = gaps(answer.times, 0.0, float("inf"))
            self.outcomes.append(outcome)
            return answer
        try:
            async with asyncio.timeout(draws.expovariate(4.0)):
                await asked
            self.counts["answered before they were cancelled"] += 1
        except TimeoutError:
            self.counts["cancelled"] += 1
            self.counts["cancelled before the first token"] += not answer.tokens
        return answer


async def _load(where: Where, stack: CheckedStack, model: Any, load_s: float, figures: Figures) -> list[str]:
    """Make answers known, load, and return what was wrong."""
    vocab_size, longest = load_config(model).vocab_size, TINY_LONGEST if where.tiny else LONGEST
    prompts, known = Prompts(vocab_size), []
    async with AsyncClient(stack.address) as client:
        for number in range(KNOWN):
            prompt = prompts(longest * (number + 1) // KNOWN)
            result = (await ask(client, prompt, greedy(ANSWER, logprobs=2))).result
            assert result is not None
            known.append((prompt, known_part(result)))
        expect(any(tokens for _, tokens in known), "no answer is certain")
        load = Load(client, known, vocab_size, longest, time.monotonic() + load_s)
        async with asyncio.TaskGroup() as group:
            for number in range(TINY_CLIENTS if where.tiny else CLIENTS):
                group.create_task(load.worker(number))
    figures.update(load.counts)
    summary = summarize(load.outcomes)
    figures["requests/s"], figures["tokens/s"] = round(summary.requests_per_s, 2), round(summary.tokens_per_s)
    for name, values in (("TTFT", summary.ttft_s), ("gap", summary.itl_s)):
        figures.update({f"{name} {point}, ms": round(1e3 * values[point], 2) for point in ("p50", "p99") if values})
    return load.wrong


def check(where: Where, figures: Figures) -> None:
    """Load, look whether everything came back, and stop."""
    end = time.monotonic() + where.limit_s - ENDING_S
    served = TINY_EXACT if where.tiny else EXACT
    model = checkpoint(where, served, figures)
    with CheckedStack(plan_of(where, served, model, "load"), end - time.monotonic()) as stack:
        figures["GPU memory at start, MiB"] = gpu_memory_mib(where)
        left = end - time.monotonic() - REST_S
        load_s = min(TINY_LOAD_S if where.tiny else LOAD_S, 0.8 * left)
        figures["load, s"] = round(load_s, 1)
        wrong: list[str] = []

        async def load() -> None:
            wrong.extend(await _load(where, stack, model, load_s, figures))

        run_until(left, load(), lambda: "the load did not end")
        figures["GPU memory at the end, MiB"] = gpu_memory_mib(where)
        stack.expect_all_run("; ".join(wrong) or "under load")
        expect(not wrong, "; ".join(wrong))
        wait_at_rest(stack.addresses, REST_S)
    stack.expect_ended_in_order()


if __name__ == "__main__":
    stage_main("load", check)
