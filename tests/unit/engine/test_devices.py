"""Two tiers of KV on a device with a hostile order: tokens, pool and hashes are those of the plain CPU, whatever it is.

`SEED=...` repeats one order.
"""

import importlib.util
import os
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.errors import ConfigError
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.kernels.choice import REPLACED
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import BlocksFetched, FetchBlocks, StageDone, StageEvent, StageTokens
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.platforms.base import CapturedGraph, Device, DeviceCapacity, DeviceEvent
from moonpool.engine.platforms.callback_thread import CallbackThread
from moonpool.engine.platforms.cpu import CpuKVMemory, CpuStream
from moonpool.engine.platforms.cuda import CudaDevice
from moonpool.engine.platforms.kv_memory import TieredKVMemory
from moonpool.engine.platforms.stage_platform import StagePlatform
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.prompt_graphs import PromptGraphs
from moonpool.engine.warm_up import warm_up
from tests.layouts import one_tensor
from tests.unit.engine.models.several_shapes import with_repeated_heads

BLOCKS, SIZE = 12, 16
FEW = [int(os.environ["SEED"])] if "SEED" in os.environ else list(range(6))
GREEDY = SampleSpec()
PROMPT = tuple(range(5, 45))
OTHER = tuple(range(60, 85))


Slices = list[tuple[bytes, int]]
"""Of a block: each layer's bytes and hash."""


@dataclass
class Rig:
    """One stage with all layers, and the pool as the I/O process sees it.

    Attributes:
        watched: blocks that are looked at whenever a layer is said to be done.
        seen: what they held, by step and layer.
        loading: blocks that come layer by layer, before the gates open.
        aborting: steps are given up after their first layer.
        not_captured: why there is no graph of decode steps, and none of prompts' layers; empty = there are.
    """

    model: StageModel
    pool: KVPool
    place: StagePlatform
    gates: KVGates = field(default_factory=KVGates)
    events: list[StageEvent] = field(default_factory=list)
    watched: tuple[int, ...] = ()
    seen: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    loading: dict[int, Slices] = field(default_factory=dict)
    aborting: bool = False
    not_captured: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        self.runner = StageRunner(0, self.model, self.place, NoLinks(), self.gates, self._emit, 5.0)
        self._next = 1

    def _emit(self, event: StageEvent) -> None:
        if isinstance(event, LayerDone):  # at this moment the slices may leave
            self.seen[event.step_id, event.layer] = [
                bytes(self.pool.slice(event.layer, tested)) for tested in self.watched
            ]
            if self.aborting:
                self.gates.abort(event.step_id)
            self._open(event.step_id, event.layer + 1)
        self.events.append(event)

    def run(self, *sequences: SequenceStep, **how: object) -> StageDone:
        """Runs a step and waits until it is said to be done."""
        step = Step(self._next, sequences, **how)  # type: ignore[arg-type]
        self._next += 1
        if step.gated:
            self._open(step.step_id, 0)
        goes_on = self.runner.run(step)
        while goes_on:
            goes_on = self.runner.go_on()
        self.settle()
        done = self.events[-1]
        assert isinstance(done, StageDone)
        return done

    def go_on(self, tokens: list[int], table: tuple[int, ...], count: int) -> None:
        """A sequence gets so many tokens: in one run on a device, step by step on the plain CPU."""
        run = 1 if self.place.device is None else count
        for _ in range(0, count, run):
            step = self.run(part(tokens, len(tokens) - 1, table), steps=run).step_id
            done = [event for event in self.events if isinstance(event, StageDone) and event.step_id == step]
            tokens += [token for event in done for token in event.sampled if token is not None]

    def _open(self, step_id: int, layer: int) -> None:
        if layer < self.pool.layout.layers:
            for block, slices in self.loading.items():
                self.pool.write(layer, block, memoryview(slices[layer][0]), slices[layer][1])
            self.gates.open(step_id, layer)

    def settle(self) -> None:
        """Until everything was emitted."""
        over = threading.Event()
        self.place.memory.fetch((), over.set)
        over.wait()

    def loaded(self) -> None:
        """Until all that landed is on the device."""
        there = threading.Event()
        self.place.memory.load(there.set)
        there.wait()

    def fetch(self, *blocks: int) -> None:
        self.runner.fetch(FetchBlocks(7, blocks))
        self.settle()
        assert self.events.pop() == BlocksFetched(7, 0)

    def slices(self, block: int) -> Slices:
        return [(bytes(data), value) for data, value in (self.pool.read(layer, block) for layer in self._layers)]

    def write(self, block: int, slices: Slices) -> None:
        for layer, (data, value) in enumerate(slices):
            self.pool.write(layer, block, memoryview(data), value)

    @property
    def _layers(self) -> range:
        return range(self.pool.layout.layers)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> StageModel:
    config = load_config(checkpoint)
    return load_stage(checkpoint, config, torch.float32, 0, config.num_layers)


