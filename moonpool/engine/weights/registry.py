"""Which class reads which weight format: one row for each format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moonpool.base.checkpoint.tensor_info import WeightFormat
from moonpool.base.checkpoint.weight_formats import (
    AwqFormat,
    Bnb4BitFormat,
    BnbInt8Format,
    CompressedFormat,
    Fp4Format,
    GgufType,
    GptqFormat,
    Mxfp4Format,
    ScaledFormat,
    StackedFp8Format,
)
from moonpool.engine.weights.base import WeightReader
from moonpool.engine.weights.folders import (
    AwqReader,
    Bnb4BitReader,
    BnbInt8Reader,
    CompressedReader,
    Fp4Reader,
    GptqReader,
    Mxfp4Reader,
    ScaledReader,
)
from moonpool.engine.weights.gguf import GgufReader

WEIGHT_READERS: dict[type[WeightFormat], Callable[[Any], WeightReader]] = {
    GgufType: GgufReader,
    ScaledFormat: ScaledReader,
    StackedFp8Format: ScaledReader,
    GptqFormat: GptqReader,
    AwqFormat: AwqReader,
    CompressedFormat: CompressedReader,
    Fp4Format: Fp4Reader,
    Mxfp4Format: Mxfp4Reader,
    BnbInt8Format: BnbInt8Reader,
    Bnb4BitFormat: Bnb4BitReader,
}
"""By the class of the format."""


def weight_reader(form: WeightFormat) -> WeightReader:
    """Return what reads weights of a format."""
    return WEIGHT_READERS[type(form)](form)
