"""Experiment `pipeline`: time to first token by how machines are joined to pipelines, by prompt length and by load.

Equal numbers of machines form one wide pipeline, some narrower pipelines, or an instance each. Then unlike widths stand
side by side,
with a mix of short and long prompts: where each kind is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import prefill_seconds
from moonpool.base.scheduling.state_machine import draw_unit
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import Request
from moonpool.simulator.experiments.frame import Progress, Result, Row
from moonpool.simulator.experiments.report import Chart, LatencyQuantiles, digits
from moonpool.simulator.traces.mooncake import TraceRequest

WIDTHS = (1, 2, 4, 8)
LENGTHS = (2048, 16384, 131072)
LOADS = (0.1, 0.4, 0.7)
"""Offered computing seconds per second, as a share of all machines' capacity."""
SHORT, LONG = LENGTHS[0], LENGTHS[-1]
SHORT_SHARE = 0.95
"""Share of short prompts in the mix; long prompts need most of the computing."""
BUSY_S = 0.001
"""A pipeline is busy for a prompt that is predicted to wait longer than this."""


@dataclass(frozen=True, slots=True)
class PromptStream:
    """Prompts without a common prefix; answers have one token: decode has no work.

    Attributes:
        lengths: and how often each comes, as shares.
        load: see `LOADS`.
        requests: so many.
        seed: for times and lengths.
    """

    lengths: Sequence[tuple[int, float]]
    load: float
    requests: int
    seed: int

    def read(self, config: ClusterConfig) -> Iterator[TraceRequest]:
        """The prompts; arrivals are a Poisson process."""
        speeds, machines = config.profile.speeds, sum(config.widths)
        mean_s = sum(share * prefill_seconds(speeds, tokens, 0) for tokens, share in self.lengths)
        at_s, block = 0.0, 0
        for number in range(self.requests):
            at_s -= log(1.0 - draw_unit(self.seed, number, 1)) * mean_s / (self.load * machines)
            tokens = self._length(draw_unit(self.seed, number, 2))
            end = block + config.blocks_for(tokens)
            yield TraceRequest(1000 * at_s, tokens, 1, tuple(range(block, end)))
            block = end

    def _length(self, draw: float) -> int:
        for tokens, share in self.lengths:
            if draw < share:
                return tokens
            draw -= share
        return self.lengths[-1][0]


def pipeline(config: ClusterConfig, machines: int, requests: int, progress: Progress) -> Result:
    """A row for each division into pipelines, load, and prompt length.

    Raises:
        ConfigError: the machines cannot be joined to pipelines of every width, or the KV has fewer layers than these.
    """
    widest = max(WIDTHS)
    if machines < widest or machines % widest:
        raise ConfigError("machines", f"must be a multiple of {widest}, is {machines}")
    if config.profile.layers < widest:
        raise ConfigError("profile", f"its KV has {config.profile.layers} layers, {widest} stages need as many")
    rows: list[Row] = []
    for load in LOADS:
        for widths in [(width,) * (machines // width) for width in WIDTHS]:
            for tokens in LENGTHS:
                rows += _run(config, widths, PromptStream([(tokens, 1.0)], load, requests, config.seed))
        half = machines // 2
        mix = [(SHORT, SHORT_SHARE), (LONG, 1.0 - SHORT_SHARE)]
        for widths in ((1,) * machines, (1,) * half + (half,), (machines,)):
            rows += _run(config, widths, PromptStream(mix, load, 5 * requests, config.seed))
        progress(f"load {load:g}: done")
    return Result("pipeline", _facts(config, machines, requests), rows, _chart(rows))


def _run(config: ClusterConfig, widths: tuple[int, ...], stream: PromptStream) -> list[Row]:
    ended: list[Request] = []
    wanted = replace(config, prefill=len(widths), widths=widths)
    cluster = Cluster(wanted, ended.append)
    cluster.feed(stream.read(wanted))
    cluster.run()
    cluster.check_at_rest()
    kind = "mix" if len(stream.lengths) > 1 else "alike"
    return [_row(widths, stream, kind, [r for r in ended if r.tokens == tokens]) for tokens, _ in stream.lengths]


def _row(widths: tuple[int, ...], stream: PromptStream, kind: str, ended: Sequence[Request]) -> Row:
    ttft, widest = LatencyQuantiles(), max(widths)
    for request in ended:
        ttft.add((request.first_at - request.arrived) / PS)
    wide = [request for request in ended if widths[int(request.prefill[1:])] == widest]
    busy = sum(request.predicted_queue_s > BUSY_S for request in wide)
    return {
        "pipelines": _name(widths),
        "load": stream.load,
        "prompts": kind,
        "tokens": ended[0].tokens if ended else 0,
        "requests": len(ended),
        "ttft_mean_s": digits(ttft.total / ttft.count if ttft.count else 0.0),
        "ttft_p50_s": digits(ttft.at(0.5)),
        "ttft_p90_s": digits(ttft.at(0.9)),
        "at_widest_idle": digits((len(wide) - busy) / len(ended) if ended else 0.0),
        "at_widest_busy": digits(busy / len(ended) if ended else 0.0),
    }


def _name(widths: tuple[int, ...]) -> str:
    """Such as "4 x 1 + 1 x 4"."""
    return " + ".join(f"{widths.count(width)} x {width}" for width in sorted(set(widths)))


def _facts(config: ClusterConfig, machines: int, requests: int) -> dict[str, object]:
    return {
        "machines": machines,
        "profile": config.profile.name,
        "hardware": config.profile.hardware,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "requests": f"{requests} of equal length, {5 * requests} of the mix",
        "mix": f"{SHORT_SHARE:.0%} of {SHORT} tokens, the others of {LONG}",
        "policy": config.policy,
        "seed": config.seed,
    }


def _chart(rows: Sequence[Row]) -> Chart:
    """Mean time to first token by width, for prompts with equal length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["prompts"] == "alike":
            width = float(str(row["pipelines"]).rpartition(" ")[2])
            name = f"{row['tokens']} at {row['load']}"
            series.setdefault(name, []).append((width, float(str(row["ttft_mean_s"]))))
    return Chart("Mean time to first token by width of the pipelines", "stages", "seconds", series, log_x=True)
