"""Loads one stage's weights from a checkpoint, and fuses projections.

Only safetensors and GGUF files are read: no data is unpickled or executed. Files are mapped; quantised rows are
dequantised piece by piece, so that no second whole tensor exists in float32.
"""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.formats import tensor_index
from moonpool.base.checkpoint.gguf import TENSOR_TYPES, TensorType, is_gguf
from moonpool.base.checkpoint.tensor_info import QuantisedTensor, Quantization, TensorInfo
from moonpool.base.errors import CheckpointError, ConfigError, UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    NormSpec,
    RecurrentSpec,
)
from moonpool.engine.kernels.arranged_weights import ArrangedWeight, arrange_packed, recorded_weight
from moonpool.engine.kernels.int8_head import make_int8_head
from moonpool.engine.kernels.memory import LARGE_PAGE, WeightArena, mapped
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.packed import CHUNK
from moonpool.engine.kernels.weight_file import WeightFile
from moonpool.engine.models.dequantise import dequantise
from moonpool.engine.models.experts import DenseAndExperts, MixtureOfExperts, expert_matrices
from moonpool.engine.models.imatrix import read_imatrix
from moonpool.engine.models.layers import FeedForward, Norm, fused_gate
from moonpool.engine.models.linear import Linear
from moonpool.engine.models.packed import PackedWeight, join_rows, pack_int4, pack_int8
from moonpool.engine.models.packed_files import packed_of_folder, packed_of_gguf
from moonpool.engine.models.recurrent import RecurrentWeights
from moonpool.engine.models.stage import StageModel, WeightNotes
from moonpool.engine.models.tensors import (
    Stored,
    attention_inputs,
    layer_tensors,
    network_inputs,
    outer_tensors,
    recurrent_inputs,
)
from moonpool.engine.models.transformers_stage import load_transformers_stage
from moonpool.engine.models.weights import AttentionWeights, LatentWeights, LayerWeights, PerLayerTable, PerLayerWeights

Pack = Callable[[Tensor], PackedWeight]
PACKERS: Mapping[str, Pack] = {"int8": pack_int8, "int4": pack_int4}
"""What packs a dense weight, by `quantization`."""
_UNPACKED_ELEMENTS = 1 << 20  # of packed weights, an element of a code
_PIECE_ELEMENTS = 1 << 16  # they stay in the cache: twice as quick as sixteen times as many
_GGUF_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}


class StoredTensors(Protocol):
    """One checkpoint's tensors."""

    dtypes: frozenset[str]
    """Types that can be copied."""

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """Copy a tensor into `out`, which has the same shape and may have another type.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        ...

    def packed(self, name: str, info: TensorInfo) -> PackedWeight | None:
        """Return a tensor as the packed weight that the checkpoint holds; None: no codes hold the tensor exactly.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        ...


def stored_tensors(path: Path, stack: ExitStack) -> StoredTensors:
    """Return what copies the tensors of the checkpoint `path`, until `stack` closes."""
    return GgufTensors() if is_gguf(path) else SafetensorsFiles(stack)


class SafetensorsFiles:
    """Tensors in safetensors files, which stay open until the exit stack closes."""

    dtypes = frozenset({"F32", "BF16", "F16"})

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._files: dict[Path, Any] = {}

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """See `StoredTensors.copy`."""
        if info.quantised is None:
            out.copy_(self._read(name, info))
            return
        with _named(name, info):
            out.copy_(dequantise(info.quantised.format, self._parts(info.quantised)))

    def packed(self, name: str, info: TensorInfo) -> PackedWeight | None:
        """See `StoredTensors.packed`."""
        if info.quantised is None:
            return None
        with _named(name, info):
            return packed_of_folder(info.quantised.format, self._parts(info.quantised))

    def _parts(self, tensor: QuantisedTensor) -> dict[str, Tensor]:
        return {role: self._read(its, where) for role, (its, where) in tensor.parts.items()}

    def _read(self, name: str, info: TensorInfo) -> Tensor:
        try:
            if info.file not in self._files:
                self._files[info.file] = self._stack.enter_context(safe_open(info.file, framework="pt"))
            tensor: Tensor = self._files[info.file].get_tensor(name)
        except Exception as error:  # safetensors raises its own bare errors
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None
        return tensor


