"""A mixture of experts: a router chooses some networks for each token, and their weighted outputs are added.

The router computes in float32. Rows are gathered by expert, so that each chosen expert is one product over the expert's
rows; a row's outputs are added in the order of experts, whatever else is in the batch. Native code does the same
(`kernels/engine/experts.cpp`), and Triton with one launch for each projection of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.base.families.spec import ExpertsSpec
from moonpool.engine.kernels import ops
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.deterministic import elementwise
from moonpool.engine.kernels.experts import ExpertMatrices, rows_by_expert
from moonpool.engine.models.layers import FeedForward, Norm, activate
from moonpool.engine.weights.linear import Linear, gated


@dataclass(slots=True)
class MixtureOfExperts:
    """One layer's experts."""

    spec: ExpertsSpec
    router: Linear  # hidden to count, float32
    correction: Tensor | None  # [count] float32
    experts: Sequence[FeedForward]
    shared: FeedForward | None
    shared_gate: Linear | None  # hidden to 1
    factors: Tensor | None = None  # [count] float32: of each expert's weight
    matrices: tuple[ExpertMatrices, ExpertMatrices] | None = None  # gates and ups, and downs, as Triton takes them
    to_experts: Linear | None = None  # hidden to the experts' width, if that is another
    from_experts: Linear | None = None  # back

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        ends = (self.to_experts, self.from_experts)
        parts = (self.router, self.correction, *self.experts, self.shared, self.shared_gate, self.factors, *ends)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor, *, deterministic: bool, routed: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs [T, hidden] for `x` [T, hidden].

        `routed`: what the router reads, if not `x`.
        """
        logits = self.router((x if routed is None else routed).float(), deterministic=deterministic)
        weights, chosen = self._route(logits, deterministic=deterministic)
        taken = x if self.to_experts is None else self.to_experts(x, deterministic=deterministic)
        if self.matrices is None:
            out = self._by_expert(taken, weights, chosen, deterministic=deterministic)
        else:
            out = self._together(taken, weights, chosen, self.matrices, deterministic=deterministic)
        if self.from_experts is not None:
            out = self.from_experts(out, deterministic=deterministic)
        if self.shared is not None:
            beside = self.shared(x, deterministic=deterministic)
            if self.shared_gate is not None:
                share = self.shared_gate(x, deterministic=deterministic)
                beside = beside * elementwise(torch.sigmoid, share, deterministic=deterministic)
            out += beside
        return out

    def _together(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        matrices: tuple[ExpertMatrices, ExpertMatrices],
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, all experts in one launch for each projection."""
        rows, spec = rows_by_expert(chosen, weights, self.spec.count), self.experts[0].spec
        if self.spec.weighted_inputs:
            shares = torch.empty_like(weights).flatten().scatter_(0, rows.places.flatten(), rows.weights.flatten())
            inputs = (x[rows.tokens] * shares[:, None]).to(x.dtype)
            both = ops.expert_linear(inputs, None, rows.starts, matrices[0], deterministic=deterministic)
        else:
            both = ops.expert_linear(x, rows.tokens, rows.starts, matrices[0], deterministic=deterministic)
        if self.experts[0].gate_up.gated:
            inner = gated(both, deterministic=deterministic)
        else:
            inner = activate(spec, both, deterministic=deterministic)
        results = ops.expert_linear(inner, None, rows.starts, matrices[1], deterministic=deterministic)
        return ops.add_weighted(results, rows.places, None if self.spec.weighted_inputs else rows.weights)

    def _by_expert(self, x: Tensor, weights: Tensor, chosen: Tensor, *, deterministic: bool) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, one expert after the other."""
        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.spec.count).tolist()
        rows, share = order // self.spec.chosen, weights.flatten()[order, None]
        begin = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                span = slice(begin, begin + count)
                inputs = x[rows[span]]
                if self.spec.weighted_inputs:
                    result = expert((inputs * share[span]).to(x.dtype), deterministic=deterministic)
                else:
                    result = expert(inputs, deterministic=deterministic) * share[span]
                out.index_add_(0, rows[span], result.to(x.dtype))
                begin += count
        return out

    def _route(self, logits: Tensor, *, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and the indices of each row's experts, both [T, chosen]."""
        spec = self.spec
        if spec.scores == "softmax_chosen":
            best, chosen = logits.topk(spec.chosen, dim=-1)
            return best.softmax(-1), chosen
        if spec.scores == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = elementwise(torch.sigmoid, logits, deterministic=deterministic)
        chosen = self._choose(scores).topk(spec.chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if spec.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=spec.least_sum)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        return weights * spec.factor, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """Return what experts are chosen by: corrected scores, -inf in groups that are not looked at."""
        spec = self.spec
        if self.correction is not None:
            scores = scores + self.correction
        if spec.groups_chosen >= spec.groups:
            return scores
        grouped = scores.view(len(scores), spec.groups, -1)
        best = grouped.topk(spec.group_top, dim=-1).values.sum(-1).topk(spec.groups_chosen, dim=-1).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        found: Tensor = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
        return found


def expert_matrices(experts: Sequence[FeedForward]) -> tuple[ExpertMatrices, ExpertMatrices] | None:
    """Return the projections of all experts as Triton takes them; None where Triton does not compute them.

    Triton computes dense weights; packed ones are computed expert by expert.
    """
    found = list[ExpertMatrices]()
    for linears in ([expert.gate_up for expert in experts], [expert.down for expert in experts]):
        plain = [linear.plain() for linear in linears]
        matrices = [weight for weight in plain if weight is not None]
        first = linears[0]
        if choose("expert_linear", first.device, first.dtype) != "triton" or len(matrices) < len(linears):
            return None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        found.append(ExpertMatrices(matrices, torch.stack(biases) if biases else None))
    return found[0], found[1]


@dataclass(slots=True)
class DenseAndExperts:
    """A dense network and experts side by side, `ExpertsSpec.beside`."""

    dense: FeedForward
    dense_out_norm: Norm
    router_norm: Norm  # without a weight
    experts_norm: Norm
    experts: MixtureOfExperts
    experts_out_norm: Norm

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        norms = (self.dense_out_norm, self.experts_norm, self.experts_out_norm)
        return sum(part.nbytes for part in (self.dense, self.experts, *norms))

    def __call__(self, x: Tensor, before: Tensor, *, deterministic: bool, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Return both parts' sum [T, hidden]: the dense network reads `x`, the experts `before`, which has no norm.

        `whole`: makes the sum of all ranks' results, which norms read.
        """
        dense = self.dense_out_norm(whole(self.dense(x, deterministic=deterministic)))
        routed = self.router_norm(before)
        chosen = self.experts(self.experts_norm(before), routed=routed, deterministic=deterministic)
        return dense + self.experts_out_norm(whole(chosen))
