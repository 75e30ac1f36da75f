"""Pools that grow and shrink while a trace is served: by the conductor's forecast, or by counting requests.

The scaler is the platform's, as `deploy/kubernetes/components/autoscaling` sets it: it reads a figure every `POLL_S`,
takes the mean of the last minute, adds what is missing at once, and takes one instance a minute away when no reading
within a while asked for it. A started instance is there after `start_s`, and costs from the order on; one that goes
drains first.
Beside both rules stands the fixed mix that the pools begin with, such as the planner's optimum.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.conductor.core.scaling import demands
from moonpool.simulator.clock import PS, ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.machines import EngineInstance
from moonpool.simulator.experiments.frame import Progress, RequestSource, Result, assumptions
from moonpool.simulator.experiments.report import Chart, Collector, digits

POLL_S, MEAN_S = 15.0, 60.0
PAUSE_S = {"prefill": 120.0, "decode": 300.0}
"""For so long no reading may have asked for an instance that is taken away."""
DOWN_S = 60.0
"""Between two instances that are taken away."""
TOLERANCE = 0.1
"""A figure that is off by so much changes nothing, as in Kubernetes."""
FIXED = "fixed"
Rule = Callable[[Cluster], tuple[float, float]]
"""Instances of prefill and of decode that are wanted now."""


def forecast(cluster: Cluster) -> tuple[float, float]:
    """What the conductors tell: the largest of their figures."""
    told = [demands(conductor.core, cluster.world.seconds) for conductor in cluster.conductors]
    return max(prefill.wanted for prefill, _ in told), max(decode.wanted for _, decode in told)


def counting(prompts: float, answers: float) -> Rule:
    """So many requests an instance, waiting or running, as autoscalers count that know nothing of their size."""

    def rule(cluster: Cluster) -> tuple[float, float]:
        prefill, decode = (sum(map(_requests, pool)) for pool in (cluster.prefills, cluster.decodes))
        return prefill / prompts, decode / answers

    return rule


def _requests(instance: EngineInstance) -> int:
    """Requests that wait and run at an instance."""
    load = instance.load()
    return load.running + load.waiting if instance.up else 0


@dataclass(slots=True)
class ScaledPool:
    """One role's instances.

    Attributes:
        instances: all that may run.
        ordered: how many run or start, without those that drain.
        bound: how many may be ordered.
        readings: (second, wanted) of the last minute.
        asked: (second, instances asked for) within the pause before instances are taken away.
        seconds: instance seconds so far, from order to end.
    """

    kind: str
    instances: Sequence[EngineInstance]
    ordered: int
    bound: int
    readings: deque[tuple[float, float]] = field(default_factory=deque)
    asked: deque[tuple[float, int]] = field(default_factory=deque)
    starting: int = 0
    shrunk_at: float = -math.inf
    seconds: float = 0.0
    most: int = 0

    def read(self, now: float, wanted: float) -> int:
        """Take a reading; return the instances that the scaler wants now."""
        self.readings.append((now, wanted))
        while self.readings[0][0] <= now - MEAN_S:
            self.readings.popleft()
        mean = sum(value for _, value in self.readings) / len(self.readings)
        asked = self.ordered if abs(mean / self.ordered - 1.0) <= TOLERANCE else math.ceil(mean)
        asked = min(max(asked, 1), self.bound)
        self.asked.append((now, asked))
        while self.asked[0][0] < now - PAUSE_S[self.kind]:
            self.asked.popleft()
        if asked >= self.ordered:
            return asked
        if max(count for _, count in self.asked) < self.ordered and now - self.shrunk_at >= DOWN_S:
            self.shrunk_at = now
            return self.ordered - 1
        return self.ordered


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a scaler may do: most instances of each kind, and the seconds that a start takes."""

    most: int
    start_s: float


