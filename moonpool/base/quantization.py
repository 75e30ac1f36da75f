"""How engines hold weights. A module of its own, as command lines name the choices and read no checkpoint."""

from typing import Literal

Quantization = Literal["auto", "file", "int8", "int4", "none"]
"""Weights as an engine holds them: as the checkpoint has them ("auto": on a CPU; "file": anywhere), packed in 8 or 4
bits, or dense."""
