"""Hugging Face checkpoint folders, without torch: where they are, what they declare, how text becomes tokens.

Owns finding a folder (`resolve`), reading and refusing its configuration (`load_config`), its identity
(`config_hash`, `weights_fingerprint`), its tokenizer and chat template, and the report of `model inspect`. It must not
know torch, grpc, or who uses the model. Nothing from a checkpoint is ever executed and no pickle is ever read.
"""

from moonpool.checkpoint.config import (
    DefaultSampling,
    ModelConfig,
    RopeScaling,
    config_hash,
    kv_layout,
    load_config,
    resolve_dtype,
)
from moonpool.checkpoint.fingerprint import weights_fingerprint
from moonpool.checkpoint.inspect import Report, inspect_checkpoint
from moonpool.checkpoint.resolve import model_name, resolve
from moonpool.checkpoint.stops import StopWatcher
from moonpool.checkpoint.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "DefaultSampling",
    "Detokenizer",
    "ModelConfig",
    "Report",
    "RopeScaling",
    "StopWatcher",
    "Tokenizer",
    "config_hash",
    "inspect_checkpoint",
    "kv_layout",
    "load_config",
    "model_name",
    "resolve",
    "resolve_dtype",
    "weights_fingerprint",
]
