"""Real engine processes on a small checkpoint, one stage and two over gloo."""

import asyncio
import os
import signal
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.base.native import build
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step, StepResult
from moonpool.engine.interface import Engine
from moonpool.engine.kernels import choice
from moonpool.engine.kernels.native import library
from moonpool.engine.messages import EngineSpec
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import start_engine

BLOCKS = 16


TOLD = Speeds(prefill_per_token_s=0.25)


def spec(
    path: Path,
    *,
    stages: int,
    ranks: int = 1,
    measure: bool = False,
    speeds: Speeds | None = None,
    device: str = "cpu",
) -> EngineSpec:
    layout = kv_layout(load_config(path), "float32", 16)
    return EngineSpec(
        str(path),
        "float32",
        layout,
        BLOCKS,
        stages=stages,
        ranks=ranks,
        device=device,
        threads=1,
        gate_timeout_s=20,
        measure=measure,
        speeds=speeds,
    )


def greedy(path: Path, tokens: list[int], count: int) -> list[int]:
    """Tokens that follow, each by a forward pass over everything before it."""
    config = load_config(path)
    model = load_stage(path, config, torch.float32, 0, config.num_layers)
    kv = torch.zeros(config.num_layers, BLOCKS, config.num_kv_heads, 2, 16, config.head_dim)
    out: list[int] = []
    for _ in range(count):
        ids = array("i", [*tokens, *out]).tobytes()
        batch = PackedBatch.build([(ids, 0, tuple(range(BLOCKS)))], 16)
        out.append(int(model.logits(model.forward(batch.token_ids, batch, kv)[-1:]).argmax()))
    return out


def part(tokens: list[int], start: int, table: tuple[int, ...], *, sample: bool) -> SequenceStep:
    ids = array("i", tokens[start:]).tobytes()
    return SequenceStep(ids, start, table, SampleSpec() if sample else None)


async def generate(engine: Engine, first_step: int, tokens: list[int], table: tuple[int, ...], count: int) -> list[int]:
    """Prompt in two chunks, both in flight when there are two stages; then one token a step."""
    chunks = [part(tokens[:32], 0, table, sample=False), part(tokens, 32, table, sample=True)]
    runs = [asyncio.ensure_future(engine.run(Step(first_step + i, (c,)))) for i, c in enumerate(chunks)]
    if engine.stages == 1:
        with pytest.raises(Exception, match="more than the 1"):
            await runs[1]
        await runs[0]
        runs[1] = asyncio.ensure_future(engine.run(Step(first_step + 1, (chunks[1],))))
    results = await asyncio.gather(*runs)
    assert results[0].sampled == (None,)
    all_tokens = list(tokens)
    step_id, sampled = first_step + 2, results[1].sampled[0]
    while True:
        assert sampled is not None
        all_tokens.append(sampled)
        if len(all_tokens) == len(tokens) + count:
            return all_tokens[len(tokens) :]
        result = await engine.run(Step(step_id, (part(all_tokens, len(all_tokens) - 1, table, sample=True),)))
        step_id, sampled = step_id + 1, result.sampled[0]


def blocked(pid: int, number: signal.Signals) -> bool:
    """Whether all threads of a process block a signal."""
    statuses = [path.read_text().splitlines() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    masks = [int(line.split()[1], 16) for lines in statuses for line in lines if line.startswith("SigBlk:")]
    return len(masks) > 0 and all(mask >> number - 1 & 1 for mask in masks)


GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
GPUS = (pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL"))


@pytest.mark.parametrize(
    ("stages", "ranks", "device"),
    [
        *((1, 1, "cpu"), (2, 1, "staged:3"), (1, 2, "cpu"), (1, 2, "staged:4")),
        *(pytest.param(2, 1, device, marks=pytest.mark.slow) for device in ("cpu", "staged:2,staged:2")),
        *(pytest.param(*both, "cpu", marks=pytest.mark.slow) for both in ((2, 2), (1, 4))),
        *(pytest.param(*both, "staged", marks=pytest.mark.slow) for both in ((2, 2), (1, 4))),
        pytest.param(1, 1, "cuda", marks=GPU),
        pytest.param(2, 1, "cuda:0,cuda:0", marks=GPU),
        pytest.param(1, 2, "cuda:0,cuda:0", marks=GPU),
        pytest.param(2, 1, "cuda", marks=GPUS),
        pytest.param(1, 2, "cuda", marks=GPUS),
    ],
)
async def test_an_engine_of_processes(checkpoint: Path, stages: int, ranks: int, device: str) -> None:
    prompt = list(range(7, 47))
    expected = greedy(checkpoint, prompt, 6)
    layers = load_config(checkpoint).num_layers
    known = TOLD if stages == 2 else None
    asked = spec(checkpoint, stages=stages, ranks=ranks, measure=True, speeds=known, device=device)
    if device != "cpu":
        asked = replace(asked, max_num_batched_tokens=0)
    async with start_engine(asked, start_timeout_s=90) as engine:
        assert isinstance(engine, ProcessEngine)
        assert engine.blocks == BLOCKS
        assert engine.max_num_batched_tokens == 512 if device == "cpu" else engine.max_num_batched_tokens >= 2048
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
            assert all(blocked(pid, number) for pid in engine.pids), number
        assert known is None or engine.speeds == known
        assert prefill_seconds(engine.speeds, 512, 0) > 0  # which part has how much is noise on busy cores
        assert known is not None or decode_step_seconds(engine.speeds, 8, 8 * 128) > 0
        assert await generate(engine, 10, prompt, (9, 2, 5, 11), 6) == expected

        if engine.run_steps > 1:
            share = part([*prompt, expected[0]], len(prompt), (9, 2, 5, 11), sample=True)
            run = Step(20, (replace(share, end_token_ids=frozenset(expected[-1:])),), steps=9)
            for step in (run, replace(run, step_id=21, patient=True)):
                told: list[StepResult] = []
                told.append(await engine.run(step, on_step=told.append))
                steps = [report for last in told for report in (*last.earlier, last)]
                assert [step.sampled for step in steps] == [(token,) for token in expected[1:]]
                assert step.patient or not any(last.earlier for last in told)

        # The prefix's KV is taken out of the pool and comes back layer by layer, behind gates.
        saved = {(layer, block): bytes(engine.pool.slice(layer, block)) for layer in range(layers) for block in (9, 2)}
        seen: list[int] = []

        def on_layer(done: LayerDone) -> None:
            seen.append(done.layer)
            load(done.layer + 1)

        def load(layer: int) -> None:
            if layer < layers:
                for source, block in ((9, 0), (2, 1)):
                    engine.pool.write(layer, block, memoryview(saved[layer, source]), 0)
                engine.open_gate(30, layer)

        load(0)
        gated = Step(30, (part(prompt, 32, (0, 1, 3), sample=True),), gated=True, layer_events=True)
        result = await engine.run(gated, on_layer=on_layer)
        assert result.sampled == (expected[0],)
        assert seen == list(range(layers))

        # An aborted step leaves all stages able to go on; its first layer had been computed on the first stage.
        def abort(done: LayerDone) -> None:
            engine.abort(done.step_id)

        engine.open_gate(31, 0)
        aborted = Step(31, gated.sequences, gated=True, layer_events=True)
        result = await engine.run(aborted, on_layer=abort)
        assert (result.aborted, result.sampled) == (True, ())
        result = await engine.run(Step(32, gated.sequences))
        assert result.sampled == (expected[0],)

        # The prefix comes into other blocks, and is brought to where steps compute, before a step has it.
        for (layer, block), data in saved.items():
            engine.pool.write(layer, {9: 7, 2: 8}[block], memoryview(data), 0)
        loading = engine.load()
        assert (loading is None) == (device == "cpu")
        if loading is not None:
            await loading
        result = await engine.run(Step(33, (part(prompt, 32, (7, 8, 3), sample=True),)))
        assert result.sampled == (expected[0],)

        # What is part-filled gets into the pool when it is asked for.
        await engine.fetch((3,))
        assert any(engine.pool.slice(0, 3))

        os.kill(engine.pids[0], signal.SIGKILL)
        async with asyncio.timeout(60):
            reason = await asyncio.shield(engine.failed)
        assert "engine stage 0 " in reason
        assert "was killed by signal 9" in reason
        with pytest.raises(Unavailable):
            await engine.run(Step(34, gated.sequences))
        if device != "cpu":
            with pytest.raises(Unavailable):
                await engine.fetch((3,))
            loading = engine.load()
            assert loading is not None
            with pytest.raises(Unavailable):
                await loading


NATIVE = "torch" if library.get() is None else f"native {build.detect()}"


@pytest.mark.parametrize(
    ("stages", "wish", "by"),
    [
        pytest.param(
            1, "", f"{NATIVE}, all layers native",
            marks=pytest.mark.skipif(library.get() is None, reason="no native kernels"),
        ),
        pytest.param(2, "torch", "torch, all layers torch (MOONPOOL_KERNELS=torch)", marks=pytest.mark.slow),
    ],
)  # fmt: skip
async def test_one_line_of_the_log_says_what_computes(
    checkpoint: Path,
    stages: int,
    wish: str,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(choice.VARIABLE, wish)
    with caplog.at_level("INFO"):
        async with start_engine(spec(checkpoint, stages=stages), start_timeout_s=90):
            pass
    told = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
    [line] = [fields for fields in told if fields["event"] == "computing"]
    said = {name: line[name] for name in ("by", "device", "weights", "kv")}
    assert said == {"by": by, "device": "cpu", "weights": "float32", "kv": "float32"}
    assert not [record for record in caplog.records if "native" in str(record.msg) and record.msg is not line]
    assert "native" not in capfd.readouterr().err  # nor do the workers say anything themselves


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_gpu_that_is_not_there_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        async with start_engine(spec(checkpoint, stages=1, device="cuda"), start_timeout_s=60):
            pass
    assert caught.value.field == "device"
