"""A session whose KV is on a slow SSD when its turns come: brought into memory before, once its pauses are known."""

from dataclasses import replace

from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.requests import Request
from moonpool.simulator.traces.mooncake import TraceRequest
from tests.unit.simulator.cluster.rig import PROFILE, config, request, run

BLOCK_BYTES = 64 * PROFILE.token_bytes
PAUSE_S, TURNS = 30.0, 9
PREFIX = tuple(range(16))
STORE = config(pool_blocks=30, disk_bytes=10_000 * BLOCK_BYTES, disk_bytes_per_s=2e5)
"""The prefix comes from memory in a tenth of a second, from SSD in half a second, and is computed in one."""
SMALL = replace(STORE, store_bytes=60 * BLOCK_BYTES)


def trace(session: str) -> list[TraceRequest]:
    """Nine turns, and single prompts between them that fill the store's memory twice in a pause."""
    turns = [
        TraceRequest(1000 * PAUSE_S * turn, 65 * 17 - 17, 1, (*PREFIX, 100 + turn), session=session)
        for turn in range(TURNS)
    ]
    between = [request(1.0 + 2.5 * number, 640, 1, 1000 + 10 * number) for number in range(12 * TURNS)]
    return sorted([*turns, *between], key=lambda each: each.timestamp)


def last_ttft_s(requests: list[Request]) -> float:
    """Seconds to the first token of the last turn; all of the prefix was reused."""
    turn = [each for each in requests if each.keys[:1] == requests[0].keys[:1]][-1]
    assert turn.reused == 64 * len(PREFIX)
    return (turn.first_at - turn.arrived) / PS


def test_a_known_session_waits_hardly_longer_for_ssd_than_for_memory() -> None:
    memory_s = last_ttft_s(run(STORE, trace(""))[0])
    assert last_ttft_s(run(SMALL, trace(""))[0]) > 2 * memory_s
    requests, cluster = run(SMALL, trace("s"))
    assert last_ttft_s(requests) <= 1.2 * memory_s
    assert cluster.conductors[0].core.scheduler.prefetch.to_memory >= 3


def test_with_blocks_to_spare_a_known_session_waits_for_no_load_at_all() -> None:
    """The instance has fetched the blocks before the turn comes."""
    spare = replace(SMALL, pool_blocks=60)
    memory_s = last_ttft_s(run(replace(STORE, pool_blocks=60), trace(""))[0])
    requests, cluster = run(spare, trace("s"))
    assert last_ttft_s(requests) <= 0.6 * memory_s
    assert sum(prefill.core.copies.copied_blocks for prefill in cluster.prefills) >= 3 * len(PREFIX)
    assert last_ttft_s(run(replace(spare, prefetch_share=0.0), trace("s"))[0]) == memory_s
