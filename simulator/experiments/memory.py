"""How a decode pool is filled: room for the longest answer at once, growing tables, shared prompts, preemption."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moonpool.core.draws import draw_unit
from moonpool.engine.emulated.profile import Profile
from simulator.cluster.config import ClusterConfig, DecodeMemory
from simulator.cluster.decode import DecodeInstance, DecodeUse
from simulator.cluster.requests import Attempt, Request
from simulator.experiments.frame import Progress, Result
from simulator.kernel.clock import PS, World
from simulator.kernel.links import Network
from simulator.report.charts import Chart
from simulator.report.quantiles import digits

_ANSWERS = 7
"""Counter of the draws of answers' lengths."""


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """What the instance gets, all at once.

    Attributes:
        requests: of one kind.
        prompt_tokens: of each.
        answer_tokens: mean of the answers; exponential, cut at `max_tokens`.
        max_tokens: what a request may ask for.
        samples: answers of each request.
        pool_blocks: of the instance.
        block_tokens: of a block.
        seed: of the answers' lengths.
    """

    requests: int = 1000
    prompt_tokens: int = 200
    answer_tokens: int = 200
    max_tokens: int = 4096
    samples: int = 1
    pool_blocks: int = 2000
    block_tokens: int = 64
    seed: int = 1

    def answer(self, number: int) -> int:
        """Tokens of the answer of a request."""
        drawn = -math.log(1.0 - draw_unit(self.seed, number, _ANSWERS)) * self.answer_tokens
        return max(2, min(self.max_tokens, round(drawn)))


def run_pool(profile: Profile, load: MemoryLoad, memory: DecodeMemory) -> tuple[DecodeUse, float, int]:
    """Serves the load on one decode instance; returns its use, the seconds, and the tokens made."""
    config = ClusterConfig(
        profile=profile, prefill=1, decode=1, kvstore=0, block_tokens=load.block_tokens, memory=memory,
        pool_blocks=load.pool_blocks, max_batch=1_000_000,
    )  # fmt: skip
    world, made = World(), list[int]()

    def promised(attempt: Attempt) -> None:
        instance.kv_whole(attempt)
        instance.start(attempt)

    def ended(attempt: Attempt) -> None:
        made.append(attempt.request.made * attempt.request.samples)

    instance = DecodeInstance(world, Network(world), config, "d0", promised, ended, load.block_tokens // 4)
    for number in range(load.requests):
        request = Request(number, 0, load.prompt_tokens, load.answer(number), (), load.samples)
        attempt = Attempt(request, 1, 0, 0, -1, 0, -1, tokens=load.prompt_tokens, left=request.answer)
        instance.ask(attempt)
        request.made = 1  # the first token comes from prefill
    world.run()
    instance.check_at_rest()
    assert len(made) == load.requests
    return instance.use, world.now / PS, sum(made)


def _row(name: str, load: MemoryLoad, found: tuple[DecodeUse, float, int]) -> dict[str, object]:
    use, seconds, tokens = found
    return {
        "mode": name,
        "samples": load.samples,
        "most_sequences": use.most_sequences,
        "mean_sequences": digits(use.sequence_steps / max(1, use.steps)),
        "slots_without_token": digits(1 - use.tokens_time / use.slots_time),
        "tokens_per_s": digits(tokens / seconds),
        "preempted": use.preempted,
        "swapped": use.swapped,
        "recomputed": use.recomputed,
    }


def modes(load: MemoryLoad) -> Mapping[str, tuple[MemoryLoad, DecodeMemory]]:
    """What is compared."""
    several, tight = replace(load, samples=8, requests=max(1, load.requests // 8)), DecodeMemory(watermark=0.0)
    return {
        "preallocation": (load, DecodeMemory(growing=False, max_tokens=load.max_tokens)),
        "on demand": (load, DecodeMemory()),
        "on demand, swap": (load, replace(tight, restore="swap")),
        "on demand, recompute": (load, replace(tight, restore="recompute")),
        "n = 8, each its own prompt": (several, DecodeMemory(sharing=False)),
        "n = 8, prompt shared": (several, DecodeMemory()),
        "uncrowded": (replace(load, pool_blocks=load.pool_blocks * 1000), DecodeMemory()),
    }


def memory(profile: Profile, load: MemoryLoad, progress: Progress) -> Result:
    """A row per way of filling the pool."""
    rows: Sequence[dict[str, object]] = []
    for name, (wanted, rules) in modes(load).items():
        rows = [*rows, _row(name, wanted, run_pool(profile, wanted, rules))]
        progress(f"{name}: {rows[-1]['most_sequences']} sequences at most")
    names = tuple(str(row["mode"]) for row in rows[:-1])
    points = [(place, float(str(row["mean_sequences"]))) for place, row in enumerate(rows[:-1])]
    short = tuple(name.replace("on demand, ", "").replace("n = 8, ", "8: ") for name in names)
    chart = Chart("Sequences at once in a fixed pool, mean", "", "sequences", {"sequences": points}, names=short)
    facts: dict[str, object] = {
        "profile": profile.name,
        "pool": f"{load.pool_blocks} blocks of {load.block_tokens} tokens",
        "requests": f"{load.requests} at once, prompts of {load.prompt_tokens}, answers of {load.answer_tokens} "
        f"(exponential, seed {load.seed}), at most {load.max_tokens}",
    }
    return Result("memory", facts, rows, chart)
