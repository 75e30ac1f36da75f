"""A stage's layers, and further steps in a run, in native calls (`kernels/engine/step.cpp`, `go_on.cpp`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.families.spec import LayerSpec
from moonpool.engine.kernels.choice import why_not_native
from moonpool.engine.kernels.native import library, structures
from moonpool.engine.kernels.native.library import TYPES, Library
from moonpool.engine.kernels.plan import AttentionPlan
from moonpool.engine.models.batch import BatchLoras, PackedBatch, logits_rows
from moonpool.engine.models.experts import MixtureOfExperts
from moonpool.engine.models.layers import FeedForward
from moonpool.engine.models.lora import StageLora
from moonpool.engine.models.weights import AttentionWeights, LayerWeights
from moonpool.engine.weights.linear import Linear

_LORA_PLACES = ("attention.qkv", "attention.output", "feed_forward.gate_up", "feed_forward.down")
"""`LoraPlace` of lora.h, by the place in `LayerWeights`."""
_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
"""`Scores` of experts.h."""


class NativeLayers:
    """Consecutive layers of one kind, from the model's layer `index` on, in the native step's form.

    Attributes:
        native: the library.
        index: the first layer, counted in the whole model.
        end: one past the last layer.
        rope: index of the layers' rotary embedding table.
    """

    def __init__(self, native: Library, config: ModelConfig, index: int, layers: Sequence[LayerWeights]) -> None:
        self.native = native
        self.index, self.end = index, index + len(layers)
        self._weights = list(layers)  # kept alive
        self._structures = [_layer_structure(layer) for layer in layers]  # kept alive: experts lie behind pointers
        self._layers = (structures.Layer * len(layers))(*self._structures)
        first, spec = layers[0], layers[0].spec
        heads = spec.attention
        assert heads.rope is not None
        self.rope = heads.rope
        dense = [layer.feed_forward.down.shape[1] for layer in layers if isinstance(layer.feed_forward, FeedForward)]
        self.model = structures.Model(
            self._layers,
            config.hidden_size, max(dense, default=0),
            TYPES[first.product.dtype], heads.num_heads, heads.num_kv_heads, heads.head_dim,
            spec.norm.eps, heads.scale,
        )  # fmt: skip

    def progress(self) -> Progress:
        """Return the progress of a step that has not begun."""
        return Progress(self.native, self.index, len(self._layers))

    def takes(self, loras: BatchLoras | None) -> bool:
        """Tell whether a batch's adapters change these layers only where native code adds."""
        if loras is None or loras.rows is not None:
            return loras is None
        return all(self._adapter(lora) is not None for lora, _ in loras.adapted)

    def _adapter(self, lora: StageLora) -> ctypes.Array[structures.LowRank] | None:
        """Return an adapter's part of these layers, [layers, places]; None: there are other places."""
        if self.index not in lora.native:
            lora.native[self.index] = self._made_adapter(lora)
        found: ctypes.Array[structures.LowRank] | None = lora.native[self.index]
        return found

    def _made_adapter(self, lora: StageLora) -> ctypes.Array[structures.LowRank] | None:
        made = (structures.LowRank * (len(self._weights) * len(_LORA_PLACES)))()
        for layer in range(self.index, self.end):
            for place, pair in lora.layers.get(layer, {}).items():
                if place not in _LORA_PLACES or pair.down.panels is None or pair.up.panels is None:
                    return None
                at = (layer - self.index) * len(_LORA_PLACES) + _LORA_PLACES.index(place)
                made[at] = structures.LowRank(_panels(pair.down), _panels(pair.up))
        return made

    def _loras(self, loras: BatchLoras, rows: int) -> structures.Loras:
        """Return the adapters of a batch's rows as native code takes them, made once for each batch."""
        if self.index not in loras.native:
            of = np.full(rows, -1, np.int32)
            adapters = [self._adapter(lora) for lora, _ in loras.adapted]
            for number, (_, adapted) in enumerate(loras.adapted):
                of[slice(None) if adapted is None else adapted.numpy()] = number
            pointers = np.array([ctypes.addressof(adapter) for adapter in adapters if adapter is not None], np.int64)
            made = structures.Loras(pointers.ctypes.data, of.ctypes.data)
            loras.native[self.index] = made, of, pointers, adapters  # live as long as the batch
        found: structures.Loras = loras.native[self.index][0]
        return found

    def run(self, step: structures.NativeStep) -> int:
        """Run a step's layers and return the layer reached, counted in the whole model."""
        return self.native.step(self.model, step) + self.index

    def step(self, inputs: StepInputs, first: int, last: int) -> structures.NativeStep:
        """Return layers `first` up to `last`, counted in the whole model, as native code takes them."""
        hidden, batch, angles, plan = inputs.hidden, inputs.batch, inputs.angles, inputs.plan
        kv, scales, signals, progress = inputs.kv, inputs.scales, inputs.signals, inputs.progress
        tables = batch.block_tables
        chosen = logits_rows(batch, inputs.last_rows)
        some = structures.Items()
        if chosen is not None:
            some = _items_structure(chosen.single, chosen.several)
        size = kv.element_size()
        step = structures.NativeStep(
            first - self.index, last - self.index, self.index,
            hidden.data_ptr(), hidden.shape[0],
            angles[0].data_ptr(), angles[1].data_ptr(),
            batch.block_ids.data_ptr(), batch.offsets.data_ptr(),
            kv.data_ptr(), kv.stride(0) * size, kv.stride(1) * size, kv.stride(3) * size, kv.shape[4],
            *((None, 0, 0, 0) if scales is None else (scales.data_ptr(), *scales.stride()[:2], scales.stride(3))),
            TYPES[kv.dtype],
            tables.data_ptr(), tables.stride(0),
            _items_structure(plan.decode, plan.prefill),
            None if chosen is None else chosen.rows.data_ptr() or hidden.data_ptr(),
            0 if chosen is None else chosen.rows.numel(),
            some,
            None if signals is None else signals.address,
            None if progress is None else progress.address,
            None if batch.loras is None else ctypes.pointer(self._loras(batch.loras, hidden.shape[0])),
            torch.get_num_threads(),
        )  # fmt: skip
        # The tensors live as long as the step has their addresses.
        step.kept = inputs, chosen
        return step

    def normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm of `rows` [R, hidden], each dense, in the weights' type."""
        out = torch.empty(rows.shape, dtype=rows.dtype)
        self.native.rms_norm(rows, None, weight, self.model.eps, out)
        return out


