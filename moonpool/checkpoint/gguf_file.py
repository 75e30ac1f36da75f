"""The header of a GGUF file: its metadata, and where each tensor lies. No tensor data is read.

A large model may come in parts, `NAME-00001-of-00003.gguf` and so on: the first has the metadata and stands for all.

Source: GGUF's specification, `docs/gguf.md` of ggml; versions 2 and 3, little-endian. Every process of a stack reads
the header when it starts. The `gguf` package's reader makes arrays for each token and takes seconds for that (ADR 19).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.errors import CheckpointError, UnsupportedModel

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32


class TensorType(NamedTuple):
    """How elements are stored: blocks of so many elements in so many bytes, all in one row."""

    name: str
    elements: int
    bytes: int


#: Types that can be read, by their number in files.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
}


class GgufTensor(NamedTuple):
    """One tensor: its type, its shape with rows first, the byte at which its data begins, and in which file."""

    type: TensorType
    shape: tuple[int, ...]
    begin: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of the file `path` and of its further parts; names of metadata and tensors are the file's own."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header of `path`, and of its further parts if it has some.

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
            raise CheckpointError(f"{path}: its parts have {len(tensors)} tensors, {wanted} are expected")
        return cls(path, first.metadata, tensors)

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the elements of the F32 tensor `name`.

        Raises:
            CheckpointError: it is stored in another type.
        """
        tensor = self.tensors[name]
        if tensor.type.name != "F32":
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {tensor.type.name}, not F32")
        count = _product(tensor.shape)
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return struct.unpack(f"<{count}f", stream.read(4 * count))


def is_gguf(path: Path | str) -> bool:
    """Tell whether `path` names a GGUF file, by its ending."""
    return str(path).endswith(SUFFIX)


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of the model that `path` is, or is the first part of.

    Raises:
        CheckpointError: it is another part, or one is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    if path != parts[0]:
        raise CheckpointError(f"{path}: is part {int(match['number'])} of a model; name the first, {parts[0].name}")
    for part in parts:
        if not part.exists():
            raise CheckpointError(f"{path}: its part {part.name} is missing")
    return parts


def gguf_name(path: Path) -> str:
    """The name of a GGUF file without its ending, and without the number of its part."""
    match = _PART.fullmatch(path.name)
    return path.name.removesuffix(SUFFIX) if match is None else match["stem"]


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
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
        """Return a value of a type that the file has just named."""
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


def _read(path: Path, cursor: _Cursor) -> GgufFile:
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
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise ValueError(f"general.alignment must be a positive integer, not {alignment!r}")
    data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        begin = data + offset
        tensors[name] = GgufTensor(_checked(name, shape, kind, begin, cursor.size), shape, begin, path)
    return GgufFile(path, metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (rows first; files have it the other way round), type and offset of one tensor."""
    name = cursor.text()
    dimensions = cursor.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = cursor.values(f"{dimensions}Q")[::-1]
    kind, offset = cursor.values("IQ")
    return name, shape, kind, offset


def _checked(name: str, shape: tuple[int, ...], number: int, begin: int, size: int) -> TensorType:
    """Return a tensor's type; refuse one that cannot be read, and data past the end of the file."""
    if number not in TENSOR_TYPES:
        known = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        raise UnsupportedModel(name, f"is stored as type {number}, which is none of {known}")
    kind = TENSOR_TYPES[number]
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
