"""Steps that tell their layers: all of them are one native call, and a callbacks tells each when it is computed."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from moonpool.base.kv.keys import slice_hash
from moonpool.base.scheduling.steps import LayerDone
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.native import library
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageDone, StageEvent, StageTokens
from moonpool.engine.platforms.base import DeviceEvent
from moonpool.engine.platforms.cpu import CpuKVMemory, CpuStream
from moonpool.engine.platforms.kv_memory import OnDone
from tests.layouts import one_tensor
from tests.unit.engine.stages import Stages, stages, whole

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

LAYERS = 4
BLOCKS = ((4, 16), (1, 16), (6, 8))
"""Those of `whole`, with their valid tokens."""


class Counting(CpuStream):
    """A stream that counts what it was given."""

    def __init__(self) -> None:
        self.given = 0

    def run(self, work: Callable[[], None]) -> None:
        self.given += 1
        super().run(work)


@dataclass
class Told:
    """A stage of a whole model, and what it tells.

    Attributes:
        names: layers in the order in which they were told, and "done" or "aborted".
        threads: that told them.
        then: what is done when a layer is told.
    """

    engine: Stages
    names: list[int | str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    then: Callable[[int], None] = lambda layer: None
    stream: Counting = field(default_factory=Counting)

    def __post_init__(self) -> None:
        [runner] = self.engine.runners
        runner.emit, runner.gate_timeout_s = self._emit, 60.0
        runner.platform = replace(runner.platform, stream=self.stream)

    def run(self, step_id: int = 1, *, gated: bool = False) -> list[int | str]:
        """What a step tells, in a pool that was emptied."""
        self.names.clear()
        self.stream.given = 0
        one_tensor(self.engine.runners[0].platform.memory.kv).zero_()
        for layer in range(LAYERS):
            for block, _ in BLOCKS:
                self.engine.pool.parts[0].set_hash(layer, block, 0)
        self.engine.run(whole(step_id, gated=gated, layer_events=True))
        for name in self.names:
            assert isinstance(name, str) or self.is_sealed(name), "it was sealed too early"
        return list(self.names)

    def is_sealed(self, layer: int) -> bool:
        """Whether a layer is computed, and all its slices have the hashes of what they hold."""
        layout = self.engine.pool.layout
        found = []
        for block, valid in BLOCKS:
            data, value = self.engine.pool.read(layer, block)
            cleaned = bytearray(data)
            layout.zero_invalid(0, memoryview(cleaned), valid)
            found.append(any(data) and value == slice_hash(cleaned))
        return all(found)

    def _emit(self, event: StageEvent) -> None:
        if not isinstance(event, StageTokens):
            self.threads.append(threading.current_thread())
        if isinstance(event, LayerDone):
            assert self.is_sealed(event.layer), "its slices may leave"
            self.names.append(event.layer)
            self.then(event.layer)
        elif isinstance(event, StageDone):
            self.names.append("aborted" if event.aborted else "done")


@contextmanager
def told(checkpoint: Path) -> Iterator[Told]:
    with stages(checkpoint, 1) as engine:
        yield Told(engine)
        assert not engine.failures


def test_layers_are_one_call_and_told_by_another_thread_before_the_step(checkpoint: Path) -> None:
    with told(checkpoint) as told_rig:
        assert told_rig.run() == [0, 1, 2, 3, "done"]
        assert told_rig.stream.given == 4, "forgetting what the step before overwrote, embedding, layers, choice"
        me = threading.current_thread()
        assert [thread is me for thread in told_rig.threads] == [False] * LAYERS + [True]
        assert told_rig.run(2) == [0, 1, 2, 3, "done"]


def test_in_torch_this_thread_tells_them_layer_by_layer(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    with told(checkpoint) as told_rig:
        assert told_rig.run() == [0, 1, 2, 3, "done"]
        assert told_rig.stream.given == LAYERS + 3
        assert set(told_rig.threads) == {threading.current_thread()}


def test_layers_below_a_shut_gate_are_told_while_it_is_shut(checkpoint: Path) -> None:
    """Each gate opens only when the layer below it is told."""
    with told(checkpoint) as told_rig:
        [gates] = told_rig.engine.gates
        told_rig.then = lambda layer: gates.open(1, layer + 1)
        gates.open(1, 0)
        assert told_rig.run(gated=True) == [0, 1, 2, 3, "done"]
        assert not len(gates)


@pytest.mark.parametrize("shut", range(1, LAYERS))
def test_a_step_aborted_at_a_gate_tells_the_layers_below_it_and_no_other(checkpoint: Path, shut: int) -> None:
    with told(checkpoint) as told_rig:
        [gates] = told_rig.engine.gates
        gates.open(1, shut - 1)
        told_rig.then = partial(_abort_at, gates, 1, shut - 1)
        assert told_rig.run(gated=True) == [*range(shut), "aborted"]
        told_rig.then = lambda layer: None
        assert told_rig.run(2) == [0, 1, 2, 3, "done"]


def _abort_at(gates: KVGates, step_id: int, at: int, layer: int) -> None:
    if layer == at:
        gates.abort(step_id)


def test_a_step_aborted_at_any_time_tells_what_was_computed(checkpoint: Path) -> None:
    """`is_sealed` looks at each layer that is told; where another thread aborts, no one knows how many there are."""
    chosen = random.Random(5)
    with told(checkpoint) as told_rig:
        [gates] = told_rig.engine.gates
        for step in range(1, 60):
            at = chosen.randrange(LAYERS)
            told_rig.then = partial(_abort_at, gates, step, at)
            *layers, end = told_rig.run(step)
            assert layers == list(range(len(layers)))
            assert len(layers) > at
            assert end == ("done" if len(layers) == LAYERS else "aborted")


def test_a_step_ends_when_all_its_layers_are_told_however_slow_that_is(checkpoint: Path) -> None:
    """The first layer is told when the last one is computed, behind what is chosen from it."""
    computed, waited = threading.Event(), list[bool]()

    class Chosen(Counting):
        def run(self, work: Callable[[], None]) -> None:
            super().run(work)
            if self.given == 3:
                computed.set()

    with stages(checkpoint, 1) as engine:
        told_rig = Told(engine, stream=Chosen())
        told_rig.then = lambda layer: waited.append(computed.wait(60))
        assert told_rig.run() == [0, 1, 2, 3, "done"]
        assert waited == [True] * LAYERS


class Broken(CpuKVMemory):
    """Memory of which one layer cannot be sealed."""

    ERROR = OSError("no")

    def finish_layer(self, layer: int, then: OnDone | None, behind: DeviceEvent | None = None) -> None:
        if layer == 1:
            raise self.ERROR
        super().finish_layer(layer, then, behind)


def test_a_layer_that_cannot_be_sealed_fails_the_step(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as engine:
        told_rig = Told(engine)
        [runner], [part] = engine.runners, engine.pool.parts
        runner.platform = replace(runner.platform, memory=Broken(part))
        with pytest.raises(OSError, match="no"):
            told_rig.run()
        assert told_rig.names == [0]
        assert engine.failures == [Broken.ERROR]
