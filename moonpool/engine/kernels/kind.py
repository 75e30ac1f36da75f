"""What attention has beside softmax(q k^T * scale) v: a window, chunks, a soft cap, sinks, norms of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionKind:
    """How one layer attends.

    Sources: windows, Beltagy et al. 2020; soft caps, Gemma 2 (2024); sinks, gpt-oss (2025); chunks, Llama 4 (2025).
    """

    window: int | None = None
    """Tokens that a query row sees, the row's own included; None: all earlier tokens."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap) before keys are hidden."""
    sinks: Tensor | None = None
    """[heads]: a further score of each head, which takes part in the softmax and has no value."""
    chunked: bool = False
    """Whether the window begins anew every `window` tokens: a row sees the row's own chunk up to the row."""

    def capped(self, scores: Tensor) -> Tensor:
        """Return `scores`, changed in place, with the soft cap."""
        if self.soft_cap is None:
            return scores
        return scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def softmax(self, scores: Tensor, heads: slice | None = None, repeats: int = 1) -> Tensor:
        """Return the weights of scores [..., rows, n] over the last dimension.

        `heads`: the KV heads in the first dimension, whose query heads lie `repeats` times in the rows; None: the first
        dimension has all KV heads for some sequences, and the rows have each one's query heads.
        """
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        if heads is None:
            sinks = self.sinks.view(-1, scores.shape[1]).repeat(scores.shape[0] * scores.shape[1] // len(self.sinks), 1)
        else:
            sinks = self.sinks.view(-1, scores.shape[1] // repeats)[heads].repeat(1, repeats)
        return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)[..., None]), dim=-1), dim=-1)[..., :-1]


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """A norm of each head of queries and keys, as `moonpool.engine.kernels.reference.norm` has it."""

    q_weight: Tensor | None
    """float32: [D], or [heads, D]."""
    k_weight: Tensor | None
    """float32: [D], or [kv_heads, D]; None if queries have none, or if there are no keys."""
    q_bias: Tensor | None
    """float32 [D]."""
    k_bias: Tensor | None
    eps: float
    centred: bool
    wide: bool
    last: bool
    """Whether the norm follows rotation, instead of standing before."""


def first_seen(position: Position, window: int, *, chunked: bool) -> Position:
    """Return the first key that a query row at `position` sees; below 0 if a window reaches before the sequence."""
    return position // window * window if chunked else position - window + 1


PLAIN = AttentionKind()
