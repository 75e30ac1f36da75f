"""The tensors of a GGUF file, under their Hugging Face names."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

from moonpool.base.checkpoint.gguf import GgufFile
from moonpool.base.checkpoint.gguf_config import LONGROPE_FACTORS, ROPE_DIVISORS, SECOND_NORM, config_of
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.checkpoint.weight_formats import GgufType
from moonpool.base.errors import UnsupportedModel
from moonpool.base.families import FAMILIES
from moonpool.base.families.base import ModelFamily, TensorNames
from moonpool.base.families.spec import AttentionSpec

_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<leaf>\w+(?:\.\w+)??)(?:\.(?P<kind>weight|bias|scale))?")
_PAIRED = ("attn_q", "attn_k")
_WHOLE_NAMES = ("sinks", "correction", "scalar", "router_scale", "expert_scale")
"""Fields of `TensorNames` that do not end with .weight or .bias."""
_WHOLE_RECURRENT = ("decay", "step_bias", "skip")
"""As `_WHOLE_NAMES`, of the keys of `TensorNames.recurrent`."""


def gguf_index(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor in a GGUF file by Hugging Face name.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModel: the file has a tensor that the model would not use; names the tensor.
    """
    file = GgufFile.read(path)
    config = config_of(file)
    family = FAMILIES[config.architecture]
    assert family.gguf is not None
    paired = config.head_dim if family.gguf.paired_rows else 0
    index, layers = dict[str, TensorInfo](), config.decoder.stored_layers
    names, second = family.names, SECOND_NORM in file.tensors
    for name, tensor in file.tensors.items():
        if name in (ROPE_DIVISORS, *LONGROPE_FACTORS) or (family.gguf.further_layers and _layer(name) >= layers):
            continue
        ours, leaf = translated(_swapped(name) if second else name, family)
        row = leaf == "exp_probs_b" and family.names.correction_row
        info = TensorInfo(
            tensor.file,
            tensor.type.name,
            (1, prod(tensor.shape)) if row else _shape(tensor.shape, family, leaf),
            begin=tensor.begin,
            paired_rows=paired if leaf in _PAIRED else 0,
            format=tensor.type if tensor.type.elements > 1 else None,
        )
        if leaf == "attn_qkv" and (names.qkv_order == "grouped" or names.inputs_first):
            index |= _by_kind(ours, info, tensor.type, config.decoder.every[_layer(name)].attention, names)
        else:
            index |= _by_expert(ours, info, tensor.type) if leaf.endswith("_exps") else {ours: info}
    return index


def _swapped(name: str) -> str:
    """Return the name of a file of Falcon in which the second norm is the network's, as elsewhere."""
    first, second = ".attn_norm.", ".attn_norm_2."
    return name.replace(first, second) if first in name else name.replace(second, first)


def _by_kind(
    name: str, info: TensorInfo, kind: GgufType, spec: AttentionSpec, names: TensorNames
) -> dict[str, TensorInfo]:
    """Return the queries', keys' and values' parts of a tensor that has all queries, then all keys, then all values."""
    found, begin = dict[str, TensorInfo](), info.begin
    for part, heads in ((names.q, spec.num_heads), (names.k, spec.num_kv_heads), (names.v, spec.num_kv_heads)):
        shape = (heads * spec.head_dim, *info.shape[1:])
        found[name.replace(names.qkv, part)] = replace(info, shape=shape, begin=begin)
        begin += prod(shape) // kind.elements * kind.bytes
    return found


def _shape(shape: tuple[int, ...], family: ModelFamily, leaf: str) -> tuple[int, ...]:
    """Return the shape that a folder has. Converters leave out a convolution's dimension of 1, and give vectors one."""
    role = "" if family.gguf is None else _recurrent_role(family, family.gguf.recurrent.get(leaf, ""))
    if role == "conv" and len(shape) > 1:
        return (prod(shape[:-1]), 1, shape[-1])
    return (prod(shape),) if role in (*_WHOLE_RECURRENT, "norm") else shape


def _recurrent_role(family: ModelFamily, name: str) -> str:
    """Return the key of `TensorNames.recurrent` that has a name; "": none."""
    return next((role for role, names in family.names.recurrent.items() if name in names), "")


def _layer(name: str) -> int:
    """Return the layer that a tensor belongs to; -1: none."""
    match = re.match(r"blk\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


def _by_expert(name: str, info: TensorInfo, kind: GgufType) -> dict[str, TensorInfo]:
    """Return each expert's part of a tensor that holds all experts, [experts, outputs, inputs] or [experts, outputs].

    If `name` is several names by space, an expert's rows are the tensors of these names.
    """
    count, rows, *inputs = info.shape
    names = name.split()
    shape = (rows // len(names), *inputs)
    size = prod(shape) // kind.elements * kind.bytes
    return {
        part.format(expert=expert): replace(info, shape=shape, begin=info.begin + (expert * len(names) + place) * size)
        for expert in range(count)
        for place, part in enumerate(names)
    }


def translated(name: str, family: ModelFamily) -> tuple[str, str]:
    """Return a tensor's Hugging Face name, and the part of GGUF's name that tells the tensor's role.

    A tensor for all experts has `{expert}` in the name.

    Raises:
        UnsupportedModel: the family has no such tensor, or no GGUF files.
    """
    names, gguf = family.names, family.gguf
    if gguf is None:
        raise UnsupportedModel(name, f"{family.architecture} has no GGUF names here")
    match = _TENSOR_NAME.fullmatch(name)
    known = {} if match is None else gguf.outer if match["layer"] is None else {**gguf.layer, **gguf.renamed}
    leaf = "" if match is None else f"{match['leaf']}.scale" if match["kind"] == "scale" else match["leaf"]
    prefix = "" if match is None or match["layer"] is None else names.layer.format(index=match["layer"])
    if match is not None and leaf in gguf.recurrent:
        ours = gguf.recurrent[leaf]
        whole = _recurrent_role(family, ours) in _WHOLE_RECURRENT
        return f"{prefix}{ours}" + ("" if whole else f".{match['kind']}"), leaf
    if leaf == "ffn_gate_up_exps":
        each = f"{prefix}{names.expert}"
        return f"{each}{names.expert_gate}.weight {each}{names.expert_up}.weight", leaf
    role = known.get(leaf, "")
    ours = getattr(names, role, "")
    if match is None or not ours:
        raise UnsupportedModel(name, "this tensor has no place in a model of this architecture")
    if match["layer"] is None:
        return f"{ours.removesuffix('.weight')}.{match['kind']}", leaf
    if leaf.endswith("_exps"):
        ours = f"{names.expert}{ours}"
    ending = "" if role in _WHOLE_NAMES else f".{match['kind'] or 'weight'}"
    return f"{prefix}{ours}{ending}", leaf
