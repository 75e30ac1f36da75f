"""What a request costs through all four services, beside the same model as `transformers` runs it.

`python -m benchmarks.serving [--model bundled|SHAPE|FOLDER] [--json]`. One instance of each kind in bfloat16; the
engines share the cores as in `moonpool up`, transformers has them all. The bundled model has 4.7 M parameters and shows
mostly the services' own cost; a shape of `moonpool model create` (`small`: 8 layers of 512) has random weights. Prompts
are fresh in every run, so nothing is cached unless the row says so. Every request decodes after its first token; rates
count all tokens from the first request's start to the last one's end.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame import Absent, Progress, Row, Skipped, optional, paired, run
from benchmarks.serving_limits import Limits, Span, measured_limits, rate, with_limit
from moonpool.bundled import model_dir
from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, Client, GenerateResult, SamplingParams

PROMPT, SHORT_PROMPT = 2048, 128
OUTPUT = 64
AFTER_FIRST = 8
"""Tokens of a request whose TTFT is measured: a decode follows, as it does for users."""
BATCHES = (1, 8)
SEED = 1
REST_S = 60.0
FORWARD, GENERATE = "transformers forward", "transformers generate"


def fresh_prompt(generator: random.Random, tokens: int) -> list[int]:
    """Random ordinary token ids."""
    return [generator.randrange(300, 4000) for _ in range(tokens)]


class Peer:
    """The same checkpoint as `transformers` runs it, in this process."""

    def __init__(self, model: Path) -> None:
        """Loads the checkpoint.

        Raises:
            Skipped: torch or transformers is not installed.
        """
        self._torch = torch = optional("torch")
        transformers = optional("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def ttft(self, prompt: Sequence[int]) -> float:
        """Seconds of one forward pass over the prompt and the choice of a token."""
        begin = time.perf_counter()
        with self._torch.inference_mode():
            self.model(self._torch.tensor([list(prompt)]), logits_to_keep=1).logits.argmax().item()
        return time.perf_counter() - begin

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Output tokens per second of a padded batch, from its start to its end."""
        ids: Any = self._torch.tensor([list(prompt) for prompt in prompts])
        flags = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        begin = time.perf_counter()
        with self._torch.inference_mode():
            self.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **flags)
        return rate([Span(begin, time.perf_counter(), len(prompts) * tokens)])


def peer_of(model: Path) -> Peer | str:
    """The peer, or why there is none."""
    try:
        return Peer(model)
    except Skipped as reason:
        return str(reason)


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many greedy tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def _together(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Span]:
    async with AsyncClient(address) as client:

        async def one(prompt: Sequence[int]) -> Span:
            begin = time.perf_counter()
            result = await client.generate(token_ids=list(prompt), sampling=greedy(tokens))
            return Span(begin, time.perf_counter(), len(result.token_ids))

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


