"""The checkpoint tensors for each part of a model, and how they lie there.

A slot is what the loader asks for, for example "q.weight"; a `Stored` tells the place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.families import FAMILIES
from moonpool.base.families.base import TensorNames
from moonpool.base.families.spec import (
    AttentionSpec,
    ExpertsSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    NormSpec,
    RecurrentSpec,
)

Shape = tuple[int, ...]
Slots = dict[str, "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a checkpoint."""

    name: str
    shape: Shape
    """Shape as stored."""
    kept_shape: Shape
    """Shape for the model."""
    arrange: Callable[[Tensor], Tensor] | None = None
    """From the one to the other; None: they are the same."""
    whole: Stored | None = None
    """The tensor as one process keeps it, if this is a rank's part."""
    cut_rows: Callable[[Tensor], Tensor] | None = None
    """Of a part that has some of a weight's outputs: from all rows, in any dtype [outputs], to the part's."""
    inputs: tuple[int, int] | None = None
    """Begin and end of the inputs of a part that has all outputs of a weight."""


def outer_tensors(config: ModelConfig) -> Slots:
    """Return the tensors outside layers: embedding, positions, final norm, and a head that is not the embedding."""
    names, decoder = FAMILIES[config.architecture].names, config.decoder
    hidden, vocab = config.hidden_size, config.vocab_size
    slots = {"embedding": _plain(names.embedding, (vocab, hidden))}
    if decoder.learnt_positions:
        rows, skipped = (decoder.learnt_positions, hidden), decoder.positions_from
        kept = (decoder.learnt_positions - skipped, hidden)
        slots["positions"] = Stored(names.positions, rows, kept, lambda table: table[skipped:])
    slots |= _norm("norm", names.norm, decoder.final_norm, (hidden,))
    if not config.tie_word_embeddings:
        slots["head.weight"] = _plain(names.head, (vocab, hidden))
    if decoder.per_layer_rows:
        width = decoder.layers[0].per_layer
        every = width * len(decoder.every)
        slots["per_layer_embedding"] = _plain(names.per_layer_embedding, (decoder.per_layer_rows, every))
        slots |= _linear(names, "per_layer_input", names.per_layer_input, (every, hidden))
        slots |= _norm("per_layer_input_norm", names.per_layer_input_norm, decoder.final_norm, (width,))
    if decoder.head_bias:
        slots["head.bias"] = _plain(f"{names.head.removesuffix('.weight')}.bias", (vocab,))
    return slots


def layer_tensors(
    config: ModelConfig,
    index: int,
    has: Callable[[str], bool] = lambda _: True,
    names: TensorNames | None = None,
) -> Slots:
    """Return the tensors of layer `index`, by slot.

    `has` tells whether the checkpoint has a tensor: if a family's folders have all experts in one tensor, other
    checkpoints (GGUF files, quantised folders) have a tensor for each. `names`: None = the family's.
    """
    names, spec = names or FAMILIES[config.architecture].names, config.decoder.every[index]
    slots: Slots = {}
    for slot in ("attention_norm", "attention_out_norm"):
        if getattr(spec, slot):
            slots |= _norm(slot, getattr(names, slot), spec.norm, (config.hidden_size,))
    prefix, inner = (names.layer.format(index=at) for at in spec.stored_at or (index, index))
    names = _of_checkpoint(names, lambda name: has(f"{prefix}{name}.weight"))
    if spec.per_layer:
        slots |= _linear(names, "per_layer_gate", names.per_layer_gate, (spec.per_layer, config.hidden_size))
        slots |= _linear(names, "per_layer_output", names.per_layer_output, (config.hidden_size, spec.per_layer))
        slots |= _norm("per_layer_norm", names.per_layer_norm, spec.norm, (config.hidden_size,))
    if spec.scalar:
        slots["scalar"] = _plain(names.scalar, (1,))
    slots |= _over_tokens(names, config, spec, lambda name: has(f"{prefix}{name}.weight"))
    slots = {slot: replace(part, name=f"{prefix}{part.name}") for slot, part in slots.items()}
    if not spec.feed_forward.inner:
        return slots
    whole = bool(names.experts_gate_up) and has(f"{inner}{names.experts_gate_up}")
    if not has(f"{inner}{names.gate_up}.weight"):
        names = replace(names, gate_up="")
    if not has(f"{inner}{names.shared_gate_up}.weight"):
        names = replace(names, shared_gate_up="")
    network = dict(_feed_forward(names, config.hidden_size, spec, whole=whole))
    for slot in ("feed_forward_norm", "feed_forward_out_norm"):
        if getattr(spec, slot):
            network |= _norm(slot, getattr(names, slot), spec.norm, (config.hidden_size,))
    return slots | {slot: replace(part, name=f"{inner}{part.name}") for slot, part in network.items()}


