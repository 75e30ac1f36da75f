"""Loads one stage's weights from a checkpoint, and fuses projections."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.weight_file import WeightFile
from moonpool.base.errors import ConfigError, UnsupportedModel
from moonpool.base.families.ranks import decoder_of_rank
from moonpool.base.families.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    NormSpec,
    RecurrentSpec,
)
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, recorded_weight
from moonpool.engine.kernels.int8_head import Int8Head, make_int8_head
from moonpool.engine.kernels.memory import WeightArena
from moonpool.engine.kernels.native import library
from moonpool.engine.models.experts import DenseAndExperts, MixtureOfExperts, expert_matrices
from moonpool.engine.models.imatrix import read_imatrix
from moonpool.engine.models.layers import FeedForward, Norm, fused_gate
from moonpool.engine.models.pictures import load_encoder, picture_positions
from moonpool.engine.models.pooling_head import load_pooling_head, names_in_front
from moonpool.engine.models.recurrent import RecurrentWeights
from moonpool.engine.models.shards import head_of_rank, slots_of_rank
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import DENSE_WEIGHTS, KeptWeights, TensorReader
from moonpool.engine.models.tensors import (
    Slots,
    Stored,
    attention_inputs,
    layer_tensors,
    network_inputs,
    outer_tensors,
    recurrent_inputs,
)
from moonpool.engine.models.transformers_stage import load_transformers_stage
from moonpool.engine.models.weights import (
    AttentionWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    PerLayerTable,
    PerLayerWeights,
    WeightNotes,
)
from moonpool.engine.models.whole_prompt_stage import load_whole_prompt_stage
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.weights.linear import Linear, LinearWeight
from moonpool.engine.weights.packing import PACKERS, Packer, pack_int8, packed_if_it_fits

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for "float32", "bfloat16" or "float16".

    Raises:
        UnsupportedModel: any other name.
    """
    if name not in _TORCH_DTYPES:
        raise UnsupportedModel("dtype", f"{name!r} is none of {', '.join(_TORCH_DTYPES)}")
    return _TORCH_DTYPES[name]


