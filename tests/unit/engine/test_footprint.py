"""The bound of an engine's memory: told when it is ready, kept by the largest steps."""

from contextlib import AsyncExitStack
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from torch import Tensor

from moonpool.base.checkpoint import inspect_checkpoint, kv_layout, load_config
from moonpool.base.errors import ConfigError
from moonpool.base.fork_server import Launcher, execute, start_worker
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import ScoredTokens, SequenceStep, Step
from moonpool.engine.footprint import (
    EXACT_GRAPH_ROWS,
    GRAMMAR_BYTES,
    decode_graph_rows,
    device_footprint,
    device_work_bytes,
    grammar_bytes,
    near_memory_limit,
    prompt_graph_tokens,
    resident_bytes,
    work_bytes,
)
from moonpool.engine.kernels.native import library
from moonpool.engine.memory_estimate import estimated_memory
from moonpool.engine.messages import EngineSpec, Footprint
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.platforms.cuda import check_free_memory
from moonpool.engine.platforms.stage_platform import stage_platform
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import start_processes

BLOCK, BATCH = 64, 64
START_S = 240.0
"""A start of a new interpreter, which imports all, beside much else on the machine."""
SAMPLED = SampleSpec(SamplingParams(temperature=0.8, top_p=0.9, top_k=50, logprobs=5, repetition_penalty=1.1))


def spec(checkpoint: Path, **changes: object) -> EngineSpec:
    config = load_config(checkpoint)
    layout = kv_layout(config, "float32", BLOCK)
    plain = EngineSpec(str(checkpoint), "float32", layout, 40, max_num_batched_tokens=1024, threads=2, measure=False)
    return replace(plain, **changes)  # type: ignore[arg-type]