def _of_checkpoint(names: TensorNames, has: Callable[[str], bool]) -> TensorNames:
    """Return the names of GGUF files where queries, keys and values are three tensors there, and one in folders."""
    split = names.qkv and not has(names.qkv) and has(names.q)
    return replace(names, qkv="", inputs_first=False) if split else names


def attention_inputs(spec: AttentionSpec, tensors: Container[str]) -> str:
    """Return the slots, by space, of the projections that attention reads its input by: one product."""
    if spec.output_gate:
        return "q k v attention_gate"
    if spec.kv_of is not None:
        return "q"
    if spec.values_of_keys:
        return "q k k"
    return "qkv" if "qkv.weight" in tensors else "q k v"


def recurrent_inputs(tensors: Iterable[str]) -> str:
    """Return the slots, by space, of the projections that a recurrent part reads its input by: one product."""
    names = [name.removesuffix(".weight") for name in tensors if name.startswith("inputs")]
    return " ".join(name for name in names if not name.endswith(".bias"))


def network_inputs(prefix: str, tensors: Container[str]) -> str:
    """Return the slots, by space, of a network's gates and ups: one product. Its slots begin with `prefix`."""
    names = [f"{prefix}{name}" for name in ("gate", "up") if f"{prefix}{name}.weight" in tensors]
    return " ".join(names) or f"{prefix}gate_up"


def projections(layer: LayerSpec, tensors: Slots) -> dict[str, str]:
    """Return the slots, by space, of each product whose rows are the batch's, by place in `LayerWeights`.

    Products of experts, whose rows are gathered, and absorbed products are left out.
    """
    places = {"attention.output": "output"}
    if layer.recurrent is not None:
        places["attention.inputs"] = recurrent_inputs(tensors)
        places |= {f"attention.{slot}": slot for slot in ("steps", "gates")}
    elif layer.indexer is not None:
        places = {"attention.q_a": "q_a"}
    elif layer.attention.latent is not None:
        places |= {f"attention.{slot}": slot for slot in ("q_a", "q_b", "kv_a")}
    else:
        places["attention.qkv"] = attention_inputs(layer.attention, tensors)
    network, prefix = "feed_forward", ""
    if layer.feed_forward.experts is not None:
        network, prefix = "feed_forward.shared", "shared_"
    places[f"{network}.gate_up"] = network_inputs(prefix, tensors)
    places[f"{network}.down"] = f"{prefix}down"
    return {place: slots for place, slots in places.items() if f"{slots.split()[0]}.weight" in tensors}


def _over_tokens(names: TensorNames, config: ModelConfig, spec: LayerSpec, has: Callable[[str], bool]) -> Slots:
    """Return the tensors of a layer's part over tokens."""
    rope = None if spec.attention.rope is None else config.decoder.ropes[spec.attention.rope]
    paired = rope.width if rope is not None and rope.paired else 0
    if spec.recurrent is not None:
        return _recurrent(names, config.hidden_size, spec.recurrent, has)
    if spec.indexer is not None:
        return _indexer(names, config, spec.attention, spec.indexer, paired)
    if spec.attention.latent is None:
        return _attention(names, config, spec.attention, paired)
    slots = _latent(names, config, spec.attention, spec.attention.latent, paired, split=not has(names.kv_b))
    return {slot: part for slot, part in slots.items() if not (spec.beside and slot.startswith("q_a"))}  # the indexer's


