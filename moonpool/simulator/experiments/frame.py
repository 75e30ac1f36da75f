"""What experiments take and give: a source of requests, a result with rows, assumptions and a chart."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.report import Chart, Collector, Summary
from moonpool.simulator.traces.agentic import AgenticWorkload
from moonpool.simulator.traces.mooncake import BLOCK_SIZE, Trace, TraceRequest
from moonpool.simulator.traces.workload import Workload, WorkloadMix

Row = Mapping[str, object]
Progress = Callable[[str], None]
"""Takes a line about how far an experiment is."""
GENERATED_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Where requests come from: a trace's file, or a seed.

    Attributes:
        path: the trace; None = generated.
        requests: most requests; 0 = the whole trace, or 1,000 generated requests.
        seed: for generated requests.
        mix: what is generated.
        sessions: so many agents' sessions are generated instead; 0 = none.
    """

    path: Path | None = None
    requests: int = 0
    seed: int = 1
    mix: WorkloadMix = field(default_factory=WorkloadMix)
    sessions: int = 0

    def read(self) -> Iterable[TraceRequest]:
        """The requests; a trace file's requests come one after the other.

        Raises:
            TraceError: the trace is wrong; names file and line.
        """
        if self.path is not None:
            return Trace(self.path, self.requests)
        if self.sessions:
            return AgenticWorkload(self.seed).requests(self.sessions)[: self.requests or None]
        return Workload(self.seed, self.mix).requests(self.requests or GENERATED_REQUESTS)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return BLOCK_SIZE if self.path is None else Trace(self.path).block_size

    def describe(self) -> str:
        """For people."""
        first = f", first {self.requests}" if self.requests else ""
        if self.path is not None:
            return f"{self.path.name}{first}"
        if self.sessions:
            return f"generated agents, seed {self.seed}, {self.sessions} sessions{first}"
        return f"generated, seed {self.seed}, {self.requests or GENERATED_REQUESTS} requests"


@dataclass(frozen=True, slots=True)
class Result:
    """What an experiment found."""

    experiment: str
    assumptions: Mapping[str, object]
    rows: Sequence[Row]
    chart: Chart

    def to_json(self) -> str:
        """One JSON object; equal results give equal text."""
        return json.dumps({"experiment": self.experiment, "assumptions": self.assumptions, "rows": self.rows}, indent=1)


def simulate(config: ClusterConfig, requests: Iterable[TraceRequest]) -> tuple[Summary, Cluster]:
    """Run a cluster until every request has ended, and look whether everything came back."""
    collector = Collector(config.slo)
    cluster = Cluster(config, collector.add)
    cluster.feed(requests)
    cluster.run()
    cluster.check_at_rest()
    return collector.summary(), cluster


def assumptions(config: ClusterConfig, source: RequestSource) -> dict[str, object]:
    """What a cluster's result depends on."""
    return {
        "trace": source.describe(),
        "rate": config.rate,
        "profile": config.profile.name,
        "hardware": config.profile.hardware,
        "instances": f"{config.division}, {config.kvstore} kvstore",
        "policy": config.policy,
        "pool_blocks": config.blocks,
        "store_gb": config.store_bytes / 1e9,
        "slo": f"TTFT {config.slo.ttft_s:g} s, TBT {config.slo.tbt_s:g} s",
        "seed": config.seed,
    }


def serving_row(summary: Summary) -> dict[str, object]:
    """A serving run's figures, as tables show them."""
    return {
        "ttft_mean_s": summary.ttft_s.get("mean"),
        "ttft_p50_s": summary.ttft_s.get("p50"),
        "ttft_p90_s": summary.ttft_s.get("p90"),
        "tbt_mean_s": summary.tbt_s.get("mean"),
        "tbt_p90_s": summary.tbt_s.get("p90"),
        "goodput_share": summary.goodput_share,
        "reused_share": summary.reused_share,
    }
