"""Weights of encoders of pictures: from a folder, or from the part for pictures beside a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moonpool.base.checkpoint.gguf import GgufFile, is_gguf
from moonpool.base.checkpoint.mmproj import mmproj_of, paired_rows, swapped_names
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.errors import CheckpointError
from moonpool.engine.models.tensor_files import GgufTensors

_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_GGUF_NAMES = (
    ("vision_model.", "v."),
    ("vision_tower.", "v."),
    ("visual.", "v."),
    ("embeddings.patch_embedding.", "patch_embd."),
    ("patch_embed.proj.", "patch_embd."),
    ("embeddings.patch_embeddings.projection.", "patch_embd."),
    ("embeddings.position_embeddings", "position_embd.weight"),
    ("embeddings.cls_token", "class_embd"),
    ("patch_conv.", "patch_embd."),
    ("ln_pre.", "pre_ln."),
    ("embeddings.position_embedding.", "position_embd."),
    ("pos_embed.", "position_embd."),
    ("encoder.layers.", "blk."),
    ("encoder.layer.", "blk."),
    ("transformer.layers.", "blk."),
    ("blocks.", "blk."),
    ("layer_norm1", "ln1"),
    ("layer_norm2", "ln2"),
    ("layernorm_before", "ln1"),
    ("layernorm_after", "ln2"),
    ("attention_norm", "ln1"),
    ("ffn_norm", "ln2"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("lambda_1", "ls1.weight"),
    ("lambda_2", "ls2.weight"),
    ("attention.projection_layer", "attn_out"),
    ("attention.o_proj", "attn_out"),
    ("attention.q_", "attn_q_"),
    ("attention.k_", "attn_k_"),
    ("attention.v_", "attn_v_"),
    ("attn_q_proj", "attn_q"),
    ("attn_k_proj", "attn_k"),
    ("attn_v_proj", "attn_v"),
    ("feed_forward.", "mlp."),
    ("self_attn.out_proj", "attn_out"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("v.post_layernorm", "v.post_ln"),
    ("v.merger.ln_q", "v.post_ln"),
    ("v.merger.norm", "v.post_ln"),
    ("v.merger.mlp.", "mm."),
    ("v.merger.linear_fc1", "mm.0"),
    ("v.merger.linear_fc2", "mm.2"),
    ("connector.modality_projection.proj", "mm.model.fc"),
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("multi_modal_projector.norm", "mm.input_norm"),
    ("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger"),
    ("multi_modal_projector.layer_norm", "mm.model.mlp.0"),
    ("multi_modal_projector.linear_", "mm."),
)
"""Parts of names by transformers and by llama.cpp, in the order in which they are replaced."""
_STACKED = re.compile(r"v\.deepstack_merger_list\.(\d+)\.(?:linear_)?")
_WHOLE_NORM = "mm.soft_emb_norm.weight"
"""The converter adds the offset of 1 to this norm."""
_INTERNVL = {"mm.1.": "mm.model.mlp.1.", "mm.2.": "mm.model.mlp.3."}
"""Names of a projector in files of InternVL in place of others."""
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def fill(path: Path, parts: Mapping[str, nn.Module], stacked: Sequence[int]) -> None:
    """Copy a checkpoint's tensors into the modules of an encoder.

    `stacked`: layers of the encoder behind which further rows are made (DeepStack).

    Raises:
        CheckpointError: a tensor is missing, quantised, or has another shape.
    """
    weights = {f"{part}.{name}": weight for part, module in parts.items() for name, weight in module.named_parameters()}
    with torch.no_grad():
        if is_gguf(path):
            _fill_from_gguf(mmproj_of(path), weights, stacked)
        else:
            _fill_from_folder(path, weights)


def _fill_from_folder(path: Path, missing: dict[str, nn.Parameter]) -> None:
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                    weight = missing.pop(stored.removeprefix("model."), None)
                    if weight is not None:
                        weight.copy_(_checked(stored, tensors.get_tensor(stored), weight))
        except Exception as error:  # safetensors raises its own bare errors
            raise CheckpointError(f"{file}: the encoder of pictures cannot be read: {error}") from None
    if missing:
        raise CheckpointError(f"{path}: tensor {min(missing)} of the encoder of pictures is missing")


def _checked(name: str, found: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor that can be copied: codes would become numbers, and a single number all of them."""
    if found.dtype not in _NUMBERS:
        raise ValueError(f"tensor {name} is quantised ({str(found.dtype).removeprefix('torch.')})")
    if found.numel() != weight.numel():
        raise ValueError(f"tensor {name} has shape {list(found.shape)}, the encoder takes {list(weight.shape)}")
    return found


def _fill_from_gguf(file: GgufFile, weights: Mapping[str, Tensor], stacked: Sequence[int]) -> None:
    tensors, swapped = GgufTensors(), swapped_names(file)
    for name, weight in weights.items():
        for theirs, target in _targets(file, _gguf_name(name, stacked), weight):
            renamed = re.sub("|".join(_SWAPPED), lambda found: _SWAPPED[found[0]], theirs) if swapped else theirs
            tensor = file.tensors.get(renamed)
            if tensor is None:
                raise CheckpointError(f"{file.path}: tensor {renamed} of the encoder of pictures is missing")
            if _sides(tensor.shape) != _sides(target.shape):
                shape, right = list(tensor.shape), list(target.shape)
                raise CheckpointError(f"{file.path}: tensor {renamed} has shape {shape}, the encoder takes {right}")
            read = torch.empty(tensor.shape)
            kind = tensor.type
            place = TensorInfo(
                tensor.file,
                kind.name,
                tensor.shape,
                tensor.begin,
                paired_rows(file, renamed),
                kind if kind.elements > 1 else None,
            )
            tensors.copy(renamed, place, read)
            target.copy_((read - 1 if renamed == _WHOLE_NORM else read).view(target.shape))


def _sides(shape: Sequence[int]) -> list[int]:
    """Return a tensor's sides without those of 1, which some converters leave out."""
    return [side for side in shape if side > 1]


def _gguf_name(name: str, stacked: Sequence[int]) -> str:
    """Return llama.cpp's name for a parameter of an encoder."""
    for ours, theirs in _GGUF_NAMES:
        name = name.replace(ours, theirs)
    return _STACKED.sub(lambda found: f"v.deepstack.{stacked[int(found[1])]}.", name)


def _targets(file: GgufFile, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that make a parameter, each with its part of the parameter."""
    if weight.dim() == 5:  # pictures count as two moments
        yield name, weight[:, :, 0]
        yield f"{name}.1", weight[:, :, 1]
    elif "attn_qkv" in name and name not in file.tensors:
        for kind, part in zip("qkv", weight.chunk(3), strict=True):
            yield name.replace("attn_qkv", f"attn_{kind}"), part
    elif name not in file.tensors and (other := _INTERNVL.get(name[:5])):
        yield f"{other}{name[5:]}", weight
    else:
        yield name, weight
