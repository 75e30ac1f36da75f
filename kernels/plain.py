"""The small operations in plain torch, few operators each: where neither native nor Triton kernels run.

Functions have the names and signatures of `kernels.reference`; arguments have been checked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `kernels.reference.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    if x.dtype == torch.float32:
        out.copy_(functional.rms_norm(x, (x.shape[-1],), weight, eps))
    else:
        torch.mul(functional.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype), weight, out=out)


def rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """See `kernels.reference.rope`; here products are rounded to the element type before they are added."""
    turned = x.roll(x.shape[-1] // 2, dims=-1)
    out.copy_(torch.addcmul(x * cos[:, None], turned, sin[:, None]))


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `kernels.reference.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)
