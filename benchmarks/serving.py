"""Time to first token through all four services: cold, cached, and with the prefix in the kvstore.

`python -m benchmarks.serving [--model MODEL,MODEL] [--json]`. One instance of each kind in bfloat16; the engines share
the cores as in `moonpool serve`. A model is a shape of `moonpool model create` (`small`: 8 layers of 512) with random
weights, a folder, or `bundled`, which has 4.7 M parameters and shows mostly the services' own cost. Prompts are fresh
in every run, so nothing is cached unless the row says so. Every request decodes after its first token.
`benchmarks.engine` has the rates beside other engines.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ceilings import Limits, measured_limits
from benchmarks.frame import Absent, Progress, Row, optional, paired, run
from moonpool.base.bundled import model_dir
from moonpool.cli.check import wait_at_rest
from moonpool.cli.load_generator.senders import greedy
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import Client, GenerateResult

PROMPT = 2048
AFTER_FIRST = 8
"""Tokens of a request whose TTFT is measured: a decode follows, as it does for users."""
FULL_HIT_TARGETS = {"qwen2.5-0.5b": 1 / 0.03, "small": 1 / 0.06}
"""Wanted of TTFT cold over that of a full hit, by shape."""
SEED = 1
REST_S = 60.0


def fresh_prompt(generator: random.Random, tokens: int) -> list[int]:
    """Random ordinary token ids."""
    return [generator.randrange(300, 4000) for _ in range(tokens)]


class Serving:
    """One stack and this machine's limits."""

    def __init__(
        self, model: str, stack: LocalStack, client: Client, limits: Limits, runs: int, progress: Progress
    ) -> None:
        self._model = model
        self._stack = stack
        self._client = client
        self._limits = limits
        self._runs = runs
        self._progress = progress
        self._random = random.Random(SEED)

    def rows(self) -> list[Row | Absent]:
        """Time to first token: cold, cached where it was computed, and from the kvstore."""
        cold, cached = [], []
        prompts = [fresh_prompt(self._random, PROMPT) for _ in range(self._runs + 1)]
        for number, prompt in enumerate(prompts):
            ours, again = self._ttft_ms(prompt), self._ttft_ms(prompt)
            if number:  # the first prompt warms up
                cold.append(ours)
                cached.append(again)
            self._progress(f"prompt {number} of {self._runs}")
        name, limit_ms = f"{self._model}, TTFT cold, {PROMPT} tokens", 1e3 * PROMPT / self._limits.prompt_tokens_per_s
        return [
            paired(name, "ms", [(own, limit_ms) for own in cold], "the best matrix product", less_is_better=True),
            self._beside_cold("TTFT cached, the same prompt", cached, cold, FULL_HIT_TARGETS.get(self._model)),
            self._beside_cold("TTFT of a prefix from the kvstore", self._from_the_store(prompts), cold),
        ]

    def _beside_cold(
        self, name: str, ours: Sequence[float], cold: Sequence[float], target: float | None = None
    ) -> Row | Absent:
        name = f"{self._model}, {name}"
        if len(ours) < len(cold):
            return Absent(name, "our TTFT cold", "the prefix did not come from the kvstore in every run")
        pairs = list(zip(ours, cold, strict=True))
        return paired(name, "ms", pairs, "our TTFT cold", less_is_better=True, target=target)

    def _from_the_store(self, prompts: Sequence[list[int]]) -> list[float]:
        """Milliseconds to the first token after prefill has forgotten its pool; only of prompts that were loaded."""
        wait_at_rest(self._stack.address, REST_S)
        self._stack.restart("prefill-0")
        results = [self._generate(prompt) for prompt in prompts]
        return [1e3 * result.timing.ttft_s for result in results[1:] if result.placement.kvstore]

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
    from moonpool.engine.models.random_checkpoint import SHAPES, create

    return create(name, folder / name, seed=SEED, dtype="bfloat16") if name in SHAPES else Path(name)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    return [row for name in options.model.split(",") for row in measure_model(name, options.runs, progress)]


def measure_model(name: str, runs: int, progress: Progress) -> list[Row | Absent]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint_of(name, Path(folder))
        limits = measured_limits(model)
        progress(f"{model.name}: {limits}")
        # Decode has what it has served: without --no-peers a prefix might come from there.
        plan = StackPlan(str(model), Path(folder), dtype="bfloat16", extra={"conductor": ["--set", "peers=false"]})
        with LocalStack(plan) as stack, Client(stack.address) as client:
            return Serving(model.name, stack, client, limits, runs, progress).rows()


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    models = "shapes of `moonpool model create`, folders or `bundled`, with commas between them"
    parser.add_argument("--model", default="small,qwen2.5-0.5b", help=models)


if __name__ == "__main__":
    run("serving", measure, flags=flags)
