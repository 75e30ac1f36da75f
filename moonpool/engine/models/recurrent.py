"""Layers with a recurrent state: short convolutions, Mamba-2, delta rules, linear attention.

On GPUs, Triton convolves and scans (`moonpool.engine.kernels.triton.recurrent`); elsewhere torch does.

A state lies in the pool as KV does: a block's slice holds the state behind the block's last token so far. A step reads
the state behind the token before the step's first token, and writes one state for each block with computed tokens that
has a window slot. So the border of a full block with a slot is a place where a prefix can be continued.

Sources: Liquid AI's LFM2; Dao and Gu 2024 (Mamba-2); Yang et al. 2024 (Gated DeltaNet, computed chunk by chunk with one
triangular system each); Kimi Linear, 2025; Qin et al. 2024 (Lightning Attention-2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.base.families.spec import RecurrentSpec
from moonpool.engine.kernels import ops
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.self_check import SelfCheck, allowed, running
from moonpool.engine.kernels.triton import CHUNK
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.layers import Norm
from moonpool.engine.weights.linear import Linear

if TYPE_CHECKING:
    from moonpool.engine.kernels.triton.recurrent import ScanShape

_FINE = 16
"""Tokens computed together where decays differ within a key: their products with each other are not one matrix."""
_OFTEN_ROUNDED = 16
"""Times what results of one product may be off: a convolution's rounding is a part of all states behind."""
Angles = tuple[Tensor, Tensor]
"""RoPE's cos and signed sin, each [T, width]."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One sequence's tokens in one block: the batch's rows `begin` to `end`.

    `source`: slot with the state before them; None: not there yet, or in the span before. `target`: slot that takes the
    state behind them; None: already there, or not kept.
    """

    sequence: int
    begin: int
    end: int
    source: int | None
    target: int | None


