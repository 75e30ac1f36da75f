"""Checkpoints (Hugging Face folders, GGUF files) without torch: finding, reading, identifying them; tokenizers.

No part of a checkpoint is executed and no pickle is read.
"""

from moonpool.base.checkpoint.chat_template import ChatOptions, RenderedChat
from moonpool.base.checkpoint.config import (
    DefaultSampling,
    ModelConfig,
    ModelImpl,
    config_hash,
    kv_layout,
    resolve_dtype,
)
from moonpool.base.checkpoint.formats import (
    CheckpointReport,
    architecture_of,
    held_quantization,
    inspect_checkpoint,
    load_config,
    weights_fingerprint,
)
from moonpool.base.checkpoint.resolve import model_name, resolve
from moonpool.base.checkpoint.tokenizer import Detokenizer, StopWatcher, Tokenizer
from moonpool.base.families.spec import RopeScaling

__all__ = [
    "ChatOptions",
    "CheckpointReport",
    "DefaultSampling",
    "Detokenizer",
    "ModelConfig",
    "ModelImpl",
    "RenderedChat",
    "RopeScaling",
    "StopWatcher",
    "Tokenizer",
    "architecture_of",
    "config_hash",
    "held_quantization",
    "inspect_checkpoint",
    "kv_layout",
    "load_config",
    "model_name",
    "resolve",
    "resolve_dtype",
    "weights_fingerprint",
]
