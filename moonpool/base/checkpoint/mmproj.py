"""The encoder of pictures of a GGUF model: the file `mmproj-*.gguf` beside it, told in a folder's words.

Source: the converters of llama.cpp for these projectors. What files leave out has the published models' values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3

from moonpool.base.checkpoint.gguf import GGUF_SUFFIX, GgufFile, is_mmproj
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields
from moonpool.base.pictures.rule import NO_ENCODER, PictureSettings

_PARTS, _SOUND = ("v.", "mm."), "mm.a."
"""What the names of an encoder's tensors begin with, and those of an encoder of sound."""
_WINDOW = 112
"""Pixels of the windows of Qwen2.5-VL's encoder."""
_QWEN2_PIXELS, _QWEN3_PIXELS = (56 * 56, 12845056), (65536, 16777216)
"""Fewest and most pixels of a picture, once resized."""
_QWEN3 = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe"}
_Read = Callable[["_Fields"], tuple[dict[str, Any], dict[str, Any]]]


def mmproj_of(model: Path) -> GgufFile:
    """Read the header of the one part for pictures beside the GGUF file `model` that is for this model.

    Raises:
        CheckpointError: there is none, or several are for this model; or a file is damaged.
        UnsupportedModel: no part is for this kind of model, or the encoder is not built; names the key.
    """
    return _fitting(model)[0]


def mmproj_settings(model: Path) -> PictureSettings:
    """Return what a folder would say of the encoder of the GGUF file `model`.

    Raises:
        CheckpointError: as `mmproj_of`; or a key is missing or malformed.
        UnsupportedModel: as `mmproj_of`.
    """
    file, whole = _fitting(model)
    _, read = _PROJECTORS[_projector(file)]
    config, processor = read(_Fields(file, whole))
    status = file.path.stat()
    return PictureSettings(config, processor, _content_hash(file.path, status.st_size, status.st_mtime_ns))


def _fitting(model: Path) -> tuple[GgufFile, GgufFile]:
    """Return the part for pictures, and the model; raises as `mmproj_of`."""
    files = [GgufFile.read(path) for path in sorted(model.parent.glob(f"*{GGUF_SUFFIX}")) if is_mmproj(path)]
    if not files:
        raise CheckpointError(NO_ENCODER)
    whole = GgufFile.read(model)
    architecture = whole.metadata.get("general.architecture")
    width = whole.metadata.get(f"{architecture}.embedding_length")
    fitting = [file for file in files if _projected(file) == width]
    if not fitting:
        first = files[0]
        why = f"{first.path.name} makes rows of {_projected(first)}, the model takes {width}"
        raise UnsupportedModel("clip.vision.projection_dim", why)
    if len(fitting) > 1:
        names = ", ".join(file.path.name for file in fitting)
        raise CheckpointError(f"{model.parent}: several parts for pictures are for {model.name}: {names}; leave one")
    projector = _projector(fitting[0])
    if projector not in _PROJECTORS or architecture not in _PROJECTORS[projector][0]:
        built = ", ".join(f"{name} for {' and '.join(names)}" for name, (names, _) in _PROJECTORS.items())
        raise UnsupportedModel("clip.projector_type", f"{projector!r} for {architecture} is not built; {built} are")
    return fitting[0], whole


def _projector(file: GgufFile) -> str:
    """Return the kind of encoder; files that also have one of sound name each under a key of its own."""
    return str(file.metadata.get("clip.projector_type") or file.metadata.get("clip.vision.projector_type"))


def mmproj_elements(model: Path) -> int:
    """Count the numbers in the encoder of the GGUF file `model`; raises as `mmproj_of`."""
    tensors = mmproj_of(model).tensors.items()
    return sum(prod(tensor.shape) for name, tensor in tensors if name.startswith(_PARTS) and _SOUND not in name)


