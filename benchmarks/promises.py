"""What early promises of decode hold while their prompts wait at prefill: `python -m benchmarks.promises --trace FILE`.

`Reserve` promises a prompt's blocks at decode before prefill begins; a late promise would come one step before the
prompt's turn (docs/adr/0006-the-life-of-a-request.md). A cluster is simulated and looked at once a second, until the
last request has come: the share of its decode blocks that are promised and get no KV yet is what late promises could
give to others, at most. In virtual time, so the figures are the same on every machine; not one of `make bench`.
"""

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Progress, Row, bounded, run
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.clock import ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.frame import RequestSource
from moonpool.simulator.experiments.report import Collector
from moonpool.simulator.traces.mooncake import trace_path

WORTH = 5.0
"""Percent of the blocks, on the mean, below which late promises are not worth a message before each job."""


class Look(NamedTuple):
    """The decode instances at a moment: shares of all blocks, the least that one could still take, and promises."""

    promised: float
    used: float
    least_spare: float
    promises: int


def look(cluster: Cluster) -> Look:
    """At a cluster as it is."""
    cores = [decode.core for decode in cluster.decodes]
    blocks = cluster.config.blocks
    held = [request.status for core in cores for request in core.requests.values()]
    return Look(
        promised=sum(core.budget.promised for core in cores) / (blocks * len(cores)),
        used=sum(core.blocks.num_used for core in cores) / (blocks * len(cores)),
        least_spare=min(core.budget.available for core in cores) / blocks,
        promises=held.count(RequestStatus.PROMISED),
    )


def looks(config: ClusterConfig, source: RequestSource) -> list[Look]:
    """One a second, while requests come."""
    requests = list(source.read())
    cluster = Cluster(config, Collector(config.slo).add)
    cluster.feed(requests)
    found: list[Look] = []
    for second in range(1 + int(requests[-1].timestamp / 1000 / config.rate)):
        cluster.world.at(ps(second), lambda _: found.append(look(cluster)))
    cluster.run()
    cluster.check_at_rest()
    return found


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    source = RequestSource(options.trace or trace_path(""), options.requests)
    config = ClusterConfig(
        profile=load_profile(options.profile), prefill=options.instances, decode=options.instances,
        kvstore=options.kvstore, rate=options.rate, pool_blocks=options.pool_blocks,
    )  # fmt: skip
    found = looks(config, source)
    percents = [100 * it.promised for it in found]
    progress(
        f"{source.describe()}, {options.instances} + {options.instances}, {config.blocks} blocks each, {len(found)} s: "
        f"at most {max(percents):.2f} % promised by {max(it.promises for it in found)} promises, on the mean "
        f"{100 * statistics.mean(it.used for it in found):.1f} % used, at least "
        f"{100 * min(it.least_spare for it in found):.1f} % free of both everywhere"
    )
    name = "decode blocks that are promised and get no KV yet, mean"
    return [bounded(name, "%", [statistics.mean(percents)], "worth a late promise", WORTH)]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--trace", type=Path, help="Mooncake's form (default: $MOONPOOL_TRACE; without it requests are generated)")
    add("--requests", type=int, default=2000, help="first ones only (default 2,000)")
    add("--rate", type=float, default=1.0, help="times as quick as in the trace (default 1)")
    add("--instances", type=int, default=8, help="prefill and as many decode instances (default 8)")
    add("--kvstore", type=int, default=8, help="kvstores (default 8)")
    add("--pool-blocks", type=int, default=0, help="of each instance; 0 = as the profile says")
    add("--profile", default="llama-70b-a800", help="a profile's name, or a path")


if __name__ == "__main__":
    run("promises", measure, flags=flags)
