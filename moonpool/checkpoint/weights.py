"""The weights that a folder declares: safetensors files, their headers, and which file holds which tensor.

A header is 8 bytes of little-endian length, then JSON; see the safetensors format. No tensor data is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.checkpoint.fields import read_json
from moonpool.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the limit that safetensors itself has
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: the file that holds it, its type there (for example "BF16" or "Q4_0") and its shape.

    Of GGUF files also the byte at which its data begins, and `paired_rows`: rows of a head, where those that RoPE turns
    together lie beside one another instead of half a head apart; 0 = they do not.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    paired_rows: int = 0

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def folder_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint in `folder`, sorted by name.

    Raises:
        CheckpointError: there are none, one that the index names is missing, or only pickle files are there.
    """
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        files = [_plain_name(index, name) for name in sorted({str(name) for name in weight_map.values()})]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{folder}: no model.safetensors and no {_INDEX}{_pickle_hint(folder)}")
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{folder}: {file.name}, named by {_INDEX}, is missing")
    return files


def folder_index(folder: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint by name, from the files' headers only.

    Raises:
        CheckpointError: a file is missing, damaged, shorter than its header says, or a tensor is in two files.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in folder_weights(folder):
        for name, info in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = info
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors that one safetensors file declares.

    Raises:
        CheckpointError: the file is no safetensors file or is cut short.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file}: not a whole safetensors file (header of {length} bytes)")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                if entry["data_offsets"][1] > size - 8 - length:
                    raise CheckpointError(f"{file}: cut short: tensor {name} lies past the end of the file")
                tensors[name] = TensorInfo(file, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from None


def _plain_name(index: Path, name: str) -> Path:
    """Return the file beside `index`; an index must not lead out of its folder."""
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
    return index.parent / name


def _pickle_hint(folder: Path) -> str:
    """Say that pickle files were seen and are not loaded."""
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    return f"; {min(pickles)} is a pickle file, and those are never loaded" if pickles else ""