def part(tokens: int, prefix: int = 0, **how: object) -> SequenceStep:
    blocks = -(-(tokens + prefix) // BLOCK)
    given = {"sample": SAMPLED, **how}
    return SequenceStep(bytes(4 * tokens), prefix, tuple(range(blocks)), **given)  # type: ignore[arg-type]


def largest_steps(longest: int) -> list[tuple[SequenceStep, ...]]:
    """The longest chunk behind the longest prefix, all of its tokens scored; chunks; batches of decode."""
    chunk = min(1024, longest // 2)
    return [
        (part(chunk, longest - chunk, scored=ScoredTokens(bytes(4 * chunk), 5)),),
        tuple(part(1024 // BATCH) for _ in range(BATCH)),
        tuple(part(1, longest - 1) for _ in range(BATCH)),
    ]


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("launcher", [execute, pytest.param(start_worker, marks=pytest.mark.slow)])
async def test_the_largest_steps_keep_the_bound(checkpoint: Path, kv_dtype: str, launcher: Launcher) -> None:
    config = load_config(checkpoint)
    layout = kv_layout(config, "float32", BLOCK, kv_dtype)
    async with start_processes(spec(checkpoint, layout=layout), start_timeout_s=START_S, launcher=launcher) as engine:
        assert isinstance(engine, ProcessEngine)
        [pid], footprint = engine.pids, engine.footprints[0]
        ready, sizes = resident_bytes(pid), []
        for number in range(1, 4):
            for kind, sequences in enumerate(largest_steps(min(config.max_position_embeddings, 40 * BLOCK))):
                await engine.run(Step(10 * number + kind, sequences))
            sizes.append(resident_bytes(pid))
    print(footprint.mebibytes(), [size >> 20 for size in sizes])
    if launcher is execute:  # a forked process has not touched all pages of the libraries
        assert footprint.libraries < sizes[0]
        estimate = estimated_memory(inspect_checkpoint(checkpoint, "float32"), spec(checkpoint, layout=layout))
        assert estimate.idle == pytest.approx(ready, rel=0.1)
    assert sizes[0] < footprint.bound
    assert sizes[2] <= sizes[1] + (4 << 20) < footprint.bound
    assert footprint.pool == 40 * layout.block_bytes
    assert footprint.formats == grammar_bytes(config) > GRAMMAR_BYTES


def mapped_weights(pid: int) -> set[tuple[str, ...]]:
    """Device, inode and name of the files with weights that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {tuple(line.split()[3:]) for line in lines if line.endswith(".weights")}


async def test_engines_of_a_host_map_the_same_pages(checkpoint: Path, tmp_path: Path) -> None:
    """Weights of two engines are pages of one file; an engine with a head in bytes has a second file for them."""
    if library.get() is None:
        pytest.skip("there are no native kernels here, which take mapped weights")
    plain = spec(checkpoint, weights_file=str(tmp_path / "weights" / "a"))
    async with AsyncExitStack() as stack:
        mapped = []
        for each in (plain, plain, replace(plain, int8_head=True)):
            engine = await stack.enter_async_context(start_processes(each, start_timeout_s=START_S))
            assert isinstance(engine, ProcessEngine)
            mapped.append(mapped_weights(engine.pids[0]))
    assert len(mapped[0]) == 1
    assert mapped[0] == mapped[1] <= mapped[2]
    held = estimated_memory(inspect_checkpoint(checkpoint, "float32"), plain)
    assert held.fits(2 * held.idle - held.weights, 2, shared=True)
    assert not held.fits(2 * held.idle - held.weights, 2)


def test_work_grows_with_what_it_is_for(checkpoint: Path) -> None:
    config, plain = load_config(checkpoint), spec(checkpoint)

    def work(*, native: bool = True, threads: int = 2, **changes: object) -> int:
        return work_bytes(config, spec(checkpoint, **changes), native=native, threads=threads)

    least = work()
    assert work(max_num_batched_tokens=2048) > least
    assert work(blocks=400, max_tokens=1 << 20) > least
    assert work(threads=8) > least
    assert work(native=False) > least
    assert work(measure=True, max_num_batched_tokens=16) > work(max_num_batched_tokens=16)
    wide = replace(config, vocab_size=config.vocab_size + 100_000)
    assert work_bytes(wide, plain, native=True, threads=2) - least >= 64 * 100_000 * 4


class FakeDevice(StagedDevice):
    """With so much memory; says what it was asked for."""

    def __init__(self, free: int) -> None:
        super().__init__(1)
        self._free, self.asked = free, (0, 0)

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        self.asked = prod(shape), beside
        check_free_memory(*self.asked, self._free)
        return super().memory(shape, beside)


def test_a_device_keeps_room_for_steps_beside_its_pool(checkpoint: Path) -> None:
    config, engine = load_config(checkpoint), spec(checkpoint)
    pool = KVPool.create(engine.layout, engine.blocks, [(0, config.num_layers)])
    [part] = pool.parts
    errors: list[BaseException] = []
    held = device_footprint(config, engine, weights=5 << 20, pool=part.nbytes)
    assert held.pool == 40 * engine.layout.block_bytes
    assert held.bound == (5 << 20) + held.pool + held.work + held.graphs
    for missing in (0, 1):
        device = FakeDevice(held.pool + held.work + held.graphs - missing)
        if missing:
            with pytest.raises(ConfigError, match="do not fit the GPU"):
                stage_platform(device, part, errors.append, held.work + held.graphs)
            device.close()
        else:
            stage_platform(device, part, errors.append, held.work + held.graphs).close()
        assert device.asked == (held.pool, held.work + held.graphs)
    assert not errors
    pool.close()


def test_work_on_a_device_grows_with_what_it_is_for(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    least = device_work_bytes(config, spec(checkpoint))
    assert device_work_bytes(config, spec(checkpoint, max_num_batched_tokens=2048)) > least
    assert device_work_bytes(config, spec(checkpoint, deterministic=True, blocks=4000, max_tokens=1 << 17)) > least
    wide = replace(config, vocab_size=config.vocab_size + 100_000)
    assert device_work_bytes(wide, spec(checkpoint)) - least >= 64 * 100_000 * 4 * 16
    graphs = [
        device_footprint(config, spec(checkpoint, graph_rows=rows, **how), weights=0, pool=0).graphs >> 20
        for rows in (0, 4)
        for how in ({"graph_prompts": False}, {"deterministic": True}, {})
    ]
    assert graphs == [0, 512, 512, 512, 1024, 1024]


def test_a_devices_memory_is_told_beside_the_hosts(checkpoint: Path) -> None:
    config, engine = load_config(checkpoint), spec(checkpoint)
    held = device_footprint(config, engine, weights=5 << 20, pool=3 << 20)
    told = Footprint(200 << 20, 5 << 20, 4 << 20, 50 << 20, 0, held).mebibytes()
    assert (told["bound_mib"], told["device_weights_mib"], told["device_pool_mib"]) == (259, 5, 3)
    assert told["device_graphs_mib"] == 1024
    assert told["device_bound_mib"] == held.bound >> 20
    assert "device_bound_mib" not in Footprint(1, 1, 1, 1, 1).mebibytes()


def test_a_process_is_near_its_bound_before_it_has_reached_it() -> None:
    now = resident_bytes()
    assert near_memory_limit(now)
    assert near_memory_limit(now + (100 << 20)), "the worst grammar fits in between"
    assert not near_memory_limit(now + GRAMMAR_BYTES)


@pytest.mark.parametrize(("shape", "exact"), [("tiny-llama", True), ("tiny-qwen3-next", False)])
def test_sequences_computed_by_themselves_have_few_graphs(shape: str, exact: bool, tmp_path: Path) -> None:
    """So are those of recurrent layers in deterministic mode: none of prompts, and of few decode rows."""
    create(shape, tmp_path / "model", seed=1, dtype="float32")
    engine, config = spec(tmp_path / "model"), load_config(tmp_path / "model")
    assert prompt_graph_tokens(config, engine) > 0
    assert bool(prompt_graph_tokens(config, replace(engine, deterministic=True))) == exact
    assert decode_graph_rows(config, engine) == engine.graph_rows
    rows = decode_graph_rows(config, replace(engine, deterministic=True))
    assert rows == (engine.graph_rows if exact else EXACT_GRAPH_ROWS)
