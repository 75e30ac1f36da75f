"""One step of training: the loss and its gradients, the two optimisers, and the course of their rates.

Knows nothing of texts, stages or clocks; ``training`` runs the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tools.bundled_model.network import Llama


def learning_rate(progress: float, warmup: float = 0.02) -> float:
    """Return the factor of the learning rates at ``progress`` (0 to 1): warm-up, plateau, then linear decay."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return min(1.0, (1.0 - progress) / 0.6)


@torch.no_grad()
def head_gradient(model: Llama, hidden: Tensor, targets: Tensor, piece: int = 512) -> tuple[float, Tensor]:
    """Return the mean loss and its gradient for ``hidden``, and set the gradient of the tied embedding.

    This is cross-entropy written out by hand: piece by piece, so that logits stay in the processor's cache, and with
    one softmax for loss and gradient. It is markedly faster on a CPU than the same by automatic differentiation.

    Args:
        model: gives the embedding; its ``.grad`` is overwritten.
        hidden: final hidden states, ``[batch, length, hidden]``.
        targets: the token ids that should follow, ``[batch, length]``.
        piece: positions whose logits exist at a time.

    Returns:
        The loss in nats per token, and the gradient in the shape and type of ``hidden``.
    """
    weight = model.embed_tokens.weight
    half = weight.to(torch.bfloat16)
    flat, wanted = hidden.flatten(0, 1).to(torch.bfloat16), targets.flatten()
    gradient = torch.empty_like(flat)
    weight_gradient = torch.zeros_like(weight)
    total = torch.zeros(())
    for start in range(0, len(wanted), piece):
        h, t = flat[start : start + piece], wanted[start : start + piece, None]
        probabilities = torch.mm(h, half.T).float().softmax(-1)
        chosen = probabilities.gather(1, t)
        total -= chosen.clamp_min(1e-20).log().sum()
        probabilities.scatter_(1, t, chosen - 1.0)
        difference = probabilities.to(torch.bfloat16)
        torch.mm(difference, half, out=gradient[start : start + piece])
        weight_gradient += torch.mm(difference.T, h)
    count = len(wanted)
    weight.grad = weight_gradient / count
    return total.item() / count, (gradient / count).view_as(hidden).to(hidden.dtype)


class Stepper:
    """The model with its optimisers: Muon for the matrices, AdamW for embedding and norms."""

    def __init__(self, model: Llama, muon_lr: float, adam_lr: float, weight_decay: float) -> None:
        """Make the optimisers; the rates are those of the plateau, ``weight_decay`` is for the matrices alone."""
        self.model = model
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or n.startswith("embed")]
        muon = torch.optim.Muon(
            matrices, lr=muon_lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [(muon, muon_lr), (adamw, adam_lr)]

    def step(self, rows: Tensor, factor: float) -> float:
        """Train on ``rows`` (``[batch, length + 1]``) at ``factor`` of the rates; return the loss, nats per token."""
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model(rows[:, :-1])
        loss, gradient = head_gradient(self.model, hidden, rows[:, 1:])
        hidden.backward(gradient)  # adds the embedding's own part to the tied gradient
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss
