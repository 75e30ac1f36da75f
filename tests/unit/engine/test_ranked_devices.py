"""Ranks with a device each: own heads in the device's memory, sums of a group, graphs; one pool of whole slices.

The devices order work as GPUs might. `SEED=...` repeats one order.
"""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.layout import KVLayout, LayerKV
from moonpool.base.kv.pool import KVPool, PoolPart
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import Step
from moonpool.engine.capture import capture_all
from moonpool.engine.messages import FetchBlocks, LoadLora, StageDone
from moonpool.engine.models.random_checkpoint import create, create_lora
from moonpool.engine.platforms.base import CapturedGraph
from moonpool.engine.platforms.kv_memory import StageSlices, pool_bytes, rank_bytes
from moonpool.engine.platforms.staged import StagedDevice
from tests.unit.engine.ranks import BLOCKS, RankedStages, ranked
from tests.unit.engine.test_ranked_stages import PROMPT, TABLE, part, story

SEED = int(os.environ.get("SEED", "1"))


@pytest.mark.parametrize(
    ("shape", "ranks", "count", "kv_dtype", "captures"),
    [
        ("tiny-qwen2", 2, 1, "auto", True),
        ("tiny-qwen2", 4, 1, "int8", True),  # two ranks have the same head
        ("tiny-gemma3", 2, 2, "auto", True),
        ("tiny-deepseek-v3", 2, 1, "auto", True),  # all ranks have the one latent vector
        ("tiny-mixtral", 2, 2, "int8", False),
        ("tiny-qwen2", 2, 1, "auto", False),
    ],
)
def test_tokens_and_slices_are_those_of_one_process(
    shape: str, ranks: int, count: int, kv_dtype: str, captures: bool, tmp_path: Path
) -> None:
    create(shape, tmp_path / "model", seed=1, dtype="float32")
    with ranked(tmp_path / "model", 1, stages=count, kv_dtype=kv_dtype) as alone:
        expected = story(alone)
    how = {"stages": count, "kv_dtype": kv_dtype, "seed": SEED, "captures": captures}
    with ranked(tmp_path / "model", ranks, **how) as several:  # type: ignore[arg-type]
        tokens, kv, layers = story(several)
        for runner in (runner for row in several.runners for runner in row) if captures else ():
            assert runner.graphs is not None
            assert runner.graphs.samples(1, "greedy") == (count == 1)
    assert (tokens, layers) == (expected[0], expected[2])
    for (data, value), (theirs, _) in zip(kv, expected[1], strict=True):
        assert value == slice_hash(data)
        assert kv_dtype != "auto" or torch.allclose(floats(data), floats(theirs), atol=1e-4)


