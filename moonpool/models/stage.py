"""Consecutive layers of a transformer on one device, over a packed batch with KV in the pool.

Call `embed`, `run` over some layers or all, and `logits`. Where native kernels run, `run` is one native call
(`moonpool.models.native_step`); elsewhere, and as the reference, layers run one by one in torch.

Precision follows transformers: RMS norms and RoPE's angles in float32, the rest in the weights' type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels import choice, ops
from kernels.attention import paged_attention, write_kv
from kernels.int8_head import Int8Head
from kernels.packed_weights import PackedWeights
from kernels.plan import AttentionPlan, make_plan, plan_of_shapes
from moonpool.checkpoint.config import ModelConfig
from moonpool.models.batch import PackedBatch
from moonpool.models.layers import LayerWeights, Linear, RopeTable
from moonpool.models.native_step import (
    NativeRun,
    Progress,
    RunInputs,
    StepInputs,
    StepSignals,
    make_native_run,
    native_layers,
)

InferenceParameters = ParamSpec("InferenceParameters")
InferenceResult = TypeVar("InferenceResult")


def in_inference_mode(
    function: Callable[InferenceParameters, InferenceResult],
) -> Callable[InferenceParameters, InferenceResult]:
    """Make `function` run in inference mode.

    Entering it costs tens of microseconds where caches are cold, as they are behind a step, so that it is not entered
    again within.
    """
    entering: Callable[InferenceParameters, InferenceResult] = torch.inference_mode()(function)

    @functools.wraps(function)
    def call(*args: InferenceParameters.args, **kwargs: InferenceParameters.kwargs) -> InferenceResult:
        return (function if torch.is_inference_mode_enabled() else entering)(*args, **kwargs)

    return call


class StageModel:
    """Layers `layer_begin` up to `layer_end` of a model; the first stage embeds, the last one has norm and head.

    `deterministic`: a sequence's results have the same bits whatever else is in the batch, for the same chunk borders.
    `kernels`: what computes (`kernels.choice.prepare`). `one_by_one`: why layers are not one native call, or "".
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_begin: int,
        layers: Sequence[LayerWeights],
        *,
        embedding: Tensor | PackedWeights | None,
        final_norm: Tensor | None,
        head: Linear | None,
        int8_head: Int8Head | None = None,
        deterministic: bool = False,
    ) -> None:
        self.config = config
        self.layer_begin = layer_begin
        self.layer_end = layer_begin + len(layers)
        self.layers = list(layers)
        self.embedding = embedding  # [vocab, hidden], first stage; the head's own panels where the two are tied
        self.final_norm = final_norm  # [hidden], last stage
        self.head = head  # hidden to vocab, last stage
        self.int8_head = int8_head
        first = self.layers[0].input_norm
        self.dtype = first.dtype
        self.device = first.device
        self._rope = RopeTable(config, self.dtype, self.device)
        self._scale = config.head_dim**-0.5
        self.deterministic = deterministic
        self.kernels = choice.prepare(self.device, self.dtype)  # built now, not in the first step
        native = native_layers(config, layer_begin, self.layers)
        self._native = None if isinstance(native, str) else native
        self.one_by_one = native if isinstance(native, str) else ""

    @property
    def is_first(self) -> bool:
        """Whether this stage takes tokens rather than hidden states."""
        return self.layer_begin == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage gives logits."""
        return self.layer_end == self.config.num_layers

    @property
    def native(self) -> bool:
        """Whether layers run in one native call."""
        return self._native is not None

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, bytes, with the int8 head; a tied head counts beside an embedding that is held."""
        parts = [
            self.embedding if isinstance(self.embedding, Tensor) else None,
            self.final_norm,
            self.head,
            self.int8_head,
        ]
        for layer in self.layers:
            parts += [getattr(layer, name) for name in LayerWeights.__slots__]
        return sum(part.nbytes for part in parts if part is not None)

    def progress(self) -> Progress | None:
        """Return what another thread follows one step's `run` by; None where layers run one by one."""
        return None if self._native is None else self._native.progress()

    @in_inference_mode
    def embed(self, token_ids: Tensor) -> Tensor:
        """Return hidden states [T, hidden] of `token_ids` [T] (int64); first stage only."""
        assert self.is_first
        assert self.embedding is not None
        if isinstance(self.embedding, PackedWeights):
            return self.embedding.rows(token_ids)
        return self.embedding.index_select(0, token_ids)  # torch's embedding takes three times as long for few

    @in_inference_mode
    def run(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        kv: Tensor,
        first: int,
        last: int,
        *,
        scales: Tensor | None = None,
        last_rows: Sequence[int] | None = None,
        signals: StepSignals | None = None,
        progress: Progress | None = None,
    ) -> tuple[int, Tensor]:
        """Run layers `first` up to `last` (counted in the whole model) on hidden states [T, hidden].

        Writes the batch's keys and values into `kv`, the stage's pool
        [layers, blocks, kv_heads, 2, block_tokens, head_dim], and attends to what is there: of quantised KV, whose
        `scales` are [layers, blocks, kv_heads, 2, block_tokens] float32, to what the stored values stand for, also of
        the batch's own tokens. So it makes no difference which of them were there before. `hidden` may be
        overwritten. `last_rows`: number of each sequence's last rows that are needed of layer `last` - 1. The other
        rows stay undefined; their keys and values are written all the same. Another thread may follow the layers by
        `progress`, made by `self.progress`; several calls may belong to one step.

        Returns:
            The layer that it came to, `last` unless `signals` stopped it before, and the hidden states there.
        """
        if self._native is not None:
            assert self.dtype == hidden.dtype
            assert scales is not None or kv.dtype == self.dtype
            assert hidden.is_contiguous()
            angles, plan = self._angles(batch), self._plan(batch, kv[0])
            inputs = StepInputs(hidden, batch, angles, plan, kv, scales, last_rows, signals, progress)
            return self._native.run(self._native.step(inputs, first, last)), hidden
        assert progress is None
        for index in range(first, last):
            if signals is not None and signals.stopped(index):
                return index, hidden
            row = index - self.layer_begin
            hidden = self._layer(index, hidden, batch, kv[row], None if scales is None else scales[row])
        return last, hidden

    @in_inference_mode
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, vocab] of hidden states [R, hidden] after the last layer; last stage only.

        `out`: those of a step before, of which the memory may be used.
        """
        assert self.final_norm is not None
        assert self.head is not None
        if self._native is not None:
            normed = self._native.normed(rows, self.final_norm)
        else:
            normed = ops.rms_norm(rows, self.final_norm, self.config.rms_norm_eps)
        return self.head(normed, deterministic=self.deterministic, wide=True, out=out)

    @in_inference_mode
    def native_run(
        self,
        batch: PackedBatch,
        kv: Tensor,
        steps: int,
        chosen: int,
        *,
        scales: Tensor | None = None,
        out: Tensor | None = None,
        signals: StepSignals | None = None,
    ) -> NativeRun | None:
        """Return what computes further steps of a run, each in one call; None where they go one operation at a time.

        Args:
            batch: Of the step before, with one token of each sequence; from now on it is changed in place.
            kv: As for `run`.
            scales: As for `run`.
            signals: As for `run`.
            steps: That are taken at most.
            chosen: Address of each sequence's token in each step, int32.
            out: Logits of the step before, of which the memory may be used.
        """
        if self._native is None or not (self.is_first and self.is_last):
            return None
        assert self.final_norm is not None
        assert self.head is not None
        assert self.embedding is not None
        hidden = torch.empty(batch.num_tokens, self.config.hidden_size, dtype=self.dtype)
        cos, sin, turns = self._rope.ahead(batch.positions, steps)
        angles = torch.empty(2, batch.num_tokens, self.config.head_dim, dtype=self.dtype)
        plan = self._plan(batch, kv[0])
        inputs = StepInputs(hidden, batch, (angles[0], angles[1]), plan, kv, scales, signals=signals)
        step = self._native.step(inputs, self.layer_begin, self.layer_end)
        parts = RunInputs(
            step, hidden, angles, cos, sin, turns, self.embedding, self.final_norm, self.head, self.int8_head
        )
        return make_native_run(self._native, batch, parts, kv.shape[1], steps, chosen, out)

    def forward(
        self, hidden_or_tokens: Tensor, batch: PackedBatch, kv: Tensor, *, scales: Tensor | None = None
    ) -> Tensor:
        """Run all layers of this stage, `kv` and `scales` as for `run`. Embeds on the first stage."""
        hidden = self.embed(hidden_or_tokens) if self.is_first else hidden_or_tokens
        return self.run(hidden, batch, kv, self.layer_begin, self.layer_end, scales=scales)[1]

    def _layer(self, index: int, hidden: Tensor, batch: PackedBatch, kv: Tensor, scales: Tensor | None) -> Tensor:
        """Run layer `index` in torch; `kv` [blocks, kv_heads, 2, block_tokens, head_dim] is its own part."""
        weights = self.layers[index - self.layer_begin]
        eps = self.config.rms_norm_eps
        normed = ops.rms_norm(hidden, weights.input_norm, eps)
        attended = self._attention(weights, normed, batch, kv, scales)
        projected = weights.output(attended, deterministic=self.deterministic)
        normed = ops.rms_norm(projected, weights.post_norm, eps, residual=hidden)  # hidden is the sum from here on
        inner = weights.gate_up(normed, deterministic=self.deterministic)
        return weights.down(inner, deterministic=self.deterministic).add_(hidden)

    def _attention(
        self, weights: LayerWeights, normed: Tensor, batch: PackedBatch, kv: Tensor, scales: Tensor | None
    ) -> Tensor:
        """Project, rotate, store keys and values, attend: [T, hidden] to [T, heads * head_dim]."""
        config = self.config
        tokens, heads, kv_heads = normed.shape[0], config.num_heads, config.num_kv_heads
        qkv = weights.qkv(normed, deterministic=self.deterministic).view(tokens, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if weights.q_norm is not None and weights.k_norm is not None:
            parts = ((qk[:, :heads], weights.q_norm), (qk[:, heads:], weights.k_norm))
            normed_parts = [
                ops.rms_norm(part.reshape(-1, config.head_dim), weight, config.rms_norm_eps).view(part.shape)
                for part, weight in parts
            ]
            qk = torch.cat(normed_parts, dim=1)
        qk = ops.rope(qk, *self._angles(batch))
        plan = self._plan(batch, kv)
        write_kv(qk[:, heads:], v, kv, batch.block_ids, batch.offsets, scales=scales)
        tables, starts, lengths = batch.block_tables, batch.query_start, batch.context_lens
        attended = paged_attention(qk[:, :heads], kv, tables, starts, lengths, self._scale, scales=scales, plan=plan)
        return attended.view(tokens, heads * config.head_dim)

    def _angles(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return RoPE's cos and sin of the batch's positions, computed once per batch."""
        key = (self.dtype, self.device)
        if key not in batch.angles:
            batch.angles[key] = self._rope.angles(batch.positions)
        return batch.angles[key]

    def _plan(self, batch: PackedBatch, kv: Tensor) -> AttentionPlan:
        """Return the attention plan of the batch, made once per batch and shape of the pool."""
        key = (kv.shape, self.config.num_heads, kv.dtype, kv.device, self.deterministic)
        if key not in batch.plans:
            batch.plans[key] = self._planned(batch, kv)
        return batch.plans[key]

    def _planned(self, batch: PackedBatch, kv: Tensor) -> AttentionPlan:
        # Triton's launches follow from shapes; what else there is looks at the contents, each time anew.
        if batch.most_context is not None and choice.choose("attention", kv.device, self.dtype) == "triton":
            return plan_of_shapes(kv, batch.num_tokens, batch.most_context, deterministic=self.deterministic)
        tables, starts, lengths = batch.block_tables, batch.query_start, batch.context_lens
        return make_plan(kv, tables, starts, lengths, deterministic=self.deterministic)