@contextmanager
def _named(name: str, info: TensorInfo) -> Iterator[None]:
    """Turn what stored numbers that do not belong together raise into an error that names the tensor."""
    try:
        yield
    except (RuntimeError, IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"{info.file}: tensor {name} cannot be dequantised: {error}") from None


class GgufTensors:
    """Tensors in one GGUF file."""

    dtypes = frozenset(_GGUF_TYPES)

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """See `StoredTensors.copy`."""
        import gguf  # other checkpoints do without

        kind, stored, width = self._stored(name, info)
        target = out.view(len(stored), width)
        step = _piece_rows(width, info.paired_rows)
        for begin in range(0, len(stored), step):
            piece = gguf.dequantize(stored[begin : begin + step], gguf.GGMLQuantizationType[kind.name])
            _copy_rows(torch.from_numpy(piece), target[begin : begin + step], info.paired_rows)

    def packed(self, name: str, info: TensorInfo) -> PackedWeight | None:
        """See `StoredTensors.packed`. Rows are unpacked some at a time, as the steps in between take several bytes."""
        _, stored, width = self._stored(name, info)
        step = max(1, _UNPACKED_ELEMENTS // width)
        pieces = [packed_of_gguf(info.dtype, its) for its in torch.split(torch.from_numpy(stored), step)]
        found = [its for its in pieces if its is not None]
        packed = join_rows(found) if len(found) == len(pieces) else None
        if packed is None or not info.paired_rows:
            return packed
        rows, order = torch.arange(packed.outputs)[:, None], torch.empty(packed.outputs, 1, dtype=torch.int64)
        _copy_rows(rows, order, info.paired_rows)
        return packed.select(order[:, 0])

    def _stored(self, name: str, info: TensorInfo) -> tuple[TensorType, NDArray[np.uint8], int]:
        """Return a tensor's type, bytes [rows, bytes per row] and elements per row."""
        kind = _GGUF_TYPES[info.dtype]
        width = info.shape[-1] if len(info.shape) > 1 else 1 if kind.elements == 1 else info.shape[0]
        rows = info.elements // width
        shape = (rows, width // kind.elements * kind.bytes)
        try:
            # Copied on write: torch wants memory that may be written to. A plain array is cut up faster.
            stored = np.asarray(np.memmap(info.file, np.uint8, mode="c", offset=info.begin, shape=shape))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None
        return kind, stored, width


def _piece_rows(width: int, paired_rows: int) -> int:
    """Return the rows to convert at once: whole heads, where their rows change places."""
    unit = paired_rows or 1
    return max(unit, _PIECE_ELEMENTS // width // unit * unit)


def _copy_rows(rows: Tensor, out: Tensor, paired_rows: int) -> None:
    """Copy rows; in each head of `paired_rows`, rows 0, 2, 4, ... become the first half, the others the second."""
    if not paired_rows:
        out.copy_(rows)
        return
    width = rows.shape[1]
    out.view(-1, 2, paired_rows // 2, width).copy_(rows.view(-1, paired_rows // 2, 2, width).transpose(1, 2))


_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for "float32", "bfloat16" or "float16".

    Raises:
        UnsupportedModel: any other name.
    """
    if name not in _TORCH_DTYPES:
        raise UnsupportedModel("dtype", f"{name!r} is none of {', '.join(_TORCH_DTYPES)}")
    return _TORCH_DTYPES[name]


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """How a stage keeps weights in memory.

    Attributes:
        quantization: "int8" or "int4" packs the layers' projections so, and the head in 8 bits; "auto" and
            "file" keep the codes of quantised weights if products take these numbers.
        int8_head: also hold an unpacked head as bytes (`moonpool.engine.kernels.int8_head`), if native code takes the
        head.
        imatrix: with "int4", a file that says how much each input counts (`moonpool.engine.models.imatrix`).
        file: the file that holds the weights which native kernels take, shared by all that load the same: a folder, and
            a name that says what weights these are, and how they are kept; None: they are in memory.
    """

    quantization: Quantization = "none"
    int8_head: bool = False
    file: Path | None = None
    imatrix: Path | None = None

    @property
    def codes(self) -> bool:
        """Whether quantised weights keep their codes."""
        return self.quantization in ("auto", "file")


DENSE_WEIGHTS = KeptWeights()
"""The element type of the stage for all weights."""


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
) -> StageModel:
    """Load layers `layer_begin` up to `layer_end`, with the embedding on the first stage and norm and head on the last.

    Weights stored in another supported type are converted to `dtype`. `deterministic`: see `StageModel`. `on_layer` is
    called after each layer, with the numbers of loaded layers and all layers.

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
        return _load_other(Path(path), config, dtype, torch.device(device), refused)
    decoder = config.decoder
    _check_whole(config, layer_end - layer_begin)
    with ExitStack() as stack, torch.inference_mode():
        reader = _TensorReader(
            Path(path), FAMILIES[config.architecture].renamed, torch.empty(0, dtype=dtype, device=device), stack
        )
        first, last = layer_begin == 0, layer_end == config.num_layers
        config = _as_tied(config, reader)
        reader.kept = kept
        if kept.imatrix is not None:
            reader.importance = read_imatrix(kept.imatrix, config)
        tied, outer = config.tie_word_embeddings, outer_tensors(config)
        wanted = [slot for slot in outer if slot.startswith(_outer_slots(first=first, last=last, tied=tied))]
        for slot in wanted:
            reader.expect(outer[slot])
        every = range(layer_begin, layer_end + (len(decoder.tail) if last else 0))
        slots = {index: layer_tensors(config, index, reader.has) for index in every}
        for part in chain.from_iterable(parts.values() for parts in slots.values()):
            reader.expect(part)

        def read(slot: str) -> Tensor | None:
            return reader.read(outer[slot]) if slot in wanted else None

        name = f"{layer_begin}-{layer_end}-{str(dtype).removeprefix('torch.')}"
        arena = stack.enter_context(_weight_memory(kept, name, lambda: on_layer(0, len(every))))
        norm = Norm(config.decoder.final_norm, read("norm.weight"), read("norm.bias")) if last else None
        positions = read("positions")
        ends = _Ends(reader, outer, arena)
        head: Linear | None
        embedding: Tensor | ArrangedWeight | None
        if tied:
            head, embedding = ends.tied(with_head=last)
        else:
            head = ends.head() if last else None
            embedding = ends.embedding() if first else None
        layers = []
        for index in every:
            parts = _LayerReader(reader, decoder.every[index], slots[index], arena)
            layers.append(parts.read())
            on_layer(len(layers), len(every))
        return StageModel(
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
            int8_head=make_int8_head(head.panels, arena)
            if kept.int8_head and kept.file is None and last and head is not None and head.panels is not None
            else None,
            notes=WeightNotes(arena.finish(reader.changed()), arena.mapped_bytes),
        )


def _check_whole(config: ModelConfig, layers: int) -> None:
    """Check that so many layers are a stage that can be computed.

    Raises:
        UnsupportedModel: the model's layers must be one stage; names the setting.
    """
    if (config.decoder.tail or config.decoder.per_layer_rows) and layers < config.num_layers:
        why = f"not for {config.architecture}, whose layers read embeddings of their own and other layers' KV"
        raise UnsupportedModel("pipeline_parallel_size", why)


def _outer_slots(*, first: bool, last: bool, tied: bool) -> tuple[str, ...]:
    """Return what the slots of tensors outside layers begin with, of those that a stage has."""
    there = (("embedding", first or (last and tied)), ("positions", first), ("per_layer", first))
    return tuple(slot for slot, its in (*there, ("norm", last), ("head", last)) if its)


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


def _as_tied(config: ModelConfig, reader: _TensorReader) -> ModelConfig:
    """Return the configuration, untied if the checkpoint has a head that is not the embedding, as transformers does."""
    untied = replace(config, tie_word_embeddings=False)
    outer = outer_tensors(untied)
    if not config.tie_word_embeddings or not reader.has(outer["head.weight"].name):
        return config
    for slot in ("embedding", "head.weight"):
        reader.expect(outer[slot])
    same = torch.equal(reader.read(outer["embedding"]), reader.read(outer["head.weight"]))
    return config if same else untied


def packed_if_it_fits(weight: Tensor, pack: Pack | None) -> Tensor | PackedWeight:
    """Return `weight` packed, or unchanged if `pack` is None or the inputs are no multiple of a product's chunk."""
    return weight if pack is None or weight.shape[1] % CHUNK else pack(weight)


def _load_other(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, refused: Mapping[str, bool]
) -> StageModel:
    """Load a model that transformers' own code computes, unless an unsupported setting is asked for."""
    for setting, asked in refused.items():
        if asked:
            raise UnsupportedModel(setting, f"not for {config.architecture}, which transformers' own code computes")
    return load_transformers_stage(path, config, dtype, device)


class _Ends:
    """Reads the embedding and the head, which have 8 bits if layers are packed, or the file's own codes."""

    def __init__(self, reader: _TensorReader, tensors: Mapping[str, Stored], arena: WeightArena) -> None:
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
            made = arrange_packed(exact, None, self._reader.dtype, gated=False, arena=self._arena)
        return made or weight.dequantise().to(self._reader.dtype).to(self._reader.device)

    def per_layer(self, norm: NormSpec) -> PerLayerTable:
        """Return tokens' embeddings for each layer."""
        read = {slot: self._reader.read(its) for slot, its in self._tensors.items() if slot.startswith("per_layer")}
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

    def _weight(self, slot: str, pack: Pack | None) -> Tensor | PackedWeight:
        packed = self._reader.packed(self._tensors[slot])
        return packed_if_it_fits(self._reader.read(self._tensors[slot]), pack) if packed is None else packed

    def _linear(self, slot: str) -> Linear:
        bias = self._reader.read(self._tensors["head.bias"]) if "head.bias" in self._tensors else None
        if self._arena.whole and (panels := recorded_weight(bias, self._arena)) is not None:
            return Linear.arranged(panels, bias)
        weight = self._weight(slot, self._pack)
        if isinstance(weight, PackedWeight):
            weight = weight.to(self._reader.device)
        return Linear(weight, bias, dtype=self._reader.dtype, arena=self._arena)


class _LayerReader:
    """Reads and fuses one layer's tensors."""

    def __init__(
        self,
        reader: _TensorReader,
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
            self._feed_forward_part(),
            self._norm("feed_forward_out_norm"),
            self._optional("scalar"),
            self._per_layer() if spec.per_layer else None,
        )

    def _per_layer(self) -> PerLayerWeights:
        norm = Norm(self._spec.norm, self._one("per_layer_norm.weight"))
        return PerLayerWeights(self._linear("per_layer_gate"), self._linear("per_layer_output"), norm)

    def _attention(self) -> AttentionWeights | LatentWeights | RecurrentWeights:
        spec = self._spec.attention
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
        )

    def _recurrent(self, spec: RecurrentSpec) -> RecurrentWeights:
        def stacked(slot: str) -> Tensor | None:
            parts = [part for name, part in self._tensors.items() if name.rstrip("0123456789") == slot]
            return self._reader.read(*parts) if parts else None

        def wide(slot: str) -> Tensor | None:
            found = self._optional(slot)
            return None if found is None else found.float()

        conv, decay = stacked("conv"), wide("decay")
        assert conv is not None
        return RecurrentWeights(
            spec,
            self._linear(recurrent_inputs(self._tensors)),
            conv,
            stacked("conv_bias"),
            self._linear("output"),
            decay=None if decay is None else -decay.exp(),
            step_bias=wide("step_bias"),
            skip=wide("skip"),
            norm=self._optional("norm"),
            steps=self._linear("steps") if "steps.weight" in self._tensors else None,
            gates=self._linear("gates") if "gates.weight" in self._tensors else None,
        )

    def _latent(self, spec: AttentionSpec, latent: LatentSpec) -> LatentWeights:
        norm = NormSpec(eps=latent.norm_eps)
        down = latent.q_rank is not None
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
        one = replace(self._spec.feed_forward, inner=spec.inner, bias=spec.bias, experts=None)
        shared = replace(one, inner=spec.shared_inner, bias=False) if spec.shared_inner else None
        router_bias, correction = self._optional("router.bias"), self._optional("correction")
        router, scale = self._one("router.weight").float(), self._optional("router_scale")
        factors = self._optional("expert_scale")
        if scale is not None:
            router = router * (scale.float() * len(scale) ** -0.5)
        experts = (
            self._all_experts(one, spec.count)
            if "experts_down.weight" in self._tensors
            else [self._feed_forward(f"expert{expert}.", one) for expert in range(spec.count)]
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
        weights = self._reader.read(stored) if packed is None else None
        for expert in range(count):
            bias = None if biases is None else biases[expert]
            if packed is not None:
                found.append(self._kept(packed[expert], bias, gated=gated))
            elif weights is not None:
                counts = self._reader.counts(stored)
                its = None if counts is None else counts[expert]
                found.append(self._packed(weights[expert], bias, its, gated=gated))
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

    def _kept(self, weight: PackedWeight, bias: Tensor | None, *, gated: bool) -> Linear:
        weight = weight.to(self._reader.device)
        return Linear(weight, bias, gated=gated, arena=self._arena, dtype=self._reader.dtype)

    def _packed(self, weight: Tensor, bias: Tensor | None, counts: Tensor | None, *, gated: bool = False) -> Linear:
        pack = self._pack
        if counts is not None and pack is pack_int4:
            pack = partial(pack_int4, importance=counts)
        packed = packed_if_it_fits(weight, pack)
        if isinstance(packed, PackedWeight):
            return self._kept(packed, bias, gated=gated)
        return Linear(packed, bias, gated=gated, arena=self._arena)

    def _one(self, slot: str) -> Tensor:
        return self._reader.read(self._tensors[slot])

    def _optional(self, slot: str) -> Tensor | None:
        return self._one(slot) if slot in self._tensors else None


class _TensorReader:
    """Checks and reads one checkpoint's tensors; keeps the files open until the exit stack closes."""

    def __init__(self, path: Path, renamed: Mapping[str, str], place: Tensor, stack: ExitStack) -> None:
        self._tensors = tensor_index(path)
        self._stored = stored_tensors(path, stack)
        self._path = path
        self._renamed = renamed
        self._like = place
        self._changed: Counter[tuple[str, str]] = Counter()
        self.kept = DENSE_WEIGHTS
        """How weights are kept; set by the loader. If codes are, a dense quantised tensor is worth a note."""
        self.importance: Mapping[str, Tensor] = {}
        """What the inputs' errors count in weights that are packed, by name; set by the loader."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is read."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Device of what is read."""
        return self._like.device

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint has a tensor."""
        return self._name(name) in self._tensors

    def expect(self, wanted: Stored) -> None:
        """Raise CheckpointError unless the checkpoint has the tensor in this shape and a supported type."""
        name = self._name(wanted.name)
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._path}: tensor {wanted.name} is missing")
        if info.shape != wanted.shape:
            raise CheckpointError(
                f"{self._path}: tensor {name} has shape {list(info.shape)}, the configuration makes it "
                f"{list(wanted.shape)}"
            )
        if info.quantised is None and info.dtype not in self._stored.dtypes:
            known = ", ".join(sorted(self._stored.dtypes))
            raise CheckpointError(f"{self._path}: tensor {name} is stored as {info.dtype}, not {known}")

    def read(self, *wanted: Stored) -> Tensor:
        """Return the tensors stacked along their first dimension, in this reader's type and on this reader's device."""
        if self.kept.codes:
            self._note(wanted, "dense")
        if len(wanted) == 1 and wanted[0].arrange is not None:
            return wanted[0].arrange(self._copied(wanted[0])).contiguous()
        shapes = [part.kept_shape for part in wanted]
        fused = self._empty((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        begin = 0
        for part, shape in zip(wanted, shapes, strict=True):
            target = fused[begin : begin + shape[0]]
            if part.arrange is None:
                self._copy(part, target)
            else:
                target.copy_(part.arrange(self._copied(part)))
            begin += shape[0]
        return fused

    def packed(self, *wanted: Stored) -> PackedWeight | None:
        """Return the tensors as `read` does, in the codes of the checkpoint; None: they are dense."""
        packed = self._packed(wanted) if self.kept.codes else None
        return None if packed is None or packed.for_products() is None else packed

    def counts(self, wanted: Stored) -> Tensor | None:
        """Return what the errors of a weight's inputs count, by the importance matrix; None: all the same.

        Raises:
            CheckpointError: the importance matrix is of other inputs.
        """
        found = self.importance.get(wanted.name)
        inputs = wanted.kept_shape[-1]
        if found is not None and found.shape[-1] != inputs:
            raise CheckpointError(
                f"{self.kept.imatrix}: has {found.shape[-1]} numbers for the {inputs} inputs of {wanted.name}"
            )
        return found

    def packed_experts(self, wanted: Stored) -> list[PackedWeight] | None:
        """Return each expert's weight in a tensor of all experts, in the checkpoint's codes; None: they are dense."""
        info = self._tensors[self._name(wanted.name)]
        if not (self.kept.codes and info.keeps_codes):
            return None
        packed = self._stored.packed(self._name(wanted.name), info)
        assert packed is not None
        count, outputs, _ = wanted.kept_shape
        rows = torch.arange(outputs)
        if wanted.arrange is not None:  # takes inputs first; gives rows other places
            rows = wanted.arrange(rows.view(1, 1, outputs)).flatten()
        return [
            packed.select(slice(begin, begin + outputs)).select(rows) for begin in range(0, count * outputs, outputs)
        ]

    def _note(self, wanted: Sequence[Stored], how: str) -> None:
        infos = [self._tensors[self._name(part.name)] for part in wanted]
        self._changed.update((info.stored_type, how) for info in infos if info.is_quantised)

    def changed(self) -> str:
        """Return which quantised tensors are not held as the checkpoint has them, for people; "" if all are."""
        return ", ".join(f"{count} tensors of {kind} are {how}" for (kind, how), count in sorted(self._changed.items()))

    def _packed(self, wanted: Sequence[Stored]) -> PackedWeight | None:
        parts = []
        for part in wanted:
            name = self._name(part.name)
            info = self._tensors[name]
            if len(part.shape) != 2 or part.shape != part.kept_shape:
                return None
            its = self._stored.packed(name, info)
            if its is None:
                return None
            if part.arrange is not None:  # gives rows other places
                its = its.select(part.arrange(torch.arange(its.outputs)))
            parts.append(its)
        return join_rows(parts)

    def _copied(self, part: Stored) -> Tensor:
        out = self._empty(part.shape)
        self._copy(part, out)
        return out

    def _copy(self, part: Stored, out: Tensor) -> None:
        name = self._name(part.name)
        self._stored.copy(name, self._tensors[name], out)

    def _name(self, name: str) -> str:
        """Return a tensor's name in this checkpoint."""
        if name in self._tensors:
            return name
        others = (name.replace(ours, its) for ours, its in self._renamed.items() if ours in name)
        return next((other for other in others if other in self._tensors), name)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a tensor; a large tensor is dropped as soon as arranged, and must leave no memory behind."""
        dtype, device = self._like.dtype, self._like.device
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < LARGE_PAGE:
            return torch.empty(shape, dtype=dtype, device=device)
        return mapped(nbytes).view(dtype).view(shape)
