"""Loads the weights of one stage from a checkpoint of the Llama family, and fuses projections.

Only safetensors and GGUF files are read: nothing is ever unpickled or executed. Files are mapped; quantised rows are
dequantised piece by piece, so that no whole tensor exists in float32 beside the one that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from kernels.int8_head import make_int8_head
from kernels.memory import LARGE_PAGE, WeightArena, mapped
from kernels.packed_weights import PackedWeights
from moonpool.checkpoint.config import ModelConfig, TensorInfo
from moonpool.checkpoint.families import FAMILIES
from moonpool.checkpoint.formats import tensor_index
from moonpool.checkpoint.gguf import TENSOR_TYPES, is_gguf
from moonpool.errors import CheckpointError, UnsupportedModel
from moonpool.models.layers import LayerWeights, Linear
from moonpool.models.stage import StageModel

_PIECE_ELEMENTS = 1 << 16  # they stay in the cache: twice as quick as sixteen times as many
_GGUF_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}


class StoredTensors(Protocol):
    """The tensors of one checkpoint."""

    dtypes: frozenset[str]
    """Types that can be copied."""

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """Copy a tensor into `out`, which has its shape and may have another type.

        Raises:
            CheckpointError: it cannot be read.
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
        try:
            if info.file not in self._files:
                self._files[info.file] = self._stack.enter_context(safe_open(info.file, framework="pt"))
            tensor: Tensor = self._files[info.file].get_tensor(name)
        except Exception as error:  # safetensors raises bare errors of its own
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None
        out.copy_(tensor)