def swapped_names(file: GgufFile) -> bool:
    """Tell whether a file has the two matrices of networks under each other's names, as older converters wrote them."""
    up, down = (file.tensors.get(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
    if up is None or down is None:  # who reads the tensors names the missing one
        return False
    hidden = file.metadata.get("clip.vision.embedding_length")
    return up.shape[-1:] != (hidden,) and down.shape[-1:] == (hidden,)


def paired_rows(file: GgufFile, name: str) -> int:
    """Return the rows of a head of a tensor whose rows converters put in pairs, as RoPE turns them; 0: they did not."""
    if _projector(file) != "pixtral" or (".attn_q." not in name and ".attn_k." not in name):
        return 0
    fields = JsonFields(file.metadata, file.path.name)
    return fields.positive("clip.vision.embedding_length") // fields.positive("clip.vision.attention.head_count")


def _projected(file: GgufFile) -> object:
    return file.metadata.get("clip.vision.projection_dim")


@lru_cache(maxsize=8)
def _content_hash(path: Path, size: int, changed_ns: int) -> str:
    """Hash a file whole; `size` and `changed_ns` tell files of one name apart."""
    del size, changed_ns
    content = blake3(max_threads=blake3.AUTO)
    try:
        return content.update_mmap(path).hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _list(file: GgufFile, key: str, value: object) -> list[Any]:
    """Return a key's list; [] if the key is missing."""
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CheckpointError(f"{file.path}: {key} must be a list, not {value!r}")
    return list(value)


class _Fields:
    """What the part for pictures and the model say.

    Attributes:
        file: the part.
        architecture: the model's.
        epsilon: of the model's norms.
        sections: pairs of elements of a head that M-RoPE turns by time, row and column; [] = the model has none.
        width: elements of a row.
        vision: the encoder's sizes as most configurations call them.
        processor: settings that all processors share.
    """

    def __init__(self, file: GgufFile, model: GgufFile) -> None:
        self.file, self._given = file, JsonFields(file.metadata, file.path.name)
        self.architecture = str(model.metadata["general.architecture"])
        self.epsilon = JsonFields(model.metadata, model.path.name).number(
            f"{self.architecture}.attention.layer_norm_rms_epsilon", 1e-6
        )
        sections = f"{self.architecture}.rope.dimension_sections"
        self.sections = _list(model, sections, model.metadata.get(sections))[:3]
        self.width = self.positive("projection_dim")
        up = file.tensors.get("v.blk.0.ffn_up.weight")
        if up is None or len(up.shape) != 2:
            raise CheckpointError(f"{file.path}: tensor v.blk.0.ffn_up.weight is missing")
        hidden = self.positive("embedding_length")
        self.vision: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": next((size for size in up.shape if size != hidden), hidden),
            "num_attention_heads": self.positive("attention.head_count"),
            "num_hidden_layers": self.positive("block_count"),
            "patch_size": self.positive("patch_size"),
            "layer_norm_eps": self._given.number("clip.vision.attention.layer_norm_epsilon", 1e-6),
        }
        self.processor: dict[str, Any] = {
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": self.get("image_mean"),
            "image_std": self.get("image_std"),
            "rescale_factor": 1 / 255,
        }

    def has(self, tensor: str) -> bool:
        """Tell whether the part has a tensor."""
        return tensor in self.file.tensors

    def get(self, key: str, default: object = None) -> Any:
        """Value of a key of the encoder."""
        return self._given.get(f"clip.vision.{key}", default)

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer; raises CheckpointError if it is missing without a default, or is another value."""
        name = f"clip.vision.{key}"
        return self._given.positive(name) if default is None else self._given.positive(name, default)


def _idefics3(found: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    side = found.positive("image_size")
    vision = {**found.vision, "model_type": "idefics3_vision", "image_size": side}
    config = {
        "model_type": "idefics3",
        "scale_factor": found.positive("projector.scale_factor", 2),
        "vision_config": vision,
        "text_config": {"model_type": "llama", "hidden_size": found.width},
    }
    return config, {
        **found.processor,
        "do_image_splitting": True,
        "do_pad": True,
        "max_image_size": {"longest_edge": side},
        "resample": 1,
        "size": {"longest_edge": found.positive("preproc_image_size", 4 * side)},
    }


def _gemma3(found: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    side = found.positive("image_size")
    rows = (side // found.vision["patch_size"] // found.positive("projector.scale_factor", 4)) ** 2
    vision = {**found.vision, "model_type": "siglip_vision_model", "image_size": side, "vision_use_head": False}
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": rows,
        "vision_config": vision,
        "text_config": {"model_type": "gemma3_text", "hidden_size": found.width},
    }
    return config, {**found.processor, "resample": 2, "size": {"height": side, "width": side}}


def _pixtral(found: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    side, patch, merged = found.positive("image_size"), found.vision["patch_size"], found.positive("spatial_merge_size")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    act = "silu" if found.get("use_silu") else "gelu"
    config = {
        "model_type": "mistral3",
        "spatial_merge_size": merged,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": found.has("mm.1.bias"),
        "projector_hidden_act": "gelu",
        "vision_config": {
            **found.vision, "model_type": "pixtral", "image_size": side, "hidden_act": act, "rope_parameters": rope,
        },
        "text_config": {"model_type": "mistral", "hidden_size": found.width, "rms_norm_eps": found.epsilon},
    }  # fmt: skip
    return config, {**found.processor, "patch_size": patch, "resample": 3, "size": {"longest_edge": side}}


def _internvl(found: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    side, patch = found.positive("image_size"), found.vision["patch_size"]
    merged, first = found.positive("projector.scale_factor", 2), "v.blk.0."
    vision = {
        **found.vision,
        "model_type": "internvl_vision",
        "image_size": [side, side],
        "patch_size": [patch, patch],
        "hidden_act": "silu" if found.get("use_silu") else "gelu",
        "attention_bias": found.has(f"{first}attn_q.bias"),
        "use_qk_norm": found.has(f"{first}attn_q_norm.weight"),
        "norm_type": "layer_norm" if found.has(f"{first}ln1.bias") else "rms_norm",
    }
    config = {
        "model_type": "internvl",
        "downsample_ratio": 1 / merged,
        "image_seq_length": (side // patch // merged) ** 2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "vision_config": vision,
        "text_config": {"model_type": "qwen2", "hidden_size": found.width},
    }
    return config, {
        **found.processor,
        "crop_to_patches": True,
        "min_patches": found.positive("preproc_min_tiles", 1),
        "max_patches": found.positive("preproc_max_tiles", 12),
        "resample": 3,
        "size": {"height": side, "width": side},
    }


def _qwen2(found: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = found.vision
    inner, hidden, layers = (sizes[name] for name in ("intermediate_size", "hidden_size", "num_hidden_layers"))
    vision = {"embed_dim": hidden, "hidden_size": found.width, "mlp_ratio": inner // hidden}
    kind = "qwen2_vl"
    if _projector(found.file) == "qwen2.5vl_merger":
        every, kind = found.positive("n_wa_pattern"), "qwen2_5_vl"
        vision = {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "out_hidden_size": found.width,
            "window_size": found.positive("window_size", _WINDOW),
            "fullatt_block_indexes": list(range(every - 1, layers, every)),
        }
    return _patches(found, kind, vision, _QWEN2_PIXELS)


def _qwen3(found: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    positions = found.file.tensors.get("v.position_embd.weight")
    if positions is None:
        raise CheckpointError(f"{found.file.path}: tensor v.position_embd.weight is missing")
    flags = _list(found.file, "clip.vision.is_deepstack_layers", found.get("is_deepstack_layers"))
    vision = {
        "hidden_size": found.vision["hidden_size"],
        "intermediate_size": found.vision["intermediate_size"],
        "out_hidden_size": found.width,
        "num_position_embeddings": positions.shape[0],
        "deepstack_visual_indexes": [index for index, added in enumerate(flags) if added],
    }
    return _patches(found, _QWEN3[found.architecture], vision, _QWEN3_PIXELS)


def _patches(
    found: _Fields, kind: str, vision: Mapping[str, Any], pixels: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what Qwen2-VL to Qwen3.5 share; `pixels`: fewest and most, where the file does not say."""
    patch, merged = found.vision["patch_size"], found.positive("spatial_merge_size", 2)
    whole = {
        **vision,
        "model_type": kind,
        "depth": found.vision["num_hidden_layers"],
        "num_heads": found.vision["num_attention_heads"],
        "patch_size": patch,
        "spatial_merge_size": merged,
        "temporal_patch_size": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": found.sections}
    config = {
        "model_type": kind,
        "vision_config": whole,
        "text_config": {"model_type": f"{kind}_text", "hidden_size": found.width, "rope_parameters": rope},
    }
    return config, {
        **found.processor,
        "merge_size": merged,
        "patch_size": patch,
        "resample": 3,
        "size": {
            "shortest_edge": found.positive("image_min_pixels", pixels[0]),
            "longest_edge": found.positive("image_max_pixels", pixels[1]),
        },
        "temporal_patch_size": 2,
    }


_PROJECTORS: Mapping[str, tuple[tuple[str, ...], _Read]] = {
    "gemma3": (("gemma3",), _gemma3),
    "idefics3": (("llama",), _idefics3),
    "internvl": (("llama", "qwen2", "qwen3", "qwen3moe"), _internvl),
    "pixtral": (("llama", "mistral3"), _pixtral),
    "qwen2.5vl_merger": (("qwen2vl",), _qwen2),
    "qwen2vl_merger": (("qwen2vl",), _qwen2),
    "qwen3vl_merger": (tuple(_QWEN3), _qwen3),
}
"""By `clip.projector_type`: architectures of the models, and what reads the part."""
