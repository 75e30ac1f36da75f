"""Rows of `kernel_speed` of recurrent layers: a layer by kernels beside the same layer in plain torch."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.ceilings import On
from benchmarks.frame import Row
from moonpool.base.families.spec import RecurrentSpec
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.recurrent import RecurrentWeights, StateUndo
from moonpool.engine.weights.linear import Linear
from tools.gpu_check.kernel_rows import beside_reference, in_torch

SPECS = {
    "Qwen3-Next": RecurrentSpec("gated_delta", 4, heads=32, key_heads=16, key_dim=128, value_dim=128),
    "Kimi Linear": RecurrentSpec("kimi_delta", 4, heads=32, key_heads=32, key_dim=128, value_dim=128, width=128),
    "Nemotron-H": RecurrentSpec("mamba2", 4, heads=128, key_heads=8, key_dim=128, value_dim=64, gate_first=True),
    "LFM2": RecurrentSpec("short_conv", 3, width=2048),
}
SMALL = {"small": RecurrentSpec("gated_delta", 4, heads=2, key_heads=1, key_dim=8, value_dim=8)}
BATCHES = ((64, 1, 100), (1, 2048, 0))
"""(sequences, rows, tokens before)"""
_HIDDEN, _BLOCK = 64, 64
"""The projections, which are a library's, are left small."""


def recurrent_rows(
    on: On, specs: Mapping[str, RecurrentSpec], dtype: torch.dtype, batches: tuple[tuple[int, int, int], ...] = BATCHES
) -> Iterator[Row]:
    """Decode steps and prompts of one layer of each kind; results are compared first."""
    rng = torch.Generator().manual_seed(1)
    for name, spec in specs.items():
        layer = random_layer(spec, _HIDDEN, dtype, on.device, rng)
        for sequences, rows, before in batches:
            call = _step(on, layer, sequences, rows, before, rng)
            title = f"GPU recurrent layer, {name}, {sequences} sequences of {rows} rows"
            yield beside_reference(on, title, call, partial(in_torch, call))


def _step(
    on: On, layer: RecurrentWeights, sequences: int, rows: int, before: int, rng: torch.Generator
) -> Callable[[], Tensor]:
    """Return a step's call; states are read from blocks that the step does not write."""
    each = -(-(before + rows) // _BLOCK)
    tables = [range(1 + each * number, 1 + each * (number + 1)) for number in range(sequences)]
    parts = [(bytes(4 * rows), before, table) for table in tables]
    batch = PackedBatch.build(parts, _BLOCK, on.device, full_hits=range(sequences))
    pool = torch.randn((1 + each * sequences, 1, 1, 1, layer.spec.state_elements), device=on.device)
    hidden = torch.randn((sequences * rows, _HIDDEN), generator=rng).to(on.device, layer.output.dtype)
    undo = StateUndo()

    def call() -> Tensor:
        undo.begin()
        return layer(hidden, batch, pool, undo, None, deterministic=False)

    return call


def random_layer(
    spec: RecurrentSpec,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device | str,
    rng: torch.Generator,
    *,
    rounded: torch.dtype | None = None,
) -> RecurrentWeights:
    """Return a layer with random weights, drawn on the host; `rounded`: weights are numbers of this type."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    def stored(weights: Tensor) -> Tensor:
        return weights.to(rounded or dtype).to(device, dtype)

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(stored(drawn(outputs, inputs) / inputs**0.5))

    values, keys = spec.heads * spec.value_dim, spec.heads * spec.key_dim
    sizes = {
        "short_conv": 3 * spec.width,
        "mamba2": values + spec.channels + spec.heads,
        "lightning": spec.channels + values,
        "gated_delta": spec.channels + values + 2 * spec.heads,
        "kimi_delta": spec.channels + 2 * spec.width + spec.heads,
    }
    conv = stored(drawn(spec.channels, spec.conv) / 2) if spec.conv > 1 else None
    bias = stored(drawn(spec.channels)) if spec.conv_bias else None
    weights = RecurrentWeights(spec, linear(sizes[spec.kind], hidden), conv, bias, linear(hidden, values or spec.width))
    if spec.heads:
        weights.decay = -drawn(spec.heads).exp().to(device)
        weights.step_bias = drawn(keys if spec.kind == "kimi_delta" else spec.heads).to(device)
        whole = spec.gate_first or bool(spec.norm_groups)
        weights.norm = stored(drawn(values if whole else spec.value_dim))
    if spec.kind == "mamba2":
        weights.skip = drawn(spec.heads).to(device)
    if spec.kind == "kimi_delta":
        weights.steps, weights.gates = linear(keys, spec.width), linear(values, spec.width)
    return weights
