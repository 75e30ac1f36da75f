"""Consecutive transformer layers on one device, over a packed batch with KV in the pool.

Call `embed`, `run` over some layers or all, and `logits`. Where native kernels run, consecutive layers of a kind that
they know are one native call (`moonpool.engine.models.native_step`). Other layers, and all layers elsewhere and as the
reference, run one by one in torch.

Precision follows transformers: RMS norms and RoPE's angles in float32, the rest in the weights' type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.families.spec import AttentionSpec, LayerSpec
from moonpool.engine.kernels import choice, ops
from moonpool.engine.kernels.arranged_weights import ArrangedWeight
from moonpool.engine.kernels.attention import norm_rope_write, paged_attention, triton_head, write_kv
from moonpool.engine.kernels.deterministic import elementwise, in_tiles
from moonpool.engine.kernels.int8_head import Int8Head
from moonpool.engine.kernels.kind import AttentionKind
from moonpool.engine.kernels.plan import AttentionPlan, make_plan, plan_of_shapes
from moonpool.engine.kernels.sparse import ChosenKeys, choose_keys, chosen_attention
from moonpool.engine.kernels.triton.tiles import limits_of
from moonpool.engine.kernels.triton.variants import AttentionShape
from moonpool.engine.models.batch import BatchLoras, LayersKV, LayersScales, PackedBatch
from moonpool.engine.models.experts import DenseAndExperts
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.layers import Norm, activate
from moonpool.engine.models.lora import with_loras
from moonpool.engine.models.lora_slots import LoraSlots
from moonpool.engine.models.native_loop import NativeLoop, RunInputs, make_native_run
from moonpool.engine.models.native_step import NativeLayers, Progress, StepInputs, StepSignals, native_layers
from moonpool.engine.models.pictures import PictureEncoder, PicturePositions
from moonpool.engine.models.pooling_head import LENGTH_ONE
from moonpool.engine.models.recurrent import RecurrentWeights, StateUndo
from moonpool.engine.models.rope import RopeTable
from moonpool.engine.models.shards import vocabulary_of_rank
from moonpool.engine.models.weights import (
    NO_NOTES,
    AttentionWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    PerLayerTable,
    PerLayerWeights,
    WeightNotes,
)
from moonpool.engine.models.whole_pictures import attend_both_ways
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.weights.linear import Linear

LOGITS, SAMPLED = 1, 0
"""First of the words by which the first rank asks the others for logits, the number of rows behind, or says that tokens
are chosen."""


class StageModel:
    """Layers `layer_begin` up to `layer_end` of a model; the first stage embeds, the last one has norm and head.

    `deterministic`: a sequence's results have the same bits whatever else is in the batch, for the same chunk borders.
    `ranks`: the other processes that compute parts of the same layers; None: there are none. `whole`: the model of
    which `config` is this rank's.
    `kernels`: what computes (`moonpool.engine.kernels.choice.prepare`). `not_native`: by layer, why torch computes it;
    "": native code does. `by_layers`: whether some layers can be run without the others. `undo`: takes back what
    a step did to recurrent states; begun with each step. `changed_weights`, `mapped_bytes`: see `WeightNotes`.
    `pooling_head`: what follows on pooled states. `picture_positions`: M-RoPE's, if the model takes pictures and has
    M-RoPE.
    """

    by_layers = True
    pooling_head = LENGTH_ONE
    pictures: PictureEncoder | None = None
    """Of the first stage; None: prompts have no pictures."""
    picture_positions: PicturePositions | None = None
    lora_slots: LoraSlots | None = None
    """Memory for LoRA adapters on a device; None: the device has none, or adapters lie anywhere."""

    def __init__(
        self,
        config: ModelConfig,
        layer_begin: int,
        layers: Sequence[LayerWeights],
        *,
        embedding: Tensor | ArrangedWeight | None,
        final_norm: Norm | None,
        head: Linear | None,
        positions: Tensor | None = None,
        per_layer: PerLayerTable | None = None,
        tail: Sequence[LayerWeights] = (),
        int8_head: Int8Head | None = None,
        deterministic: bool = False,
        notes: WeightNotes = NO_NOTES,
        ranks: Ranks | None = None,
        whole: ModelConfig | None = None,
    ) -> None:
        self.ranks, self._total = ranks, _as_they_are if ranks is None else ranks.sum
        self.whole = whole or config
        self.config = config
        self.changed_weights, self.mapped_bytes = notes.changed, notes.mapped_bytes
        self.layer_begin = layer_begin
        self.layer_end = layer_begin + len(layers)
        self.layers = list(layers)
        self._tail, self._per_layer = list(tail), per_layer  # in one stage with all layers
        self.embedding = embedding  # [vocab, hidden], first stage; the head's own panels where the two are tied
        self.positions = positions  # [positions, hidden], learnt ones, first stage
        self.final_norm = final_norm  # last stage
        self.head = head  # hidden to vocab, last stage
        self.int8_head = int8_head
        first = self.layers[0].product
        self.dtype = first.dtype
        self.device = first.device
        positions_of_all = config.max_position_embeddings
        self._ropes = [RopeTable(rope, positions_of_all, self.dtype, self.device) for rope in config.decoder.ropes]
        self.deterministic = deterministic
        self._whole_layer = config.decoder.whole_layer
        self.undo = StateUndo()
        self.kernels = choice.prepare(self.device, self.dtype)  # built now, not in the first step
        if ranks is None:
            runs, self.not_native = native_layers(config, layer_begin, self.layers)
        else:
            runs, self.not_native = [], [f"{ranks.ranks} ranks"] * len(self.layers)
        self._runs = {layer: run for run in runs for layer in range(run.index, run.end)}
        one_call = len(runs) == 1 and len(self._runs) == len(self.layers)
        self._one_call = runs[0] if one_call else None

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
        """Whether all layers run in one native call."""
        return self._one_call is not None

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, bytes, with the int8 head; a tied head counts beside an embedding that is held."""
        tied = self.head is not None and self.embedding is self.head.panels
        parts: list[Any] = [
            None if tied else self.embedding,
            self.final_norm,
            self.head,
            self.int8_head,
        ]
        parts += [self.positions, self._per_layer, self.pictures, *self.layers, *self._tail]
        return sum(part.nbytes for part in parts if part is not None)

    def attention_shapes(self, kv: LayersKV) -> list[AttentionShape]:
        """Return what launches of Triton's attention follow from, each once; none where other kernels attend.

        `kv`: as for `run`.
        """
        if choice.choose("attention", self.device, self.dtype) != "triton":
            return []
        limits, shapes = limits_of(self.device), dict[AttentionShape, None]()
        for weights, pool in zip(self.layers, kv, strict=True):
            latent = weights.spec.attention.latent
            value_dim = None if latent is None else latent.kv_rank
            if weights.spec.recurrent is None and triton_head(pool, value_dim):
                sizes = weights.spec.attention.num_heads, pool.shape[1], pool.shape[4], self.deterministic, limits
                shapes[AttentionShape(self.dtype, pool.dtype, *sizes, 0 if latent is None else latent.rope_width)] = (
                    None
                )
        return list(shapes)

    def progress(self, loras: BatchLoras | None = None) -> Progress | None:
        """Return what another thread follows one step's `run` by; None if layers are not one native call.

        `loras`: the batch's adapters.
        """
        whole = self._one_call
        return None if whole is None or not whole.takes(loras) else whole.progress()

    @in_inference_mode
    def embed(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return hidden states [T, hidden] of `token_ids` [T] (int64); first stage only.

        `positions` [T] (int64): of the tokens, for models that learn them.
        """
        assert self.is_first
        assert self.embedding is not None
        decoder = self.config.decoder
        if isinstance(self.embedding, ArrangedWeight):
            hidden = self.embedding.rows(token_ids)
        else:
            hidden = self.embedding.index_select(0, token_ids)  # torch's embedding takes three times as long for few
        if decoder.embedding_factor != 1.0:
            hidden *= torch.tensor(decoder.embedding_factor, dtype=self.dtype)
        if self.positions is not None:
            assert positions is not None
            hidden += self.positions.index_select(0, positions)
        return hidden

    @in_inference_mode
    def run(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        kv: LayersKV,
        first: int,
        last: int,
        *,
        scales: LayersScales | None = None,
        last_rows: Sequence[int] | None = None,
        signals: StepSignals | None = None,
        progress: Progress | None = None,
    ) -> tuple[int, Tensor]:
        """Run layers `first` up to `last` (counted in the whole model) on hidden states [T, hidden].

        Writes the batch's keys and values into `kv`, the stage's pool, and attends to the pool's values: in quantised
        KV, with `scales`, to what the stored values stand for, also for the batch's own tokens. So earlier presence in
        the pool makes no difference. `hidden` may be overwritten. `last_rows`: number of each sequence's last rows
        needed from layer `last` - 1. The other rows stay undefined; their keys and values are written all the same.
        Another thread may follow the layers by `progress`, made by `self.progress`; several calls may belong to one
        step.

        Returns:
            The layer reached, `last` unless `signals` stopped the run before, and the hidden states there.
        """
        assert progress is None or self._one_call is not None
        if first == self.layer_begin and self._per_layer is not None:
            batch.per_layer = self._per_layer(batch.token_ids, hidden, deterministic=self.deterministic)
        added: Tensor | None = None  # what the last layer adds to the hidden states: the next one's norm does so
        while first < last:
            run = self._runs.get(first)
            run = run if run is not None and run.takes(batch.loras) and not batch.pictures else None
            # Layers of several shapes may lie anywhere: each is a call.
            one_by_one = run is None or not isinstance(kv, Tensor) or first < len(batch.added)
            end = first + 1 if run is None or one_by_one else min(last, run.end)
            if run is not None:
                hidden, added = _sum(hidden, added), None
                rows = last_rows if end == last else None
                inputs = self._native_inputs(run, first, hidden.contiguous(), batch, kv, scales)
                inputs = replace(inputs, last_rows=rows, signals=signals, progress=progress)
                hidden, came = inputs.hidden, run.run(run.step(inputs, first, end))
                if came != end:
                    return came, hidden
            elif signals is not None and signals.stopped(first):
                return first, _sum(hidden, added)
            else:
                row = first - self.layer_begin
                layer_scales = None if scales is None else scales[row]
                hidden, added = self._layer(first, self.layers[row], hidden, added, batch, kv[row], layer_scales)
            if first < len(batch.added):
                rows_at, values = batch.added[first]
                hidden, added = _sum(hidden, added), None
                hidden.index_add_(0, rows_at, values)
            first = end
        for index, weights in enumerate(self._tail if last == self.config.num_layers else (), last):
            read = weights.spec.attention.kv_of
            assert read is not None
            read_scales = None if scales is None else scales[read]
            hidden, added = self._layer(index, weights, hidden, added, batch, kv[read], read_scales)
        return last, _sum(hidden, added)

    def _native_inputs(
        self,
        run: NativeLayers,
        layer: int,
        hidden: Tensor,
        batch: PackedBatch,
        kv: LayersKV,
        scales: LayersScales | None,
    ) -> StepInputs:
        """Return inputs of native layers from `layer` on, or of `layer` alone; `hidden` [T, hidden] is dense."""
        assert self.dtype == hidden.dtype
        run_kv = self._pool_of(run, layer, kv)
        run_scales = None if scales is None else self._pool_of(run, layer, scales)
        assert run_scales is not None or run_kv.dtype == self.dtype
        plan = self._plan(batch, run_kv[0], self.layers[layer - self.layer_begin].spec.attention)
        return StepInputs(hidden, batch, self._angles(batch, run.rope), plan, run_kv, run_scales)

    def _pool_of(self, run: NativeLayers, layer: int, stored: Tensor | Sequence[Tensor | None]) -> Tensor:
        """Return native layers of the pool [layers, ...]; where each layer is a tensor, `layer` in place of all."""
        if isinstance(stored, Tensor):
            return stored[run.index - self.layer_begin : run.end - self.layer_begin]
        alone = stored[layer - self.layer_begin]
        assert alone is not None
        return alone.expand(run.end - run.index, *alone.shape)

    @in_inference_mode
    def normed(self, rows: Tensor) -> Tensor:
        """Return hidden states [R, hidden] after the last layer as the head takes them; last stage only."""
        assert self.final_norm is not None
        if self._one_call is None or not self._plain_end:
            return self.final_norm(rows)
        assert self.final_norm.weight is not None
        return self._one_call.normed(rows, self.final_norm.weight)

    @in_inference_mode
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, vocab] of hidden states [R, hidden] after the last layer; last stage only.

        `out`: an earlier step's logits, whose memory may be used.
        """
        if self.head is None:  # a model that only pools answers every prompt with the first token
            return torch.zeros(rows.shape[0], self.config.vocab_size, device=self.device)
        rows = self.normed(rows)
        if self.ranks is None:
            return self._scaled(self.head(rows, deterministic=self.deterministic, wide=True, out=out))
        self.ranks.tell([LOGITS, len(rows)])
        rows = self.ranks.share(rows, rows.shape, self.dtype)
        return self._scaled(self._gathered(self.ranks, self.head, rows))

    @in_inference_mode
    def logits_on_all_ranks(self, rows: Tensor) -> Tensor:
        """As `logits`, of rows that all ranks have, each of which calls this; on others than the first, [R, 0]."""
        if self.ranks is None:
            return self.logits(rows)
        assert self.head is not None
        return self._scaled(self._gathered(self.ranks, self.head, self.normed(rows)))

    @in_inference_mode
    def assist(self, count: int) -> None:
        """Compute logits of `count` rows with the first rank, which asks for them by `LOGITS`; other ranks only."""
        assert self.ranks is not None
        assert self.head is not None
        self._gathered(self.ranks, self.head, self.ranks.share(None, (count, self.config.hidden_size), self.dtype))

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return logits as the family has them behind the head."""
        decoder = self.config.decoder
        if decoder.logits_factor != 1.0:
            logits *= decoder.logits_factor
        if decoder.logits_soft_cap is not None:
            logits = elementwise(torch.tanh, logits.div_(decoder.logits_soft_cap), deterministic=self.deterministic)
            logits *= decoder.logits_soft_cap
        return logits

    def _gathered(self, ranks: Ranks, head: Linear, rows: Tensor) -> Tensor:
        """Return logits [R, vocab], on the first rank; each rank computes those of some tokens."""
        part = head(rows, deterministic=self.deterministic, wide=True)
        widths = [len(vocabulary_of_rank(self.config.vocab_size, rank, ranks.ranks)) for rank in range(ranks.ranks)]
        return ranks.gather(part, widths)

    @in_inference_mode
    def pooled(self, hidden: Tensor, batch: PackedBatch, indices: Sequence[int]) -> Tensor:
        """Return what the prompts of sequences become, [R, n] in float32; last stage only.

        Args:
            hidden: states after the last layer [T, hidden].
            batch: the step.
            indices: sequences whose last prompt token is in the step.
        """
        return self.pooling_head(self.normed(batch.last_of(hidden, indices)))

    @in_inference_mode
    def native_run(
        self,
        batch: PackedBatch,
        kv: LayersKV,
        steps: int,
        chosen: int,
        *,
        scales: LayersScales | None = None,
        out: Tensor | None = None,
        signals: StepSignals | None = None,
    ) -> NativeLoop | None:
        """Return an object that computes a run's further steps, each in one call; None if by single operations.

        Args:
            batch: The step before, with one token per sequence; from now on the batch is changed in place.
            kv: As for `run`.
            scales: As for `run`.
            signals: As for `run`.
            steps: That are taken at most.
            chosen: Address of each sequence's token in each step, int32.
            out: The step before's logits, whose memory may be used.
        """
        whole, ends = self._one_call, self.is_first and self.is_last and self._plain_end
        if whole is None or not ends or self.head is None or self._factors or not whole.takes(batch.loras):
            return None
        assert self.final_norm is not None
        assert self.final_norm.weight is not None
        assert self.embedding is not None
        hidden = torch.empty(batch.num_tokens, self.config.hidden_size, dtype=self.dtype)
        turned = batch.positions if batch.rope_positions is None else batch.rope_positions
        cos, sin, turns = self._ropes[whole.rope].ahead(turned, steps)
        angles = torch.empty(2, batch.num_tokens, self.config.head_dim, dtype=self.dtype)
        inputs = self._native_inputs(whole, self.layer_begin, hidden, batch, kv, scales)
        inputs = replace(inputs, angles=(angles[0], angles[1]), signals=signals)
        step = whole.step(inputs, self.layer_begin, self.layer_end)
        parts = RunInputs(
            step, hidden, angles, cos, sin, turns, self.embedding, self.final_norm.weight, self.head, self.int8_head
        )
        return make_native_run(whole, batch, parts, inputs.kv.shape[1], steps, chosen, out)

    def forward(
        self, hidden_or_tokens: Tensor, batch: PackedBatch, kv: LayersKV, *, scales: LayersScales | None = None
    ) -> Tensor:
        """Run all layers of this stage, `kv` and `scales` as for `run`. Embeds on the first stage."""
        hidden = self.embed(hidden_or_tokens, batch.positions) if self.is_first else hidden_or_tokens
        return self.run(hidden, batch, kv, self.layer_begin, self.layer_end, scales=scales)[1]

    @property
    def _plain_end(self) -> bool:
        """Whether the last norm is that of the layers, which native code computes."""
        return self.config.decoder.final_norm == self.layers[0].spec.norm

    @property
    def _factors(self) -> bool:
        """Whether embeddings or logits are changed, which native runs do not do."""
        decoder = self.config.decoder
        return decoder.embedding_factor != 1.0 or decoder.logits_factor != 1.0 or decoder.logits_soft_cap is not None

    def _layer(
        self,
        index: int,
        weights: LayerWeights,
        hidden: Tensor,
        added: Tensor | None,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run layer `index` in torch over `kv` [blocks, kv_heads, planes, block_size, head_dim], which it reads.

        `added`: what the layer before adds to `hidden`, not yet done; None: nothing. Returns both behind this layer.
        """
        if batch.loras is not None:
            weights = with_loras(batch.loras, index, weights)
        spec = weights.spec
        if isinstance(weights.attention, IndexerWeights):
            batch.normed, hidden = _read(weights, hidden, added, batch)
            self._choose_keys(weights.attention, spec, batch.normed, batch, kv, scales)
            return hidden, None
        return self._with_result(index, weights, hidden, added, batch, kv, scales)

    def _with_result(
        self,
        index: int,
        weights: LayerWeights,
        hidden: Tensor,
        added: Tensor | None,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `_layer`, for layers that change hidden states."""
        spec = weights.spec
        if index == self._whole_layer:
            batch = batch.without_slots()
        normed, hidden = _read(weights, hidden, added, batch)
        added = self._total(self._over_tokens(weights, normed, batch, kv, scales))
        if weights.attention_out_norm is not None:
            added = weights.attention_out_norm(added)
        if spec.residual_factor != 1.0:
            added = added * spec.residual_factor
        if weights.feed_forward is None:
            batch.normed = normed
            return hidden.add_(added), None
        if spec.parallel:
            inner = normed if weights.feed_forward_norm is None else weights.feed_forward_norm(hidden)
            hidden = hidden + added
        elif weights.feed_forward_norm is not None:
            inner = weights.feed_forward_norm(added, residual=hidden)  # hidden is the sum from here on
        else:
            inner = hidden.add_(added)
        if isinstance(weights.feed_forward, DenseAndExperts):
            added = weights.feed_forward(inner, hidden, deterministic=self.deterministic, whole=self._total)
        else:
            added = self._total(weights.feed_forward(inner, deterministic=self.deterministic))
        if weights.feed_forward_out_norm is not None:
            added = weights.feed_forward_out_norm(added)
        if spec.residual_factor != 1.0:
            added = added * spec.residual_factor
        if weights.per_layer is None and weights.scalar is None:
            return hidden, added
        hidden = _sum(hidden, added)
        if weights.per_layer is not None:
            hidden = self._with_own_embedding(weights.per_layer, spec, index, hidden, batch)
        return hidden if weights.scalar is None else hidden.mul_(weights.scalar), None

    def _over_tokens(
        self, weights: LayerWeights, normed: Tensor, batch: PackedBatch, kv: Tensor, scales: Tensor | None
    ) -> Tensor:
        """Return attention's result, or that of what stands in its place, [T, hidden]."""
        attention, spec = weights.attention, weights.spec.attention
        if isinstance(attention, RecurrentWeights):
            rotated = attention.spec.kind == "lightning" and spec.rope is not None
            angles = self._angles(batch, spec.rope or 0) if rotated else None
            undo = self.undo if batch.most_context is None else None
            return attention(normed, batch, kv, undo, angles, deterministic=self.deterministic)
        if isinstance(attention, LatentWeights):
            return self._latent_attention(attention, spec, normed, batch, kv, scales)
        assert isinstance(attention, AttentionWeights)
        return self._attention(attention, spec, normed, batch, kv, scales)

    def _with_own_embedding(
        self, weights: PerLayerWeights, spec: LayerSpec, index: int, hidden: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Add tokens' embeddings for layer `index` to [T, hidden], gated."""
        assert batch.per_layer is not None
        gate = replace(spec.feed_forward, gated=False, experts=None)
        gates = activate(gate, weights.gate(hidden, deterministic=self.deterministic), deterministic=self.deterministic)
        added = weights.output(gates * batch.per_layer[:, index], deterministic=self.deterministic)
        return weights.norm(added).add_(hidden)

    def _attention(
        self,
        weights: AttentionWeights,
        spec: AttentionSpec,
        normed: Tensor,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
    ) -> Tensor:
        """Project, rotate, store keys and values, attend, project back: [T, hidden] to [T, hidden]."""
        tokens, heads, kv_heads = normed.shape[0], spec.num_heads, spec.num_kv_heads
        flat = weights.qkv(normed, deterministic=self.deterministic)
        width = spec.value_width or spec.head_dim
        begin, end = (heads + kv_heads) * spec.head_dim, (heads + kv_heads) * spec.head_dim + kv_heads * width
        qk, v = flat[:, :begin].view(tokens, -1, spec.head_dim), flat[:, begin:end].view(tokens, -1, width)
        if spec.value_factor:
            v = v * spec.value_factor
        if spec.value_width:
            v = functional.pad(v, (0, spec.head_dim - width))
        if weights.v_norm is not None:
            v = weights.v_norm(v)
        if self._in_one_launch(weights, spec, qk, batch):
            q, stored = self._ready(weights, spec, qk, v, batch, kv, scales), None
        else:
            if not spec.qk_norm_last:
                qk = _normed_heads(weights, spec, qk, self.ranks)
            qk = self._rotated(spec, qk, batch)
            if spec.qk_norm_last:
                qk = _normed_heads(weights, spec, qk, self.ranks)
            q, stored = qk[:, :heads], (qk[:, heads:], v) if spec.kv_of is None else None
        attended = self._attended(spec, q, stored, batch, kv, scales, sinks=weights.sinks)
        if spec.output_gate:
            gates = flat[:, end:].view(tokens, -1, spec.head_dim)
            attended = attended * elementwise(torch.sigmoid, gates, deterministic=self.deterministic)
        if weights.head_gate is not None:
            gates = weights.head_gate(normed, deterministic=self.deterministic)
            attended = attended * elementwise(torch.sigmoid, gates, deterministic=self.deterministic)[..., None]
        if spec.value_width:
            attended = attended[..., : spec.value_width]
        return weights.output(attended.flatten(1), deterministic=self.deterministic)

    def _in_one_launch(self, weights: AttentionWeights, spec: AttentionSpec, qk: Tensor, batch: PackedBatch) -> bool:
        """Tell whether norms of heads, rotation and KV write are one launch.

        Pictures' rows need keys and values beside the pool. If queries stay as they are, the write alone is one launch.
        """
        one = choice.choose("norm_rope_write", qk.device, qk.dtype) == "triton" and not batch.pictures
        norm = weights.q_norm is not None and spec.qk_norm_over != "all"
        return one and (norm or (self._turned(spec) > 0 and not spec.qk_norm_last))

    def _turned(self, spec: AttentionSpec) -> int:
        """Return how many elements of a head are rotated."""
        return 0 if spec.rope is None else self.config.decoder.ropes[spec.rope].width

    def _ready(
        self,
        weights: AttentionWeights,
        spec: AttentionSpec,
        qk: Tensor,
        v: Tensor,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
    ) -> Tensor:
        """Return queries [T, heads, head_dim] as attention reads them; keys and values are stored."""
        if spec.qk_norm_over == "all":
            qk, norms = _normed_heads(weights, spec, qk, self.ranks), None
        else:
            norms = Norm.of_heads(weights.q_norm, weights.k_norm, last=spec.qk_norm_last)
        angles = self._angles(batch, spec.rope) if spec.rope is not None and self._turned(spec) else None
        own = spec.kv_of is None
        return norm_rope_write(
            qk, v if own else None, spec.num_heads, kv if own else None,
            batch.block_ids if spec.window is None else batch.slot_ids, batch.offsets,
            norms=norms, angles=angles, scales=scales if own else None,
        )  # fmt: skip

    def _latent_attention(
        self,
        weights: LatentWeights,
        spec: AttentionSpec,
        normed: Tensor,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
    ) -> Tensor:
        """As `_attention`, over the latent vectors: the pool's one head holds them and the key's rotated part."""
        latent, exact = spec.latent, self.deterministic
        assert latent is not None
        tokens, narrow = normed.shape[0], normed
        if weights.q_a is not None:
            narrow = weights.q_a(normed, deterministic=exact)
        elif latent.q_rank is not None:
            assert batch.narrow is not None
            narrow = batch.narrow
        if weights.q_a_norm is not None:
            narrow = weights.q_a_norm(narrow)
        q = weights.q_b(narrow, deterministic=exact).view(tokens, spec.num_heads, -1)
        stored = weights.kv_a(normed, deterministic=exact)
        vector = weights.kv_a_norm(stored[:, : latent.kv_rank].contiguous())[:, None]
        turned = torch.cat((q[..., latent.key_width :], stored[:, None, latent.kv_rank :]), dim=1)
        turned = self._rotated(replace(spec, head_dim=latent.rope_width), turned, batch)
        absorbed = _by_head(q[..., : latent.key_width], weights.to_latent, deterministic=exact)
        q = torch.cat((absorbed, turned[:, :-1]), dim=-1)
        key = torch.cat((vector, turned[:, -1:]), dim=-1)
        attended = self._attended(spec, q, (key, None), batch, kv, scales)
        attended = _by_head(attended, weights.from_latent, deterministic=exact)
        return weights.output(attended.flatten(1), deterministic=exact)

    def _choose_keys(
        self,
        weights: IndexerWeights,
        layer: LayerSpec,
        normed: Tensor,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
    ) -> None:
        """Store the indexer's keys, and note which keys each row of the batch sees."""
        spec, indexer, exact = layer.attention, layer.indexer, self.deterministic
        assert indexer is not None
        batch.narrow = weights.q_a_norm(weights.q_a(normed, deterministic=exact))
        q = weights.query(batch.narrow, deterministic=exact).view(len(normed), spec.num_heads, spec.head_dim)
        key = weights.key_norm(weights.key(normed, deterministic=exact))[:, None]
        turned = self._rotated(spec, torch.cat((q, key), dim=1), batch)
        q, key = turned[:, :-1], turned[:, -1:]
        write_kv(key, None, kv, batch.block_ids, batch.offsets, scales=scales)
        by_head = weights.weights(normed.float(), deterministic=exact) * spec.num_heads**-0.5
        lists = batch.block_tables, batch.query_start, batch.context_lens
        plan = self._plan(batch, kv, spec)
        batch.chosen = choose_keys(q, by_head, kv, scales, *lists, spec.scale, indexer.topk, plan=plan)

    def _rotated(self, spec: AttentionSpec, heads: Tensor, batch: PackedBatch) -> Tensor:
        """Return `heads` [T, n, head_dim] with rotary embeddings."""
        width = self._turned(spec)
        if spec.rope is None or not width:
            return heads
        angles = self._angles(batch, spec.rope)
        if width == spec.head_dim:
            return ops.rope(heads, *angles)
        return torch.cat((ops.rope(heads[..., :width].contiguous(), *angles), heads[..., width:]), dim=-1)

    def _attended(
        self,
        spec: AttentionSpec,
        q: Tensor,
        stored: tuple[Tensor, Tensor | None] | None,
        batch: PackedBatch,
        kv: Tensor,
        scales: Tensor | None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store keys and values, latent vectors alone, or nothing, and attend: [T, heads, elements of a value]."""
        if spec.rope is not None and (factors := self._query_factors(batch, spec.rope)) is not None:
            q = q * factors
        plan = self._plan(batch, kv, spec)
        windowed = spec.window is not None
        if stored is not None:
            write_kv(*stored, kv, batch.slot_ids if windowed else batch.block_ids, batch.offsets, scales=scales)
        tables = batch.slot_tables if windowed else batch.block_tables
        starts, lengths = batch.query_start, batch.context_lens
        value_dim = None if spec.latent is None else spec.latent.kv_rank
        chosen: ChosenKeys | None = batch.chosen if spec.index_topk else None
        if chosen is not None:
            assert value_dim is not None
            return chosen_attention(q, kv, scales, chosen, spec.scale, value_dim, deterministic=self.deterministic)
        kind = AttentionKind(spec.window, spec.soft_cap, sinks, spec.chunked)
        out = paged_attention(
            q, kv, tables, starts, lengths, spec.scale, kind=kind, scales=scales, plan=plan, value_dim=value_dim
        )
        if batch.pictures:
            assert stored is not None
            attend_both_ways(batch.pictures, q, stored, kv, scales, tables, spec.scale, kind, out)
        return out

    def _angles(self, batch: PackedBatch, rope: int) -> tuple[Tensor, Tensor]:
        """Return RoPE's cos and sin of the batch's positions, computed once per batch and table."""
        key = (self.dtype, self.device, rope)
        if key not in batch.angles:
            positions = batch.positions if batch.rope_positions is None else batch.rope_positions
            if positions.dim() == 1:
                batch.angles[key] = self._ropes[rope].angles(positions)
            else:
                assert self.picture_positions is not None
                batch.angles[key] = self._ropes[rope].angles_of(positions, self.picture_positions.components)
        return batch.angles[key]

    def _query_factors(self, batch: PackedBatch, rope: int) -> Tensor | None:
        """Return what the batch's queries are multiplied with, computed once per batch and table; None: 1."""
        if rope not in batch.query_factors:
            batch.query_factors[rope] = self._ropes[rope].query_factors(batch.positions)
        return batch.query_factors[rope]

    def _plan(self, batch: PackedBatch, kv: Tensor, spec: AttentionSpec) -> AttentionPlan:
        """Return the batch's attention plan, made once per batch, pool shape and window."""
        key = (kv.shape, spec.num_heads, spec.window, spec.chunked, kv.dtype, kv.device, self.deterministic)
        if key not in batch.plans:
            batch.plans[key] = self._planned(batch, kv, spec)
        return batch.plans[key]

    def _planned(self, batch: PackedBatch, kv: Tensor, spec: AttentionSpec) -> AttentionPlan:
        # Triton's launches follow from shapes; what else there is looks at the contents, each time anew.
        if batch.most_context is not None and choice.choose("attention", kv.device, self.dtype) == "triton":
            shapes = kv, batch.num_tokens, len(batch.context_lens), batch.most_context
            return plan_of_shapes(*shapes, deterministic=self.deterministic, window=spec.window, chunked=spec.chunked)
        host = batch.host
        tables = host.block_tables if spec.window is None else host.slot_tables
        return make_plan(
            kv, tables, host.query_start, host.context_lens,
            deterministic=self.deterministic, window=spec.window, chunked=spec.chunked,
        )  # fmt: skip


def _read(weights: LayerWeights, hidden: Tensor, added: Tensor | None, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return what a layer's part over tokens reads, and hidden states with `added`, which is not looked at again."""
    if added is not None and weights.attention_norm is not None and not weights.spec.beside:
        return weights.attention_norm(added, residual=hidden), hidden  # hidden is the sum from here on
    hidden = _sum(hidden, added)
    if weights.spec.beside:
        assert batch.normed is not None
        return batch.normed, hidden
    return (hidden if weights.attention_norm is None else weights.attention_norm(hidden)), hidden


def _sum(hidden: Tensor, added: Tensor | None) -> Tensor:
    """Return hidden states with what a layer adds; `added` may be overwritten."""
    return hidden if added is None else added.add_(hidden)


def _as_they_are(part: Tensor) -> Tensor:
    """Return what a stage without ranks has computed: the sum over its ranks."""
    return part


def _normed_heads(weights: AttentionWeights, spec: AttentionSpec, qk: Tensor, ranks: Ranks | None) -> Tensor:
    """Return queries and keys [T, heads + kv_heads, head_dim] with their norms."""
    if weights.q_norm is None:
        return qk
    if ranks is not None and spec.qk_norm_over == "all":
        return _normed_over_ranks(weights, spec, qk, ranks)
    norms = ((slice(spec.num_heads), weights.q_norm), (slice(spec.num_heads, qk.shape[1]), weights.k_norm))
    found = torch.empty(qk.shape if weights.k_norm else qk[:, : spec.num_heads].shape, dtype=qk.dtype, device=qk.device)
    for heads, norm in norms:
        if norm is None:  # keys are another layer's
            continue
        part, out = qk[:, heads], found[:, heads]
        if spec.qk_norm_over == "all":
            out.copy_(norm(part.flatten(1)).view(part.shape))
        elif spec.qk_norm_over != "heads" and choice.choose("norm", qk.device, qk.dtype) != "triton":
            out.copy_(norm(part.reshape(-1, spec.head_dim)).view(part.shape))
        else:
            norm(part, out=out)
    return found


def _normed_over_ranks(weights: AttentionWeights, spec: AttentionSpec, qk: Tensor, ranks: Ranks) -> Tensor:
    """As `_normed_heads`, with norms over the heads of all ranks.

    A head of several ranks counts as often in the squares' sum as in their number.
    """
    norms, parts = (weights.q_norm, weights.k_norm), torch.split(qk, [spec.num_heads, qk.shape[1] - spec.num_heads], 1)
    squares = ranks.sum(torch.stack([part.float().square().sum((1, 2)) for part in parts]))
    found = []
    for part, norm, square in zip(parts, norms, squares, strict=True):
        flat = part.flatten(1)
        assert norm is not None
        found.append(norm.with_mean_square(flat, square[:, None] / (flat.shape[1] * ranks.ranks)).view(part.shape))
    return torch.cat(found, dim=1)


def _by_head(rows: Tensor, weight: Tensor, *, deterministic: bool) -> Tensor:
    """Return rows [T, heads, n] by weight [heads, n, m]: [T, heads, m]."""

    def product(tile: Tensor) -> Tensor:
        return torch.bmm(tile.transpose(0, 1), weight).transpose(0, 1)

    return in_tiles(product, rows) if deterministic else product(rows)