def _attention(names: TensorNames, config: ModelConfig, spec: AttentionSpec, paired: int) -> Slots:
    hidden, size = config.hidden_size, spec.head_dim
    q, kv = spec.num_heads * size, spec.num_kv_heads * size
    values = spec.num_kv_heads * (spec.value_width or size)
    slots: Slots = {}
    if names.qkv:
        arrange = partial(_ungrouped, spec) if names.qkv_order == "grouped" else None
        slots |= _linear(names, "qkv", names.qkv, (q + kv + values, hidden), bias=spec.qkv_bias, arrange=arrange)
        assert not paired
    else:
        turn = partial(_unpaired, size, paired) if paired else None
        projected = (("q", q, turn), ("k", kv, turn), ("v", values, None))
        for slot, rows, arrange in projected[: 1 if spec.kv_of is not None else 2 if spec.values_of_keys else 3]:
            slots |= _linear(names, slot, getattr(names, slot), (rows, hidden), bias=spec.qkv_bias, arrange=arrange)
        if spec.output_gate:  # a head's gate lies behind the head's query
            for slot, first in (("q", 0), ("attention_gate", size)):
                arrange = partial(_part_of_heads, 2 * size, first, size)
                part_slots = _linear(names, slot, names.q, (2 * q, hidden), bias=spec.qkv_bias, arrange=arrange)
                slots |= {at: replace(part, kept_shape=(q, *part.shape[1:])) for at, part in part_slots.items()}
    attended = spec.num_heads * (spec.value_width or size)
    slots |= _linear(names, "output", names.output, (hidden, attended), bias=spec.output_bias)
    if spec.qk_norm is not None:
        normed = (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads))
        for slot, heads in normed[: 1 if spec.kv_of is not None else 2]:
            kept = {"head": (size,), "heads": (heads, size), "all": (heads * size,)}[spec.qk_norm_over]
            norms = _norm(slot, getattr(names, slot), spec.qk_norm, kept)
            if paired:  # the elements of a head have other places here
                turn_norm = partial(_unpaired_norm, size, paired)
                norms = {
                    name: Stored(part.name, part.shape, part.kept_shape, turn_norm) for name, part in norms.items()
                }
            slots |= norms
    if spec.head_gate:
        slots |= _linear(names, "head_gate", names.head_gate, (spec.num_heads, hidden))
    if spec.sinks:
        slots["sinks"] = _plain(names.sinks, (spec.num_heads,))
    return slots


def _recurrent(names: TensorNames, hidden: int, spec: RecurrentSpec, has: Callable[[str], bool]) -> Slots:
    """Return the tensors of a recurrent part; projections that are stacked have numbers behind their slots."""
    keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
    rows: tuple[int, ...] = {
        "short_conv": (3 * spec.width,),
        "mamba2": (values + spec.channels + spec.heads,),
        "gated_delta": (spec.channels + values, 2 * spec.heads)
        if names.interleaved
        else (spec.channels, values, spec.heads, spec.heads),
        "kimi_delta": (keys, keys, values, spec.width, spec.width, spec.heads),
        "lightning": (spec.channels, values),
    }[spec.kind]
    theirs, slots = names.recurrent, Slots()
    inputs = theirs["inputs"]
    by_kind = (partial(_by_kind, spec, 2), partial(_by_kind, spec, 0))
    arranged: tuple[Callable[[Tensor], Tensor] | None, ...] = by_kind if names.interleaved else (None,) * len(rows)
    if names.interleaved and not has(inputs[0]):
        inputs, rows = (*theirs["split"], inputs[1]), (spec.channels, values, 2 * spec.heads)
        arranged = (None, None, by_kind[1])
    for number, (name, count, arrange) in enumerate(zip(inputs, rows, arranged, strict=True)):
        slots |= _linear(names, f"inputs{number}", name, (count, hidden), bias=spec.bias, arrange=arrange)
    convolved = theirs.get("conv", ())
    channels = (spec.channels,) if len(convolved) == 1 else (keys, keys, values)[: len(convolved)]
    for number, (name, count) in enumerate(zip(convolved, channels, strict=True)):
        kept = (count, spec.conv)
        slots[f"conv{number}"] = Stored(f"{name}.weight", (count, 1, spec.conv), kept, lambda x: x[:, 0])
        if spec.conv_bias:
            slots[f"conv_bias{number}"] = _plain(f"{name}.bias", (count,))
    outputs = spec.width if spec.kind == "short_conv" else values
    slots |= _linear(names, "output", theirs["output"][0], (hidden, outputs), bias=spec.bias)
    fine = spec.kind == "kimi_delta"
    if "decay" in theirs:
        stored = (1, 1, spec.heads, 1) if fine and not spec.decay_stored else (spec.heads,)
        slots["decay"] = Stored(theirs["decay"][0], stored, (spec.heads,), torch.Tensor.flatten)
        slots["step_bias"] = _plain(theirs["step_bias"][0], (keys if fine else spec.heads,))
        if not spec.without_norm:
            slots["norm"] = _plain(f"{theirs['norm'][0]}.weight", (values if spec.gate_first else spec.value_dim,))
    if spec.kind == "lightning":
        slots["norm"] = _plain(f"{theirs['norm'][0]}.weight", (values,))
    for slot in ("q_norm", "k_norm") if spec.head_norms else ():
        slots[slot] = _plain(f"{theirs[slot][0]}.weight", (spec.key_dim,))
    if "skip" in theirs:
        slots["skip"] = _plain(theirs["skip"][0], (spec.heads,))
    if fine:
        slots |= _linear(names, "steps", theirs["steps"][0], (keys, spec.width))
        slots |= _linear(names, "gates", theirs["gates"][0], (values, spec.width))
    return slots


