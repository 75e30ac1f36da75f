"""When moving KV pays: the bandwidth above which loading a prefix is quicker than computing it.

The paper's line: reuse pays when B / G > 2ds / (gqa (apd + bd^2)), B bytes and G floating-point operations per second.
Solved for B it is the prefix's bytes over the seconds of computing it. The simulated truth also has what a prompt costs
once, the rest of the prompt that is computed anyway, and layers that load while others compute.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace

from moonpool.engine.emulated.profile import Profile
from moonpool.kv.changes import KeyChanges
from moonpool.kv.keys import BlockKey
from services.conductor.core.failures import Failure, Stale
from services.conductor.core.messages import Target
from services.prefill.core.actions import TellToken
from services.prefill.core.events import Source
from simulator.cluster.config import ClusterConfig
from simulator.cluster.prefill import PrefillInstance
from simulator.cluster.prompts import Peers
from simulator.cluster.requests import Request, Sequence
from simulator.cluster.store import Store
from simulator.experiments.frame import Progress, Result
from simulator.kernel.calls import CallDelays, Calls
from simulator.kernel.clock import World
from simulator.kernel.links import Link, Network
from simulator.report.charts import Chart
from simulator.report.quantiles import digits

PREFIXES = (2048, 4096, 8192, 16384, 32768, 65536)
REST = 512
"""Tokens after the prefix."""
_STEPS = 40
_EQUAL = 1e-9


def ttft_s(profile: Profile, prefix: int, bytes_per_s: float) -> float:
    """Simulated seconds to the first token when the prefix is loaded at a rate; computed when the rate is 0."""
    speeds = replace(profile.speeds, load_bytes_per_s=bytes_per_s)
    config = ClusterConfig(profile=replace(profile, speeds=speeds), prefill=1, decode=1, kvstore=1)
    world, ends = World(), list[float]()
    network = Network(world)
    store = Store(world, network, config, "s0", _ignore, lambda: None)
    calls = Calls(world, CallDelays(0.0, 0.0), seed=0)
    peers = Peers(_ignore, lambda: None, lambda _: None, _alone, lambda _: False, _alone)
    instance = PrefillInstance(world, network, config, "p0", [store], lambda _: store, calls, peers)
    keys = tuple(BlockKey(number.to_bytes(32, "little")) for number in range(prefix // config.block_tokens))
    if bytes_per_s:
        store.write(keys, Link("elsewhere", 1e18), lambda: None)
        world.run()
    begun = world.seconds
    prompt = Sequence(Request(1, world.now, prefix + REST, 1, keys), "r1", prefix + REST, 1)
    sources = (Source("s0", len(keys)),) if bytes_per_s else ()
    instance.submit(prompt, None, _Waits(lambda: ends.append(world.seconds)), sources)
    world.run()
    return ends[0] - begun


@dataclass(frozen=True, slots=True)
class _Waits:
    """Waits for the first token."""

    came: Callable[[], None]

    def accepted(self, number: int) -> None:
        """See `Client.accepted`."""

    def token(self, told: TellToken) -> None:
        """See `Client.token`."""
        self.came()

    def delivered(self) -> None:
        """See `Client.delivered`."""

    def over(self, result: Failure | Stale | None) -> None:
        """See `Client.over`."""
        assert result is None, result


def _alone(target: Target) -> None:
    raise AssertionError("nobody else is there")


def _ignore(changes: KeyChanges) -> None:
    """Nobody asks what the parts hold."""


def break_even(profile: Profile, prefix: int) -> float:
    """The rate, bytes per second, at which loading takes as long as computing; by bisection."""
    computed = ttft_s(profile, prefix, 0.0)
    low, high = 1.0, 1e15
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        if ttft_s(profile, prefix, middle) > computed * (1 - _EQUAL):  # equal: the core did not even try
            low = middle
        else:
            high = middle
    return high


def paper_line(profile: Profile, prefix: int, operations_per_s: float) -> float:
    """The paper's B for LLaMA-70B, whose KV bytes per token must be those of the profile."""
    layers, width, a, b = 80, 8192, 4, 22
    operations = layers * (a * prefix * prefix * width + b * prefix * width * width)
    return prefix * profile.token_bytes * operations_per_s / operations


def transfer(profile: Profile, progress: Progress, prefixes: Listed[int] = PREFIXES) -> Result:
    """A row per length of prefix."""
    reference = 8192
    seconds = ttft_s(profile, reference, 0.0) - ttft_s(profile, 0, 0.0)
    operations_per_s = reference * profile.token_bytes / seconds / paper_line(profile, reference, 1.0)
    rows = []
    for prefix in prefixes:
        line, truth = paper_line(profile, prefix, operations_per_s), break_even(profile, prefix)
        rows.append(
            {
                "prefix_tokens": prefix,
                "computed_s": digits(ttft_s(profile, prefix, 0.0)),
                "loaded_s_at_profile_rate": digits(ttft_s(profile, prefix, profile.speeds.load_bytes_per_s or 1e9)),
                "paper_gb_per_s": digits(line / 1e9),
                "simulated_gb_per_s": digits(truth / 1e9),
            }
        )
        progress(f"{prefix} tokens: paper {line / 1e9:.3g} GB/s, simulated {truth / 1e9:.3g} GB/s")
    series = {
        name: [(float(str(row["prefix_tokens"])), float(str(row[column]))) for row in rows]
        for name, column in (("paper's line", "paper_gb_per_s"), ("simulated", "simulated_gb_per_s"))
    }
    facts: dict[str, object] = {
        "profile": profile.name,
        "rest_tokens": REST,
        "operations_per_s": digits(operations_per_s),
        "operations_from": f"the profile's seconds for {reference} tokens",
    }
    chart = Chart("Bandwidth above which loading pays", "prefix, tokens (logarithmic)", "GB/s", series, log_x=True)
    return Result("transfer", facts, rows, chart)
