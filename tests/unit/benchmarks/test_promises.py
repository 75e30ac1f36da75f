"""What early promises hold, in a small cluster."""

from benchmarks.eviction import SHIPPED
from benchmarks.promises import looks
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.frame import RequestSource


def test_promises_wait_where_prompts_do() -> None:
    profile, source = load_profile("llama-70b-a800"), RequestSource(SHIPPED, requests=16)
    crowded, idle = (
        looks(ClusterConfig(profile=profile, prefill=prefills, decode=2, kvstore=0, rate=4.0), source)
        for prefills in (1, 16)
    )
    assert len(crowded) == len(idle) > 1
    assert max(it.promises for it in crowded) > max(it.promises for it in idle)
    assert max(it.promised for it in crowded) > max(it.promised for it in idle)
    for it in (*crowded, *idle):
        assert (it.promised > 0) == (it.promises > 0)
        assert it.promised + it.used + it.least_spare <= 1.0
    assert max(it.used for it in idle) > 0
