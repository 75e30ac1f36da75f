"""A stage's weights, layer by layer, as the torch path and the native step take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moonpool.base.families.spec import LayerSpec
from moonpool.engine.models.experts import DenseAndExperts, MixtureOfExperts
from moonpool.engine.models.layers import FeedForward, Norm
from moonpool.engine.models.recurrent import RecurrentWeights
from moonpool.engine.weights.linear import Linear


@dataclass(slots=True)
class AttentionWeights:
    """One layer's attention weights; projections that read the same input are one matrix."""

    qkv: Linear  # hidden to (heads + 2 * kv_heads) * head_dim: q, then k, then v, then gates [heads * head_dim] if any
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear  # heads * head_dim to hidden
    sinks: Tensor | None  # [heads]
    v_norm: Norm | None = None  # without a weight
    head_gate: Linear | None = None  # hidden to heads

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return _nbytes(self.qkv, self.q_norm, self.k_norm, self.output, self.sinks, self.head_gate)


@dataclass(slots=True)
class LatentWeights:
    """Weights of multi-head latent attention, `moonpool.base.families.spec.LatentSpec`."""

    q_a: Linear | None  # hidden to q_rank; None: there is none, or the indexer before has it
    q_a_norm: Norm | None
    q_b: Linear  # q_rank (or hidden) to heads * (key_width + rope_width)
    kv_a: Linear  # hidden to kv_rank + rope_width
    kv_a_norm: Norm
    to_latent: Tensor  # [heads, key_width, kv_rank]: takes queries into the latent space
    from_latent: Tensor  # [heads, kv_rank, value_width]: takes attention's result out of the latent space
    output: Linear  # heads * value_width to hidden

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        parts = (self.q_a, self.q_a_norm, self.q_b, self.kv_a, self.kv_a_norm, self.to_latent, self.from_latent)
        return _nbytes(*parts, self.output)


@dataclass(slots=True)
class IndexerWeights:
    """Weights of what chooses keys, `moonpool.base.families.spec.IndexerSpec`."""

    q_a: Linear  # hidden to q_rank
    q_a_norm: Norm
    query: Linear  # q_rank to heads * head_dim
    key: Linear  # hidden to head_dim
    key_norm: Norm
    weights: Linear  # hidden to heads, float32

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return _nbytes(self.q_a, self.q_a_norm, self.query, self.key, self.key_norm, self.weights)


@dataclass(slots=True)
class PerLayerWeights:
    """What adds a token's embedding for one layer to the layer's result, `LayerSpec.per_layer`."""

    gate: Linear  # hidden to per_layer
    output: Linear  # per_layer to hidden
    norm: Norm

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return _nbytes(self.gate, self.output, self.norm)


@dataclass(slots=True)
class PerLayerTable:
    """Tokens' embeddings for each layer."""

    embedding: Tensor  # [rows, layers * per_layer]
    projection: Linear  # hidden to layers * per_layer
    norm: Norm  # over per_layer

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return _nbytes(self.embedding, self.projection, self.norm)

    def __call__(self, token_ids: Tensor, hidden: Tensor, *, deterministic: bool) -> Tensor:
        """Return [T, layers, per_layer] for tokens [T] whose usual embeddings are `hidden` [T, hidden]."""
        assert self.norm.weight is not None
        width = len(self.norm.weight)
        stored = self.embedding.index_select(0, token_ids)
        stored = stored * torch.tensor(width**0.5, dtype=stored.dtype)
        projected = self.projection(hidden, deterministic=deterministic) * hidden.shape[1] ** -0.5
        projected = self.norm(projected.view(len(hidden), -1, width))
        return (projected + stored.view(projected.shape)) * 2**-0.5


@dataclass(slots=True)
class LayerWeights:
    """One layer's weights; norms that the layer does not have are None."""

    spec: LayerSpec
    attention_norm: Norm | None
    attention: AttentionWeights | LatentWeights | RecurrentWeights | IndexerWeights
    attention_out_norm: Norm | None
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | MixtureOfExperts | DenseAndExperts | None
    feed_forward_out_norm: Norm | None
    scalar: Tensor | None = None  # [1]
    per_layer: PerLayerWeights | None = None

    @property
    def product(self) -> Linear:
        """One of the layer's products: of the layer's type, and on its device."""
        part = self.attention
        return part.key if isinstance(part, IndexerWeights) else part.output

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        return _nbytes(*(getattr(self, name) for name in self.__slots__ if name != "spec"))


def _nbytes(*parts: Any) -> int:
    return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class WeightNotes:
    """What people are told about a stage's weights.

    Attributes:
        changed: which quantised weights are not held as the checkpoint has them; "" if all are.
        mapped_bytes: of weights in a file that is mapped.
    """

    changed: str = ""
    mapped_bytes: int = 0


NO_NOTES = WeightNotes()
"""All weights are in memory, as the checkpoint has them."""
