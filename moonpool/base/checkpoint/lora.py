"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` in a folder. Torch-free.

Settings that would change answers and are not computed here are refused by name. An adapter's identity is the hash of
both files. Source: Hu et al. 2021; PEFT's format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from moonpool.base.checkpoint.huggingface import read_header
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields, check_files
from moonpool.base.json_parts import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    }
)  # fmt: skip
"""Training settings, and settings that the file's tensors show, such as the modules."""
_PLAIN_VALUES: Mapping[str, Sequence[object]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others change the base model's weights
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted projection: outputs += `scale` * B(A(inputs)), where A has `rank` outputs."""

    rank: int
    scale: float
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter's description.

    Attributes:
        id: 32 bytes, the content's hash: equal for equal files, independent of the adapter's name.
        base_model: the model that the adapter was made for, as the adapter says; "" if the adapter does not say.
        modules: the adapted projections by name in the base model, for example "model.layers.0.self_attn.q_proj".
    """

    id: bytes
    base_model: str
    modules: Mapping[str, LoraModule]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(module.rank for module in self.modules.values())


def read_adapter(folder: Path) -> LoraAdapter:
    """Return the adapter in `folder`; read only the weights' header, and hash all bytes.

    Raises:
        CheckpointError: a file is missing, damaged, or the two files do not belong together.
        UnsupportedModel: the adapter does something that is not computed; names the setting or the tensor.
    """
    settings = read_settings(folder)
    file = folder / WEIGHTS
    if not file.exists():
        raise CheckpointError(f"{folder}: no {WEIGHTS} in this folder{_pickle_hint(folder)}")
    content = blake3(max_threads=blake3.AUTO)
    try:
        content.update_mmap(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    shapes = {name: info.shape for name, info in read_header(file).items()}
    return describe_adapter(settings, content.digest(), shapes, folder)


def read_settings(folder: Path) -> bytes:
    """Return the content of `adapter_config.json`, once all of the adapter's files are known to be files.

    Raises:
        CheckpointError: the file is missing or cannot be read; or the folder has what is no file.
    """
    check_files(folder)
    try:
        return (folder / CONFIG).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {CONFIG} in this folder") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / CONFIG}: {error}") from error


def describe_adapter(
    settings: bytes, weights_digest: bytes, shapes: Mapping[str, Sequence[int]], folder: Path
) -> LoraAdapter:
    """Return the adapter with these settings and tensors; see `read_adapter`.

    Args:
        settings: content of `adapter_config.json`.
        weights_digest: BLAKE3 of the file with the tensors.
        shapes: the tensors' shapes, by name.
        folder: for errors.
    """
    try:
        data = parse_json(settings)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder / CONFIG}: must hold a JSON object")
    fields = JsonFields(data, CONFIG)
    _refuse_others(data)
    parts = _pairs(shapes)
    modules = {name: _module(fields, name, *parts[name]) for name in sorted(parts)}
    if not modules:
        raise CheckpointError(f"{folder / WEIGHTS}: has no LoRA tensors")
    base = data.get("base_model_name_or_path")
    identity = blake3(b"moonpool lora adapter v1\0" + blake3(settings).digest() + weights_digest).digest()
    return LoraAdapter(identity, base if isinstance(base, str) else "", modules)


def check_rank(lora: LoraAdapter, max_rank: int) -> None:
    """Raise UnsupportedModel, which names `max_lora_rank`, if the adapter's rank is larger."""
    if lora.rank > max_rank:
        raise UnsupportedModel("max_lora_rank", f"the LoRA adapter has rank {lora.rank}, the setting allows {max_rank}")


def _refuse_others(data: Mapping[str, object]) -> None:
    """Refuse each setting that is neither read nor without effect, unless the setting is empty or off."""
    for name, value in data.items():
        plain = _PLAIN_VALUES.get(name)
        if name in _READ or name in _WITHOUT_EFFECT or not value or (plain is not None and value in plain):
            continue
        raise UnsupportedModel(f"{CONFIG}: {name}", f"an adapter with {json.dumps(value)[:80]} is not supported")
    if data.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{CONFIG}: peft_type", f"{data.get('peft_type')!r} is not 'LORA'")


def _pairs(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Return the shapes of A [rank, inputs] and B [outputs, rank] by module."""
    found: dict[str, dict[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(name, "only tensors lora_A.weight and lora_B.weight of projections are supported")
        found.setdefault(match["module"], {})[match["part"]] = shape
    for name, parts in found.items():
        if len(parts) < 2:
            raise CheckpointError(f"{WEIGHTS}: {name} has only lora_{next(iter(parts))}.weight")
    return {name: (parts["A"], parts["B"]) for name, parts in found.items()}


def _module(fields: JsonFields, name: str, a: Sequence[int], b: Sequence[int]) -> LoraModule:
    rank, alpha = _of_module(fields, "rank_pattern", "r", name), _of_module(fields, "alpha_pattern", "lora_alpha", name)
    if rank != int(rank) or rank < 1:
        raise CheckpointError(f"{CONFIG}: the rank of {name} must be a positive integer, not {rank}")
    if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank):
        raise CheckpointError(f"{WEIGHTS}: {name} has lora_A {list(a)} and lora_B {list(b)}; {CONFIG} says rank {rank}")
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    return LoraModule(int(rank), scale, a[1], b[0])


def _of_module(fields: JsonFields, patterns: str, default: str, name: str) -> float:
    """Return a module's number: the first pattern that fits the name's end decides, as in PEFT; else `default`."""
    found = fields.get(patterns) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIG}: {patterns} must be an object, not {found!r}")
    for pattern in found:
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return JsonFields(found, f"{CONFIG}: {patterns}").number(pattern)
        except re.error as error:
            raise CheckpointError(f"{CONFIG}: {patterns}: {pattern!r} is no regular expression: {error}") from None
    return fields.number(default)


def _pickle_hint(folder: Path) -> str:
    """Say that a pickle file was seen and is not loaded."""
    there = (folder / "adapter_model.bin").exists()
    return "; adapter_model.bin is a pickle file, and those are never loaded" if there else ""
