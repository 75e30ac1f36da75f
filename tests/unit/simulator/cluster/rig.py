"""A hardware with round numbers, and runs of small clusters on it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.emulated.profile import Profile
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import LEAPS, ClusterConfig, Runs
from moonpool.simulator.cluster.requests import Request
from moonpool.simulator.network import CallDelays
from moonpool.simulator.traces.mooncake import TraceRequest

PROFILE = Profile(
    name="round",
    hardware="round numbers",
    speeds=Speeds(
        prefill_per_token_s=0.001,
        decode_base_s=0.010,
        decode_per_sequence_s=0.001,
        decode_per_context_token_s=1e-6,
        load_bytes_per_s=1e6,
        transfer_bytes_per_s=1e6,
    ),
    token_bytes=100,
    max_tokens=100_000,
    layers=4,
    pool_bytes=100 * 64 * 200,
)
"""A millisecond per prompt token; 200 blocks of 64 tokens; a block's KV crosses a link in 6.4 ms."""
NO_DELAYS = CallDelays(least_s=0.0, more_s=0.0)


def config(**changed: Any) -> ClusterConfig:
    """One of each, without delays between them; prefill computes the prompts."""
    plain = ClusterConfig(
        profile=PROFILE,
        prefill=1,
        decode=1,
        block_size=64,
        max_num_batched_tokens=256,
        decode_prompt_tokens=0,
        delays=NO_DELAYS,
    )
    return replace(plain, **changed)


def request(at_s: float, tokens: int, answer: int, first_id: int) -> TraceRequest:
    """A prompt whose blocks have ids from `first_id` on."""
    return TraceRequest(at_s * 1000, tokens, answer, tuple(range(first_id, first_id - (-tokens // 64))))


def run(wanted: ClusterConfig, trace: Sequence[TraceRequest], *, runs: Runs = LEAPS) -> tuple[list[Request], Cluster]:
    """All requests in the order of coming; everything must have come back."""
    ended: list[Request] = []
    cluster = Cluster(wanted, ended.append, runs=runs)
    cluster.feed(trace)
    cluster.run()
    cluster.check_at_rest()
    return sorted(ended, key=lambda request: request.number), cluster