def _latent(
    names: TensorNames, config: ModelConfig, spec: AttentionSpec, latent: LatentSpec, paired: int, *, split: bool
) -> Slots:
    hidden, heads = config.hidden_size, spec.num_heads
    width = latent.key_width + latent.rope_width
    norm = NormSpec(eps=latent.norm_eps)
    slots: Slots = {}
    if latent.q_rank is None:
        slots |= _linear(names, "q_b", names.q, (heads * width, hidden))
    else:
        slots |= _linear(names, "q_a", names.q_a, (latent.q_rank, hidden), bias=spec.qkv_bias)
        slots |= _norm("q_a_norm", names.q_a_norm, norm, (latent.q_rank,))
        slots |= _linear(names, "q_b", names.q_b, (heads * width, latent.q_rank))
    slots |= _linear(names, "kv_a", names.kv_a, (latent.kv_rank + latent.rope_width, hidden), bias=spec.qkv_bias)
    slots |= _norm("kv_a_norm", names.kv_a_norm, norm, (latent.kv_rank,))
    if split:
        for slot, shape in (
            ("k_b", (heads, latent.kv_rank, latent.key_width)),
            ("v_b", (heads, latent.value_width, latent.kv_rank)),
        ):
            slots[f"{slot}.weight"] = _plain(f"{getattr(names, slot)}.weight", shape)
    else:
        slots |= _linear(names, "kv_b", names.kv_b, (heads * (latent.key_width + latent.value_width), latent.kv_rank))
    slots |= _linear(names, "output", names.output, (hidden, heads * latent.value_width), bias=spec.output_bias)
    if paired:  # the rotated elements are the last in a query, and in the latent vector's projection
        for slot, size in (("q_b", width), ("kv_a", latent.kv_rank + latent.rope_width)):
            for kind in ("weight", "bias"):
                if part := slots.get(f"{slot}.{kind}"):
                    turn = partial(_unpaired, size, paired, first=size - paired)
                    slots[f"{slot}.{kind}"] = Stored(part.name, part.shape, part.kept_shape, turn)
    return slots


def _indexer(names: TensorNames, config: ModelConfig, spec: AttentionSpec, indexer: IndexerSpec, paired: int) -> Slots:
    hidden, heads, size = config.hidden_size, spec.num_heads, spec.head_dim
    turn = partial(_unpaired, size, paired) if paired else None
    slots = _linear(names, "q_a", names.q_a, (indexer.q_rank, hidden), bias=spec.qkv_bias)
    slots |= _norm("q_a_norm", names.q_a_norm, NormSpec(), (indexer.q_rank,))
    slots |= _linear(names, "index_q", names.index_q, (heads * size, indexer.q_rank), arrange=turn)
    slots |= _linear(names, "index_k", names.index_k, (size, hidden), arrange=turn)
    norm = _norm("index_k_norm", names.index_k_norm, NormSpec("layer", bias=True), (size,))
    slots |= {slot: replace(part, arrange=turn) for slot, part in norm.items()}
    return slots | {"index_weights.weight": _plain(f"{names.index_weights}.weight", (heads, hidden))}