class Serving:
    """One stack, its peer and this machine's limits."""

    def __init__(
        self, stack: LocalStack, client: Client, peer: Peer | str, limits: Limits, runs: int, progress: Progress
    ) -> None:
        self._stack = stack
        self._client = client
        self._peer = peer
        self._limits = limits
        self._runs = runs
        self._progress = progress
        self._random = random.Random(SEED)

    def rows(self) -> list[Row | Absent]:
        """All rows; each run measures ours and the peer's one after the other."""
        return [*self.prompt_rows(), *(self.decode_row(batch) for batch in BATCHES)]

    def prompt_rows(self) -> list[Row | Absent]:
        """Time to first token: cold, cached where it was computed, and from the kvstore."""
        cold, cached, beside = [], [], []
        prompts = [fresh_prompt(self._random, PROMPT) for _ in range(self._runs + 1)]
        for number, prompt in enumerate(prompts):
            ours = self._ttft_ms(prompt)
            theirs = 1e3 * self._peer.ttft(prompt) if isinstance(self._peer, Peer) else 0.0
            again = self._ttft_ms(prompt)
            if number:  # the first prompt warms up
                cold.append(ours)
                cached.append(again)
                beside.append(theirs)
            self._progress(f"prompt {number} of {self._runs}")
        name = f"TTFT cold, {PROMPT} tokens"
        limit_ms = 1e3 * PROMPT / self._limits.prompt_tokens_per_s
        if isinstance(self._peer, Peer):
            row = paired(name, "ms", list(zip(cold, beside, strict=True)), FORWARD, less_is_better=True)
            first: Row | Absent = with_limit(row, limit_ms, less_is_better=True)
        else:
            first = Absent(name, FORWARD, self._peer)
        return [
            first,
            paired(name, "ms", [(own, limit_ms) for own in cold], "the best matrix product", less_is_better=True),
            self._beside_cold("TTFT cached, the same prompt", cached, cold),
            self._beside_cold("TTFT of a prefix from the kvstore", self._from_the_store(prompts), cold),
        ]

    def _beside_cold(self, name: str, ours: Sequence[float], cold: Sequence[float]) -> Row | Absent:
        if len(ours) < len(cold):
            return Absent(name, "our TTFT cold", "the prefix did not come from the kvstore in every run")
        return paired(name, "ms", list(zip(ours, cold, strict=True)), "our TTFT cold", less_is_better=True)

    def _from_the_store(self, prompts: Sequence[list[int]]) -> list[float]:
        """Milliseconds to the first token after prefill has forgotten its pool; only of prompts that were loaded."""
        wait_at_rest(self._stack.address, REST_S)
        self._stack.restart("prefill-0")
        results = [self._generate(prompt) for prompt in prompts]
        return [1e3 * result.timing.ttft_s for result in results[1:] if result.placement.kvstore]

    def decode_row(self, batch: int) -> Row | Absent:
        """Output tokens per second of a batch of requests sent together."""
        name = f"generate, batch {batch}, {SHORT_PROMPT} + {OUTPUT} tokens"
        if not isinstance(self._peer, Peer):
            return Absent(name, GENERATE, self._peer)
        pairs: list[tuple[float, float]] = []
        for number in range(self._runs):
            prompts = [fresh_prompt(self._random, SHORT_PROMPT) for _ in range(batch)]
            ours = rate(asyncio.run(_together(self._stack.address, prompts, OUTPUT)))
            pairs.append((ours, self._peer.tokens_per_s(prompts, OUTPUT)))
            self._progress(f"{name}, run {number + 1} of {self._runs}")
        return with_limit(paired(name, "tokens/s", pairs, GENERATE), self._limits.decode_tokens_per_s(batch))

    def _ttft_ms(self, prompt: list[int]) -> float:
        return 1e3 * self._generate(prompt).timing.ttft_s

    def _generate(self, prompt: list[int]) -> GenerateResult:
        return self._client.generate(token_ids=prompt, sampling=greedy(AFTER_FIRST))


def checkpoint_of(name: str, folder: Path) -> Path:
    """The bundled model, a fresh one of a named shape with random weights, or a folder.

    Raises:
        Skipped: torch is not installed.
    """
    if name == "bundled":
        return model_dir()
    optional("torch")
    from moonpool.model.create import create
    from moonpool.model.shapes import SHAPES

    return create(name, folder / name, seed=SEED, dtype="bfloat16") if name in SHAPES else Path(name)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint_of(options.model, Path(folder))
        limits = measured_limits(model)
        progress(f"{model.name}: {limits}")
        peer = peer_of(model)
        plan = StackPlan(model=str(model), data_dir=Path(folder), dtype="bfloat16")
        with LocalStack(plan) as stack, Client(stack.address) as client:
            return Serving(stack, client, peer, limits, options.runs, progress).rows()


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--model", default="bundled", help="bundled, a shape of `moonpool model create`, or a folder")


if __name__ == "__main__":
    run("serving", measure, flags=flags)
