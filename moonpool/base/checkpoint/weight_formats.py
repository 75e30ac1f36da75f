"""The formats of weights in codes: GGUF's block types, and what Hugging Face folders hold.

A format says what headers tell: the shape of the weight, whether engines hold the codes, and their memory. No tensor
data is read here but the shapes that bitsandbytes and compressed-tensors store as tensors. The numbers are read by
`moonpool.engine.weights`, which has a class for each class here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.base.checkpoint.tensor_info import TensorInfo, WeightFormat
from moonpool.base.json_parts import parse_json

Shape = tuple[int, ...]
Parts = Mapping[str, tuple[str, TensorInfo]]
PACKED_BYTES: Mapping[str, float] = {"int8": 1 + 2 / 32, "int4": 0.5 + 4 / 32}
"""Bytes of an element that an engine packs, by `quantization`: with float16 scales (and offsets) for each 32."""
DEQUANTISED_OUTPUTS = 4096
"""Outputs of a weight in codes that products in torch dequantise at a time: their work space."""
_INPUTS = 32
"""Products with packed weights take a multiple of so many inputs."""
_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True, slots=True)
class GgufType(WeightFormat):
    """A type of GGUF files: how elements are stored in blocks, all blocks of a row in one row.

    Attributes:
        name: of the type in ggml.
        elements: of a block; 1: numbers without codes.
        bytes: of a block.
        exact: whether packed weights hold the codes and scales.
        held_bits: of an element in memory, if packed weights take more than the file; 0: as in the file.
    """

    name: str
    elements: int
    bytes: int
    exact: bool = False
    held_bits: float = 0

    def keeps_codes(self, info: TensorInfo) -> bool:
        return self.exact and _fits_products(info)

    def held_bytes(self, info: TensorInfo) -> float:
        return info.elements * (self.held_bits / 8 or self.bytes / self.elements)

    def described(self, info: TensorInfo) -> str:
        del info
        return self.name


GGUF_TYPES: Mapping[int, GgufType] = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18, exact=True),
    3: GgufType("Q4_1", 32, 20, exact=True),
    6: GgufType("Q5_0", 32, 22, exact=True),
    7: GgufType("Q5_1", 32, 24, exact=True),
    8: GgufType("Q8_0", 32, 34, exact=True),
    10: GgufType("Q2_K", 256, 84, exact=True, held_bits=5.125),
    11: GgufType("Q3_K", 256, 110, exact=True, held_bits=4.5625),
    12: GgufType("Q4_K", 256, 144, exact=True),
    13: GgufType("Q5_K", 256, 176, exact=True),
    14: GgufType("Q6_K", 256, 210, exact=True),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", 32, 18, exact=True),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136, exact=True),
    29: GgufType("IQ1_M", 256, 56),
    30: GgufType("BF16", 1, 2),
    34: GgufType("TQ1_0", 256, 54, exact=True, held_bits=4.0625),
    35: GgufType("TQ2_0", 256, 66, exact=True, held_bits=4.0625),
    39: GgufType("MXFP4", 32, 17, exact=True),
    40: GgufType("NVFP4", 64, 36, exact=True),
}
"""Types that can be read, by their number in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat(WeightFormat):
    """How some or all of a folder's weights are stored: which tensors make a weight.

    Attributes:
        name: for people.
        values: name endings for the tensor with the values.
        dtypes: types of that tensor; a `.weight` of another type is not quantised.
        parts: name endings for further tensors, by role.
        optional: roles of tensors that may be absent.
        bits: bits per value; 0: told by the shapes.
        group: inputs that share a scale; 0: all.
        targets: compressed-tensors' patterns of the modules that are stored so; none: all.
    """

    name: str
    values: tuple[str, ...]
    dtypes: frozenset[str]
    parts: Mapping[str, tuple[str, ...]]
    optional: frozenset[str] = frozenset()
    bits: int = 8
    group: int = 0
    targets: tuple[str, ...] = ()

    @abstractmethod
    def dense_shape(self, parts: Parts) -> Shape:
        """Return the weight's shape, usually [outputs, inputs].

        Raises:
            IndexError, ZeroDivisionError, ValueError, KeyError, TypeError, OSError: a stored shape is malformed.
        """

    def dense_name(self, stem: str) -> str:
        """Return the weight's name, from the common beginning of the tensors' names."""
        return f"{stem}.weight"

    def keeps_codes(self, info: TensorInfo) -> bool:
        return _fits_products(info)

    def held_bytes(self, info: TensorInfo) -> float:
        return sum(part.stored_bytes for _, part in info.parts.values())

    def described(self, info: TensorInfo) -> str:
        return f"{self.name} ({info.dtype})"


