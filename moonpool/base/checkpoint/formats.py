"""Reads a checkpoint in either format: configuration, tensors, weights' identity, and the memory needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from moonpool.base.checkpoint.config import ModelConfig, ModelImpl, config_hash, kv_layout, resolve_dtype
from moonpool.base.checkpoint.gguf import GgufFile, gguf_parts, is_gguf
from moonpool.base.checkpoint.gguf_config import gguf_config
from moonpool.base.checkpoint.gguf_tensors import gguf_index
from moonpool.base.checkpoint.huggingface import folder_config, folder_index, folder_weights, quantisation_settings
from moonpool.base.checkpoint.model_cards import card_sampling
from moonpool.base.checkpoint.picture_rule import encoder_elements
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.checkpoint.weight_formats import PACKED_BYTES
from moonpool.base.errors import CheckpointError, InvalidRequest, MoonpoolError, UnsupportedModel
from moonpool.base.families import names_of
from moonpool.base.families.spec import described_ways
from moonpool.base.json_parts import parse_json
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE, ELEMENT_BYTES, KVGroup, KVLayout
from moonpool.base.quantization import Quantization

_STEP_TOKENS = 512
"""Tokens of an engine's largest step, unless a flag says another number."""


_DRAFTING = ("mtp.", "model.mtp.")
"""Beginnings of names of tensors that only draft, and are not loaded."""


def load_config(path: Path | str, model_impl: ModelImpl = "auto", max_model_len: int = 0) -> ModelConfig:
    """Read the configuration of the checkpoint `path`. If the files suggest no sampling, the model's card does.

    Args:
        path: folder or GGUF file.
        model_impl: "moonpool": refuse an architecture that no family describes; "transformers": describe what
            transformers' own code needs, also of an architecture with a family; "auto": the family if there is one.
        max_model_len: tokens of the longest sequence that is wanted, by which LongRoPE's factors are chosen; 0: as many
            as the short factors are for.

    Raises:
        CheckpointError: there is no readable configuration, or a field is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the field.
    """
    if is_gguf(path):
        if model_impl == "transformers":
            raise UnsupportedModel("model_impl", "transformers' own code does not compute GGUF files here")
        config = gguf_config(Path(path), max_model_len)
    else:
        config = folder_config(Path(path), model_impl, max_model_len)
    if config.default_sampling.given:
        return config
    return replace(config, default_sampling=card_sampling(Path(path)))