def load_stage(
    path: Path | str,
    config: ModelConfig,
    dtype: torch.dtype,
    layer_begin: int,
    layer_end: int,
    device: torch.device | str = "cpu",
    *,
    deterministic: bool = False,
    kept: KeptWeights = DENSE_WEIGHTS,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
    ranks: Ranks | None = None,
) -> StageModel:
    """Load layers `layer_begin` up to `layer_end`, with the embedding on the first stage and norm and head on the last.

    The first stage also has the encoder of pictures, if the model has one.

    Weights stored in another supported type are converted to `dtype`. `deterministic`: see `StageModel`. `on_layer` is
    called after each layer, with the numbers of loaded layers and all layers. `ranks`: this process's part of each
    layer is loaded.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or an unsupported type (names the tensor; checked for
            all tensors before any is read), or a file is damaged.
        UnsupportedModel: a setting is not for this model; names the setting.
        ConfigError: the folder for mapped weights cannot be written to, or has no room.
    """
    assert 0 <= layer_begin < layer_end <= config.num_layers
    if config.decoder.other:
        refused = {
            "pipeline_parallel_size": layer_end - layer_begin < config.num_layers,
            "deterministic": deterministic,
            "quantization": kept.quantization in ("file", *PACKERS),
        }
        stage = _load_other(Path(path), config, dtype, torch.device(device), refused)
        stage.pooling_head = load_pooling_head(Path(path), config, dtype, torch.device(device))
        return stage
    decoder = config.decoder
    _check_whole(config, layer_end - layer_begin)
    with ExitStack() as stack, torch.inference_mode():
        reader = TensorReader(Path(path), names_in_front(config), torch.empty(0, dtype=dtype, device=device))
        first, last = layer_begin == 0, layer_end == config.num_layers
        generates = config.generates
        config = _as_tied(config, reader) if generates else replace(config, tie_word_embeddings=False)
        reader.kept = kept
        if kept.imatrix is not None:
            reader.importance = read_imatrix(kept.imatrix, config)
        tied, outer = config.tie_word_embeddings, outer_tensors(config)
        if ranks is not None:
            tied, outer = False, _outer_of_rank(outer, ranks)
        wanted = [slot for slot in outer if slot.startswith(_outer_slots(first=first, last=last, tied=tied))]
        if not generates:
            wanted = [slot for slot in wanted if not slot.startswith("head")]
        for slot in wanted:
            reader.expect(outer[slot])
        every = range(layer_begin, layer_end + (len(decoder.tail) if last else 0))
        slots = _layer_slots(config, every, reader, ranks)
        declared = config
        if ranks is not None:
            decoder = decoder_of_rank(decoder, ranks.ranks)
            config = replace(config, decoder=decoder)

        def read(slot: str) -> Tensor | None:
            return reader.read(outer[slot]) if slot in wanted else None

        name = f"{layer_begin}-{layer_end}-{str(dtype).removeprefix('torch.')}"
        name += "" if ranks is None else f"-{ranks.rank}-of-{ranks.ranks}"
        arena = stack.enter_context(_weight_memory(kept, name, lambda: on_layer(0, len(every))))
        norm = Norm(config.decoder.final_norm, read("norm.weight"), read("norm.bias")) if last else None
        positions = read("positions")
        ends = _Ends(reader, outer, arena)
        head: Linear | None
        embedding: Tensor | ArrangedWeight | None
        if tied:
            head, embedding = ends.tied(with_head=last)
        else:
            head = ends.head() if last and generates else None
            embedding = ends.embedding() if first else None
        layers = []
        for index in every:
            parts = _LayerReader(reader, decoder.every[index], slots[index], arena)
            layers.append(parts.read())
            on_layer(len(layers), len(every))
        int8_head = None
        if kept.int8_head and last and head is not None and head.panels is not None:
            int8_head = _int8_head(head.panels, kept, name, arena)
        stage = StageModel(
            config,
            layer_begin,
            layers[: layer_end - layer_begin],
            tail=layers[layer_end - layer_begin :],
            per_layer=ends.per_layer(decoder.final_norm) if first and decoder.per_layer_rows else None,
            deterministic=deterministic,
            embedding=embedding if first else None,
            positions=positions,
            final_norm=norm,
            head=head if last else None,
            int8_head=int8_head,
            notes=WeightNotes(arena.finish(reader.changed()), arena.mapped_bytes),
            ranks=ranks,
            whole=declared,
        )
        _add_parts_outside(stage, Path(path), dtype, torch.device(device))
        return stage


