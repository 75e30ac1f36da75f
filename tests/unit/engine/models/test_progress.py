"""A step's progress: another thread learns of each layer while the native step goes on, and of its end."""

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.engine.kernels.native import library
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.native_step import Progress
from moonpool.engine.models.stage import StageModel

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

FIRST, LAST, BLOCK = 1, 4, 16
"""A stage in the middle of a model of four layers, so that layers are not counted from 0."""


class Shut:
    """A watch: all layers above one are shut."""

    def __init__(self, highest: int) -> None:
        self.words = array("q", (0, highest, 0))
        self.address = self.words.buffer_info()[0]

    def stopped(self, layer: int) -> bool:
        return self.words[1] < layer


@dataclass
class Work:
    """Steps of one stage over the same tokens."""

    stage: StageModel
    batch: PackedBatch = field(default_factory=lambda: PackedBatch.build([(bytes(4 * 20), 0, [0, 1])], BLOCK))

    def __post_init__(self) -> None:
        config = self.stage.config
        self._pool = torch.zeros(LAST - FIRST, 2, config.num_kv_heads, 2, BLOCK, config.head_dim)

    def run(self, first: int, progress: Progress, signals: Shut | None = None) -> int:
        """Layers from one on; returns what it came to."""
        hidden = torch.ones(20, self.stage.config.hidden_size)
        return self.stage.run(hidden, self.batch, self._pool, first, LAST, signals=signals, progress=progress)[0]

    def progress(self) -> Progress:
        progress = self.stage.progress()
        assert progress is not None
        return progress


@pytest.fixture
def work(checkpoint: Callable[[str], Path]) -> Work:
    path = checkpoint("tiny-llama")
    return Work(load_stage(path, load_config(path), torch.float32, FIRST, LAST))


@contextmanager
def follower(progress: Progress, layers: range) -> Iterator["SimpleQueue[tuple[int, bool]]"]:
    """What another thread hears of each layer."""
    heard: SimpleQueue[tuple[int, bool]] = SimpleQueue()

    def follow() -> None:
        for layer in layers:
            heard.put((layer, progress.wait(layer)))

    thread = threading.Thread(target=follow)
    thread.start()
    yield heard
    thread.join()


def test_who_follows_hears_of_the_layers_up_to_a_shut_gate_and_then_of_the_others(work: Work) -> None:
    progress = work.progress()
    with follower(progress, range(FIRST, LAST)) as heard:
        assert work.run(FIRST, progress, Shut(2)) == 3
        assert [heard.get(), heard.get()] == [(1, True), (2, True)]
        assert heard.empty()
        assert work.run(3, progress) == LAST
        assert heard.get() == (3, True)


def test_who_follows_hears_that_a_layer_will_not_be_computed(work: Work) -> None:
    progress = work.progress()
    with follower(progress, range(FIRST, LAST)) as heard:
        assert work.run(FIRST, progress, Shut(1)) == 2
        assert heard.get() == (1, True)
        progress.end()
        assert [heard.get(), heard.get()] == [(2, False), (3, False)]
    assert progress.wait(1), "it is computed all the same"


def test_an_end_before_the_first_layer_and_behind_the_last(work: Work) -> None:
    none, all_ = work.progress(), work.progress()
    none.end()
    assert not none.wait(FIRST)
    work.run(FIRST, all_)
    all_.end()
    assert [all_.wait(layer) for layer in range(FIRST, LAST + 1)] == [True, True, True, False]


def test_when_layers_began(work: Work) -> None:
    progress, before = work.progress(), time.monotonic_ns()
    assert work.run(FIRST, progress, Shut(2)) == 3
    between = time.monotonic_ns()
    work.run(3, progress)
    began = [progress.began_ns(layer) for layer in range(FIRST, LAST)]
    assert before <= began[0] < began[1] < between <= began[2] <= time.monotonic_ns()


def test_nothing_is_missed_however_the_threads_meet(work: Work) -> None:
    """Each step ends at any layer, with a follower that waits already or does not yet: none of them waits for ever."""
    chosen = random.Random(3)
    for _ in range(200):
        progress, shut = work.progress(), chosen.randrange(FIRST, LAST + 1)
        with follower(progress, range(FIRST, LAST)) as heard:
            came = work.run(FIRST, progress, Shut(shut - 1))
            progress.end()
        assert came == shut
        assert [heard.get() for _ in range(FIRST, LAST)] == [(index, index < shut) for index in range(FIRST, LAST)]
