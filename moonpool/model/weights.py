"""The weights of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moonpool.model.linear import Linear


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer; projections that read the same input are one matrix."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden to (heads + 2 * kv_heads) * head_dim: q, then k, then v
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # heads * head_dim to hidden
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # gated: hidden to intermediate
    down: Linear  # intermediate to hidden
