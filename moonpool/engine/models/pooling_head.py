"""What follows on a prompt's pooled states: products of a head or of sentence-transformers, and the length 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.folder_tokenizer import folder_tokenizer
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.engine.models.tensor_reader import TensorReader
from moonpool.engine.models.tensors import Stored

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda values: values, "Tanh": torch.tanh, "ReLU": torch.relu, "GELU": torch.nn.functional.gelu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A product: `weight` [outputs, inputs], `bias` [outputs] or None, and the name of what follows."""

    weight: Tensor
    bias: Tensor | None
    activation: str = "Identity"


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """Takes pooled states [R, hidden] and gives float32 values [R, n]; `unit`: each row of length 1."""

    layers: Sequence[HeadLayer] = ()
    unit: bool = True

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the values of each row."""
        for layer in self.layers:
            rows = torch.nn.functional.linear(rows.to(layer.weight.dtype), layer.weight, layer.bias)
            rows = _ACTIVATIONS[layer.activation](rows)
        rows = rows.float()
        return torch.nn.functional.normalize(rows, dim=-1) if self.unit else rows


LENGTH_ONE = PoolingHead()
"""No products: the states, scaled to length 1."""


def load_pooling_head(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PoolingHead:
    """Read what follows on pooled states. A whole-prompt classifier's head is in transformers' own module.

    Raises:
        CheckpointError: a tensor is missing or has a wrong shape.
        UnsupportedModel: an answer is no token; names `classifier_from_token`.
    """
    pooling = config.pooling
    if pooling is None:
        return LENGTH_ONE
    if pooling.task == "embed":
        return PoolingHead([_dense(path, config, index, device) for index in range(len(pooling.dense))])
    if pooling.whole:
        return PoolingHead(unit=False)
    hidden, labels = config.hidden_size, len(pooling.labels)
    reader = TensorReader(path, names_in_front(config), torch.empty(0, dtype=dtype, device=device))

    def read(name: str, *shape: int) -> Tensor:
        stored = Stored(name, shape, shape)
        reader.expect(stored)
        return reader.read(stored).clone()

    if pooling.answers:
        no, yes = _token_ids(path, pooling.answers)
        rows = read(_head_name(config, reader), config.vocab_size, hidden)
        return PoolingHead([HeadLayer(rows[[yes]] - rows[[no]], None)], unit=False)
    if not pooling.hidden_head:
        return PoolingHead([HeadLayer(read("score.weight", labels, hidden), None)], unit=False)
    first = HeadLayer(read("score.0.weight", hidden, hidden), read("score.0.bias", hidden), "ReLU")
    last = HeadLayer(read("score.2.weight", labels, hidden), read("score.2.bias", labels))
    return PoolingHead([first, last], unit=False)


def names_in_front(config: ModelConfig) -> Mapping[str, str]:
    """Return parts of names that this family's checkpoints have in place of others.

    A folder that was saved without its head, as sentence-transformers does, has names without what stands in front. A
    family that has another name for that part keeps its own.
    """
    family = FAMILIES[config.architecture]
    return {f"{family.names.embedding.partition('.')[0]}.": "", **family.renamed}


def _head_name(config: ModelConfig, reader: TensorReader) -> str:
    """Return the name of the head over the vocabulary, which may be the embedding."""
    names = FAMILIES[config.architecture].names
    return names.head if reader.has(names.head) else names.embedding


def _token_ids(path: Path, texts: Sequence[str]) -> list[int]:
    """Return the tokens of texts.

    Raises:
        UnsupportedModel: a text is no token; names `classifier_from_token`.
    """
    backend = folder_tokenizer(path).backend
    found: list[int] = []
    for text in texts:
        token = backend.token_to_id(text)
        if token is None:
            raise UnsupportedModel("classifier_from_token", f"{text!r} is no token of the vocabulary")
        found.append(token)
    return found


def _dense(path: Path, config: ModelConfig, index: int, device: torch.device) -> HeadLayer:
    """Read a dense layer of sentence-transformers, in float32."""
    from safetensors.torch import load_file

    assert config.pooling is not None
    layer = config.pooling.dense[index]
    inputs = config.pooling.dense[index - 1].outputs if index else config.hidden_size
    file = path / layer.folder / "model.safetensors"
    if not file.exists():
        raise CheckpointError(f"{path}: {layer.folder}/model.safetensors is missing; pickle files are never loaded")
    tensors = load_file(file, device=str(device))
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or tuple(weight.shape) != (layer.outputs, inputs) or (layer.bias and bias is None):
        raise CheckpointError(f"{file}: linear.weight must be {layer.outputs} by {inputs}, and linear.bias beside it")
    return HeadLayer(weight.float(), bias.float() if layer.bias and bias is not None else None, layer.activation)