def architecture_of(path: Path | str) -> str:
    """Return the model's class as the checkpoint names it; "" if it names none, or cannot be read."""
    try:
        if is_gguf(path):
            return str(GgufFile.read(Path(path)).metadata.get("general.architecture", ""))
        names = parse_json((Path(path) / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError, MoonpoolError):
        return ""
    return str(names[0]) if isinstance(names, list) and names else ""


def weight_files(path: Path | str) -> list[Path]:
    """Return the files that hold the weights, sorted by name.

    Raises:
        CheckpointError: there are none, one that the index names is missing, or only pickle files are there.
    """
    return gguf_parts(Path(path)) if is_gguf(path) else folder_weights(Path(path))


def tensor_index(path: Path | str) -> dict[str, TensorInfo]:
    """Return every tensor by Hugging Face name, from the files' headers only.

    Raises:
        CheckpointError: a file is missing, damaged, shorter than its header says, or a tensor is in two files.
        UnsupportedModel: a GGUF file has a tensor that no supported model has.
    """
    return (gguf_index if is_gguf(path) else folder_index)(Path(path))


def weights_fingerprint(path: Path | str) -> bytes:
    """Return 32 bytes that differ wherever configuration or weights differ.

    Hashes every weight file whole (memory-mapped, on all cores), so that a fine-tuned copy with the same header never
    passes for the original. The same weights in other shards get another fingerprint; that costs cache misses, never a
    wrong answer.

    Raises:
        CheckpointError: as `load_config` and `weight_files`; or a file cannot be read.
    """
    digest = blake3(b"moonpool weights 1\0" + config_hash(load_config(path)))
    if not is_gguf(path) and (settings := quantisation_settings(Path(path))) is not None:
        digest.update(json.dumps(settings, sort_keys=True).encode())  # by which bytes stand for other weights
    for file in weight_files(path):
        content = blake3(max_threads=blake3.AUTO)
        try:
            content.update_mmap(file)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
        digest.update(content.digest())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One model's sizes in one element type.

    `weight_bytes` is what the weights take in memory in `dtype`, `file_bytes` what they take on disk. `kv_token_bytes`
    is one token's KV over all layers, `kv_block_bytes` one block's, `state_bytes` the part of a block that is
    recurrent states. `kv_groups` divides them by kind of layer.
    `fit_blocks` and `fit_tokens` say how much KV fits beside the weights into the given memory, as a pool divides it;
    None when none was given. `context_tokens` is the longest sequence, `kv_context_bytes` what it holds in a pool: of
    layers with a window, the window.
    `picture_bytes`: the encoder of pictures, if engines load it; not in `weight_bytes`.
    `computed`: how layers compute on a CPU. `reading_bytes`: what loading holds beside weights: the largest tensor
    in `dtype`, and of a folder the same tensor in its file, which is mapped meanwhile.
    """

    config: ModelConfig
    dtype: str
    parameters: int
    weight_bytes: int
    file_bytes: int
    block_size: int
    kv_token_bytes: int
    kv_block_bytes: int
    state_bytes: int
    kv_groups: str
    context_tokens: int
    kv_context_bytes: int
    computed: str
    reading_bytes: int
    picture_bytes: int = 0
    fit_blocks: int | None = None
    fit_tokens: int | None = None


def inspect_checkpoint(
    path: Path | str,
    dtype: str = "auto",
    block_size: int = DEFAULT_BLOCK_SIZE,
    memory_bytes: int | None = None,
    *,
    max_model_len: int | None = None,
    quantization: Quantization = "auto",
    model_impl: ModelImpl = "auto",
) -> CheckpointReport:
    """Return the sizes for the checkpoint in `path`, with the KV for a sequence with `max_model_len` tokens.

    `quantization`: how an engine will hold the weights. `model_impl`: see `load_config`.

    Raises:
        CheckpointError: as `load_config` and `tensor_index`.
        InvalidRequest: `memory_bytes` is negative, or `max_model_len` is not positive.
    """
    if max_model_len is not None and max_model_len <= 0:
        raise InvalidRequest("max_model_len", "must be positive")
    config = load_config(path, model_impl, max_model_len or 0)
    chosen = resolve_dtype(config, dtype)
    layout = kv_layout(config, chosen, block_size)
    tensors = _loaded(config, tensor_index(path))
    parameters = _count_parameters(config, tensors)
    weight_bytes = _held_bytes(config, tensors, ELEMENT_BYTES[chosen], quantization)
    file_bytes = sum(file.stat().st_size for file in sorted({info.file for info in tensors.values()}))
    largest = max(info.elements for info in tensors.values()) * ELEMENT_BYTES[chosen]
    context = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    blocks = None
    if memory_bytes is not None:
        if memory_bytes < 0:
            raise InvalidRequest("memory_bytes", "must not be negative")
        blocks = layout.blocks_in(max(0, memory_bytes - weight_bytes), _STEP_TOKENS, context)
    return CheckpointReport(
        config=config,
        dtype=chosen,
        parameters=parameters,
        weight_bytes=weight_bytes,
        file_bytes=file_bytes,
        block_size=block_size,
        kv_token_bytes=layout.token_bytes,
        kv_block_bytes=layout.block_bytes,
        state_bytes=layout.state_bytes,
        kv_groups="; ".join(_described(group, layout) for group in layout.groups),
        context_tokens=context,
        kv_context_bytes=layout.sequence_bytes(context),
        computed=_computed(config),
        reading_bytes=largest * (1 if is_gguf(path) else 2),
        picture_bytes=encoder_elements(Path(path)) * ELEMENT_BYTES[chosen],
        fit_blocks=blocks,
        fit_tokens=None if blocks is None else blocks * block_size,
    )


def _computed(config: ModelConfig) -> str:
    return described_ways([config.decoder.not_native(layer) for layer in range(config.num_layers)])


def _loaded(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors that engines load: not those of layers for drafting."""
    if config.decoder.other:
        return dict(tensors)
    begin, layers = names_of(config.architecture).layer.partition("{index}")[0], config.decoder.stored_layers

    def further(name: str) -> bool:
        index = name.removeprefix(begin).partition(".")[0] if name.startswith(begin) else ""
        return name.startswith(_DRAFTING) or (index.isdecimal() and int(index) >= layers)

    return {name: info for name, info in tensors.items() if not further(name)}


def _count_parameters(config: ModelConfig, tensors: dict[str, TensorInfo]) -> int:
    """Count the parameters; a tied output head is the embedding and counts once, stored or not."""
    head = names_of(config.architecture).head
    return sum(info.elements for name, info in tensors.items() if not (config.tie_word_embeddings and name == head))


def _held_bytes(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], element: int, quantization: Quantization
) -> int:
    """Return the memory of the weights: routers in float32, a packed model's head in 8 bits, a file's own codes."""
    names, total = names_of(config.architecture), 0.0
    for name, info in tensors.items():
        is_head, is_embedding = name == names.head, name == names.embedding
        if is_head and config.tie_word_embeddings:
            continue
        size: float = element
        if len(info.shape) > 1 and f"{names.router}.weight" in name:
            size = 4
        elif info.keeps_codes and quantization in ("auto", "file"):
            size = info.stored_bytes / info.elements
        elif len(info.shape) > 1 and info.shape[-1] % 32 == 0 and quantization in PACKED_BYTES:
            size = PACKED_BYTES[quantization]
            if is_head or is_embedding:
                size = PACKED_BYTES["int8"] if is_head or config.tie_word_embeddings else element
        total += info.elements * size
    return int(total)


def held_quantization(path: Path | str, config: ModelConfig, asked: Quantization) -> Quantization:
    """Return `asked`, or "none" if `asked` keeps a checkpoint's codes and this checkpoint has no such codes.

    Raises:
        CheckpointError: as `tensor_index`.
    """
    if asked not in ("auto", "file"):
        return asked
    if asked == "auto" and config.decoder.other:  # transformers' own code takes dense weights
        return "none"
    return asked if any(info.keeps_codes for info in tensor_index(path).values()) else "none"


def _described(group: KVGroup, layout: KVLayout) -> str:
    if group.kind == "recurrent":
        size = layout.slice_bytes(group.layers[0])
        return f"{len(group.layers)} layers with a recurrent state, {size:,} bytes a block each"
    what = {"full": "", "window": f" with a window of {group.window:,} tokens", "latent": " of latent vectors"}[
        group.kind
    ]
    token_bytes = -(-layout.slice_bytes(group.layers[0]) // layout.block_size)
    return f"{len(group.layers)} layers{what}, {token_bytes:,} bytes a token each"
