"""What the histograms are told."""

from moonpool.kv.keys import BlockKey
from moonpool.telemetry.metrics import Metrics
from services.kvstore.operate import observe
from services.kvstore.operate.observe import Observer


def key(first: int, number: int = 0) -> BlockKey:
    return BlockKey(bytes([first]) + number.to_bytes(31, "big"))


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = Metrics("kvstore")
        self.observer = Observer(self.metrics, lambda: self.now)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"moonpool_kvstore_{name}", labels)


def test_lifetimes_and_gaps_of_sampled_blocks() -> None:
    scene = Scene()
    followed, ignored = key(16), key(17)
    scene.observer.changed([followed, ignored], [])
    assert len(scene.observer) == 1
    scene.now = 10.0
    scene.observer.asked([followed, ignored])
    scene.now = 14.0
    scene.observer.asked([followed])
    scene.now = 100.0
    scene.observer.changed([], [followed, ignored])
    assert len(scene.observer) == 0
    assert (scene.value("block_reuse_gap_seconds_count"), scene.value("block_reuse_gap_seconds_sum")) == (2.0, 14.0)
    assert (scene.value("block_lifetime_seconds_count"), scene.value("block_lifetime_seconds_sum")) == (1.0, 100.0)


def test_blocks_that_nobody_follows_are_nothing() -> None:
    scene = Scene()
    scene.observer.asked([key(0)])
    scene.observer.changed([], [key(0)])
    assert scene.value("block_lifetime_seconds_count") == 0.0


def test_the_books_are_bounded() -> None:
    scene = Scene()
    scene.observer.changed([key(0, number) for number in range(observe.MAX_FOLLOWED + 5)], [])
    assert len(scene.observer) == observe.MAX_FOLLOWED


def test_reads_by_tier_and_commits() -> None:
    scene = Scene()
    scene.observer.read(cold=True, seconds=0.5)
    scene.observer.read(cold=False, seconds=0.25)
    scene.observer.committed(0.125)
    assert scene.value("read_seconds_sum", tier="ssd") == 0.5
    assert scene.value("read_seconds_sum", tier="dram") == 0.25
    assert scene.value("commit_seconds_sum") == 0.125