def _fits_products(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and not info.shape[1] % _INPUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFormat(FolderFormat):
    """Floats or whole numbers of 8 bits: FP8 and MXFP8 of several tools, int8 of compressed-tensors.

    Attributes:
        block: outputs and inputs that share a scale, if the shapes do not tell.
    """

    name: str = "scaled"
    values: tuple[str, ...] = (".weight",)
    dtypes: frozenset[str] = _FLOAT8 | {"I8"}
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"scales": (".weight_scale_inv", ".weight_scale"), "zeros": (".weight_zero_point",)}
    )
    optional: frozenset[str] = frozenset({"zeros"})
    block: tuple[int, int] | None = None

    def dense_shape(self, parts: Parts) -> Shape:
        return parts["values"][1].shape

    def keeps_codes(self, info: TensorInfo) -> bool:
        return info.dtype in self.dtypes and _fits_products(info)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedFp8Format(ScaledFormat):
    """ModelOpt's FP8 of Llama 4: all experts in one tensor, inputs first, with one scale. Engines hold numbers."""

    values: tuple[str, ...] = ("_proj",)
    dtypes: frozenset[str] = _FLOAT8
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"scales": ("_proj_weight_scale",)})
    optional: frozenset[str] = frozenset()

    def dense_name(self, stem: str) -> str:
        return f"{stem}_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat(FolderFormat):
    """GPTQ's words of values along the inputs.

    Attributes:
        v1: the first format, which stores zero points less one.
    """

    name: str = "gptq"
    values: tuple[str, ...] = (".qweight",)
    dtypes: frozenset[str] = frozenset({"I32"})
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"scales": (".scales",), "zeros": (".qzeros",), "groups": (".g_idx",)}
    )
    optional: frozenset[str] = frozenset({"groups"})
    bits: int = 0
    v1: bool = False

    def dense_shape(self, parts: Parts) -> Shape:
        shape, scales = parts["values"][1].shape, parts["scales"][1].shape
        bits = 32 * parts["zeros"][1].shape[1] // scales[1]
        return shape[1], shape[0] * 32 // bits


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat(FolderFormat):
    """AWQ's words of 4-bit values along the outputs."""

    name: str = "awq"
    values: tuple[str, ...] = (".qweight",)
    dtypes: frozenset[str] = frozenset({"I32"})
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"scales": (".scales",), "zeros": (".qzeros",)}
    )
    bits: int = 4

    def dense_shape(self, parts: Parts) -> Shape:
        shape = parts["values"][1].shape
        return shape[1] * 8, shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedFormat(FolderFormat):
    """compressed-tensors' words of values along the inputs."""

    name: str = "packed"
    values: tuple[str, ...] = (".weight_packed",)
    dtypes: frozenset[str] = frozenset({"I32"})
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "scales": (".weight_scale",),
            "zeros": (".weight_zero_point",),
            "groups": (".weight_g_idx",),
            "shape": (".weight_shape",),
        }
    )
    optional: frozenset[str] = frozenset({"zeros", "groups"})

    def dense_shape(self, parts: Parts) -> Shape:
        shape, scales = parts["values"][1].shape, parts["scales"][1].shape
        whole = scales[1] * self.group == shape[1] * 32 // self.bits
        return (shape[0], scales[1] * self.group) if whole else _stored_shape(parts["shape"][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Format(FolderFormat):
    """Floats of 4 bits in groups: NVFP4, and MXFP4 of compressed-tensors.

    Attributes:
        divided: the tensor's scale divides the other scales, instead of multiplying them.
    """

    name: str = "fp4"
    values: tuple[str, ...] = (".weight_packed", ".weight")
    dtypes: frozenset[str] = frozenset({"U8"})
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "scales": (".weight_scale",),
            "whole": (".weight_global_scale", ".weight_scale_2"),
        }
    )
    bits: int = 4
    divided: bool = False

    def dense_shape(self, parts: Parts) -> Shape:
        shape = parts["values"][1].shape
        return shape[0], shape[1] * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Format(FolderFormat):
    """MXFP4 of gpt-oss: all experts in one tensor."""

    name: str = "mxfp4"
    values: tuple[str, ...] = ("_blocks",)
    dtypes: frozenset[str] = frozenset({"U8"})
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"scales": ("_scales",)})
    bits: int = 4

    def dense_shape(self, parts: Parts) -> Shape:
        shape = parts["values"][1].shape  # [experts, outputs, inputs / 32, 16 bytes]; the dense form has inputs first
        return shape[0], shape[2] * 32, shape[1]

    def dense_name(self, stem: str) -> str:
        return stem

    def keeps_codes(self, info: TensorInfo) -> bool:
        del info
        return True  # blocks have 32 inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BnbInt8Format(FolderFormat):
    """bitsandbytes' whole numbers of 8 bits, with a scale for each output."""

    name: str = "bnb_int8"
    values: tuple[str, ...] = (".weight",)
    dtypes: frozenset[str] = frozenset({"I8"})
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"scales": (".SCB", ".weight.SCB")})

    def dense_shape(self, parts: Parts) -> Shape:
        return parts["values"][1].shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb4BitFormat(FolderFormat):
    """bitsandbytes' NF4 and FP4: codes of 4 bits that choose from a table."""

    name: str = "bnb_4bit"
    values: tuple[str, ...] = (".weight",)
    dtypes: frozenset[str] = frozenset({"U8"})
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "scales": (".weight.absmax",),
            "table": (".weight.quant_map",),
            "state": (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
            "nested_scales": (".weight.nested_absmax",),
            "nested_table": (".weight.nested_quant_map",),
        }
    )
    optional: frozenset[str] = frozenset({"nested_scales", "nested_table"})
    bits: int = 4

    def dense_shape(self, parts: Parts) -> Shape:
        state = parse_json(_read(parts["state"][1], 1))
        return tuple(int(size) for size in state["shape"])


def _stored_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the whole numbers that a tensor of I32 or I64 holds."""
    size = {"I32": 4, "I64": 8}[info.dtype]
    data = _read(info, size)
    return tuple(int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size))


def _read(info: TensorInfo, element_bytes: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.begin)
        return stream.read(info.elements * element_bytes)