class StepSignals(Protocol):
    """Signals of other threads to a step that runs."""

    address: int
    """Address of three 8-byte words: whether the step was aborted, the model's highest layer that may run, and whether
    the run must return after the step.
    """

    def stopped(self, layer: int) -> bool:
        """Tell whether this layer must not run, or not yet."""
        ...


class Progress:
    """Progress through a step's layers, for one thread that follows them while another thread computes.

    Args:
        native: The library.
        first: The stage's first layer, counted in the whole model, as in what follows.
        count: Number of layers.
    """

    def __init__(self, native: Library, first: int, count: int) -> None:
        self._native, self._first = native, first
        self._began_ns = array("q", bytes(8 * count))
        self._words = structures.NativeProgress(first, self._began_ns.buffer_info()[0])
        self.address = ctypes.addressof(self._words)

    def wait(self, layer: int) -> bool:
        """Wait until a layer is computed; return False if the step is over before.

        Other threads of Python run meanwhile.
        """
        return self._native.follow(self._words, layer)

    def began_ns(self, layer: int) -> int:
        """Return when a layer began that was waited for, time.monotonic_ns."""
        return self._began_ns[layer - self._first]

    def end(self) -> None:
        """No further layer is computed. By the thread that computes."""
        self._native.over(self._words)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step's layers."""

    hidden: Tensor
    """States [T, hidden], contiguous: in and out."""
    batch: PackedBatch
    """The sequences; `plan` was made from the batch's tables."""
    angles: tuple[Tensor, Tensor]
    """RoPE's cos and sin of the batch's rows, each [T, head_dim]."""
    plan: AttentionPlan
    """Of `batch` and `kv`."""
    kv: Tensor
    """These layers' pool [layers, blocks, kv_heads, 2, block_size, head_dim], as `kernels.attention` takes each."""
    scales: Tensor | None = None
    """Of quantised KV, [layers, blocks, kv_heads, 2, block_size] float32."""
    last_rows: Sequence[int] | None = None
    """Number of each sequence's last rows that the last layer computes; the other rows stay undefined. None: all."""
    signals: StepSignals | None = None
    """What the layers look at while they run."""
    progress: Progress | None = None
    """Receives each layer's end."""


