"""Importance matrices, as `llama-imatrix` of llama.cpp writes them: how much each input of a matrix counts.

A number is the mean square of an input over a text. Files are GGUF (since 2025), or have the older form: the number of
entries, and for each entry the name, the number of calls, and the numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.gguf import GgufFile
from moonpool.base.checkpoint.gguf_tensors import translated
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES

_MAGIC = b"GGUF"
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path, config: ModelConfig) -> Mapping[str, Tensor]:
    """Return the importance of inputs by the weight's Hugging Face name, float32 [inputs].

    If a family has all experts in one tensor, that tensor's name has [experts, inputs]. Entries for tensors that the
    model does not have are left out.

    Raises:
        CheckpointError: the file is damaged, or has nothing for this model.
    """
    try:
        with path.open("rb") as stream:
            is_gguf = stream.read(len(_MAGIC)) == _MAGIC
        entries = dict(_of_gguf(path) if is_gguf else _of_older(path))
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: not an importance matrix: {error}") from None
    found: dict[str, Tensor] = {}
    for name, importance in entries.items():
        found |= _of_model(path, name, importance, config)
    if not found:
        raise CheckpointError(f"{path}: has no tensor of a model of {config.architecture}")
    return found


def _of_model(path: Path, name: str, importance: Tensor, config: ModelConfig) -> Mapping[str, Tensor]:
    """Return an entry under the names of the model's weights."""
    family = FAMILIES[config.architecture]
    try:
        ours, leaf = translated(name, family)
    except UnsupportedModel:
        return {}
    if not leaf.endswith("_exps"):
        return {ours: importance.flatten()}
    experts = next((layer.feed_forward.experts for layer in config.decoder.layers if layer.feed_forward.experts), None)
    if experts is None or importance.numel() % experts.count:
        raise CheckpointError(f"{path}: {name} has {importance.numel()} numbers, which are not those of experts")
    rows = importance.reshape(experts.count, -1)
    found = {ours.format(expert=expert): row for expert, row in enumerate(rows)}
    whole = {"ffn_gate_exps": family.names.experts_gate_up, "ffn_down_exps": family.names.experts_down}.get(leaf)
    if whole:
        found[ours.partition(family.names.expert)[0] + whole] = rows
    return found


def _of_gguf(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names, and mean squares [inputs] or [experts, inputs]."""
    file = GgufFile.read(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ValueError(f"general.type is {file.metadata.get('general.type')!r}")
    for name, tensor in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        stem = name.removesuffix(_SUMS)
        if f"{stem}{_COUNTS}" not in file.tensors:
            raise ValueError(f"{stem} has no counts")
        if not prod(tensor.shape):
            raise ValueError(f"{stem} has no numbers")
        sums = torch.tensor(file.floats(name)).view(-1, tensor.shape[-1])
        counts = torch.tensor(file.floats(f"{stem}{_COUNTS}")).view(-1, 1)
        if len(counts) != len(sums):
            raise ValueError(f"{stem} has {len(sums)} rows and {len(counts)} counts")
        yield stem, sums / counts.clamp(min=1)


def _of_older(path: Path) -> Iterator[tuple[str, Tensor]]:
    """As `_of_gguf`; numbers of all experts lie one behind the other."""
    data, at = path.read_bytes(), 4
    (count,) = struct.unpack_from("<i", data)
    if not 0 < count < len(data):
        raise ValueError(f"{count} entries")
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, at)
        if length < 0:
            raise ValueError(f"a name of {length} bytes")
        name = data[at + 4 : at + 4 + length].decode()
        calls, size = struct.unpack_from("<ii", data, at + 4 + length)
        at += 12 + length
        if size < 1 or at + 4 * size > len(data):
            raise ValueError(f"{name} has {size} numbers")
        numbers = np.frombuffer(data, np.float32, size, at)
        at += 4 * size
        yield name, torch.from_numpy(numbers / max(1, calls))
