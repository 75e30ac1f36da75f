"""The identity of a checkpoint's weights: a hash of the function they compute and of every byte of them."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from moonpool.checkpoint.config import config_hash
from moonpool.checkpoint.formats import load_config, weight_files
from moonpool.errors import CheckpointError


def weights_fingerprint(path: Path | str) -> bytes:
    """Return 32 bytes that differ wherever configuration or weights differ.

    Hashes every file of weights whole (memory-mapped, on all cores), so that a fine-tuned copy with the same header
    never passes for the original. The same weights in other shards get another fingerprint; that costs cache misses,
    never a wrong answer.

    Raises:
        CheckpointError: as `load_config` and `weight_files`; or a file cannot be read.
    """
    digest = blake3(b"moonpool weights 1\0" + config_hash(load_config(path)))
    for file in weight_files(path):
        content = blake3(max_threads=blake3.AUTO)
        try:
            content.update_mmap(file)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
        digest.update(content.digest())
    return digest.digest()