class Scaler:
    """Reads a rule and starts and drains instances, while there are requests."""

    def __init__(self, cluster: Cluster, rule: Rule | None, bounds: Bounds) -> None:
        """`rule`: None = nothing changes."""
        config = cluster.config
        self._cluster, self._rule, self._start_ps = cluster, rule, ps(bounds.start_s)
        self.pools = (
            ScaledPool("prefill", cluster.prefills, config.prefill, bounds.most),
            ScaledPool("decode", cluster.decodes, config.decode, bounds.most),
        )
        for pool in self.pools:
            pool.asked.append((0.0, pool.ordered))  # the pools were right before
        self.course: dict[str, list[tuple[float, float]]] = {pool.kind: [] for pool in self.pools}
        cluster.world.after(0, self._poll)

    def _poll(self, _: object = None) -> None:
        cluster = self._cluster
        now = cluster.world.seconds
        wanted = None if self._rule is None else self._rule(cluster)
        for number, pool in enumerate(self.pools):
            if wanted is not None:
                self._set(pool, pool.read(now, wanted[number]))
            held = sum(instance.up for instance in pool.instances) + pool.starting
            pool.seconds += held * POLL_S
            pool.most = max(pool.most, held)
            self.course[pool.kind].append((now / 60, held))
        if cluster.busy:
            cluster.world.after(ps(POLL_S), self._poll)

    def _set(self, pool: ScaledPool, count: int) -> None:
        while pool.ordered < count:
            pool.ordered += 1
            pool.starting += 1
            self._cluster.world.after(self._start_ps, self._begin, pool)
        while pool.ordered > count:
            # What still starts is left to start: a platform that has got a machine for it lets it come, and then go.
            running = [instance for instance in pool.instances if instance.up and not instance.draining]
            if len(running) < 2:
                return
            pool.ordered -= 1
            self._cluster.machines.leave(min(running, key=_requests))

    def _begin(self, pool: ScaledPool) -> None:
        pool.starting -= 1
        free = next((instance for instance in pool.instances if not instance.up), None)
        if free is None:  # one that should have gone still drains
            pool.ordered -= 1
        else:
            self._cluster.machines.begin(free)


def scaling(
    config: ClusterConfig, source: RequestSource, bounds: Bounds, targets: Sequence[tuple[float, float]], tell: Progress
) -> Result:
    """A row for the mix that the pools begin with, one for the forecast, and one for each pair of counted requests."""
    rules: dict[str, Rule | None] = {FIXED: None, "forecast": forecast}
    rules |= {f"{prompts:g} prompts, {answers:g} answers": counting(prompts, answers) for prompts, answers in targets}
    config = replace(
        config, roles=replace(config.roles, ttft_s=config.slo.ttft_s)
    )  # as of requests that say their limit
    spare = max(0, bounds.most - min(config.prefill, config.decode))
    rows: list[dict[str, object]] = []
    chart: dict[str, list[tuple[float, float]]] = {}
    hours = 0.0
    for name, rule in rules.items():
        collector = Collector(config.slo)
        cluster = Cluster(replace(config, spare=spare if rule is not None else 0), collector.add)
        scaler = Scaler(cluster, rule, bounds)
        cluster.feed(source.read())
        cluster.run()
        cluster.check_at_rest()
        summary = collector.summary()
        used = sum(pool.seconds for pool in scaler.pools) / 3600
        hours = hours or used
        rows.append(
            {
                "rule": name,
                "goodput_share": summary.goodput_share,
                "ttft_p90_s": summary.ttft_s.get("p90"),
                "tbt_p90_s": summary.tbt_s.get("p90"),
                "instance_hours": digits(used),
                "of_fixed": digits(used / hours),
                "most": " + ".join([str(pool.most) for pool in scaler.pools]),
            }
        )
        tell(f"{name}: goodput {summary.goodput_share}, {used:.2f} instance hours")
        if name == "forecast":
            chart = scaler.course
    facts = assumptions(config, source) | {
        "begins": config.division,
        "bounds": f"at most {bounds.most} of each kind, a start takes {bounds.start_s:g} s",
        "minutes": digits(cluster.clients.ended_at / PS / 60),
    }
    return Result("scaling", facts, rows, Chart("Instances by the forecast", "minutes", "instances", chart))
