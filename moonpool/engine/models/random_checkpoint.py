"""Writes checkpoints with random weights: Hugging Face folders of named shapes, which transformers loads too."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.formats import load_config
from moonpool.base.errors import ConfigError
from moonpool.engine.models.loader import torch_dtype
from moonpool.engine.models.tensors import layer_tensors, outer_tensors

ModelShape = Mapping[str, Any]
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(
    architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> ModelShape:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **({"sliding_window": None} if model_type == "mistral" else {}),
        **({"use_sliding_window": False} if model_type.startswith("qwen") else {}),
        **more,
    }


_LATENT_SIZES = (64, 96, 4, 4, 4, 512)
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
#: Shapes that `moonpool model create` knows. Those named after a model have its shape, with random weights.
SHAPES: Mapping[str, ModelShape] = {
    # For tests: some 100,000 parameters.
    "tiny-llama": _shape("LlamaForCausalLM", 64, 128, 4, 4, 2, 512),
    "tiny-llama3": _shape(
        "LlamaForCausalLM",
        64,
        128,
        4,
        4,
        2,
        512,
        rope_theta=500000.0,
        rope_scaling={**_LLAMA3_SCALING, "original_max_position_embeddings": 64},
    ),
    "tiny-mistral": _shape("MistralForCausalLM", 64, 128, 4, 4, 1, 512),
    "tiny-qwen2": _shape("Qwen2ForCausalLM", 64, 128, 4, 4, 2, 512, tie_word_embeddings=True),
    "tiny-qwen3": _shape("Qwen3ForCausalLM", 64, 128, 4, 4, 2, 512, head_dim=32, tie_word_embeddings=True),
    # One model for each kind: windows, experts, latent attention with experts, recurrent states.
    "tiny-gemma3": _shape(
        "Gemma3ForCausalLM",
        64,
        128,
        4,
        4,
        2,
        512,
        model_type="gemma3_text",
        head_dim=16,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=False,
    ),
    "tiny-mixtral": _shape(
        "MixtralForCausalLM", 64, 96, 4, 4, 2, 512, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "tiny-deepseek-v3": _shape("DeepseekV3ForCausalLM", *_LATENT_SIZES, model_type="deepseek_v3", **_LATENT),
    "tiny-deepseek-v32": _shape(
        "DeepseekV32ForCausalLM",
        *_LATENT_SIZES,
        model_type="deepseek_v32",
        **_LATENT,
        index_topk=24,
        index_head_dim=16,
        index_n_heads=16,
    ),
    "tiny-qwen3-next": _shape(
        "Qwen3NextForCausalLM",
        64,
        96,
        4,
        4,
        2,
        512,
        model_type="qwen3_next",
        head_dim=16,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    ),
    # For measurements on a laptop.
    "small": _shape("LlamaForCausalLM", 512, 1408, 8, 8, 4, 32000, max_position_embeddings=8192),
    # A layer as of 3 billion weights, of which a token reads 0.5; fewer layers.
    "small-experts": _shape(
        "Qwen3MoeForCausalLM",
        1024,
        2048,
        8,
        16,
        2,
        32000,
        model_type="qwen3_moe",
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "smollm2-135m": _shape(
        "LlamaForCausalLM",
        576,
        1536,
        30,
        9,
        3,
        49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": _shape(
        "Qwen2ForCausalLM",
        896,
        4864,
        24,
        14,
        2,
        151936,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": _shape(
        "Qwen3ForCausalLM",
        1024,
        3072,
        28,
        16,
        8,
        151936,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _shape(
        "LlamaForCausalLM",
        2048,
        8192,
        16,
        32,
        8,
        128256,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={**_LLAMA3_SCALING, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-3-8b": _shape(
        "LlamaForCausalLM",
        4096,
        14336,
        32,
        32,
        8,
        128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "mistral-7b": _shape(
        "MistralForCausalLM",
        4096,
        14336,
        32,
        32,
        8,
        32768,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    ),
}
_BOS, _EOS, _PAD = "<s>", "</s>", "<pad>"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '[tools] ' + (tools | tojson) + '\\n' }}{% endif %}{% for message in messages %}"
    "{{ '[' + message['role'] + '] ' + message['content'] + '\\n' }}{% for call in message['tool_calls'] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>\\n' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


# Letters and signs by falling frequency in English text; the made-up merges join the frequent ones first.
_FREQUENT = " etaoinshrdlcumwfgypbvkxjqz\n.,ETAOINSHRDLCUMWFGYPBVKXJQZ0123456789-'\"()_=:;!?/[]{}<>+*#@$%&|~^`\\"


def create(
    name: str,
    path: Path | str,
    seed: int = 0,
    dtype: str = "bfloat16",
    *,
    shard_bytes: int = 2 << 30,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of shape `name` with weights drawn from `seed` into the folder `path`, and return the folder.

    The weights depend on seed, tensor names and shapes only, not on how they are sharded. They are larger than a
    trained model's first weights are, so that greedy output depends on what attention sees. More than `shard_bytes`
    of weights become several files with an index. `overrides` replaces fields of the shape's configuration.

    Raises:
        ConfigError: the name is unknown, `path` is not empty, or the vocabulary is smaller than 260.
        CheckpointError: the overridden configuration is not loadable.
    """
    if name not in SHAPES:
        raise ConfigError("name", f"{name!r} is none of {', '.join(SHAPES)}")
    fields = {**SHAPES[name], **(overrides or {})}
    if fields["vocab_size"] < 260:
        raise ConfigError("vocab_size", f"{fields['vocab_size']} does not hold 256 bytes and the special tokens")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError("path", f"{folder} is not empty")
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    _write_json(folder / "config.json", {**fields, **ends, "torch_dtype": dtype})
    _write_json(folder / "generation_config.json", {**ends, "do_sample": False})
    config = load_config(folder)
    _write_tokenizer(folder, config)
    _write_weights(folder, config, seed, torch_dtype(dtype), shard_bytes)
    return folder