def _feed_forward(names: TensorNames, hidden: int, layer: LayerSpec, *, whole: bool) -> Iterator[tuple[str, Stored]]:
    spec = layer.feed_forward
    if spec.experts is not None:
        yield from _experts(names, hidden, spec.experts, gated=spec.gated, whole=whole).items()
        if not spec.experts.beside:
            return
        for slot in ("dense_out_norm", "experts_norm", "experts_out_norm"):
            yield from _norm(slot, getattr(names, slot), layer.norm, (hidden,)).items()
    if names.gate_up and spec.gated:
        yield from _linear(names, "gate_up", names.gate_up, (2 * spec.inner, hidden), bias=spec.bias).items()
    else:
        if spec.gated:
            yield from _linear(names, "gate", names.gate, (spec.inner, hidden), bias=spec.bias).items()
        yield from _linear(names, "up", names.up, (spec.inner, hidden), bias=spec.bias).items()
    yield from _linear(names, "down", names.down, (hidden, spec.inner), bias=spec.bias).items()


def _experts(names: TensorNames, hidden: int, experts: ExpertsSpec, *, gated: bool, whole: bool) -> Slots:
    slots = _linear(names, "router", names.router, (experts.count, hidden), bias=experts.router_bias)
    if experts.beside:
        slots["router_scale"] = _plain(names.router_scale, (hidden,))
        slots["expert_scale"] = _plain(names.expert_scale, (experts.count,))
    if experts.correction:
        stored = (1, experts.count) if names.correction_row else (experts.count,)
        slots["correction"] = Stored(names.correction, stored, (experts.count,), torch.Tensor.flatten)
    width = experts.latent_width or hidden
    if experts.latent_width:
        slots |= _linear(names, "to_experts", names.to_experts, (width, hidden))
        slots |= _linear(names, "from_experts", names.from_experts, (hidden, width))
    if whole:
        slots |= _all_experts(names, width, experts)
    else:
        for expert in range(experts.count):
            prefix = names.expert.format(expert=expert)
            for slot, name, shape in (
                ("gate", names.expert_gate, (experts.inner, width)),
                ("up", names.expert_up, (experts.inner, width)),
                ("down", names.expert_down, (width, experts.inner)),
            )[0 if gated else 1 :]:
                slots |= _linear(names, f"expert{expert}.{slot}", f"{prefix}{name}", shape, bias=experts.bias)
    if experts.shared_inner and names.shared_gate_up:
        shape = (2 * experts.shared_inner, hidden)
        slots |= _linear(names, "shared_gate_up", names.shared_gate_up, shape)
        slots |= _linear(names, "shared_down", names.shared_down, (hidden, experts.shared_inner))
    elif experts.shared_inner:
        if gated:
            slots |= _linear(names, "shared_gate", names.shared_gate, (experts.shared_inner, hidden))
        slots |= _linear(names, "shared_up", names.shared_up, (experts.shared_inner, hidden))
        slots |= _linear(names, "shared_down", names.shared_down, (hidden, experts.shared_inner))
    if experts.shared_gate:
        slots |= _linear(names, "shared_weight", names.shared_weight, (1, hidden))
    return slots


def _all_experts(names: TensorNames, hidden: int, experts: ExpertsSpec) -> Slots:
    """Return the experts' tensors where all experts are one: [count, outputs, inputs], or gpt-oss's form."""
    count, inner = experts.count, experts.inner
    gate_up, down = (count, 2 * inner, hidden), (count, hidden, inner)
    if not experts.bias:
        slots = {"experts_gate_up.weight": (names.experts_gate_up, gate_up)}
        slots["experts_down.weight"] = (names.experts_down, down)
        if names.experts_inputs_first:
            return {
                slot: Stored(name, (shape[0], shape[2], shape[1]), shape, lambda x: x.transpose(1, 2))
                for slot, (name, shape) in slots.items()
            }
        return {slot: _plain(name, shape) for slot, (name, shape) in slots.items()}
    # gpt-oss: inputs first; gates and ups take turns
    return {
        "experts_gate_up.weight": Stored(
            names.experts_gate_up, (count, hidden, 2 * inner), gate_up, lambda x: _in_turns(x.transpose(1, 2))
        ),
        "experts_gate_up.bias": Stored(
            f"{names.experts_gate_up}_bias", (count, 2 * inner), (count, 2 * inner), _in_turns
        ),
        "experts_down.weight": Stored(names.experts_down, (count, inner, hidden), down, lambda x: x.transpose(1, 2)),
        "experts_down.bias": _plain(f"{names.experts_down}_bias", (count, hidden)),
    }


