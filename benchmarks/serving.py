"""What a request costs through all four services, beside the same model as `transformers` runs it.

`python -m benchmarks.serving [--json]`. The bundled model, bfloat16, one instance of each kind; the engines share out
the cores as in `moonpool up`, transformers has them all. Prompts are fresh in every run, so nothing is cached unless
the row says so.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame import Progress, Row, optional, paired, run
from moonpool.bundled import model_dir
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult, SamplingParams

PROMPT = 2048
OUTPUT = 64
SEED = 1


def fresh_prompt(generator: random.Random, tokens: int) -> list[int]:
    """Random ordinary token ids."""
    return [generator.randrange(16, 4000) for _ in range(tokens)]


class Peer:
    """The same checkpoint as `transformers` runs it, in this process."""

    def __init__(self) -> None:
        self._torch = torch = optional("torch")
        transformers = optional("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.bfloat16).eval()

    def ttft(self, prompt: Sequence[int]) -> float:
        """Seconds of one forward pass over the prompt and the choice of a token."""
        begin = time.perf_counter()
        with self._torch.inference_mode():
            self.model(self._torch.tensor([list(prompt)]), logits_to_keep=1).logits.argmax().item()
        return time.perf_counter() - begin

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Output tokens per second of a padded batch, after its first token."""
        ids = self._torch.tensor([list(prompt) for prompt in prompts])
        flags: dict[str, object] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        first, whole = (self._timed(ids, count, flags) for count in (1, tokens))
        return len(prompts) * (tokens - 1) / (whole - first)

    def _timed(self, ids: Any, count: int, flags: dict[str, object]) -> float:
        begin = time.perf_counter()
        with self._torch.inference_mode():
            self.model.generate(ids, max_new_tokens=count, min_new_tokens=count, **flags)
        return time.perf_counter() - begin


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many greedy tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def _together(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[GenerateResult]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(client.generate(token_ids=list(prompt), sampling=greedy(tokens)) for prompt in prompts)
        )


def prompt_rows(client: Client, other: Peer, generator: random.Random, runs: int, progress: Progress) -> list[Row]:
    """Time to first token, cold and cached."""
    cold: list[tuple[float, float]] = []
    cached: list[tuple[float, float]] = []
    for number in range(runs + 1):
        prompt = fresh_prompt(generator, PROMPT)
        ours = client.generate(token_ids=prompt, sampling=greedy(1)).timing.ttft_s
        theirs = other.ttft(prompt)
        again = client.generate(token_ids=prompt, sampling=greedy(1)).timing.ttft_s
        if number:  # the first pair warms up
            cold.append((1e3 * ours, 1e3 * theirs))
            cached.append((1e3 * again, 1e3 * ours))
        progress(f"prompt {number} of {runs}")
    return [
        paired(f"TTFT cold, {PROMPT} tokens", "ms", cold, "transformers forward", less_is_better=True),
        paired("TTFT cached, the same prompt", "ms", cached, "our TTFT cold", less_is_better=True),
    ]


def decode_row(address: str, other: Peer, generator: random.Random, batch: int, runs: int, progress: Progress) -> Row:
    """Output tokens per second of a batch of requests sent together."""
    pairs: list[tuple[float, float]] = []
    for number in range(runs):
        prompts = [fresh_prompt(generator, 128) for _ in range(batch)]
        results = asyncio.run(_together(address, prompts, OUTPUT))
        longest = max(result.timing.e2e_s - result.timing.ttft_s for result in results)
        pairs.append((batch * (OUTPUT - 1) / longest, other.tokens_per_s(prompts, OUTPUT)))
        progress(f"decode, batch {batch}, run {number + 1} of {runs}")
    return paired(f"decode, batch {batch}", "tokens/s", pairs, "transformers generate")


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows; each run measures ours and the peer's one after the other."""
    generator = random.Random(SEED)
    other = Peer()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalStack(StackPlan(model=str(model_dir()), data_dir=Path(folder))) as stack,
        Client(stack.address) as client,
    ):
        rows = prompt_rows(client, other, generator, options.runs, progress)
        return rows + [decode_row(stack.address, other, generator, batch, options.runs, progress) for batch in (1, 8)]


if __name__ == "__main__":
    run("serving", measure)