def native_layers(
    config: ModelConfig, index: int, layers: Sequence[LayerWeights]
) -> tuple[list[NativeLayers], list[str]]:
    """Return the layers from `index` on that the native step takes, in runs of one kind; and why not, by layer."""
    first = layers[0].product
    missing = why_not_native(first.device, first.dtype)
    reasons = [missing or _why_not(config, at, layer) for at, layer in enumerate(layers, index)]
    native = library.get() if not missing else None
    if native is None:
        return [], reasons
    runs = list[NativeLayers]()
    kinds = (None if why else _kind(layer.spec) for why, layer in zip(reasons, layers, strict=True))
    for kind, run in groupby(enumerate(kinds), key=lambda item: item[1]):
        if kind is not None:
            rows = [row for row, _ in run]
            runs.append(NativeLayers(native, config, index + rows[0], layers[rows[0] : rows[-1] + 1]))
    return runs, reasons


def _kind(spec: LayerSpec) -> LayerSpec:
    """Return what layers of one native call share: all but widths inside, and experts."""
    return spec.with_feed_forward(inner=0, experts=None)


def _why_not(config: ModelConfig, index: int, layer: LayerWeights) -> str:
    """Return why the native step does not take a layer; "" if it does."""
    missing = config.decoder.not_native(index)
    if not missing and any(linear.panels is None for linear in _linears(layer)):
        missing = "a matrix cannot be arranged in panels"
    return missing


def _linears(layer: LayerWeights) -> tuple[Linear, ...]:
    attention, inner = layer.attention, layer.feed_forward
    assert isinstance(attention, AttentionWeights)
    if isinstance(inner, FeedForward):
        return attention.qkv, attention.output, inner.gate_up, inner.down
    assert isinstance(inner, MixtureOfExperts)
    networks = [*inner.experts, *([] if inner.shared is None else [inner.shared])]
    gates = [] if inner.shared_gate is None else [inner.shared_gate]
    each = [linear for network in networks for linear in (network.gate_up, network.down)]
    return attention.qkv, attention.output, inner.router, *gates, *each


def _layer_structure(weights: LayerWeights) -> structures.Layer:
    attention, inner = weights.attention, weights.feed_forward
    assert isinstance(attention, AttentionWeights)
    norms = (weights.attention_norm, weights.feed_forward_norm, attention.q_norm, attention.k_norm)
    stored = (None if norm is None else norm.weight for norm in norms)
    layer = structures.Layer(
        *(None if weight is None else weight.data_ptr() for weight in stored),
        _panels(attention.qkv),
        _panels(attention.output),
    )
    if isinstance(inner, FeedForward):
        layer.gate_up, layer.down = _panels(inner.gate_up), _panels(inner.down)
    else:
        assert isinstance(inner, MixtureOfExperts)
        layer.experts = ctypes.pointer(_experts_structure(inner))
    return layer


def _experts_structure(weights: MixtureOfExperts) -> structures.Experts:
    spec, count = weights.spec, len(weights.experts)
    matrices = structures.Panels * count
    made = structures.Experts(
        spec.count, spec.chosen,
        _SCORES[spec.scores], int(spec.normalised), spec.groups, spec.groups_chosen, spec.group_top,
        spec.least_sum, spec.factor,
        None if weights.correction is None else weights.correction.data_ptr(),
        matrices(*(_panels(expert.gate_up) for expert in weights.experts)),
        matrices(*(_panels(expert.down) for expert in weights.experts)),
        _panels(weights.router),
    )  # fmt: skip
    if weights.shared is not None:
        made.shared_gate_up, made.shared_down = _panels(weights.shared.gate_up), _panels(weights.shared.down)
    if weights.shared_gate is not None:
        made.shared_gate = _panels(weights.shared_gate)
    return made


def _panels(linear: Linear) -> structures.Panels:
    assert linear.panels is not None
    return linear.panels.structure


def _items_structure(single: Tensor, several: Tensor) -> structures.Items:
    return structures.Items(single.data_ptr(), single.shape[0], several.data_ptr(), several.shape[0])