def _plain(name: str, shape: Shape) -> Stored:
    return Stored(name, shape, shape)


def _linear(
    names: TensorNames,
    slot: str,
    name: str,
    shape: Shape,
    *,
    bias: bool = False,
    arrange: Callable[[Tensor], Tensor] | None = None,
) -> Slots:
    """Return weight and bias of a projection [outputs, inputs]; `arrange` reorders the outputs."""
    slots = {f"{slot}.weight": Stored(f"{name}.weight", shape, shape, arrange)}
    if names.inputs_first:
        turn: Callable[[Tensor], Tensor] = lambda x: x.t() if arrange is None else arrange(x.t())  # noqa: E731
        slots = {f"{slot}.weight": Stored(f"{name}.weight", shape[::-1], shape, turn)}
    if bias:
        slots[f"{slot}.bias"] = Stored(f"{name}.bias", shape[:1], shape[:1], arrange)
    return slots


def _norm(slot: str, name: str, spec: NormSpec, shape: Shape) -> Slots:
    slots: Slots = {}
    if spec.weighted:
        slots[f"{slot}.weight"] = _plain(f"{name}.weight", shape)
    if spec.bias:
        slots[f"{slot}.bias"] = _plain(f"{name}.bias", shape)
    return slots


def _unpaired(size: int, width: int, rows: Tensor, *, first: int = 0) -> Tensor:
    """Return `rows` [heads * size, ...] with the pairs among elements first .. first + width of a head drawn apart.

    Elements 0, 2, 4, ... of these become their first half and 1, 3, 5, ... their second one.
    """
    places = torch.arange(size)
    turned = places[first : first + width]
    places[first : first + width] = torch.cat((turned[0::2], turned[1::2]))
    turned_rows: Tensor = rows.reshape(-1, size, *rows.shape[1:])[:, places.to(rows.device)]
    return turned_rows.flatten(0, 1)


def _unpaired_norm(size: int, width: int, weight: Tensor) -> Tensor:
    return _unpaired(size, width, weight.reshape(-1)).view(weight.shape)


def _ungrouped(spec: AttentionSpec, rows: Tensor) -> Tensor:
    """Return all of q, then k, then v, from rows that lie by KV head: queries, key, value."""
    share, size = spec.num_heads // spec.num_kv_heads, spec.head_dim
    grouped = rows.reshape(spec.num_kv_heads, share + 2, size, *rows.shape[1:])
    parts = (grouped[:, :share], grouped[:, share : share + 1], grouped[:, share + 1 :])
    return torch.cat([part.flatten(0, 2) for part in parts])


def _part_of_heads(size: int, first: int, count: int, rows: Tensor) -> Tensor:
    """Return rows first .. first + count of each head of `size` rows."""
    part: Tensor = rows.reshape(-1, size, *rows.shape[1:])[:, first : first + count]
    return part.flatten(0, 1)


def _by_kind(spec: RecurrentSpec, keys: int, rows: Tensor) -> Tensor:
    """Return all queries, keys, values and gates, or all b and a, of rows that lie by key head.

    `keys`: how many of them have key_dim rows a head, the first ones; the others are values, or one row each.
    """
    each = spec.heads // spec.key_heads
    sizes = [spec.key_dim] * keys + [each * spec.value_dim if keys else each] * 2
    grouped = rows.reshape(spec.key_heads, sum(sizes), *rows.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in torch.split(grouped, sizes, dim=1)])


def _in_turns(x: Tensor) -> Tensor:
    """Return gates, then ups, along dimension 1, where they took turns."""
    return torch.cat((x[:, 0::2], x[:, 1::2]), dim=1)