def nothing_fails(error: BaseException) -> None:
    raise AssertionError from error


@contextmanager
def rig(
    model: StageModel,
    device: Device | None,
    batch_slices: int = 2,
    kv_dtype: str = "auto",
    *,
    graphs: bool = False,
    slots: Sequence[int] = (),
) -> Iterator[Rig]:
    """On a plain CPU without a device; with `graphs`, steps are captured. `slots`: of the blocks."""
    layout = kv_layout(model.config, "float32", SIZE, kv_dtype)
    pool = KVPool.create(layout, BLOCKS, [(0, layout.layers)], slots=len(slots))
    pool.move_slots(enumerate(slots))
    [part] = pool.parts
    if device is None:
        place = StagePlatform(torch.device("cpu"), CpuStream(), CpuKVMemory(part), CallbackThread(nothing_fails))
    else:
        callbacks = CallbackThread(nothing_fails, device.enter_thread)
        memory = TieredKVMemory(part, device, callbacks, batch_slices)
        place = StagePlatform(device.torch_device, device.compute, memory, callbacks, device)
    tested = Rig(model, pool, place)
    if graphs and device is not None:
        cache = GraphCache(BLOCKS * SIZE, most_rows=4, adapters=model.lora_slots is not None)
        tested.runner.graphs = DecodeGraphs(device, model, place.memory, cache, BLOCKS * SIZE)
        tested.runner.prompt_graphs = PromptGraphs(device, model, place.memory, BLOCKS * SIZE, 64)
        warm_up(tested.runner, 64, BLOCKS * SIZE, lambda what: None)  # as a service starts: kernels are compared
        assert not REPLACED
        assert tested.runner.prompt_graphs is not None
        tested.not_captured = cache.stopped, tested.runner.prompt_graphs.not_captured
    yield tested
    tested.runner.close()
    pool.close()


