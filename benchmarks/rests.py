"""What it brings that decode computes short rests of prompts itself: `python -m benchmarks.rests`.

One prefill and one decode instance without a kvstore, and conversations side by side, whose turns follow each other at
once. In each run the same conversations go to a conductor with `decode_prompt_tokens` and to one without, each in a
stack of its own. The first turn of each is prefill's in both. `--engine emulated:PROFILE` takes a profile's times.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.frame import Progress, Row, paired, run
from moonpool.base.bundled import model_dir
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, GenerateResult

ORDINARY_TOKENS = (300, 4000)
SYSTEM_TOKENS = 200
NEW_TOKENS = (12, 40)
"""Of a turn, beside the first one's beginning."""
BESIDE = "all prompts through prefill"


@dataclass(slots=True)
class Conversation:
    """New tokens of each of its turns; equal seeds give equal ones."""

    seed: str
    turns: int
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        drawn = random.Random(f"moonpool rests {self.seed}")
        counts = [drawn.randint(*NEW_TOKENS) + (0 if turn else SYSTEM_TOKENS) for turn in range(self.turns)]
        self.prompts = [[drawn.randrange(*ORDINARY_TOKENS) for _ in range(count)] for count in counts]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the later turns of one run: seconds, and the share that decode computed itself."""

    ttft_s: float
    ttft_p90_s: float
    tpot_s: float
    share: float


async def talk(client: AsyncClient, conversation: Conversation, answer: int) -> list[GenerateResult]:
    """All turns, one after the other."""
    history: list[int] = []
    results = []
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    for prompt in conversation.prompts:
        history += prompt
        results.append(await client.generate(token_ids=history, sampling=sampling))
        history += results[-1].token_ids
    return results


async def together(address: str, conversations: Sequence[Conversation], answer: int) -> list[list[GenerateResult]]:
    """All conversations side by side."""
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(talk(client, one, answer) for one in conversations))


def figures(talks: Sequence[Sequence[GenerateResult]]) -> Figures:
    """Of the turns after the first."""
    later = [result for results in talks for result in results[1:]]
    ttft_s = sorted(result.timing.ttft_s for result in later)
    return Figures(
        statistics.median(ttft_s),
        ttft_s[min(int(0.9 * len(ttft_s)), len(ttft_s) - 1)],
        statistics.median(result.timing.tpot_s for result in later),
        sum(result.placement.prefill == result.placement.decode for result in later) / len(later),
    )


def one_run(options: argparse.Namespace, number: int, tokens: int) -> Figures:
    """A stack that has been taught by some conversations, and then is measured."""
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(
            str(model_dir()),
            Path(folder),
            engine=options.engine,
            time_scale=options.time_scale,
            kvstore=0,
            log_level="warning",
            extra={"conductor": ["--set", f"decode_prompt_tokens={tokens}"]},
        )
        with LocalStack(plan) as stack:
            for kind in ("taught", "measured"):
                seeds = [f"{options.seed} {number} {kind} {one}" for one in range(options.conversations)]
                conversations = [Conversation(seed, options.turns) for seed in seeds]
                talks = asyncio.run(together(stack.address, conversations, options.answer))
    return figures(talks)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    pairs = []
    for number in range(options.runs):
        ours, beside = (one_run(options, number, tokens) for tokens in (options.tokens, 0))
        pairs.append((ours, beside))
        told = f"{ours.share:.0%} at decode, TTFT {ours.ttft_s:.4f} s; {beside.ttft_s:.4f} s through prefill"
        progress(f"run {number + 1} of {options.runs}: {told}")
    return list(rows(pairs))


def rows(pairs: Sequence[tuple[Figures, Figures]]) -> Iterator[Row]:
    """A row per figure."""
    names: Mapping[str, str] = {
        "ttft_s": "TTFT of later turns, median",
        "ttft_p90_s": "TTFT of later turns, p90",
        "tpot_s": "TPOT of later turns, median",
    }
    for key, name in names.items():
        runs = [(1e3 * getattr(ours, key), 1e3 * getattr(beside, key)) for ours, beside in pairs]
        yield paired(f"{name}, rests at decode", "ms", runs, BESIDE, less_is_better=True)
    shares = [(100 * ours.share, 100.0) for ours, _ in pairs]
    yield paired("later turns that decode computed itself", "%", shares, "all of them")


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--engine", default="real", help="real, or emulated:PROFILE (default real)")
    add("--time-scale", type=float, default=0.0, help="emulated seconds that pass in one second; 0 = the profile's own")
    add("--tokens", type=int, default=256, help="of decode_prompt_tokens (default 256)")
    add("--conversations", type=int, default=4, help="side by side (default 4)")
    add("--turns", type=int, default=5, help="of each (default 5)")
    add("--answer", type=int, default=48, help="tokens of each answer (default 48)")
    add("--seed", type=int, default=1, help="of the prompts (default 1)")


if __name__ == "__main__":
    run("rests", measure, flags=flags)
