"""The bound of an engine's memory: told when it is ready, kept by the largest steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.checkpoint import kv_layout, load_config
from moonpool.engine.footprint import GRAMMAR_BYTES, format_bytes, near, resident_bytes, work_bytes
from moonpool.engine.messages import EngineSpec
from moonpool.engine.process import ProcessEngine
from moonpool.engine.start import start_engine
from moonpool.sampling import SampleSpec, SamplingParams
from moonpool.sched.steps import Scored, SequenceStep, Step

BLOCK, BATCH = 64, 64
SAMPLED = SampleSpec(SamplingParams(temperature=0.8, top_p=0.9, top_k=50, logprobs=5, repetition_penalty=1.1))


def spec(checkpoint: Path, **changes: object) -> EngineSpec:
    config = load_config(checkpoint)
    layout = kv_layout(config, "float32", BLOCK)
    plain = EngineSpec(str(checkpoint), "float32", layout, 40, step_tokens=1024, threads=2, measure=False)
    return replace(plain, **changes)  # type: ignore[arg-type]


def part(tokens: int, prefix: int = 0, **how: object) -> SequenceStep:
    blocks = -(-(tokens + prefix) // BLOCK)
    given = {"sample": SAMPLED, **how}
    return SequenceStep(bytes(4 * tokens), prefix, tuple(range(blocks)), **given)  # type: ignore[arg-type]


def largest_steps(longest: int) -> list[tuple[SequenceStep, ...]]:
    """The longest chunk behind the longest prefix, all of its tokens scored; chunks; batches of decode."""
    chunk = min(1024, longest // 2)
    return [
        (part(chunk, longest - chunk, scored=Scored(bytes(4 * chunk), 5)),),
        tuple(part(1024 // BATCH) for _ in range(BATCH)),
        tuple(part(1, longest - 1) for _ in range(BATCH)),
    ]


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
async def test_the_largest_steps_keep_the_bound(checkpoint: Path, kv_dtype: str) -> None:
    config = load_config(checkpoint)
    layout = kv_layout(config, "float32", BLOCK, kv_dtype)
    async with start_engine(spec(checkpoint, layout=layout)) as engine:
        assert isinstance(engine, ProcessEngine)
        [pid], footprint = engine.pids, engine.footprints[0]
        sizes = []
        for number in range(1, 4):
            for kind, sequences in enumerate(largest_steps(min(config.max_position_embeddings, 40 * BLOCK))):
                await engine.run(Step(10 * number + kind, sequences))
            sizes.append(resident_bytes(pid))
    print(footprint.mebibytes(), [size >> 20 for size in sizes])
    assert footprint.libraries < sizes[0] < footprint.bound
    assert sizes[2] <= sizes[1] + (4 << 20) < footprint.bound
    assert footprint.pool == 40 * layout.block_bytes
    assert footprint.formats == format_bytes(config) > GRAMMAR_BYTES


def test_work_grows_with_what_it_is_for(checkpoint: Path) -> None:
    config, plain = load_config(checkpoint), spec(checkpoint)

    def work(*, native: bool = True, threads: int = 2, **changes: object) -> int:
        return work_bytes(config, spec(checkpoint, **changes), native=native, threads=threads)

    least = work()
    assert work(step_tokens=2048) > least
    assert work(blocks=400, max_tokens=1 << 20) > least
    assert work(threads=8) > least
    assert work(native=False) > least
    assert work(measure=True, step_tokens=16) > work(step_tokens=16)
    wide = replace(config, vocab_size=config.vocab_size + 100_000)
    assert work_bytes(wide, plain, native=True, threads=2) - least >= 64 * 100_000 * 4


def test_a_process_is_near_its_bound_before_it_has_reached_it() -> None:
    now = resident_bytes()
    assert near(now)
    assert near(now + (100 << 20)), "the worst grammar fits in between"
    assert not near(now + GRAMMAR_BYTES)