def state_spans(batch: PackedBatch) -> list[list[StateSpan]]:
    """Return each sequence's spans in a batch."""
    size, found = batch.block_size, list[list[StateSpan]]()
    host = batch.host
    starts, tables = host.query_start.tolist(), host.slot_tables.tolist()
    positions, written = host.positions.tolist(), host.slot_ids.tolist()
    for sequence, (first, last) in enumerate(pairwise(starts)):
        spans, begin = list[StateSpan](), first
        while begin < last:
            at = positions[begin]
            end = min(last, begin + size - at % size)
            source = tables[sequence][(at - 1) // size] if begin == first and at else None
            target = written[begin] if written[begin] >= 0 else None
            spans.append(StateSpan(sequence, begin, end, source, target))
            begin = end
        found.append(spans)
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive sequences of a step, with their rows, that are computed together; `spans`: theirs.

    Without spans: captured work, which does not look at lengths.
    """

    sequences: slice
    rows: slice
    spans: Sequence[Sequence[StateSpan]] | None

    @property
    def singles(self) -> int | None:
        """The sequences with one row; None: not known."""
        if self.spans is not None:
            return sum(spans[-1].end - spans[0].begin == 1 for spans in self.spans)
        sequences, rows = (part.stop - part.start for part in (self.sequences, self.rows))
        return sequences if sequences == rows else None


def _parts(batch: PackedBatch, *, captured: bool, alone: bool) -> list[_Part]:
    """Return what is computed together: all of the step, or each sequence `alone`."""
    sequences, rows, spans = len(batch.context_lens), batch.num_tokens, None
    if not captured:
        batch.spans = spans = batch.spans if batch.spans is not None else state_spans(batch)
    if not alone:
        return [_Part(slice(0, sequences), slice(0, rows), spans)]
    starts = range(sequences + 1) if captured else batch.host.query_start.tolist()
    assert starts[-1] == rows, "captured prompts are computed together"
    return [
        _Part(slice(number, number + 1), slice(*ends), None if spans is None else [spans[number]])
        for number, ends in enumerate(pairwise(starts))
        if ends[0] < ends[1]
    ]


class StateUndo:
    """States that a step overwrote, of sequences that began within a block.

    Such a state cannot be computed again from the block. If a step is given up, or a sequence gets no token, the
    sequence takes the step again from the earlier state. Captured work keeps no states: it is not taken again.
    """

    def __init__(self) -> None:
        self._states: list[tuple[Tensor, int, int, Tensor]] = []

    def begin(self) -> None:
        """Forget the states of the step before."""
        self._states.clear()

    def keep(self, pool: Tensor, spans: Collection[StateSpan], states: Tensor) -> None:
        """Keep the states [spans, elements] that `spans` begin with, if the spans overwrite them in `pool`."""
        for span, state in zip(spans, states, strict=True):
            if span.source is not None and span.source == span.target:
                self._states.append((pool, span.sequence, span.source, state))

    def restore(self, sequences: Collection[int] | None = None) -> None:
        """Write the states back: for some of the step's sequences, or for all."""
        for pool, sequence, block, state in self._states:
            if sequences is None or sequence in sequences:
                pool[block, : len(state)] = state
        self._states = [state for state in self._states if sequences is not None and state[1] not in sequences]


@dataclass(slots=True)
class RecurrentWeights:
    """Weights of a layer's recurrent part. What a kind of layer lacks is None."""

    spec: RecurrentSpec
    inputs: Linear  # hidden to what `_Inputs.of` divides
    conv: Tensor | None  # [channels, conv]
    conv_bias: Tensor | None  # [channels]
    output: Linear  # heads * value_dim, or width, to hidden
    decay: Tensor | None = None  # [heads] float32: negative, per unit of a token's step
    step_bias: Tensor | None = None  # [heads] or [heads * key_dim] float32
    skip: Tensor | None = None  # [heads] float32: factor of the values added to the result ("mamba2")
    norm: Tensor | None = None  # [value_dim], or [heads * value_dim] where the norm's input is gated
    steps: Linear | None = None  # width to heads * key_dim ("kimi_delta")
    gates: Linear | None = None  # width to heads * value_dim ("kimi_delta")
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    factors: Tensor | None = None  # on what `inputs` gives, [outputs] ("mamba2")

    @property
    def nbytes(self) -> int:
        """Memory of the weights, bytes."""
        parts = (self.inputs, self.conv, self.conv_bias, self.output, self.decay, self.step_bias, self.skip, self.norm)
        every = (*parts, self.steps, self.gates, self.q_norm, self.k_norm, self.factors)
        return sum(part.nbytes for part in every if part is not None)

    def __call__(
        self,
        normed: Tensor,
        batch: PackedBatch,
        kv: Tensor,
        undo: StateUndo | None,
        angles: Angles | None,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the part's result [T, hidden] for `normed` [T, hidden]; reads and writes states in `kv`.

        `undo`: keeps overwritten states; None: they are not needed again. `angles`: of the tokens, if queries and keys
        are rotated. `deterministic`: every sequence by itself, so that the sequence's bits do not depend on others.
        """
        projected, pool = self.inputs(normed, deterministic=deterministic), kv.flatten(1)
        if (check := running()) is not None and batch.block_size % CHUNK == 0 and check.due("recurrent", self.spec):
            with check.room("recurrent"):
                self._compare(check, projected, batch.block_size, pool, angles)
        by_triton = choose("recurrent", pool.device, projected.dtype) == "triton" and batch.block_size % CHUNK == 0
        captured, found = by_triton and batch.most_context is not None, list[Tensor]()
        for part in _parts(batch, captured=captured, alone=deterministic):
            turns = None if angles is None else (angles[0][part.rows], angles[1][part.rows])
            inputs = _Inputs.of(self, projected[part.rows], turns, deterministic=deterministic)
            mixed = self._by_triton if by_triton else self._by_torch
            found.append(self._gated(mixed(inputs, part, batch, pool, undo), inputs.gate))
        result = self.output(found[0] if len(found) == 1 else torch.cat(found), deterministic=deterministic)
        return result.mul_(self.spec.output_factor) if self.spec.output_factor else result

    def _by_triton(
        self, inputs: _Inputs, part: _Part, batch: PackedBatch, pool: Tensor, undo: StateUndo | None
    ) -> Tensor:
        """Return the results [T, n] of a part's rows; states go to the pool."""
        from moonpool.engine.kernels.triton import recurrent as kernels

        spec, numbers, sequences = self.spec, part.sequences, part.sequences.stop - part.sequences.start
        # The convolution needs the inputs before the step while it writes those behind.
        kept = spec.state_elements if undo is not None else max(1, spec.channels * (spec.conv - 1))
        before = torch.empty(sequences, kept, device=pool.device)
        places = kernels.StatePlaces(
            pool, before, batch.query_start[numbers.start :], batch.context_lens[numbers], batch.slot_tables[numbers],
            batch.slot_ids, batch.block_size, part.rows.start, keep=undo is not None,
        )  # fmt: skip
        mixed = found = inputs.mixed
        if self.conv is not None:
            mixed = found = torch.empty(inputs.mixed.shape, dtype=inputs.mixed.dtype, device=pool.device)
            silu, one_row = spec.kind != "short_conv", len(inputs.gate) == sequences
            kernels.convolve(inputs.mixed, self.conv, self.conv_bias, places, mixed, silu=silu, one_row=one_row)
        if spec.kind != "short_conv":
            found = torch.empty(inputs.gate.shape, dtype=inputs.mixed.dtype, device=pool.device)
            shape, singles = self._scan_shape(), part.singles
            kernels.scan(mixed, inputs.decay, inputs.step, self.skip, places, shape, found, singles=singles)
        if undo is not None:
            assert part.spans is not None
            undo.keep(pool, [spans[0] for spans in part.spans], before)
        return found

    def _scan_shape(self) -> ScanShape:
        from moonpool.engine.kernels.triton.recurrent import ScanShape

        spec = self.spec
        keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
        mamba, delta = spec.kind == "mamba2", spec.kind in ("gated_delta", "kimi_delta")
        begins = (values + keys, values, 0) if mamba else (0, keys, 2 * keys)
        heads = (spec.heads, spec.key_heads, spec.key_dim, spec.value_dim)
        return ScanShape(*heads, delta, not mamba, spec.in_turn, *begins, spec.channels * (spec.conv - 1))

    def _by_torch(
        self, inputs: _Inputs, part: _Part, batch: PackedBatch, pool: Tensor, undo: StateUndo | None
    ) -> Tensor:
        """As `_by_triton`."""
        del batch
        assert part.spans is not None
        first = part.rows.start
        sequences = [
            [replace(span, begin=span.begin - first, end=span.end - first) for span in spans]
            for spans in part.spans
            if spans
        ]
        found = torch.empty_like(inputs.gate)
        single = [spans[0] for spans in sequences if spans[-1].end - spans[0].begin == 1]
        if single:
            rows = torch.tensor([[span.begin] for span in single], device=pool.device)
            states = self._states(pool, single)
            if undo is not None:
                undo.keep(pool, single, states)
            result, states = self._advance(inputs, rows, states)
            found[rows[:, 0]] = result[:, 0]
            _store(pool, single, states)
        for spans in sequences:
            if spans[-1].end - spans[0].begin == 1:
                continue
            states = self._states(pool, spans[:1])
            if undo is not None:
                undo.keep(pool, spans[:1], states)
            for span in spans:
                rows = torch.arange(span.begin, span.end, device=pool.device)[None]
                result, states = self._advance(inputs, rows, states)
                found[span.begin : span.end] = result[0]
                _store(pool, [span], states)
        return found

    def _compare(self, check: SelfCheck, like: Tensor, size: int, pool: Tensor, angles: Angles | None) -> None:
        """Compare Triton with torch on drawn rows and states, in the pool's first slots."""
        if choose("recurrent", pool.device, like.dtype) != "triton":
            return
        sequences, used = list[tuple[bytes, int, Sequence[int]]](), 0
        for rows, before in ((2 * CHUNK + 2, size - 10), (1, size - 1), (5, 12), (1, 0)):
            table = range(used, used - (-(rows + before) // size))
            if table.stop <= len(pool):
                sequences.append((bytes(4 * rows), before, table))
                used = table.stop
        if not sequences:
            return
        batch, elements = PackedBatch.build(sequences, size, pool.device), self.spec.state_elements
        [part] = _parts(batch, captured=False, alone=False)
        turns = None
        if angles is not None:
            turned = check.draws.normal(like.new_empty(2, batch.num_tokens, angles[0].shape[1]))
            turns = turned[0], turned[1]
        inputs = _Inputs.of(
            self, check.draws.normal(like.new_empty(batch.num_tokens, like.shape[1])), turns, deterministic=True
        )
        states = check.draws.normal(
            like.new_empty(used, elements)
        ).float()  # the convolution's inputs have the rows' type

        def computed(mixed: Callable[..., Tensor], undo: StateUndo | None) -> list[Tensor]:
            pool[:used, :elements] = states
            found = mixed(inputs, part, batch, pool, undo)
            return [found, pool[:used, :elements].clone()]

        for undo in (None, StateUndo()):  # another kernel keeps the states before
            check.compare(
                "recurrent", f"{self.spec}, {like.dtype}", partial(computed, self._by_triton, undo),
                partial(computed, self._by_torch, None), [allowed(like.dtype, _OFTEN_ROUNDED)] * 2,
            )  # fmt: skip

    def _states(self, pool: Tensor, spans: Collection[StateSpan]) -> Tensor:
        """Return the states [spans, elements] before some spans, float32."""
        states = pool[[span.source or 0 for span in spans], : self.spec.state_elements]
        fresh = [index for index, span in enumerate(spans) if span.source is None]
        if fresh:
            states[fresh] = 0.0
        return states

    def _advance(self, parts: _Inputs, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results [B, L, heads * value_dim] of rows [B, L] behind `states` [B, elements], and new states."""
        spec, count, kept = self.spec, len(rows), self.spec.channels * (self.spec.conv - 1)
        inputs = parts.mixed[rows]
        last = states[:, :0]
        if self.conv is not None:
            mixed, last = self._convolved(inputs, states[:, :kept])
            if spec.kind == "short_conv":
                return mixed, last
            q, k, v = self._heads(functional.silu(mixed).float())
        else:
            q, k, v = self._heads(inputs.float())
        state = states[:, kept:].view(count, spec.heads, spec.key_dim, spec.value_dim)
        decay = parts.decay[rows].transpose(1, 2)
        step = None if parts.step is None else parts.step[rows].transpose(1, 2)
        if spec.kind == "mamba2":
            assert step is not None
            result, state = scan(q, k, v * step[..., None], decay, None, state)
            assert self.skip is not None
            result = result + v * self.skip[:, None, None]
        elif spec.kind == "lightning":
            result, state = scan(q * spec.key_dim**-0.5, k, v, decay, None, state)
        else:
            result, state = scan(_unit(q) * spec.key_dim**-0.5, _unit(k), v, decay, step, state)
        return result.transpose(1, 2).flatten(2).to(inputs.dtype), torch.cat((last, state.flatten(1)), dim=1)

    def _convolved(self, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolution of `inputs` [B, L, channels] behind the inputs `before` them, and the last inputs."""
        spec = self.spec
        assert self.conv is not None
        past = before.view(len(inputs), spec.channels, spec.conv - 1)
        seen = torch.cat((past.to(inputs.dtype), inputs.transpose(1, 2)), dim=2)
        mixed = functional.conv1d(seen, self.conv[:, None], self.conv_bias, groups=spec.channels).transpose(1, 2)
        return mixed, seen[:, :, seen.shape[2] - (spec.conv - 1) :].float().flatten(1)

    def rotated(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        """Return queries or keys [T, heads * key_dim] with their norm and rotary embeddings."""
        heads = torch.unflatten(heads, 1, (-1, self.spec.key_dim)).contiguous()
        heads = heads if norm is None else norm(heads)
        width = angles[0].shape[1]
        turned = ops.rope(heads[..., :width].contiguous(), *angles)
        return torch.cat((turned, heads[..., width:]), dim=2).flatten(1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys [B, heads, L, key_dim] and values [B, heads, L, value_dim] of [B, L, channels]."""
        spec = self.spec
        keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
        if spec.kind == "mamba2":  # values, then keys, then queries
            v, k, q = torch.split(mixed, [values, keys, keys], dim=2)
        else:
            q, k, v = torch.split(mixed, [keys, keys, values], dim=2)
        each = spec.heads // spec.key_heads
        heads = torch.unflatten(torch.cat((q, k), dim=2), 2, (2, spec.key_heads, spec.key_dim))
        heads = heads.repeat(1, 1, 1, each, 1) if spec.in_turn else heads.repeat_interleave(each, 3)
        q, k = heads.permute(2, 0, 3, 1, 4)
        return q, k, torch.unflatten(v, 2, (-1, spec.value_dim)).transpose(1, 2)

    def _gated(self, found: Tensor, gate: Tensor) -> Tensor:
        """Return results [T, n] with their gates and the norm."""
        spec = self.spec
        if spec.kind == "short_conv":
            return gate * found
        if spec.kind == "lightning":
            assert self.norm is not None
            groups = torch.unflatten(found.float(), 1, (spec.norm_groups, -1))
            normed = functional.rms_norm(groups, groups.shape[2:], None, spec.norm_eps).flatten(1)
            return (self.norm.float() * normed).to(found.dtype) * torch.sigmoid(gate)
        if self.norm is None:
            return (found.float() * functional.silu(gate.float())).to(found.dtype)
        if spec.gate_first:
            wide = found.float() * functional.silu(gate.float())
            groups = torch.unflatten(wide, 1, (spec.key_heads, -1))
            normed = functional.rms_norm(groups, groups.shape[2:], None, spec.norm_eps).flatten(1)
            return self.norm * normed.to(found.dtype)
        wide = torch.unflatten(found.float(), 1, (spec.heads, -1))
        normed = functional.rms_norm(wide, wide.shape[2:], None, spec.norm_eps)
        gates = torch.unflatten(gate.float(), 1, (spec.heads, -1))
        if spec.kind == "kimi_delta":
            return (self.norm.float() * normed * torch.sigmoid(gates)).to(found.dtype).flatten(1)
        return ((self.norm * normed.to(found.dtype)) * functional.silu(gates)).to(found.dtype).flatten(1)


@dataclass(slots=True)
class _Inputs:
    """What a step's tokens bring, before their convolution."""

    mixed: Tensor  # [T, channels]
    gate: Tensor  # [T, heads * value_dim], or width
    decay: Tensor  # [T, heads] or [T, heads, key_dim] float32, logarithms
    step: Tensor | None  # [T, heads] float32: how much of a token is taken in; None: all

    @classmethod
    def of(cls, weights: RecurrentWeights, projected: Tensor, angles: Angles | None, *, deterministic: bool) -> _Inputs:
        """Divide the projection of tokens."""
        spec, none = weights.spec, projected.new_empty(0)
        if spec.kind == "short_conv":
            before, behind, x = projected.chunk(3, dim=1)
            return cls(before * x, behind, none, none)
        channels, values = spec.channels, spec.heads * spec.value_dim
        if spec.kind == "lightning":
            assert angles is not None
            assert weights.decay is not None
            keys = spec.key_heads * spec.key_dim
            q, k, v, gate = torch.split(projected, [keys, keys, values, values], dim=1)
            q, k = weights.rotated(q, weights.q_norm, angles), weights.rotated(k, weights.k_norm, angles)
            return cls(torch.cat((q, k, v), dim=1), gate, weights.decay.expand(len(q), -1), None)
        assert weights.decay is not None
        assert weights.step_bias is not None
        if spec.kind == "mamba2":
            projected = projected if weights.factors is None else projected * weights.factors
            gate, mixed, step = torch.split(projected, [values, channels, spec.heads], dim=1)
            step = functional.softplus(step.float() + weights.step_bias)
            return cls(mixed, gate, weights.decay * step, step)
        if spec.kind == "gated_delta":
            sizes = [channels, values, spec.heads, spec.heads]
            mixed, gate, taken, step = torch.split(projected, sizes, dim=1)
            step = functional.softplus(step.float() + weights.step_bias)
            return cls(mixed, gate, weights.decay * step, taken.sigmoid().float())
        sizes = [channels, spec.width, spec.width, spec.heads]
        mixed, inner, inner_gate, taken = torch.split(projected, sizes, dim=1)
        assert weights.steps is not None
        assert weights.gates is not None
        steps = weights.steps(inner.contiguous(), deterministic=deterministic).float() + weights.step_bias
        decay = weights.decay[:, None] * torch.unflatten(functional.softplus(steps), 1, (spec.heads, -1))
        gate = weights.gates(inner_gate.contiguous(), deterministic=deterministic)
        return cls(mixed, gate, decay, taken.sigmoid().float())


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return q_t @ S_t for each token, and the last S, of S_t = exp(decay_t) S_(t-1) + k_t^T u_t.

    u_t is v_t without `step`; with `step`, the delta rule's step_t (v_t - k_t @ (exp(decay_t) S_(t-1))).

    Args:
        q: [B, heads, L, key_dim], float32, as all are.
        k: As q.
        v: [B, heads, L, value_dim].
        decay: [B, heads, L] or [B, heads, L, key_dim].
        step: [B, heads, L].
        state: S before the first token, [B, heads, key_dim, value_dim].
    """
    fine, tokens = decay.dim() == 4, q.shape[2]
    if not fine:
        return _chunk(q, k, v, decay[..., None], step, state)
    found = []
    for begin in range(0, tokens, _FINE):
        q_, k_, v_, decay_ = (tensor[:, :, begin : begin + _FINE] for tensor in (q, k, v, decay))
        result, state = _chunk(q_, k_, v_, decay_, None if step is None else step[:, :, begin : begin + _FINE], state)
        found.append(result)
    return torch.cat(found, dim=2), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `scan`, with decay [B, heads, L, key_dim or 1]: all tokens against the state, then against each other."""
    tokens = q.shape[2]
    past = decay.cumsum(dim=2)  # of each token, since before the first
    faded = k * past.exp()
    if step is not None:
        v = (v - faded @ state) * step[..., None]
    between = past[:, :, :, None] - past[:, :, None]  # [B, heads, L, L, key_dim or 1]: from the second to the first
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later[..., None], -torch.inf).exp()
    if between.shape[-1] == 1:
        by_key, by_query = ((factor @ k.transpose(2, 3)) * between[..., 0] for factor in (k, q))
    else:
        by_key, by_query = ((factor[:, :, :, None] * k[:, :, None] * between).sum(-1) for factor in (k, q))
    if step is not None and tokens > 1:
        v = torch.linalg.solve_triangular(by_key * step[..., None], v, upper=False, unitriangular=True)
    result = (q * past.exp()) @ state + by_query @ v
    end = past[:, :, -1:]
    return result, state * end.exp().transpose(2, 3) + (k * (end - past).exp()).transpose(2, 3) @ v


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _store(pool: Tensor, spans: Collection[StateSpan], states: Tensor) -> None:
    """Write the states [spans, elements] behind some spans to the spans' blocks."""
    written = [(index, span.target) for index, span in enumerate(spans) if span.target is not None]
    if written:
        rows, blocks = zip(*written, strict=True)
        pool[list(blocks), : states.shape[1]] = states[list(rows)]