def floats(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def test_a_run_ends_on_all_ranks_with_an_end_token_and_when_the_first_is_stopped(checkpoint: Path) -> None:
    with ranked(checkpoint, 2, seed=SEED, captures=True) as several:
        tokens, _, _ = story(several)
        new, before = tokens[len(PROMPT) :], tokens[: len(PROMPT) + 1]
        end = next(index for index, token in enumerate(new) if index > 1 and token not in new[:index])
        several.run(Step(50, (part(before, len(PROMPT), ends=frozenset({new[end]})),), steps=20))
        assert [token for (token,) in several.sampled(50)] == new[1 : end + 1]
        several.gates[0][0].stop_run(51, urgent=False)  # no other rank hears it
        several.run(Step(51, (part(before, len(PROMPT)),), steps=6))
        told = [token for (token,) in several.sampled(51)]
        assert told == new[1 : len(told) + 1]
        assert len(told) < 6
        several.gates[0][1].stop_run(52, urgent=False)  # the first does not hear it
        several.run(Step(52, (part(before, len(PROMPT)),), steps=6))
        assert [token for (token,) in several.sampled(52)] == new[1:7]
        several.gates[0][0].abort(53)
        assert several.run(Step(53, (part(before, len(PROMPT)),), steps=6)).aborted
        further = [event for event in several.events[0][1] if isinstance(event, StageDone)]
        assert not any(event.sampled for event in further), "the first rank tells of tokens"


def test_a_dropped_sequence_and_the_first_ranks_gates(checkpoint: Path) -> None:
    """Another rank hears neither."""
    with ranked(checkpoint, 2, seed=SEED, captures=True) as several:
        expected = several.run(Step(1, (part(PROMPT, 0),))).sampled
        several.gates[0][0].drop(2, 0)
        dropped = several.run(Step(2, (part([*PROMPT, 5], len(PROMPT)), part([*PROMPT, 6], len(PROMPT)))))
        assert dropped.sampled[0] is None
        assert dropped.sampled[1] is not None
        opening = threading.Thread(target=several.gates[0][0].open, args=(3, several.pool.layout.layers - 1))
        opening.start()
        done = several.run(Step(3, (part(PROMPT, 0),), gated=True, layer_events=True))
        opening.join()
        assert done.sampled == expected
        assert several.layers() == list(range(several.pool.layout.layers))


def test_drawn_tokens_are_those_of_one_process(checkpoint: Path) -> None:
    spec = SampleSpec(SamplingParams(temperature=0.9, top_p=0.8, seed=7))
    found = []
    for ranks, how in ((1, {}), (2, {"seed": SEED, "captures": True})):
        with ranked(checkpoint, ranks, **how) as several:  # type: ignore[arg-type]
            first = several.run(Step(1, (replace(part(PROMPT, 0), sample=spec),))).sampled
            longer = [*PROMPT, *first]
            further = replace(part(longer, len(PROMPT)), sample=replace(spec, position=1))  # type: ignore[arg-type]
            several.run(Step(2, (further,), steps=8))
            found.append((first, several.sampled(2)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("theirs", "ours"), [(2, 4), (4, 1), (1, 2)])
def test_kv_that_ranks_store_is_read_by_others_of_another_number(checkpoint: Path, theirs: int, ours: int) -> None:
    """Full blocks, and a part-filled one that is fetched, as a sequence's that is swapped out."""
    with ranked(checkpoint, theirs, seed=SEED, captures=True) as several:
        tokens, _, _ = story(several)
        for runner in several.runners[0]:
            runner.fetch(FetchBlocks(7, TABLE[:3]))
            runner.platform.callbacks.send(lambda: None).wait()
        kept = slices(several)
    with ranked(checkpoint, ours, seed=SEED + 1, captures=True) as several:
        for (layer, block), (data, value) in kept.items():
            several.pool.write(layer, block, memoryview(data), value)
        start = len(PROMPT) + 3
        several.run(Step(1, (part(tokens[: start + 1], start),), steps=5))
        assert [token for (token,) in several.sampled(1)] == tokens[start + 1 : start + 6]


def slices(of: RankedStages) -> dict[tuple[int, int], tuple[bytes, int]]:
    layers = range(of.pool.layout.layers)
    found = {(layer, block): of.pool.read(layer, block) for layer in layers for block in TABLE[:3]}
    return {key: (bytes(data), value) for key, (data, value) in found.items()}


def test_copied_blocks_are_there_on_all_devices(checkpoint: Path) -> None:
    with ranked(checkpoint, 2, seed=SEED, captures=True) as several:
        tokens, _, _ = story(several)
        before = tokens[: len(PROMPT) + 1]
        several.run(Step(70, (part(before, 0),)))
        copied = replace(part(before, len(PROMPT)), block_table=(4, 1, 3))
        assert several.run(Step(80, (copied,), copies=((6, 3),))).sampled == (tokens[len(PROMPT) + 1],)


def test_adapters_in_slots_of_each_rank(checkpoint: Path, tmp_path: Path) -> None:
    folder = create_lora(tmp_path / "lora", load_config(checkpoint), 1)
    lora, found = read_adapter(folder).id, []
    for ranks, how in ((1, {}), (2, {"seed": SEED, "captures": True, "max_loras": 2})):
        with ranked(checkpoint, ranks, **how) as several:  # type: ignore[arg-type]
            for runner in several.runners[0]:
                runner.max_lora_rank = 16
                runner.load_lora(LoadLora(7, lora, str(folder)))
            first = several.run(Step(1, (replace(part(PROMPT, 0), lora=lora),), layer_events=True)).sampled
            further = replace(part([*PROMPT, *first], len(PROMPT)), lora=lora)  # type: ignore[list-item]
            several.run(Step(2, (further,), steps=8))
            found.append((first, several.sampled(2)))
    assert found[0] == found[1]


class _OneFails(StagedDevice):
    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        raise RuntimeError("no memory for it")


def test_graphs_are_captured_on_all_ranks_or_on_none(checkpoint: Path) -> None:
    """Captured sums wait for the others' graphs."""

    class Said:
        def __init__(self, others: bool) -> None:
            self.others = others

        def all_say(self, yes: bool) -> bool:
            return yes and self.others

    def no_work() -> None: ...

    def failing() -> None:
        raise RuntimeError("no memory")

    room = lambda nbytes: True  # noqa: E731 - one of two
    device, lacking = StagedDevice(SEED), _OneFails(SEED)
    assert len(capture_all(device, [no_work] * 2, room, Said(True)).graphs) == 2  # type: ignore[arg-type]
    assert capture_all(device, [no_work], room, Said(False)).failed == "another rank has none"  # type: ignore[arg-type]
    assert capture_all(lacking, [no_work], room, Said(True)).failed == "no memory for it"  # type: ignore[arg-type]
    assert capture_all(device, [no_work], lambda nbytes: False, None) == capture_all(device, [], lambda _: False, None)
    assert capture_all(device, [failing], room, None).failed == "no memory"
    with pytest.raises(RuntimeError, match="no memory"):  # others may wait for its sums
        capture_all(device, [failing], room, Said(True))  # type: ignore[arg-type]
    device.close()
    lacking.close()


LAYOUTS = [
    KVLayout.uniform(3, 4, 8, 16, "float32"),
    KVLayout.uniform(2, 2, 8, 16, "bfloat16"),
    KVLayout.uniform(2, 4, 16, 16, "int8"),
    KVLayout.of_layers(16, [LayerKV(1, 24, "float32", "latent"), LayerKV(1, 8, "float32", "latent")]),
    KVLayout.of_layers(16, [LayerKV(4, 8, "int8", "window", 16), LayerKV(2, 16, "int8"), LayerKV(4, 8, "int8")]),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_brings_its_heads_and_all_together_store_whole_slices(layout: KVLayout, ranks: int) -> None:
    drawn = random.Random(SEED)
    slots = 5 if layout.windowed_layers else 0
    pools = [KVPool.create(layout, BLOCKS, [(0, layout.layers)], slots=slots) for _ in range(2)]
    for pool in pools:
        pool.move_slots(enumerate(range(slots)))
    [source], [target] = (pool.parts for pool in pools)
    source.view[:] = drawn.randbytes(source.nbytes)
    device = StagedDevice(SEED)
    numbers = torch.arange(layout.layers * BLOCKS)
    for rank in range(ranks):
        copy_by_rank(device, source, target, rank, ranks, numbers)
    for layer in range(layout.layers):
        for block in range(BLOCKS):
            if source.has(layer, block):
                assert target.slice(layer, block) == source.slice(layer, block)
    device.close()
    for pool in pools:
        pool.close()


def copy_by_rank(
    device: StagedDevice, source: PoolPart, target: PoolPart, rank: int, ranks: int, numbers: torch.Tensor
) -> None:
    """Bring a rank's heads from one pool, and store them in another."""
    own = StageSlices(torch.zeros(rank_bytes(source, ranks), dtype=torch.uint8), source, ranks=ranks, whole=False)
    whole = [StageSlices(pool_bytes(part), part, ranks=ranks) for part in (source, target)]
    for each in whole:
        device.register(each.flat)
    begin, end = (each.heads_of(rank, ranks) for each in whole)
    own.copy(device, begin, numbers)
    end.copy(device, own, numbers)
