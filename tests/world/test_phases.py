"""Each kind of service is killed at many moments of a few requests: every answer is whole and right."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from moonpool.client import AsyncClient, SamplingParams
from tests.world.cluster import Cluster, Simulation, answer, prompt
from tests.world.process import on_virtual_time
from tests.world.profiles import slow_prefill

BLOCK, STREAMS = 16, 6
SAMPLING = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
RATES = "rates: {load_bytes_per_s: 1.0e+6, transfer_bytes_per_s: 1.0e+6}"
"""The beginning of a prompt is loaded in 0.08 s and computed in 0.64 s."""
DECODE_S = 0.008
MOMENTS_S = (0.004, 0.04, 0.15, 0.35, 0.5, 0.7, 1.0)
"""After the requests were sent; the last answer ends after a second and a half."""
SEEN_BY = {
    "loading": ("prefill", "loads"),
    "queued": ("prefill", "sequences_waiting"),
    "computing": ("prefill", "steps_in_flight"),
    "streaming KV": ("prefill", "transfers"),
    "promised": ("decode", "transfers_promised"),
    "receiving": ("decode", "transfers_receiving"),
    "decoding": ("decode", "sequences_running"),
}
"""By which gauge of which instances a phase is seen."""
FLAGS = {"prefill": ["--block-size", str(BLOCK)], "decode": ["--block-size", str(BLOCK)]}


async def phases(cluster: Cluster) -> set[str]:
    """Which some request is in."""
    names = [name for name, service in cluster.services.items() if service.kind in ("prefill", "decode")]
    busy = {(gauge.instance.partition("-")[0], gauge.name) for gauge in await cluster.gauges(*names) if gauge.value > 0}
    return {phase for phase, seen in SEEN_BY.items() if seen in busy}


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("prefill", "kvstore")), "decode", "conductor"]
)
@on_virtual_time
async def test_whoever_is_killed_at_whatever_moment(simulation: Simulation, tmp_path: Path, kind: str) -> None:
    """All prompts begin alike. Between two moments all of prefill starts anew, so that the beginning is loaded."""
    profile = slow_prefill(tmp_path, RATES, DECODE_S)
    cluster = Cluster(simulation, dict.fromkeys(("conductor", "prefill", "decode"), 2), FLAGS, profile)
    await cluster.start()
    met, placements = set[str](), Counter[int]()
    shared = prompt(40 * BLOCK, kind)
    async with AsyncClient(cluster.addresses) as client:
        for moment, moment_s in enumerate(MOMENTS_S):
            prompts = [
                shared + prompt(20 * BLOCK + 30 * number, f"{kind} {moment} {number}") for number in range(STREAMS)
            ]
            running = [asyncio.ensure_future(client.generate(token_ids=each, sampling=SAMPLING)) for each in prompts]
            await asyncio.sleep(moment_s)
            met |= await phases(cluster)
            victim = cluster.services[f"{kind}-0"]
            victim.kill()
            results = await asyncio.gather(*running)
            assert [result.token_ids for result in results] == [answer(each, SAMPLING.max_tokens) for each in prompts]
            placements.update(len(result.placements) for result in results)
            await victim.start()
            await cluster.rest()
            for name in ("prefill-0", "prefill-1"):
                await cluster.services[name].drain()
                await cluster.services[name].start()
            await cluster.rest()
    assert met == set(SEEN_BY), f"never met: {set(SEEN_BY) - met}"
    assert kind in ("kvstore", "conductor") or placements[2] > 0, "nothing was placed again"