LORA_SLOTS = ("q", "k", "v", "output", "gate", "up", "down")
"""Slots of a Llama's projections."""


def create_lora(
    path: Path | str,
    config: ModelConfig,
    seed: int = 0,
    slots: Sequence[str] = LORA_SLOTS,
    *,
    rank: int = 8,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a LoRA adapter in PEFT's format into the folder `path`, over what is there, and return the folder.

    The adapter is of all layers' projections at `slots` (`moonpool.engine.models.tensors`), with float32 weights drawn
    from `seed` that change most greedy tokens. `settings` replaces fields of adapter_config.json.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for index in range(config.num_layers):
        stored = layer_tensors(config, index)
        for slot in slots:
            part = stored[f"{slot}.weight"]
            name, (outputs, inputs) = f"base_model.model.{part.name.removesuffix('.weight')}", part.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in tensors if "lora_A" in name})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 4,
        "bias": "none",
        "target_modules": targets,
    }
    _write_json(folder / "adapter_config.json", {**fields, **(settings or {})})
    return folder


def _write_weights(folder: Path, config: ModelConfig, seed: int, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write the weights in one file or several with an index, holding no more than two files' in memory."""
    shapes = _tensor_shapes(config)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = total = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
        total += size
    weight_map: dict[str, str] = {}
    with _drawing_threads() as threads:
        drawn = _draw_ahead(threads, shards, seed, dtype)
        for number, (shard, tensors) in enumerate(zip(shards, drawn, strict=True), 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # safetensors makes files the writer's alone; services run as other users
            weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


@contextlib.contextmanager
def _drawing_threads() -> Iterator[ThreadPoolExecutor]:
    """Return a thread for each core, in which torch computes on that core alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of threads that begin from now on, too
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            yield threads
    finally:
        torch.set_num_threads(before)


def _draw_ahead(
    threads: ThreadPoolExecutor, shards: Sequence[Mapping[str, tuple[int, ...]]], seed: int, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield each shard's tensors, while `threads` draw the next shard's: one core draws 8e9 in two minutes."""

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        return _draw(name, shape, seed).to(dtype)

    def begin(shard: Mapping[str, tuple[int, ...]]) -> dict[str, Future[Tensor]]:
        return {name: threads.submit(draw, name, shape) for name, shape in shard.items()}

    waiting = begin(shards[0])
    for following in (*shards[1:], {}):
        tensors = {name: future.result() for name, future in waiting.items()}
        waiting = begin(following)
        yield tensors


def _tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return all tensors of the checkpoint."""
    slots = [*outer_tensors(config).values()]
    for index in range(config.num_layers):
        slots += layer_tensors(config, index).values()
    return {slot.name: slot.shape for slot in slots}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return one tensor's float32 weights, a function of seed, name and shape."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return values.mul_(0.1).add_(1.0)
    if name.endswith("bias") or len(shape) == 1:
        return values.mul_(0.5)
    if name == "model.embed_tokens.weight":
        return values.mul_(0.3)
    gain = 1.5 if ("q_proj" in name or "k_proj" in name) else 1.0
    return values.mul_(gain / shape[1] ** 0.5)


def _write_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Write a byte-level BPE tokenizer with exactly the model's vocabulary, so that every emitted token is text."""
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([_BOS, _EOS, _PAD, *byte_tokens])}
    merges = []
    for left, right in islice(_merges(), config.vocab_size - len(vocab)):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    begins = not config.architecture.startswith("Qwen")  # Qwen's tokenizers add no BOS
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{_BOS} $A", pair=f"{_BOS} $A {_BOS} $B", special_tokens=[(_BOS, 0)]
        )
    backend.add_special_tokens([_BOS, _EOS, _PAD])
    backend.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": _EOS,
            "pad_token": _PAD,
            "add_bos_token": begins,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _merges() -> Iterator[tuple[str, str]]:
    """Yield character pairs, then pairs with a third character: nearly a million, each giving a new token."""
    to_token = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    letters = [to_token(character)[0][0] for character in _FREQUENT]
    count = len(letters)
    pairs = sorted(((i, j) for i in range(count) for j in range(count)), key=lambda pair: (sum(pair), pair))
    for i, j in pairs:
        yield letters[i], letters[j]
    for i, j in pairs:
        for third in letters:
            yield letters[i] + letters[j], third


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
