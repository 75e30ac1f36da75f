"""One engine or two: instances in the role both beside divisions into prefill and decode, on as many machines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moonpool.base.errors import ConfigError
from moonpool.base.frozen import frozen
from moonpool.simulator.cluster.config import ChunkSteps, ClusterConfig
from moonpool.simulator.experiments.frame import (
    Progress,
    RequestSource,
    Result,
    Row,
    assumptions,
    serving_row,
    simulate,
)
from moonpool.simulator.experiments.report import Chart

TIME_SLICES = 2.0
"""Steps of two engines on one machine take so many times as long while both compute."""


@frozen
class Mixing:
    """How instances in the role both compute prompts beside answers.

    Attributes:
        chunk_steps: the fixed time of such a step.
        chunk: most tokens of prompts in the step.
        continuous: steps of answers alone between two such steps.
    """

    chunk_steps: ChunkSteps
    chunk: int
    continuous: int

    def __str__(self) -> str:
        return f"{self.chunk_steps}, {self.chunk} tokens, {self.continuous} steps between"

    def applied(self, config: ClusterConfig) -> ClusterConfig:
        """A cluster that computes prompts so."""
        memory = replace(config.memory, chunked_prefill_size=self.chunk, num_continuous_decode_steps=self.continuous)
        return replace(config, memory=memory, chunk_steps=self.chunk_steps)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared.

    Attributes:
        machines: number of machines.
        splits: prefill instances of each division; none needed on one machine.
        mixings: of the instances in the role both.
    """

    machines: int
    splits: Sequence[int]
    mixings: Sequence[Mixing]

    def __post_init__(self) -> None:
        if self.machines < 1:
            raise ConfigError("machines", f"must be at least 1, is {self.machines}")
        for prefill in self.splits:
            if not 1 <= prefill < max(2, self.machines):
                raise ConfigError("splits", f"must be from 1 to {self.machines - 1}, is {prefill}")

    def clusters(self, config: ClusterConfig) -> Iterator[tuple[str, ClusterConfig]]:
        """Name and config of each row, divisions first.

        Two engines on one machine have half the pool each, and get the machine in time slices. A division is run once
        with prompts computed at prefill only, and once as `config` allows.
        """
        alone = {"host_slowdown": TIME_SLICES, "pool_blocks": max(1, config.blocks // 2)} if self.machines == 1 else {}
        for prefill in (1,) if self.machines == 1 else self.splits:
            decode = 1 if self.machines == 1 else self.machines - prefill
            split = replace(config, prefill=prefill, decode=decode, both=0, **alone)  # type: ignore[arg-type]  # numbers
            yield f"{prefill} + {decode}", replace(split, decode_prompt_tokens=0)
            if self.machines > 1 and config.decode_prompt_tokens:
                yield f"{prefill} + {decode}, prompts at decode", split
        for mixing in self.mixings:
            both = replace(config, prefill=0, decode=0, both=self.machines)
            yield f"{self.machines} both: {mixing}", mixing.applied(both)


def engines(config: ClusterConfig, source: RequestSource, compared: Comparison, progress: Progress) -> Result:
    """A row for each division and each way of the role both."""
    rows: list[Row] = []
    for name, cluster in compared.clusters(config):
        summary, _ = simulate(cluster, source.read())
        tokens = {"tpot_p90_s": summary.tpot_s.get("p90"), "e2e_mean_s": summary.e2e_s.get("mean")}
        rows.append({"engines": name, **serving_row(summary), **tokens})
        progress(f"{name}: mean TTFT {summary.ttft_s.get('mean', 0.0):g} s, goodput {summary.goodput_share:.1%}")
    names = tuple(str(row["engines"]) for row in rows)
    series = {
        label: [(place, float(str(row[column] or 0.0))) for place, row in enumerate(rows)]
        for label, column in (("TTFT p90", "ttft_p90_s"), ("ten times TBT p90", "tbt_p90_s"))
    }
    series["ten times TBT p90"] = [(place, 10 * seconds) for place, seconds in series["ten times TBT p90"]]
    facts = {**assumptions(config, source), "instances": f"{compared.machines} machines, {config.kvstore} kvstore"}
    return Result("engines", facts, rows, Chart("One engine or two", "", "seconds", series, names=names))
