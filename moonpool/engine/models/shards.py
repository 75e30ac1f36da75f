"""Which part of each tensor a rank of a stage has (`moonpool.base.families.ranks`).

The rule is one for all families. What reads hidden states is cut by outputs, so that a rank computes whole heads and
inner states. What gives hidden states back is cut by inputs, and the ranks' results are added; a bias is on the first
rank alone. All else is whole on every rank. A cut follows a tensor's own arrangement, so that loading does not know of
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moonpool.base.families.ranks import heads_of_rank
from moonpool.base.families.spec import LayerSpec
from moonpool.engine.models.tensors import Slots, Stored

Cut = Callable[[Tensor], Tensor]
Units = tuple[int, ...]
"""Of each of several stacked projections: heads or inner states, whose rows lie together."""
_EXPERT = re.compile(r"expert\d+\.")


def slots_of_rank(slots: Slots, layer: LayerSpec, rank: int, ranks: int) -> Slots:
    """Return a layer's tensors as a rank keeps them; `layer` is the whole one."""
    by_outputs = _by_outputs(layer)
    found = {}
    for slot, stored in slots.items():
        name, kind = slot.rsplit(".", 1) if "." in slot else (slot, "")
        plain = _EXPERT.sub("expert.", name)
        at = 1 if plain.startswith("experts_") else 0  # one tensor of all experts has them in front
        cut: Cut | None = None
        rows: Cut | None = None
        if plain in by_outputs:
            cut = partial(_parts, by_outputs[plain], rank, ranks, at)
            rows = partial(_parts, by_outputs[plain], rank, ranks, 0)
        elif plain in _BY_INPUTS:
            whole = torch.zeros_like if rank else None
            cut = partial(_chunk, rank, ranks, at + 1) if kind == "weight" else whole
        found[slot] = stored if cut is None else replace(_cut(stored, cut), cut_rows=rows)
        if plain in _BY_INPUTS and kind == "weight":
            width = stored.kept_shape[-1] // ranks
            found[slot] = replace(found[slot], inputs=(rank * width, (rank + 1) * width))
    return found


def head_of_rank(stored: Stored, rank: int, ranks: int) -> Stored:
    """Return the output head's weight or bias, by rows of the vocabulary, as a rank keeps the tensor."""
    rows = vocabulary_of_rank(stored.kept_shape[0], rank, ranks)
    return _cut(stored, lambda tensor: tensor[rows.start : rows.stop])


def vocabulary_of_rank(tokens: int, rank: int, ranks: int) -> range:
    """Return the tokens whose logits a rank computes."""
    return range(rank * tokens // ranks, (rank + 1) * tokens // ranks)


_BY_INPUTS = {"output", "down", "shared_down", "expert.down", "experts_down"}


def _by_outputs(layer: LayerSpec) -> dict[str, Units]:
    """Return the tensors that are cut by outputs, and what their rows are of."""
    attention, network, experts = layer.attention, layer.feed_forward, layer.feed_forward.experts
    q, kv = attention.num_heads, attention.num_kv_heads
    found: dict[str, Units] = {"q": (q,), "k": (kv,), "v": (kv,), "attention_gate": (q,), "qkv": (q, kv, kv)}
    found |= {"sinks": (q,), "head_gate": (q,), "q_b": (q,), "kv_b": (q,), "k_b": (q,), "v_b": (q,)}
    if attention.qk_norm_over != "head":
        found |= {"q_norm": (q,), "k_norm": (kv,)}
    found |= dict(_networks("", network.inner))
    if experts is not None:
        found |= dict(_networks("expert.", experts.inner)) | dict(_networks("experts_", experts.inner))
        found |= dict(_networks("shared_", experts.shared_inner))
    return found


def _networks(prefix: str, inner: int) -> Iterator[tuple[str, Units]]:
    yield f"{prefix}gate", (inner,)
    yield f"{prefix}up", (inner,)
    yield f"{prefix}gate_up", (inner, inner)


def _cut(stored: Stored, cut: Cut) -> Stored:
    """Return the tensor with a cut behind the tensor's arrangement."""
    shape = tuple(cut(torch.empty(stored.kept_shape, device="meta")).shape)
    arrange = cut if stored.arrange is None else partial(_both, stored.arrange, cut)
    return replace(stored, kept_shape=shape, arrange=arrange, whole=stored)


def _both(first: Cut, then: Cut, tensor: Tensor) -> Tensor:
    return then(first(tensor))


def _parts(units: Units, rank: int, ranks: int, at: int, tensor: Tensor) -> Tensor:
    """Return a rank's part of each stacked projection along a dimension."""
    size = tensor.shape[at] // sum(units)
    parts: Sequence[Tensor] = torch.split(tensor, [count * size for count in units], at)
    shares = [heads_of_rank(count, rank, ranks) for count in units]
    cut = [part.narrow(at, share[0] * size, len(share) * size) for part, share in zip(parts, shares, strict=True)]
    return cut[0] if len(cut) == 1 else torch.cat(cut, at)


def _chunk(rank: int, ranks: int, at: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(ranks, at)[rank]
