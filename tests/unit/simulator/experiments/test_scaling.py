"""Pools that scale: the platform's rule, and instances that come and drain while requests are served."""

from dataclasses import replace

import pytest

from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.experiments.frame import RequestSource
from moonpool.simulator.experiments.report import Collector
from moonpool.simulator.experiments.scaling import DOWN_S, MEAN_S, PAUSE_S, POLL_S, Bounds, ScaledPool, Scaler, scaling

CONFIG = ClusterConfig(profile=load_profile("llama-70b-a800"), prefill=1, decode=1, kvstore=1)
SOURCE = RequestSource(requests=40)


def test_a_pool_grows_at_once_and_shrinks_by_one_after_a_pause() -> None:
    pool = ScaledPool("prefill", [None] * 9, 2, 5)  # type: ignore[list-item]
    assert pool.read(0.0, 2.1) == 2, "within the tolerance"
    assert pool.read(POLL_S, 4.0) == pool.ordered + 2, "the mean of both readings, rounded up"
    pool.ordered = 4
    now = POLL_S + MEAN_S
    assert pool.read(now, 9.0) == 5, "no more than may be"
    pool.ordered = 5
    for number in range(int(PAUSE_S["prefill"] / POLL_S)):
        now += POLL_S
        wanted = pool.read(now, 1.0)
        assert wanted == 5, f"asked for {number * POLL_S:g} s ago"
    now += MEAN_S
    assert pool.read(now, 1.0) == 4
    pool.ordered = 4
    assert pool.read(now + POLL_S, 1.0) == 4
    assert pool.read(now + DOWN_S, 1.0) == 3


def test_instances_come_and_drain_under_requests() -> None:
    collector = Collector(CONFIG.slo)
    cluster = Cluster(replace(CONFIG, spare=2), collector.add)
    assert [instance.up for instance in cluster.prefills] == [True, False, False]
    turns = iter([(3.0, 3.0)] * 8)
    scaler = Scaler(cluster, lambda _: next(turns, (1.0, 1.0)), Bounds(3, 5.0))
    cluster.feed(SOURCE.read())
    cluster.run()
    cluster.check_at_rest()
    assert collector.summary().outcomes == {"done": 40}
    assert [pool.most for pool in scaler.pools] == [3, 3]
    assert all(instance.core.taken for instance in cluster.prefills), "each has computed prompts"


def test_rules_stand_beside_the_fixed_mix_and_are_the_same_each_time() -> None:
    lines: list[str] = []
    first, again = (scaling(CONFIG, SOURCE, Bounds(3, 10.0), [(4, 32)], lines.append) for _ in range(2))
    assert first.to_json() == again.to_json()
    rows = {str(row["rule"]): row for row in first.rows}
    assert set(rows) == {"fixed", "forecast", "4 prompts, 32 answers"}
    assert rows["fixed"]["of_fixed"] == 1.0
    assert rows["fixed"]["most"] == "1 + 1"
    assert float(str(rows["forecast"]["instance_hours"])) == pytest.approx(
        float(str(rows["forecast"]["of_fixed"])) * float(str(rows["fixed"]["instance_hours"])), rel=0.01
    )