class GgufTensors:
    """Tensors in one GGUF file."""

    dtypes = frozenset(_GGUF_TYPES)

    def copy(self, name: str, info: TensorInfo, out: Tensor) -> None:
        """See `StoredTensors.copy`."""
        kind = _GGUF_TYPES[info.dtype]
        width = info.shape[-1] if len(info.shape) > 1 else 1 if kind.elements == 1 else info.shape[0]
        rows = info.elements // width
        shape = (rows, width // kind.elements * kind.bytes)
        try:
            # Copied on write: torch wants memory that may be written to. A plain array is cut up faster.
            stored = np.asarray(np.memmap(info.file, np.uint8, mode="c", offset=info.begin, shape=shape))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from None
        target = out.view(rows, width)
        step = _piece_rows(width, info.paired_rows)
        for begin in range(0, rows, step):
            piece = gguf.dequantize(stored[begin : begin + step], gguf.GGMLQuantizationType[kind.name])
            _copy_rows(torch.from_numpy(piece), target[begin : begin + step], info.paired_rows)


def _piece_rows(width: int, paired_rows: int) -> int:
    """Return the rows to convert at once: whole heads, where their rows change places."""
    unit = paired_rows or 1
    return max(unit, _PIECE_ELEMENTS // width // unit * unit)


def _copy_rows(rows: Tensor, out: Tensor, paired_rows: int) -> None:
    """Copy rows; of each head of `paired_rows`, rows 0, 2, 4, ... become its first half and 1, 3, 5, ... its second."""
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


def load_stage(
    path: Path | str,
    config: ModelConfig,
    dtype: torch.dtype,
    layer_begin: int,
    layer_end: int,
    device: torch.device | str = "cpu",
    *,
    deterministic: bool = False,
    int8_head: bool = False,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> StageModel:
    """Load layers `layer_begin` up to `layer_end`, with the embedding on the first stage and norm and head on the last.

    Weights stored in another supported type are converted to `dtype`. `deterministic`: see `StageModel`. `int8_head`:
    also hold the head as bytes (`kernels.int8_head`), if native code takes it. `on_layer` is called after each layer,
    with the number of loaded layers and of all.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or an unsupported type (names it; checked for all
            tensors before any is read), or a file is damaged.
    """
    assert 0 <= layer_begin < layer_end <= config.num_layers
    with ExitStack() as stack, torch.inference_mode():
        reader = _TensorReader(Path(path), dtype, torch.device(device), stack)
        first, last = layer_begin == 0, layer_end == config.num_layers
        tied, names = config.tie_word_embeddings, FAMILIES[config.architecture].names
        outer: dict[str, tuple[int, ...]] = {}
        if first or (last and tied):
            outer[names.embedding] = (config.vocab_size, config.hidden_size)
        if last:
            outer[names.norm] = (config.hidden_size,)
            if not tied:
                outer[names.head] = (config.vocab_size, config.hidden_size)
        for name, shape in outer.items():
            reader.expect(name, shape)
        for index in range(layer_begin, layer_end):
            for name, shape in layer_shapes(config, index).items():
                reader.expect(name, shape)
        arena = WeightArena()
        norm = reader.read([names.norm]) if last else None
        embedding: Tensor | PackedWeights | None = None
        if names.embedding in outer:
            embedding = reader.read([names.embedding])
        head = None
        if last:
            head = Linear(
                embedding if isinstance(embedding, Tensor) and tied else reader.read([names.head]), arena=arena
            )
            if tied and head.panels is not None:
                embedding = head.panels  # held once: the arrangement gives rows back
        layers = []
        for index in range(layer_begin, layer_end):
            layers.append(_read_layer(reader, config, index, arena))
            on_layer(len(layers), layer_end - layer_begin)
        return StageModel(
            config,
            layer_begin,
            layers,
            deterministic=deterministic,
            embedding=embedding if first else None,
            final_norm=norm,
            head=head,
            int8_head=make_int8_head(head.panels, arena)
            if int8_head and head is not None and head.panels is not None
            else None,
        )


def layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of layer `index` in a checkpoint."""
    names = FAMILIES[config.architecture].names
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_out, kv_out = config.num_heads * head, config.num_kv_heads * head
    weights: dict[str, tuple[int, ...]] = {
        names.input_norm: (hidden,),
        names.q: (q_out, hidden),
        names.k: (kv_out, hidden),
        names.v: (kv_out, hidden),
        names.output: (hidden, q_out),
        names.post_norm: (hidden,),
        names.gate: (inner, hidden),
        names.up: (inner, hidden),
        names.down: (hidden, inner),
    }
    biases = (
        (config.qkv_bias, (names.q, names.k, names.v)),
        (config.output_bias, (names.output,)),
        (config.mlp_bias, (names.gate, names.up, names.down)),
    )
    shapes = {f"{name}.weight": shape for name, shape in weights.items()}
    shapes |= {f"{name}.bias": weights[name][:1] for there, biased in biases if there for name in biased}
    if config.qk_norm:
        shapes |= {f"{names.q_norm}.weight": (head,), f"{names.k_norm}.weight": (head,)}
    prefix = names.layer.format(index=index)
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _read_layer(reader: _TensorReader, config: ModelConfig, index: int, arena: WeightArena) -> LayerWeights:
    """Read and fuse the tensors of one layer."""
    names = FAMILIES[config.architecture].names
    prefix = names.layer.format(index=index)

    def read(*tensors: str, kind: str = "weight") -> Tensor:
        return reader.read([f"{prefix}{name}.{kind}" for name in tensors])

    def linear(bias: bool, *tensors: str, gated: bool = False) -> Linear:
        return Linear(read(*tensors), read(*tensors, kind="bias") if bias else None, gated=gated, arena=arena)

    return LayerWeights(
        input_norm=read(names.input_norm),
        qkv=linear(config.qkv_bias, names.q, names.k, names.v),
        q_norm=read(names.q_norm) if config.qk_norm else None,
        k_norm=read(names.k_norm) if config.qk_norm else None,
        output=linear(config.output_bias, names.output),
        post_norm=read(names.post_norm),
        gate_up=linear(config.mlp_bias, names.gate, names.up, gated=True),
        down=linear(config.mlp_bias, names.down),
    )


class _TensorReader:
    """Checks and reads tensors of one checkpoint; keeps its files open until the exit stack closes."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, stack: ExitStack) -> None:
        self._tensors = tensor_index(path)
        self._stored = stored_tensors(path, stack)
        self._path = path
        self._dtype = dtype
        self._device = device

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the checkpoint has tensor `name` in this shape and a supported type."""
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._path}: tensor {name} is missing")
        if info.shape != shape:
            raise CheckpointError(
                f"{self._path}: tensor {name} has shape {list(info.shape)}, the configuration makes it {list(shape)}"
            )
        if info.dtype not in self._stored.dtypes:
            known = ", ".join(sorted(self._stored.dtypes))
            raise CheckpointError(f"{self._path}: tensor {name} is stored as {info.dtype}, not {known}")

    def read(self, names: Sequence[str]) -> Tensor:
        """Return the tensors stacked along their first dimension, in this reader's type and on its device."""
        infos = [self._tensors[name] for name in names]
        rows = sum(info.shape[0] for info in infos)
        fused = self._empty((rows, *infos[0].shape[1:]))
        begin = 0
        for name, info in zip(names, infos, strict=True):
            self._stored.copy(name, info, fused[begin : begin + info.shape[0]])
            begin += info.shape[0]
        return fused

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a tensor; a large one is dropped as soon as it is arranged, and must leave nothing behind."""
        nbytes = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or nbytes < LARGE_PAGE:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        return mapped(nbytes).view(self._dtype).view(shape)
