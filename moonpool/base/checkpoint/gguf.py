"""A GGUF file's header: metadata, and the file's own tensor names and places.

A large model may come in parts, `NAME-00001-of-00003.gguf` and so on: the first part has the metadata and stands for
all. Source: GGUF's specification, `docs/gguf.md` of ggml; versions 2 and 3, little-endian. No tensor data is read.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.base.checkpoint.weight_formats import GGUF_TYPES, GgufType
from moonpool.base.errors import CheckpointError, UnsupportedModel

GGUF_SUFFIX = ".gguf"
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """One tensor: type, shape with rows first, the byte at which the data begins, and file."""

    type: GgufType
    shape: tuple[int, ...]
    begin: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of the file `path` and of further parts; metadata and tensors have the file's own names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header of `path`, and of further parts if any.

        Raises:
            CheckpointError: a file is missing, damaged, cut short or no GGUF file, or not the first part.
            UnsupportedModel: a version, a byte order or a tensor's type that cannot be read.
        """
        first, *others = (_read_one(part) for part in gguf_parts(path))
        tensors = dict(first.tensors)
        for part in others:
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{part.path}: tensor {name} is in {tensors[name].file.name} too")
                tensors[name] = tensor
        wanted, count = (first.metadata.get(f"split.{key}") for key in ("tensors.count", "count"))
        if (count or 1) != 1 + len(others):
            raise CheckpointError(f"{path}: is one of {count} parts, which its name does not say")
        if others and wanted is not None and wanted != len(tensors):
            raise CheckpointError(f"{path}: the parts have {len(tensors)} tensors, {wanted} are expected")
        return cls(path, first.metadata, tensors)

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the F32 tensor `name`'s elements.

        Raises:
            CheckpointError: stored in another type.
        """
        tensor = self.tensors[name]
        if tensor.type.name != "F32":
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {tensor.type.name}, not F32")
        count = _product(tensor.shape)
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return struct.unpack(f"<{count}f", stream.read(4 * count))


def is_gguf(path: Path | str) -> bool:
    """Tell whether `path` names a GGUF file, by the ending."""
    return str(path).endswith(GGUF_SUFFIX)


def is_mmproj(path: Path) -> bool:
    """Tell whether a GGUF file is the part for pictures, by the name that llama.cpp's converter gives it."""
    return "mmproj" in path.name.lower()


def gguf_parts(path: Path) -> list[Path]:
    """Return the model's files, if `path` is the model or the model's first part.

    Raises:
        CheckpointError: another part, or a part is missing.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{GGUF_SUFFIX}") for number in range(1, count + 1)
    ]
    if path != parts[0]:
        raise CheckpointError(f"{path}: is part {int(match['number'])} of a model; name the first, {parts[0].name}")
    for part in parts:
        if not part.exists():
            raise CheckpointError(f"{path}: part {part.name} is missing")
    return parts


def gguf_name(path: Path) -> str:
    """Return a GGUF file's name without the ending and part number."""
    match = _PART_NAME.fullmatch(path.name)
    return path.name.removesuffix(GGUF_SUFFIX) if match is None else match["stem"]


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_value(path, _Cursor(data))
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file: {error}") from None


class _Cursor:
    """Reads values one after the other; raises ValueError or struct.error past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.position = 0

    def raw(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise ValueError(f"it ends at byte {self.size}, within its header")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def values(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._data, self.position)
        self.position += struct.calcsize("<" + form)
        return found

    def number(self, form: str) -> int:
        value: int = self.values(form)[0]
        return value

    def text(self) -> str:
        return self.raw(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Return a value, of the type that the file has just named."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(*self.values("IQ"))
        if kind not in _SCALARS:
            raise ValueError(f"metadata of type {kind}")
        return self.values(_SCALARS[kind])[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata is an array of type {kind}")
        return list(self.values(f"{count}{_SCALARS[kind]}"))


def _read_value(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.raw(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModel("GGUF.version", f"{path}: {version} is none of {_VERSIONS}, little-endian")
    tensor_count, metadata_count = cursor.values("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"{key} is there twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_read_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise ValueError(f"general.alignment must be a positive integer, not {alignment!r}")
    data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        begin = data + offset
        tensors[name] = GgufTensor(_checked_type(name, shape, kind, begin, cursor.size), shape, begin, path)
    return GgufFile(path, metadata, tensors)


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (rows first; files have the reverse order), type and offset for one tensor."""
    name = cursor.text()
    dimensions = cursor.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = cursor.values(f"{dimensions}Q")[::-1]
    kind, offset = cursor.values("IQ")
    return name, shape, kind, offset


def _checked_type(name: str, shape: tuple[int, ...], number: int, begin: int, size: int) -> GgufType:
    """Return a tensor's type; refuse an unreadable type, and data past the file's end."""
    if number not in GGUF_TYPES:
        known = ", ".join(kind.name for kind in GGUF_TYPES.values())
        raise UnsupportedModel(name, f"is stored as type {number}, which is none of {known}")
    kind = GGUF_TYPES[number]
    if shape and shape[-1] % kind.elements:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} elements, {kind.name} stores {kind.elements} together")
    if begin + _product(shape) // kind.elements * kind.bytes > size:
        raise ValueError(f"tensor {name} lies past its end")
    return kind


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
