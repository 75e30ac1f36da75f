"""The histograms of a store."""

from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.kvstore.metrics import FOLLOWED_KEYS, StoreObserver
from tests.unit.kvstore.helpers import keys_of

A, B = keys_of(2)


class Scene:
    def __init__(self, sample_keys: int = FOLLOWED_KEYS) -> None:
        self.now = 0.0
        self.metrics = PrometheusMetrics("kvstore")
        self.observer = StoreObserver(self.metrics, lambda: self.now, sample_keys)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"moonpool_kvstore_{name}", labels)


def test_lifetimes_and_gaps() -> None:
    scene = Scene()
    scene.observer.changed([A, B], [])
    scene.now = 10.0
    scene.observer.asked([A])
    scene.now = 14.0
    scene.observer.asked([A])
    scene.now = 100.0
    scene.observer.changed([], [A])
    assert len(scene.observer.followed) == 1
    assert (scene.value("block_reuse_gap_seconds_count"), scene.value("block_reuse_gap_seconds_sum")) == (2.0, 14.0)
    assert (scene.value("block_lifetime_seconds_count"), scene.value("block_lifetime_seconds_sum")) == (1.0, 100.0)


def test_blocks_that_are_not_followed_are_not_counted() -> None:
    scene = Scene()
    scene.observer.asked([A])
    scene.observer.changed([], [A])
    assert scene.value("block_lifetime_seconds_count") == 0.0


def test_the_sample_is_bounded_and_long_lives_are_not_left_out() -> None:
    scene = Scene(sample_keys=64)
    old, new = keys_of(400)[:200], keys_of(400)[200:]
    scene.observer.changed(old, [])
    scene.now = 50.0
    scene.observer.changed(new, [])
    assert 0 < len(scene.observer.followed) <= 64
    followed = len(scene.observer.followed)
    scene.observer.changed([], [*old, *new])
    assert scene.value("block_lifetime_seconds_count") == followed
    seconds = scene.value("block_lifetime_seconds_sum")
    assert seconds is not None
    assert 0.3 * followed < seconds / 50.0 < 0.7 * followed, "about half of those followed are old"


def test_reads_by_tier_and_commits() -> None:
    scene = Scene()
    scene.observer.read(cold=True, seconds=0.5)
    scene.observer.read(cold=False, seconds=0.25)
    scene.observer.committed(0.125)
    assert scene.value("read_seconds_sum", tier="ssd") == 0.5
    assert scene.value("read_seconds_sum", tier="dram") == 0.25
    assert scene.value("commit_seconds_sum") == 0.125
