"""The two forms of a checkpoint, a Hugging Face folder and a GGUF file: reads whichever a path names."""

from __future__ import annotations

from pathlib import Path

from moonpool.checkpoint.config import ModelConfig
from moonpool.checkpoint.folder import folder_config
from moonpool.checkpoint.gguf_config import gguf_config
from moonpool.checkpoint.gguf_file import gguf_parts, is_gguf
from moonpool.checkpoint.gguf_weights import gguf_index
from moonpool.checkpoint.weights import TensorInfo, folder_index, folder_weights


def load_config(path: Path | str) -> ModelConfig:
    """Read the configuration of the checkpoint `path`.

    Raises:
        CheckpointError: there is no readable configuration, or a field is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the field.
    """
    return (gguf_config if is_gguf(path) else folder_config)(Path(path))


def weight_files(path: Path | str) -> list[Path]:
    """Return the files that hold the weights, sorted by name.

    Raises:
        CheckpointError: there are none, one that the index names is missing, or only pickle files are there.
    """
    return gguf_parts(Path(path)) if is_gguf(path) else folder_weights(Path(path))


def tensor_index(path: Path | str) -> dict[str, TensorInfo]:
    """Return every tensor by its Hugging Face name, from the files' headers only.

    Raises:
        CheckpointError: a file is missing, damaged, shorter than its header says, or a tensor is in two files.
        UnsupportedModel: a GGUF file has a tensor that no supported model has.
    """
    return (gguf_index if is_gguf(path) else folder_index)(Path(path))
