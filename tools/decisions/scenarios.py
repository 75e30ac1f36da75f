"""Small clusters in virtual time with recorded cores: policies, faults, load peaks, roles, stores, full pools."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from moonpool.conductor.core.actions import ChangeRole
from moonpool.conductor.core.instances import InstanceKind
from moonpool.conductor.core.roles import RoleLimits
from moonpool.engine.decode.core.settings import Preemption
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.clock import ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import LEAPS, ClusterConfig, DecodeMemory, Runs, SloTargets
from moonpool.simulator.experiments.faults import MIX, storm
from moonpool.simulator.experiments.prefix_caching import HotLoad
from moonpool.simulator.network import CallDelays
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.simulator.traces.workload import CHAT, Workload, WorkloadMix

PROFILE = load_profile("llama-70b-a800")
GB = 10**9
BUSY = WorkloadMix(rate_per_s=2.0, pause_s=20.0)
"""About what two and two instances can do."""
SEVERAL = replace(BUSY, several=0.4, rate_per_s=1.0)
TALK = replace(CHAT, rate_per_s=12.0, answer_tokens=400.0)
"""Long answers to short prompts: decode's pool fills."""
TENANTS = replace(BUSY, tenants=4, rate_per_s=3.0, burst_factor=6.0, burst_every_s=40.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and its events.

    Attributes:
        settings: the cluster's; default: two prefill instances, two decode instances and a kvstore.
        mix: the requests' mix.
        requests: so many.
        crashes: (when, instance, seconds away).
        runs: decode's steps.
        stormy: faults are drawn by the seed.
        trace: requests by seed, instead of `mix`.
        changes: (when, instance) for orders to change roles.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    mix: WorkloadMix = BUSY
    requests: int = 120
    crashes: tuple[tuple[float, str, float], ...] = ()
    runs: Runs = LEAPS
    stormy: bool = False
    trace: Callable[[int], Iterable[TraceRequest]] | None = None
    changes: tuple[tuple[float, str], ...] = ()

    def run(self, seed: int) -> None:
        """Until every request has ended.

        Raises:
            AssertionError: something did not come back.
        """
        config = ClusterConfig(**{"profile": PROFILE, "prefill": 2, "decode": 2, "seed": seed, **self.settings})
        trace = self.trace(seed) if self.trace else Workload(seed, self.mix).requests(self.requests)
        if self.stormy:
            storm(config, list(trace), seed)
            return
        cluster = Cluster(config, lambda _: None, runs=self.runs)
        cluster.feed(trace)
        for when, name, away in self.crashes:
            cluster.world.at(ps(when), lambda crash: cluster.crash(*crash), (name, away))
        for when, name in self.changes:
            kind = InstanceKind.PREFILL if name[0] == "d" else InstanceKind.DECODE
            cluster.world.at(ps(when), cluster.machines.change, ChangeRole(name, 1, kind))
        cluster.run()
        cluster.check_at_rest()


def _crowd(seed: int) -> list[TraceRequest]:
    """Short prompts, some with a common beginning, and long answers, all within seconds. Blocks have 64 tokens."""
    rng, found, fresh = random.Random(f"crowd {seed}"), [], 1000
    for number in range(50):
        shared, own = 100 * rng.randrange(4), rng.randint(1, 6)
        ids = (*range(shared, shared + rng.randint(0, 6)), *range(fresh, fresh + own))
        fresh += own
        tokens, choices = 64 * len(ids) - rng.randint(1, 63), rng.choice((1, 1, 1, 3))
        found.append(TraceRequest(100.0 * number, tokens, rng.randint(50, 900), ids, f"t{number % 3}", choices))
    return found


def _full(way: Preemption, **memory: Any) -> Scenario:
    """A decode pool for some sequences, with answers longer than expected."""
    kept = DecodeMemory(preemption=way, **{"swap_bytes": 2 * GB, "assumed_answer_tokens": 32, **memory})
    return Scenario({"decode": 1, "memory": kept, "pool_blocks": 150, "kvstore": 2, "block_size": 64}, trace=_crowd)


def _admitting(admission: str, **more: Any) -> Scenario:
    """More comes than can be served in time."""
    settings = {"admission": admission, "rate": 3.0, "decode": 1, "slo": SloTargets(15.0, 0.034), **more}
    return Scenario(settings, replace(BUSY, tenants=2, answer_tokens=300.0), 150)


SWAPPING = RoleLimits(swap=True, ttft_s=2.0, tbt_s=0.04, ratio=1.2, hold_s=8.0, dwell_s=20.0)
HELD = RoleLimits(swap=True, hold_s=1e6)
DROPS = CallDelays(drop_share=0.02, late_share=0.03)
READING = WorkloadMix(conversations=0.1, questions=0.1, document=3.5, answer_tokens=60.0, rate_per_s=1.2)

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "policy-random": Scenario({"policy": "random", "prefill": 3}),
    "policy-round-robin": Scenario({"policy": "round_robin", "prefill": 3}),
    "policy-load-balance": Scenario({"policy": "load_balance", "prefill": 3}),
    "policy-cache-aware": Scenario({"policy": "cache_aware", "prefill": 3}),
    "several-answers": Scenario(mix=SEVERAL),
    "tenants-in-bursts": Scenario(mix=TENANTS, requests=150),
    "full-auto": _full(Preemption.AUTO, swap_bytes=GB // 4),
    "full-recompute": _full(Preemption.RECOMPUTE),
    "full-swap": _full(Preemption.SWAP),
    "admission-early": _admitting("promised_early"),
    "admission-predictive": _admitting("promised"),
    "admission-at-decode": _admitting("promised_none", keep_tbt=True),
    "admission-paper": _admitting("predictive", by_pool=True),
    "waits-for-room": Scenario(
        {"room_wait_s": 5.0, "pool_blocks": 90, "decode": 1, "deadline_s": 40.0},
        replace(TALK, tenants=3, rate_per_s=3.0),
        100,
    ),
    "storm": Scenario({"prefill": 3, "decode": 3, "kvstore": 2}, MIX, 60, stormy=True),
    "storm-of-conductors": Scenario({"conductors": 2, "kvstore": 1}, MIX, 60, stormy=True),
    "lost-messages": Scenario({"delays": DROPS, "deadline_s": 60.0, "kvstore": 2}, CHAT, 120),
    "lost-instances": Scenario(crashes=((15.0, "p0", 5.0), (25.0, "d1", 5.0), (35.0, "s0", 0.0), (45.0, "d0", 20.0))),
    "conductors": Scenario({"conductors": 3}, TALK, 120, crashes=((4.0, "c0", 3.0), (9.0, "c1", 2.0))),
    "roles": Scenario({"decode": 4, "roles": SWAPPING, "role_change_s": 5.0, "kvstore": 0}, READING, 120),
    "drains": Scenario({"roles": HELD, "role_change_s": 5.0, "decode": 3}, changes=((10.0, "d4"), (25.0, "p0"))),
    "pipelines": Scenario({"prefill": 3, "widths": (1, 2, 4)}, replace(BUSY, document=3.5)),
    "hot-prefixes": Scenario(
        {"prefill": 4, "kvstore": 0},
        trace=lambda seed: HotLoad(requests=200, rate_per_s=14.0, prefixes=3, seed=seed).arrivals(),
    ),
    "rests-at-decode": Scenario(
        {"decode_prompt_tokens": 2048, "prefill": 1, "kvstore": 0}, replace(CHAT, rate_per_s=4.0), 150
    ),
    "small-stores": Scenario({"kvstore": 3, "store_bytes": 30 * GB, "eviction": "kv-aware"}),
    "stores-with-disks": Scenario({"kvstore": 2, "store_bytes": 15 * GB, "disk_bytes": 60 * GB, "eviction": "s3-fifo"}),
    "one-machine": Scenario({"max_queue": 3, "host_slowdown": 1.6, "peers": False, "slow_factor": 2.0}),
    "single-steps": Scenario(
        {"memory": DecodeMemory(chunked_prefill_size=64)}, replace(TALK, answer_tokens=60.0), 60, runs=Runs(1)
    ),
    "short-runs": Scenario({"pool_blocks": 200}, replace(TALK, answer_tokens=100.0), 60, runs=Runs(8, 8)),
}
