"""All layers of a stage in one native call (`kernels/native/step.cpp`), where native kernels run."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention import AttentionPlan
from kernels.choice import why_not_native
from kernels.native import library, structures
from kernels.native.library import MAX_HEAD_DIM, TYPES, Library
from moonpool.checkpoint.config import ModelConfig
from moonpool.model.batch import PackedBatch
from moonpool.model.trim import trim
from moonpool.model.weights import LayerWeights


class Watch(Protocol):
    """What other threads may change while a step runs."""

    address: int
    """Of three words of 8 bytes: whether the step was given up, the model's highest layer that may run, and whether
    something waits for the step's end."""

    def stopped(self, layer: int) -> bool:
        """Whether this layer must not run (any more, or yet)."""
        ...


class Progress:
    """How far the layers of a step have come, for one thread that follows them while another one computes.

    Args:
        native: The library that they run by.
        first: The stage's first layer, counted in the whole model, as in what follows.
        count: Its layers.
    """

    def __init__(self, native: Library, first: int, count: int) -> None:
        self._native, self._first = native, first
        self._began_ns = array("q", bytes(8 * count))
        self._words = structures.Progress(first, self._began_ns.buffer_info()[0])
        self.address = ctypes.addressof(self._words)

    def wait(self, layer: int) -> bool:
        """Wait until a layer is computed; return False if it is over before. Other threads of Python run meanwhile."""
        return self._native.follow(self._words, layer)

    def began_ns(self, layer: int) -> int:
        """Return when a layer began that was waited for, time.monotonic_ns."""
        return self._began_ns[layer - self._first]

    def end(self) -> None:
        """No further layer is computed. By the thread that computes."""
        self._native.over(self._words)


class NativeLayers:
    """The layers of one stage, from layer `index` of the model on, as the native step is given them."""

    def __init__(self, native: Library, config: ModelConfig, index: int, layers: Sequence[LayerWeights]) -> None:
        self.native = native
        self._index = index
        self._weights = list(layers)  # kept alive
        self._layers = (structures.Layer * len(layers))(*map(_layer, layers))
        first = layers[0].input_norm
        self.model = structures.Model(
            self._layers,
            config.hidden_size, config.intermediate_size,
            TYPES[first.dtype], config.num_heads, config.num_kv_heads, config.head_dim,
            config.rms_norm_eps, config.head_dim**-0.5,
        )  # fmt: skip

    def progress(self) -> Progress:
        """Return a step's progress, of which nothing is done."""
        return Progress(self.native, self._index, len(self._layers))

    def run(self, step: structures.Step) -> int:
        """Run a step's layers and return the one that it came to, counted in the whole model."""
        return self.native.step(self.model, step) + self._index

    def step(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        kv: Tensor,
        scales: Tensor | None,
        first: int,
        last: int,
        *,
        tails: Sequence[int] | None,
        watch: Watch | None,
        progress: Progress | None = None,
    ) -> structures.Step:
        """Return layers `first` up to `last`, counted in the whole model, over a batch, as native code is given them.

        Args:
            hidden: States [T, hidden], contiguous: in and out.
            batch: The sequences; its tables were checked for `plan`.
            angles: RoPE's cos and sin of the batch's rows.
            plan: Of the batch and `kv`.
            kv: The stage's pool [layers, blocks, kv_heads, 2, block_tokens, head_dim], each block dense.
            scales: Of quantised KV, [layers, blocks, kv_heads, 2, block_tokens] float32, each block dense.
            first: First layer.
            last: The layer after the last.
            tails: Of each sequence so many last rows are wanted of layer `last` - 1, the others are left undefined;
                None: all are wanted.
            watch: What the layers look at; None: nothing.
            progress: What is told of each layer; None: nothing.
        """
        tables = batch.block_tables
        chosen = trim(batch, tails)
        some = structures.Items()
        if chosen is not None:
            some = _items(chosen.single, chosen.several)
        size = kv.element_size()
        step = structures.Step(
            first - self._index, last - self._index, self._index,
            hidden.data_ptr(), hidden.shape[0],
            angles[0].data_ptr(), angles[1].data_ptr(),
            batch.block_ids.data_ptr(), batch.offsets.data_ptr(),
            kv.data_ptr(), kv.stride(0) * size, kv.stride(1) * size, kv.shape[4],
            *((None, 0, 0) if scales is None else (scales.data_ptr(), scales.stride(0), scales.stride(1))),
            TYPES[kv.dtype],
            tables.data_ptr(), tables.stride(0),
            _items(plan.decode, plan.prefill),
            None if chosen is None else chosen.rows.data_ptr() or hidden.data_ptr(),
            0 if chosen is None else chosen.rows.numel(),
            some,
            None if watch is None else watch.address,
            None if progress is None else progress.address,
            torch.get_num_threads(),
        )  # fmt: skip
        # Alive, as long as it has their addresses.
        step.kept = hidden, batch, angles, plan, kv, scales, chosen, watch, progress
        return step

    def normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm of `rows` [R, hidden], each dense, in the weights' type."""
        out = torch.empty(rows.shape, dtype=rows.dtype)
        self.native.rms_norm(rows, None, weight, self.model.eps, out)
        return out


def native_layers(config: ModelConfig, index: int, layers: Sequence[LayerWeights]) -> NativeLayers | str:
    """Return the layers from `index` on for the native step, or why they run operation by operation."""
    first = layers[0].input_norm
    missing = why_not_native(first.device, first.dtype) or _missing(config, layers)
    if missing:
        return missing
    native = library.get()
    assert native is not None
    return NativeLayers(native, config, index, layers)


def _missing(config: ModelConfig, layers: Sequence[LayerWeights]) -> str:
    """Return why the native step does not take these layers; "" where it does."""
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is no multiple of 16 up to {MAX_HEAD_DIM}"
    linears = [linear for layer in layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if any(linear.panels is None for linear in linears):
        return "a matrix cannot be arranged in panels"
    return ""


def _layer(weights: LayerWeights) -> structures.Layer:
    matrices = []
    for linear in (weights.qkv, weights.output, weights.gate_up, weights.down):
        assert linear.panels is not None
        matrices.append(linear.panels.structure)
    norms = (weights.input_norm, weights.post_norm, weights.q_norm, weights.k_norm)
    return structures.Layer(*(None if norm is None else norm.data_ptr() for norm in norms), *matrices)


def _items(single: Tensor, several: Tensor) -> structures.Items:
    return structures.Items(single.data_ptr(), single.shape[0], several.data_ptr(), several.shape[0])
