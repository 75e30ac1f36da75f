"""Rows of `benchmarks.kernels_gpu`: sampling, and whole decode steps of a stage, layer by layer and as a graph."""

import tempfile
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.device import On
from benchmarks.frame import Row, paired
from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.models.batch import LayersKV, PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.base import Device
from moonpool.engine.platforms.cuda import CudaDevice
from moonpool.engine.platforms.stage_platform import StagePlatform, stage_platform
from moonpool.engine.sampling.sampler import Sampler

BLOCK = 16
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top-p 0.95, penalties": SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.2, repetition_penalty=1.1),
}


@dataclass(frozen=True, slots=True)
class StepCase:
    """Decode steps of a model with random weights."""

    shape: str = "qwen2.5-0.5b"
    overrides: dict[str, int] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 8, 32, 128)
    context: int = 1024
    dtype: str = "bfloat16"
    device: Callable[[], Device] = lambda: CudaDevice(0)


STEP = StepCase()


def sampling_rows(on: On, rows: int, vocab: int) -> list[Row]:
    """From logits to tokens on the host, beside reading the logits once; top-p also beside torch's sort and draw."""
    logits = torch.randn(rows, vocab, device=on.device) * 2
    found = []
    for way, params in WAYS.items():
        call = _sampling(logits, params)
        pairs = on.pairs(1.0, call, lambda: on.copied() / logits.nbytes)
        name = f"GPU sampling, {way}, {rows} rows of {vocab}"
        found.append(_in_ms(name, pairs, "the logits once at a copy's rate"))
        if way == "top-p 0.95":
            theirs = partial(on.per_second, partial(_by_sort, logits, params))
            found.append(_in_ms(name, on.pairs(1.0, call, theirs), "torch's sort and multinomial"))
    return found


def _in_ms(name: str, rates: list[tuple[float, float]], limit_name: str) -> Row:
    return paired(name, "ms", [(1e3 / own, 1e3 / limit) for own, limit in rates], limit_name, less_is_better=True)


def _sampling(logits: Tensor, params: SamplingParams) -> Callable[[], object]:
    """A further step of a run; the logits are written anew each time, as a step's are."""
    history = array("i", range(0, 1000, 2)).tobytes() if params.penalised else None
    specs = [SampleSpec(params, seed, history=history, prompt_tokens=100) for seed in range(len(logits))]
    sampler, room = Sampler(specs, logits.shape[1], logits.device, 1 << 16), torch.empty_like(logits)

    def call() -> object:
        tokens = sampler.sample(room.copy_(logits)).tokens
        sampler.advance([its[0] for its in tokens])
        return tokens

    return call


def _by_sort(logits: Tensor, params: SamplingParams) -> Tensor:
    ordered = torch.softmax(logits / params.temperature, -1).sort(-1, descending=True)
    kept = torch.where(ordered.values.cumsum(-1) - ordered.values < params.top_p, ordered.values, 0.0)
    return ordered.indices.gather(1, kept.multinomial(1)).cpu()


@torch.inference_mode()
def step_rows(on: On, case: StepCase) -> list[Row]:
    """Weights and KV that decode steps read per second, logits and greedy tokens included, beside a copy."""
    with tempfile.TemporaryDirectory(prefix="moonpool-step-") as folder:
        path = create(case.shape, Path(folder) / "model", overrides=case.overrides)
        device, config = case.device(), load_config(path)
        dtype = getattr(torch, case.dtype)
        model = load_stage(path, config, dtype, 0, config.num_layers, device.torch_device)
    blocks = max(case.batches) * (case.context // BLOCK)
    layout = kv_layout(config, case.dtype, BLOCK)
    with closing(KVPool.create(layout, blocks, [(0, config.num_layers)])) as pool:
        errors: list[BaseException] = []
        with closing(stage_platform(device, pool.parts[0], errors.append)) as place:
            return [row for batch in case.batches for row in _rows_of(on, case, model, place, batch)]


def _rows_of(on: On, case: StepCase, model: StageModel, place: StagePlatform, batch: int) -> list[Row]:
    blocks, read = case.context // BLOCK, model.weight_bytes + batch * case.context * _kv_bytes(place.memory.kv)
    tables = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(batch)]
    found = []
    for name, forward in _forwards(case, model, place, tables).items():
        sampler = Sampler([SampleSpec()] * batch, model.config.vocab_size, place.torch_device)

        def call(forward: Callable[[], Tensor] = forward, sampler: Sampler = sampler) -> object:
            return sampler.sample(model.logits(forward()))

        pairs = [(own / 1e9, limit / 1e9) for own, limit in on.pairs(read, call, on.copied)]
        title = f"GPU decode step, {case.shape}, {case.dtype}, batch {batch}, context {case.context}, {name}"
        found.append(paired(title, "GB/s", pairs, "copy"))
    return found


def _kv_bytes(kv: LayersKV) -> int:
    """Of a token in all layers."""
    return sum(layer[0].nbytes // layer.shape[3] for layer in kv)


def _forwards(
    case: StepCase, model: StageModel, place: StagePlatform, tables: list[tuple[int, ...]]
) -> dict[str, Callable[[], Tensor]]:
    """The layers of a step: eagerly, and as a graph, which was captured."""
    token, start = array("i", [5]).tobytes(), case.context - 1
    parts = [(token, start, table) for table in tables]
    assert place.device is not None
    cache = GraphCache(case.context, most_rows=len(tables))
    graphs = DecodeGraphs(place.device, model, place.memory, cache, case.context)
    graphs.capture(place.stream, lambda what: None)
    nothing = torch.empty(0)

    def eagerly() -> Tensor:
        batch = PackedBatch.build(parts, BLOCK, place.torch_device)
        hidden = model.embed(batch.token_ids)
        return model.run(hidden, batch, place.memory.kv, 0, model.config.num_layers)[1]

    def replayed() -> Tensor:
        batch = PackedBatch.build(parts, BLOCK)
        shape = graphs.shape(Step(1, tuple(SequenceStep(*part) for part in parts)), batch)
        assert shape is not None
        return graphs.run(shape, batch, nothing)

    return {"layer by layer": eagerly, "as a graph": replayed}