def ids(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def part(tokens: Sequence[int], start: int, table: tuple[int, ...], *, sample: bool = True) -> SequenceStep:
    return SequenceStep(ids(tokens[start:]), start, table, GREEDY if sample else None)


Story = tuple[list[object], list[object]]


def story(tested: Rig) -> Story:
    """What an instance does with its pool, and everything that can be seen of it: tokens, and KV with its hashes."""
    found: list[object] = []
    kv: list[object] = []
    # A prompt in two chunks, layer by layer, beside another one.
    tested.watched = (4, 1)
    tested.run(part(PROMPT[:32], 0, (4, 1), sample=False), layer_events=True)
    done = tested.run(part(PROMPT, 32, (4, 1, 6)), part(OTHER, 0, (7, 2)), layer_events=True)
    found.append(done.sampled)
    kv += [dict(tested.seen), [tested.slices(block) for block in (4, 1, 7)]]
    kv.append([value for _, value in tested.slices(6)])  # behind its last token lies something
    # Its blocks go elsewhere and come back into others, as a transfer's; its last one is part-filled.
    for source, block in ((4, 9), (1, 3), (6, 5)):
        tested.write(block, tested.slices(source))
    tokens = list(PROMPT)
    first = done.sampled[0]
    assert first is not None
    tokens.append(first)
    tested.go_on(tokens, (9, 3, 5), 3)
    found.append(list(tokens))
    # Another shares its blocks and gets a copy of a part-filled one, which has just come, where a lost one had come.
    tested.fetch(5)
    tested.write(8, tested.slices(5))
    tested.write(10, tested.slices(4))
    table, twin = (9, 3, 5), (9, 3, 10)
    moved = [*tokens[:-1], 99]
    shares = part(tokens, len(tokens) - 1, table), part(moved, len(moved) - 1, twin)
    found.append(tested.run(*shares, copies=((8, 10),)).sampled)
    # It is swapped out and comes back into blocks that were others'.
    tested.fetch(*twin)
    saved = [tested.slices(block) for block in twin]
    kv.append(saved[:2])
    for block in twin:
        tested.write(block, [(bytes(len(data)), 0) for data, _ in tested.slices(block)])
    for slices, block in zip(saved, (4, 1, 6), strict=True):
        tested.write(block, slices)
    # Another comes into the other's part-filled block and goes again before it has run: the device has old bytes there.
    tested.write(5, saved[0])
    tested.fetch(5)
    kv.append(tested.slices(5))
    tested.go_on(moved, (4, 1, 6), 3 * SIZE + 1 - len(moved))  # until its third block is full
    found.append(moved)
    kv.append(tested.slices(6))
    # A prefix comes layer by layer, behind gates; a wrong one is given up, and the next has its blocks.
    wrong: Slices = [(bytes([layer + 1]) * len(data), 0) for layer, (data, _) in enumerate(saved[0])]
    tested.aborting, tested.loading = True, {8: wrong, 0: wrong}
    found.append(tested.run(part(PROMPT, 32, (8, 0, 11)), gated=True, layer_events=True).aborted)
    tested.aborting, tested.loading = False, dict(zip((8, 0), saved, strict=False))
    found.append(tested.run(part(PROMPT, 32, (8, 0, 11)), gated=True, layer_events=True).sampled)
    return found, kv


@pytest.fixture(scope="module")
def expected(model: StageModel) -> Story:
    with rig(model, None) as tested:
        return story(tested)


@pytest.mark.parametrize("seed", FEW)
def test_a_hostile_order_changes_nothing(model: StageModel, expected: Story, seed: int) -> None:
    with rig(model, StagedDevice(seed), 1 + seed % 5, graphs=seed % 2 == 0) as tested:
        assert story(tested) == expected
    assert os.environ.get("TOKENS") in (None, repr(expected[0])), "other kernels chose others"


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_nor_does_it_with_quantised_kv(model: StageModel, kv_dtype: str) -> None:
    with rig(model, None, kv_dtype=kv_dtype) as tested:
        expected = story(tested)
    for seed in FEW[:2]:
        with rig(model, StagedDevice(seed), kv_dtype=kv_dtype, graphs=True) as tested:
            assert story(tested) == expected
            assert tested.place.memory.host_bytes == 2 * tested.pool.nbytes


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_nor_with_layers_whose_slices_differ(checkpoint: Path, kv_dtype: str, tmp_path: Path) -> None:
    config = with_repeated_heads(checkpoint, tmp_path)
    model = load_stage(tmp_path, config, torch.float32, 0, config.num_layers)
    with rig(model, None, kv_dtype=kv_dtype) as tested:
        assert len({tested.pool.layout.slice_bytes(layer) for layer in range(config.num_layers)}) == 2
        expected = story(tested)
    for seed in FEW[:2]:
        with rig(model, StagedDevice(seed), kv_dtype=kv_dtype, graphs=True) as tested:
            assert story(tested) == expected


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_nor_with_window_slots_in_another_order_than_blocks(kv_dtype: str, tmp_path: Path) -> None:
    """Every second layer has a window of one block and a half."""
    create("tiny-gemma3", tmp_path / "model", seed=1, dtype="float32")
    config = load_config(tmp_path / "model")
    model = load_stage(tmp_path / "model", config, torch.float32, 0, config.num_layers)
    with rig(model, None, kv_dtype=kv_dtype) as tested:
        assert 0 < len(tested.pool.layout.windowed_layers) < config.num_layers
        expected = story(tested)
    slots = random.Random(2).sample(range(BLOCKS), BLOCKS)
    with rig(model, None, kv_dtype=kv_dtype, slots=slots) as tested:
        assert story(tested) == expected
    for seed in FEW[:2]:
        with rig(model, StagedDevice(seed), kv_dtype=kv_dtype, graphs=True, slots=slots) as tested:
            assert story(tested) == expected


@pytest.mark.parametrize("seed", FEW[:2])
@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE])
def test_a_full_hit_gives_the_prompts_token_and_writes_nothing(model: StageModel, length: int, seed: int) -> None:
    """Around the borders of blocks: all KV is there. On a device the steps are graphs, padded to four rows."""
    device = StagedDevice(seed) if seed else None
    with rig(model, device, graphs=True) as tested:
        prompts = [tuple(range(first, first + length)) for first in (5, 60, 90)]
        tables = [(4, 1, 6), (7, 2, 8), (0, 3, 5)]
        whole = [part(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
        expected = tested.run(*whole).sampled
        tested.fetch(*range(BLOCKS))
        kv = [layer.clone() for layer in tested.place.memory.kv]
        last = [replace(part(prompt, length - 1, sequence.block_table), full_hit=True)
                for prompt, sequence in zip(prompts, whole, strict=True)]  # fmt: skip
        for _ in range(2):
            assert tested.run(*last).sampled == expected
        for layer, before in zip(tested.place.memory.kv, kv, strict=True):
            assert torch.equal(layer.view(torch.uint8), before.view(torch.uint8))


def test_tokens_are_told_while_kv_is_hashed(model: StageModel) -> None:
    """The step is over when the hashes are there."""
    with rig(model, StagedDevice(3)) as tested:
        hashing, sampled = threading.Event(), threading.Event()
        tested.place.callbacks.send(lambda: nothing_fails(TimeoutError()) if not hashing.wait(60) else None)
        emit = tested.runner.emit

        def heard(event: StageEvent) -> None:
            emit(event)
            if isinstance(event, StageTokens):
                assert not any(value for _, value in tested.slices(4))
                sampled.set()
                hashing.set()

        tested.runner.emit = heard
        done = tested.run(part(PROMPT[:32], 0, (4, 1)), layer_events=True)
        [told] = [event.done for event in tested.events if isinstance(event, StageTokens)]
        assert sampled.is_set()
        assert told.sampled == done.sampled != ()
        assert all(value for _, value in tested.slices(4))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_hostile_orders_change_nothing(model: StageModel, expected: Story) -> None:
    for seed in range(1000):
        with rig(model, StagedDevice(seed), 1 + seed % 5, graphs=seed % 2 == 0) as tested:
            assert story(tested) == expected, f"SEED={seed}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_chooses_the_same_tokens(checkpoint: Path, expected: Story, graphs: bool) -> None:
    config = load_config(checkpoint)
    device = CudaDevice(0)
    model = load_stage(checkpoint, config, torch.float32, 0, config.num_layers, device.torch_device)
    with rig(model, device, graphs=graphs) as tested:
        assert story(tested)[0] == expected[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_gpu_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no GPU 99") as absent:
        CudaDevice(99)
    with pytest.raises(ConfigError, match="do not fit the GPU") as full:
        CudaDevice(0).memory((1 << 50,), 0)
    assert (absent.value.field, full.value.field) == ("device", "kv_cache_memory_bytes")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_of_gpus_in_a_hostile_order_choose_the_same_tokens(expected: Story) -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    name = f"{Path(__file__)}::test_a_hostile_order_changes_nothing"
    environment = os.environ | {"MOONPOOL_KERNELS": "triton", "TRITON_INTERPRET": "1", "SEED": "0"}
    environment["TOKENS"] = repr(expected[0])
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=500", "-p", "no:cacheprovider", name]
    command += ["-W", "ignore::RuntimeWarning"]  # numpy's, of padding rows: they read what is no number
    subprocess.run(command, env=environment, check=True)


class Refusing(StagedDevice):
    """A device that captures nothing."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        raise RuntimeError("out of memory")


def test_where_nothing_can_be_captured_steps_run_eagerly(model: StageModel) -> None:
    answers = []
    for device in (None, Refusing(2)):
        with rig(model, device, graphs=True) as tested:
            tokens = list(PROMPT)
            tokens += [token for token in tested.run(part(PROMPT, 0, (4, 1, 6))).sampled if token is not None]
            for _ in range(4):
                tested.go_on(tokens, (4, 1, 6), 1)
            answers.append(tokens)
            assert device is None or tested.runner.graphs is not None
            if tested.runner.graphs is not None:
                last = part(tokens, len(tokens) - 1, (4, 1, 6))
                batch = PackedBatch.build([(last.token_ids, last.start, last.block_table)], SIZE)
                assert tested.runner.graphs.shape(Step(99, (last,)), batch) is None
                assert tested.runner.prompt_graphs is not None
                assert tested.runner.prompt_graphs.shape(batch) is None
                assert "out of memory" in tested.runner.prompt_graphs.not_captured
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(PROMPT) + 5


@contextmanager
def later_stage(checkpoint: Path) -> Iterator[tuple[StageModel, StagedDevice, TieredKVMemory]]:
    """The second of two stages, with its device and KV."""
    config = load_config(checkpoint)
    layout, first = kv_layout(config, "float32", SIZE), config.num_layers // 2
    pool = KVPool.create(layout, BLOCKS, [(0, first), (first, layout.layers)])
    later, device = load_stage(checkpoint, config, torch.float32, first, layout.layers), StagedDevice(1)
    callbacks = CallbackThread(nothing_fails, device.enter_thread)
    memory = TieredKVMemory(pool.parts[1], device, callbacks)
    try:
        yield later, device, memory
    finally:
        memory.close()
        callbacks.close()
        device.close()
        pool.close()


def test_graphs_of_a_later_stage_give_what_its_layers_give(checkpoint: Path) -> None:
    with later_stage(checkpoint) as (later, device, memory):
        config, first = later.config, later.config.num_layers // 2
        graphs = DecodeGraphs(device, later, memory, GraphCache(SIZE, most_rows=4), SIZE)
        graphs.capture(device.compute, lambda what: None)
        shares = [part((5,), 0, (1,)), part((6,), 0, (2,)), part((7,), 0, (3,))]
        batch = PackedBatch.build([(share.token_ids, share.start, share.block_table) for share in shares], SIZE)
        hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(2))
        shape = graphs.shape(Step(1, tuple(shares)), batch)
        assert shape is not None
        with torch.inference_mode():
            eager = later.run(hidden.clone(), batch, memory.kv, first, config.num_layers)[1]
        for _ in range(2):
            assert torch.equal(graphs.run(shape, batch, hidden.clone()), eager)


class Interrupted(CpuStream):
    """A stream during whose second work something else happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = iter([lambda: None, happens])

    def run(self, work: Callable[[], None]) -> None:
        next(self._happens, lambda: None)()
        super().run(work)


class Counting(CpuStream):
    """A stream that counts how often its work waits for another stream."""

    waits = 0

    def wait_event(self, event: DeviceEvent) -> None:
        self.waits += 1


class Held(CpuStream):
    """A stream whose events are not reached before it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def record(self) -> DeviceEvent:
        return self

    def wait(self) -> None:
        self.go.wait()


class Again:
    """A graph whose replay does the work again."""

    nbytes = 0

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class AtOnce:
    """A device that does everything at once, except for what its loading stream does otherwise."""

    def __init__(self, load_stream: CpuStream) -> None:
        self.torch_device = torch.device("cpu")
        self.compute, self.load_stream, self.store_stream = Counting(), load_stream, CpuStream()

    def enter_thread(self) -> None: ...

    def capacity(self) -> DeviceCapacity:
        return DeviceCapacity(1, 1, 1)

    def memory(self, shape: tuple[int, ...], beside: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    def register(self, memory: torch.Tensor) -> None: ...

    def goes_on(self) -> None: ...

    def copy_slices(self, target: torch.Tensor, source: torch.Tensor, slices: torch.Tensor) -> None:
        target[slices] = source[slices]

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        return Again(work)

    def close(self) -> None: ...


def blocks_of(model: StageModel) -> list[Slices]:
    """KV of the prompt's first two blocks."""
    with rig(model, None) as plain:
        plain.run(part(PROMPT, 0, (4, 1, 6)))
        return [plain.slices(4), plain.slices(1)]


def held(tested: Rig, block: int) -> list[bytes]:
    """What the device has of a block."""
    return [layer.numpy().tobytes() for layer in one_tensor(tested.place.memory.kv)[:, block]]


def test_what_is_written_while_it_is_brought_is_brought_once_more(model: StageModel) -> None:
    """As of a prompt that nobody waits for any more, whose prefix still comes."""
    first, second = blocks_of(model)
    wrong: Slices = [(bytes(len(data)), 0) for data, _ in first]
    rigs: list[Rig] = []
    with rig(model, AtOnce(Interrupted(lambda: rigs[0].write(4, first))), 1) as tested:
        rigs.append(tested)
        tested.write(4, wrong)
        tested.write(1, second)
        tested.loaded()
        tested.loaded()
        assert held(tested, 4) == [data for data, _ in first]


def test_kv_is_brought_as_it_lands(model: StageModel) -> None:
    """No step asks for it; the I/O process tells the device of slices only while nothing is under way."""
    blocks, told = blocks_of(model), list[int]()
    with rig(model, AtOnce(stream := Held())) as tested:

        def tell() -> None:
            told.append(len(told))
            tested.place.memory.load(None)

        tested.pool.parts[0].on_landed = tell
        tested.write(4, blocks[0])
        tested.write(1, blocks[1])
        assert told == [0]
        stream.go.set()
        while [held(tested, block) for block in (4, 1)] != [[data for data, _ in block] for block in blocks]:
            os.sched_yield()


@pytest.mark.parametrize("graphs", [False, True])
def test_running_sequences_do_not_wait_for_a_joining_one(model: StageModel, graphs: bool) -> None:
    """Its KV is under way until it is let go. Then it joins, and nothing waits either."""
    blocks, other = blocks_of(model), [*OTHER]
    joining = (9, 3, 5)
    with rig(model, None) as plain:
        for table, block in zip(joining, blocks, strict=False):
            plain.write(table, block)
        plain.run(part(PROMPT, 32, joining))
        other += [token for token in plain.run(part(OTHER, 0, (7, 2))).sampled if token is not None]
        plain.go_on(other, (7, 2), 4)
        together = plain.run(part(other, len(other) - 1, (7, 2)), part(PROMPT, 39, joining)).sampled
    device = AtOnce(stream := Held())
    with rig(model, device, graphs=graphs) as tested:
        mine = [*OTHER, *(token for token in tested.run(part(OTHER, 0, (7, 2))).sampled if token is not None)]
        for table, block in zip(joining, blocks, strict=False):
            tested.write(table, block)
        there = threading.Event()
        tested.place.memory.load(there.set)
        tested.go_on(mine, (7, 2), 4)
        assert mine == other
        assert not there.is_set()
        stream.go.set()
        there.wait()
        tested.run(part(PROMPT, 32, joining))
        assert tested.run(part(mine, len(mine) - 1, (7, 2)), part(PROMPT, 39, joining)).sampled == together
        assert device.compute.waits == 0


def test_a_step_waits_for_its_own_kv_alone(model: StageModel) -> None:
    """A sequence whose KV is under way is in the step."""
    blocks = blocks_of(model)
    device = AtOnce(stream := Held())
    with rig(model, device) as tested:
        tested.write(9, blocks[0])
        tested.place.memory.begin(Step(1, (part(OTHER, 24, (7, 2)),)))
        tested.place.memory.prepare_layer(0)
        assert device.compute.waits == 0
        tested.place.memory.begin(Step(2, (part(PROMPT, 16, (9, 3, 5)),)))
        tested.place.memory.prepare_layer(0)
        assert device.compute.waits == 1
        stream.go.set()


class Words:
    """Words of a pool that counts how often one is read."""

    def __init__(self, words: memoryview) -> None:
        self._words, self.read = words, 0

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def release(self) -> None:
        self._words.release()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on tensors."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        self.count += 1
        return func(*args, **(kwargs if isinstance(kwargs, dict) else {}))


def test_a_step_without_new_kv_looks_at_one_word(model: StageModel) -> None:
    """Once for a run, whatever its length and its sequences'."""
    with rig(model, AtOnce(CpuStream())) as tested:
        tested.write(4, blocks_of(model)[0])
        tested.loaded()
        words = tested.pool.parts[0].landed = Words(tested.pool.parts[0].landed)  # type: ignore[assignment]
        memory, layers = tested.place.memory, range(tested.pool.layout.layers)
        with Operations() as operations:  # type: ignore[no-untyped-call]
            memory.begin(Step(1, (part(PROMPT, 39, (4, 1, 6)), part(OTHER, 24, (7, 2))), steps=9))
            for step in range(3):
                if step:
                    memory.advance((6, 2), ())
                for layer in layers:
                    memory.prepare_layer(layer)
                for layer in layers:
                    memory.finish_layer(layer, None)
                memory.finish_step(lambda: None, aborted=False)
        assert words.read == 1
        assert operations.count == 0
