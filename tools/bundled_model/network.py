"""The model: a small Llama in torch, as training and evaluation run it.

Apart from Moonpool's own forward pass on purpose: this one has gradients, that one has KV caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.bundled_model.config import CONTEXT, Shape


def rope_table(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of rotary embedding, each ``[length, head_dim]``."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        """Make the norm over the last axis of ``size``."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        """Make the four projections."""
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally within ``x`` (``[batch, length, hidden]``)."""
        batch, length, _ = x.shape
        shape = self.shape

        def rotate(y: Tensor) -> Tensor:
            swapped = y.roll(shape.head_dim // 2, -1)
            return (y * cos + swapped * sin).transpose(1, 2)

        q = rotate(self.q_proj(x).view(batch, length, shape.num_attention_heads, shape.head_dim))
        k = rotate(self.k_proj(x).view(batch, length, shape.num_key_value_heads, shape.head_dim))
        v = self.v_proj(x).view(batch, length, shape.num_key_value_heads, shape.head_dim).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Feedforward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        """Make the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        """Make attention, feed-forward block and their norms."""
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Feedforward(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The model, with parameter names as in ``LlamaForCausalLM.model`` and a tied output head."""

    def __init__(self, shape: Shape) -> None:
        """Make and initialise the model from torch's current random state."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if name.startswith("embed") else parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * shape.num_hidden_layers)
                nn.init.normal_(parameter, std=std)
        self.tables = rope_table(shape, CONTEXT)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the final hidden states of ``ids`` (``[batch, length]``)."""
        length = ids.shape[1]
        x: Tensor = self.embed_tokens(ids)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = (table[:length, None, :].to(dtype) for table in self.tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def losses(self, ids: Tensor, targets: Tensor, piece: int = 2048) -> Iterator[Tensor]:
        """Yield the losses (nats, flat) of pieces of the batch, so that the logits never exist all at once."""
        hidden, wanted = self(ids).flatten(0, 1), targets.flatten()
        for start in range(0, len(wanted), piece):
            logits = functional.linear(hidden[start : start + piece], self.embed_tokens.weight).float()
            yield functional.cross_entropy(logits, wanted[start : start + piece], reduction="none")
