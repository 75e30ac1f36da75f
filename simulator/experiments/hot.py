"""Hot prefixes: most prompts begin with one of a few long ones. How soon first tokens come, by how these spread."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from moonpool.errors import ConfigError
from simulator.cluster.config import ClusterConfig
from simulator.experiments.frame import Progress, Result, Source, assumptions, simulate
from simulator.report.charts import Chart
from simulator.traces.mooncake import BLOCK_TOKENS, TraceRequest

WAYS = {"none": (False, 0.0), "loading": (True, 0.0), "loading and copies": (True, 0.1)}
"""How prefixes spread beside being computed where they are not: not, by being loaded, and by copies as well. Whether
peers are read, and the share of a link that copies may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLoad:
    """What comes.

    Attributes:
        requests: in all.
        rate_per_s: arrivals per second, Poisson.
        prefixes: hot ones, all asked for alike.
        prefix_tokens: of each.
        share: of the requests that begin with one; the others' prompts are as long, and their own.
        question_tokens: after the prefix.
        answer_tokens: of each answer.
        seed: of what comes when.
    """

    requests: int = 2000
    rate_per_s: float = 16.0
    prefixes: int = 10
    prefix_tokens: int = 8192
    share: float = 0.95
    question_tokens: int = 512
    answer_tokens: int = 32
    seed: int = 1

    def __post_init__(self) -> None:
        if self.prefix_tokens < BLOCK_TOKENS:
            raise ConfigError("prefix_tokens", f"must be at least a block of {BLOCK_TOKENS}, is {self.prefix_tokens}")

    def arrivals(self) -> Iterator[TraceRequest]:
        """The requests; equal loads give equal ones."""
        draw, now, fresh = random.Random(f"hot {self.seed}"), 0.0, 0
        blocks = self.prefix_tokens // BLOCK_TOKENS
        tokens = blocks * BLOCK_TOKENS + self.question_tokens
        rest = -(-self.question_tokens // BLOCK_TOKENS)
        for _ in range(self.requests):
            now += draw.expovariate(self.rate_per_s)
            hot = draw.random() < self.share
            first = draw.randrange(self.prefixes) * blocks
            own = self.prefixes * blocks + fresh
            prefix = range(first, first + blocks) if hot else range(own, own + blocks)
            end = own if hot else own + blocks
            fresh += rest + (0 if hot else blocks)
            yield TraceRequest(round(1000 * now), tokens, self.answer_tokens, (*prefix, *range(end, end + rest)))


def hot(config: ClusterConfig, load: HotLoad, progress: Progress) -> Result:
    """A row per way in which prefixes spread."""
    rows = []
    for name, (peers, copy_share) in WAYS.items():
        spread = replace(config, peers=peers, copy_share=copy_share)
        summary, cluster = simulate(spread, load.arrivals())
        ttft, use = summary.ttft_s, cluster.use()
        rows.append(
            {
                "spread by": name,
                "ttft_mean_s": ttft.get("mean"),
                "ttft_p50_s": ttft.get("p50"),
                "ttft_p90_s": ttft.get("p90"),
                "ttft_p99_s": ttft.get("p99"),
                "reused_share": summary.reused_share,
                "loaded_blocks": int(use["loaded_from_peers_blocks"]),
                "copied_blocks": int(use["copied_blocks"]),
                "prefill_busy": round(use["prefill_busy"], 4),
            }
        )
        progress(f"{name}: p90 of TTFT {ttft.get('p90', 0.0):g} s")
    series = {
        name: [(place, float(str(row[column]))) for place, row in enumerate(rows)]
        for name, column in (("p50", "ttft_p50_s"), ("p90", "ttft_p90_s"), ("p99", "ttft_p99_s"))
    }
    chart = Chart("Time to first token by how hot prefixes spread", "", "seconds", series, names=tuple(WAYS))
    facts = {**assumptions(config, Source()), "trace": "generated", **asdict(load)}
    return Result("hot", facts, rows, chart)