def _add_parts_outside(stage: StageModel, path: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Load what stands before the first stage's embedding, and behind the last stage's norm."""
    stage.picture_positions = picture_positions(path)
    if stage.is_first:
        stage.pictures = load_encoder(path, dtype, device)
    if stage.is_last:
        stage.pooling_head = load_pooling_head(path, stage.config, dtype, device)


def _int8_head(panels: ArrangedWeight, kept: KeptWeights, name: str, arena: WeightArena) -> Int8Head | None:
    """Return the head in bytes; in a file of its own, as engines without one share the other weights."""
    if kept.file is None:
        return make_int8_head(panels, arena)
    with _weight_memory(kept, f"{name}-int8-head", lambda: None) as own:
        made = make_int8_head(panels, own)
        own.finish("")
        return made


def _check_whole(config: ModelConfig, layers: int) -> None:
    """Check that so many layers are a stage that can be computed.

    Raises:
        UnsupportedModel: the model's layers must be one stage; names the setting.
    """
    if (config.decoder.tail or config.decoder.per_layer_rows) and layers < config.num_layers:
        why = f"not for {config.architecture}, whose layers read embeddings of their own, or what other layers have"
        raise UnsupportedModel("pipeline_parallel_size", why)


def _layer_slots(config: ModelConfig, every: range, reader: TensorReader, ranks: Ranks | None) -> dict[int, Slots]:
    """Return the tensors of some layers, a rank's part of them.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or has another shape.
    """
    slots = {index: layer_tensors(config, index, reader.has) for index in every}
    for part in chain.from_iterable(parts.values() for parts in slots.values()):
        reader.expect(part)
    if ranks is None:
        return slots
    whole = config.decoder.every
    return {index: slots_of_rank(its, whole[index], ranks.rank, ranks.ranks) for index, its in slots.items()}


def _outer_of_rank(outer: Slots, ranks: Ranks) -> Slots:
    """Return the tensors outside layers with a head of a rank's rows; the embedding is whole on all ranks."""
    head = outer.get("head.weight") or outer["embedding"]  # where the two are tied
    heads = {"head.weight": head} | ({"head.bias": outer["head.bias"]} if "head.bias" in outer else {})
    return outer | {slot: head_of_rank(stored, ranks.rank, ranks.ranks) for slot, stored in heads.items()}


def _outer_slots(*, first: bool, last: bool, tied: bool) -> tuple[str, ...]:
    """Return what the slots of tensors outside layers begin with, of those that a stage has."""
    there = (("embedding", first or (last and tied)), ("positions", first), ("per_layer", first))
    return tuple(slot for slot, present in (*there, ("norm", last), ("head", last)) if present)


@contextmanager
def _weight_memory(kept: KeptWeights, name: str, waiting: Callable[[], None]) -> Iterator[WeightArena]:
    """Give the memory for arranged weights; of a file, `name` is the end of the name.

    Raises:
        ConfigError: the folder for mapped weights cannot be written to, or has no room.
    """
    native = library.get()
    if kept.file is None or native is None:
        yield WeightArena()
        return
    folder = kept.file.parent
    file: WeightFile | None = None
    try:
        file = WeightFile(folder, f"{kept.file.name}-{name}-{native.path.stem}", waiting)
        yield WeightArena(file)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "; XDG_CACHE_HOME names another place" if full else ""
        raise ConfigError("mmap_weights", f"weights cannot be put into {folder}: {error}{hint}") from None
    finally:
        if file is not None:
            file.close()  # what is mapped stays


def _as_tied(config: ModelConfig, reader: TensorReader) -> ModelConfig:
    """Return the configuration, untied if the checkpoint has a head that is not the embedding, as transformers does."""
    untied = replace(config, tie_word_embeddings=False)
    outer = outer_tensors(untied)
    if not config.tie_word_embeddings or not reader.has(outer["head.weight"].name):
        return config
    for slot in ("embedding", "head.weight"):
        reader.expect(outer[slot])
    same = torch.equal(reader.read(outer["embedding"]), reader.read(outer["head.weight"]))
    return config if same else untied


def _load_other(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, refused: Mapping[str, bool]
) -> StageModel:
    """Load a model that transformers' own code computes, unless an unsupported setting is asked for."""
    for setting, asked in refused.items():
        if asked:
            raise UnsupportedModel(setting, f"not for {config.architecture}, which transformers' own code computes")
    whole = config.pooling is not None and config.pooling.whole
    return (load_whole_prompt_stage if whole else load_transformers_stage)(path, config, dtype, device)


class _Ends:
    """Reads the embedding and the head, which have 8 bits if layers are packed, or the file's own codes."""

    def __init__(self, reader: TensorReader, tensors: Mapping[str, Stored], arena: WeightArena) -> None:
        self._reader, self._tensors, self._arena = reader, tensors, arena
        self._pack = pack_int8 if reader.kept.quantization in PACKERS else None

    def tied(self, *, with_head: bool) -> tuple[Linear | None, Tensor | ArrangedWeight]:
        """Return the head and the embedding, which are the same tensor.

        A packed head is the embedding on every stage, so that stages compute the same as a whole model.
        """
        if not with_head:
            weight = self._weight("embedding", self._pack)
            if isinstance(weight, Tensor):
                return None, self._placed(weight)
        head = self._linear("embedding")
        if head.panels is not None:
            return head, head.panels  # held once: the arrangement gives rows back
        weight = self._weight("embedding", self._pack)
        return head, self._placed(weight) if isinstance(weight, Tensor) else head.dense()

    def head(self) -> Linear:
        """Return the head."""
        return self._linear("head.weight")

    def embedding(self) -> Tensor | ArrangedWeight:
        """Return the embedding."""
        weight = self._weight("embedding", None)
        if isinstance(weight, Tensor):
            return self._placed(weight)
        exact = weight.for_products()
        made = None
        if self._arena.whole:
            made = recorded_weight(None, self._arena)
        elif exact is None:
            self._arena.record(None)
        else:
            made = exact.method(None, self._reader.dtype, gated=False, arena=self._arena).panels
        return made or weight.dequantise().to(self._reader.dtype).to(self._reader.device)

    def per_layer(self, norm: NormSpec) -> PerLayerTable:
        """Return tokens' embeddings for each layer."""
        read = {
            slot: self._reader.read(stored) for slot, stored in self._tensors.items() if slot.startswith("per_layer")
        }
        panels = recorded_weight(None, self._arena) if self._arena.whole else None
        projection = (
            Linear(read["per_layer_input.weight"], arena=self._arena)
            if panels is None
            else Linear.arranged(panels, None)
        )
        norm_ = Norm(norm, read["per_layer_input_norm.weight"])
        return PerLayerTable(self._placed(read["per_layer_embedding"]), projection, norm_)

    def _placed(self, table: Tensor) -> Tensor:
        """Return the embedding where weights are to be."""
        if self._reader.kept.file is None or table.device.type != "cpu":
            return table
        placed = self._arena.take(table.nbytes).view(table.dtype).view(table.shape)
        return placed if self._arena.whole else placed.copy_(table)

    def _weight(self, slot: str, pack: Packer | None) -> Tensor | LinearWeight:
        packed = self._reader.packed(self._tensors[slot])
        return packed_if_it_fits(self._reader.read(self._tensors[slot]), pack) if packed is None else packed

    def _linear(self, slot: str) -> Linear:
        bias = self._reader.read(self._tensors["head.bias"]) if "head.bias" in self._tensors else None
        if self._arena.whole and (panels := recorded_weight(bias, self._arena)) is not None:
            return Linear.arranged(panels, bias)
        weight = self._weight(slot, self._pack)
        if not isinstance(weight, Tensor):
            weight = weight.to(self._reader.device)
        return Linear(weight, bias, dtype=self._reader.dtype, arena=self._arena)


class _LayerReader:
    """Reads and fuses one layer's tensors."""

    def __init__(
        self,
        reader: TensorReader,
        spec: LayerSpec,
        tensors: Mapping[str, Stored],
        arena: WeightArena,
    ) -> None:
        self._reader = reader
        self._pack = PACKERS.get(reader.kept.quantization)
        self._spec = spec
        self._tensors = tensors
        self._arena = arena

    def read(self) -> LayerWeights:
        """Return the layer's weights."""
        spec = self._spec
        return LayerWeights(
            spec,
            self._norm("attention_norm"),
            self._attention(),
            self._norm("attention_out_norm"),
            self._norm("feed_forward_norm"),
            self._feed_forward_part() if spec.feed_forward.inner else None,
            self._norm("feed_forward_out_norm"),
            self._optional("scalar"),
            self._per_layer() if spec.per_layer else None,
        )

    def _per_layer(self) -> PerLayerWeights:
        norm = Norm(self._spec.norm, self._one("per_layer_norm.weight"))
        return PerLayerWeights(self._linear("per_layer_gate"), self._linear("per_layer_output"), norm)

    def _attention(self) -> AttentionWeights | LatentWeights | RecurrentWeights | IndexerWeights:
        spec = self._spec.attention
        if self._spec.indexer is not None:
            return self._indexer(self._spec.indexer)
        if self._spec.recurrent is not None:
            return self._recurrent(self._spec.recurrent)
        if spec.latent is not None:
            return self._latent(spec, spec.latent)
        return AttentionWeights(
            self._linear(attention_inputs(spec, self._tensors)),
            self._norm("q_norm", spec.qk_norm),
            self._norm("k_norm", spec.qk_norm),
            self._linear("output"),
            self._optional("sinks"),
            Norm(replace(spec.qk_norm, weighted=False), None, None) if spec.value_norm and spec.qk_norm else None,
            self._linear("head_gate") if spec.head_gate else None,
        )

    def _recurrent(self, spec: RecurrentSpec) -> RecurrentWeights:
        def stacked(slot: str) -> Tensor | None:
            parts = [part for name, part in self._tensors.items() if name.rstrip("0123456789") == slot]
            return self._reader.read(*parts) if parts else None

        def wide(slot: str) -> Tensor | None:
            found = self._optional(slot)
            return None if found is None else found.float()

        def head_norm(slot: str) -> Norm | None:
            return Norm(NormSpec(eps=spec.norm_eps), self._one(slot)) if spec.head_norms else None

        decay = wide("decay")
        if spec.decays:
            decay = torch.tensor(spec.decays, dtype=torch.float32, device=self._reader.device)
        return RecurrentWeights(
            spec,
            self._linear(recurrent_inputs(self._tensors)),
            stacked("conv"),
            stacked("conv_bias"),
            self._linear("output"),
            decay=decay if decay is None or spec.decay_stored or spec.decays else -decay.exp(),
            step_bias=wide("step_bias"),
            skip=wide("skip"),
            norm=self._optional("norm"),
            steps=self._linear("steps") if "steps.weight" in self._tensors else None,
            gates=self._linear("gates") if "gates.weight" in self._tensors else None,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            factors=self._input_factors(spec) if spec.input_factors else None,
        )

    def _input_factors(self, spec: RecurrentSpec) -> Tensor:
        values, keys = spec.heads * spec.value_dim, spec.key_heads * spec.key_dim
        factors = torch.tensor(spec.input_factors, dtype=self._reader.dtype)
        counts = torch.tensor([values, values, keys, keys, spec.heads])
        return factors.repeat_interleave(counts).to(self._reader.device)

    def _indexer(self, spec: IndexerSpec) -> IndexerWeights:
        key_norm = NormSpec("layer", spec.key_norm_eps, bias=True)
        return IndexerWeights(
            self._linear("q_a"),
            Norm(NormSpec(eps=spec.q_norm_eps), self._one("q_a_norm.weight")),
            self._linear("index_q"),
            self._linear("index_k"),
            Norm(key_norm, self._one("index_k_norm.weight"), self._one("index_k_norm.bias")),
            Linear(self._one("index_weights.weight").float()),
        )

    def _latent(self, spec: AttentionSpec, latent: LatentSpec) -> LatentWeights:
        norm = NormSpec(eps=latent.norm_eps)
        down = "q_a.weight" in self._tensors
        if "k_b.weight" in self._tensors:
            keys, values = self._one("k_b.weight").transpose(1, 2), self._one("v_b.weight")
        else:
            both = self._one("kv_b.weight").view(spec.num_heads, latent.key_width + latent.value_width, latent.kv_rank)
            keys, values = both[:, : latent.key_width], both[:, latent.key_width :]
        return LatentWeights(
            self._linear("q_a") if down else None,
            self._norm("q_a_norm", norm),
            self._linear("q_b"),
            self._linear("kv_a"),
            Norm(norm, self._one("kv_a_norm.weight")),
            keys.contiguous(),
            values.transpose(1, 2).contiguous(),
            self._linear("output"),
        )

    def _feed_forward(self, prefix: str, spec: FeedForwardSpec) -> FeedForward:
        """Return the network with tensor slots that begin with `prefix`."""
        return FeedForward(
            spec,
            self._linear(network_inputs(prefix, self._tensors), gated=fused_gate(spec)),
            self._linear(f"{prefix}down"),
        )

    def _feed_forward_part(self) -> FeedForward | MixtureOfExperts | DenseAndExperts:
        spec, norm = self._spec.feed_forward, self._spec.norm
        if spec.experts is None:
            return self._feed_forward("", spec)
        experts = self._experts(spec.experts)
        if not spec.experts.beside:
            return experts
        names = ("dense_out_norm", "experts_norm", "experts_out_norm")
        dense_out, norm_in, norm_out = (Norm(norm, self._one(f"{name}.weight"), None) for name in names)
        unweighted = Norm(replace(norm, weighted=False), None, None)
        dense = self._feed_forward("", replace(spec, experts=None))
        return DenseAndExperts(dense, dense_out, unweighted, norm_in, experts, norm_out)

    def _experts(self, spec: ExpertsSpec) -> MixtureOfExperts:
        single = replace(self._spec.feed_forward, inner=spec.inner, bias=spec.bias, experts=None)
        beside = replace(single, inner=spec.shared_inner, bias=False, silu_limit=spec.shared_silu_limit)
        shared = beside if spec.shared_inner else None
        router_bias, correction = self._optional("router.bias"), self._optional("correction")
        router, scale = self._one("router.weight").float(), self._optional("router_scale")
        factors = self._optional("expert_scale")
        if scale is not None:
            router = router * (scale.float() * len(scale) ** -0.5)
        experts = (
            self._all_experts(single, spec.count)
            if "experts_down.weight" in self._tensors
            else [self._feed_forward(f"expert{expert}.", single) for expert in range(spec.count)]
        )
        return MixtureOfExperts(
            spec,
            Linear(router, None if router_bias is None else router_bias.float()),
            None if correction is None else correction.float(),
            experts,
            None if shared is None else self._feed_forward("shared_", shared),
            Linear(self._one("shared_weight.weight"), self._optional("shared_weight.bias"))
            if spec.shared_gate
            else None,
            None if factors is None else factors.float(),
            expert_matrices(experts),
            self._linear("to_experts") if spec.latent_width else None,
            self._linear("from_experts") if spec.latent_width else None,
        )

    def _all_experts(self, spec: FeedForwardSpec, count: int) -> list[FeedForward]:
        """Return the experts in a checkpoint that has all experts in one tensor."""
        gate_ups = self._each_expert("experts_gate_up", count, gated=fused_gate(spec))
        return [
            FeedForward(spec, gate_up, down)
            for gate_up, down in zip(gate_ups, self._each_expert("experts_down", count), strict=True)
        ]

    def _each_expert(self, slot: str, count: int, *, gated: bool = False) -> list[Linear]:
        """Return the projections in a tensor that has those of all experts."""
        biases, stored = self._optional(f"{slot}.bias"), self._tensors[f"{slot}.weight"]
        found: list[Linear] = []
        if self._arena.whole:
            its_biases = [None if biases is None else biases[expert] for expert in range(count)]
            recorded = [recorded_weight(bias, self._arena) for bias in its_biases]
            pairs = zip(recorded, its_biases, strict=True)
            found = [Linear.arranged(panels, bias) for panels, bias in pairs if panels is not None]
            if found:
                return found
        packed = self._reader.packed_experts(stored)
        counts = None if packed is not None else self._reader.counts(stored)
        each: Iterable[Tensor | LinearWeight] = self._reader.each(stored) if packed is None else packed
        for expert, weight in enumerate(each):
            bias = None if biases is None else biases[expert]
            if isinstance(weight, Tensor):
                own = None if counts is None else counts[expert]
                found.append(self._packed(weight, bias, own, gated=gated))
            else:
                found.append(self._kept(weight, bias, gated=gated))
        return found

    def _norm(self, name: str, spec: NormSpec | None = None) -> Norm | None:
        if name in ("q_norm", "k_norm"):
            there = spec is not None and (name == "q_norm" or self._spec.attention.kv_of is None)
        elif name == "q_a_norm":
            there = f"{name}.weight" in self._tensors
        else:
            there = getattr(self._spec, name)
        if not there:
            return None
        return Norm(spec or self._spec.norm, self._optional(f"{name}.weight"), self._optional(f"{name}.bias"))

    def _linear(self, names: str, *, gated: bool = False) -> Linear:
        """Return the projections `names`, which have the same inputs, as one."""
        slots = names.split()
        weights = [self._tensors[f"{name}.weight"] for name in slots]
        biased = f"{slots[0]}.bias" in self._tensors
        bias = self._reader.read(*(self._tensors[f"{name}.bias"] for name in slots)) if biased else None
        if self._arena.whole and (panels := recorded_weight(bias, self._arena)) is not None:
            return Linear.arranged(panels, bias)
        packed = self._reader.packed(*weights)
        if packed is not None:
            return self._kept(packed, bias, gated=gated)
        counts = self._reader.counts(weights[0])
        return self._packed(self._reader.read(*weights), bias, counts, gated=gated)

    def _kept(self, weight: LinearWeight, bias: Tensor | None, *, gated: bool) -> Linear:
        weight = weight.to(self._reader.device)
        return Linear(weight, bias, gated=gated, arena=self._arena, dtype=self._reader.dtype)

    def _packed(self, weight: Tensor, bias: Tensor | None, counts: Tensor | None, *, gated: bool = False) -> Linear:
        packed = packed_if_it_fits(weight, self._pack, counts)
        if isinstance(packed, Tensor):
            return Linear(packed, bias, gated=gated, arena=self._arena)
        return self._kept(packed, bias, gated=gated)

    def _one(self, slot: str) -> Tensor:
        return self._reader.read(self._tensors[slot])

    def _optional(self, slot: str) -> Tensor | None:
        return self._one(slot) if slot in self._tensors else None
