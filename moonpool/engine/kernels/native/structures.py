"""What native functions are given: the C structures of the same names, field by field."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Attention(ctypes.Structure):
    """In pool.h."""

    _fields_ = (
        ("q", _P), ("q_stride", _L), ("q_type", _I),
        ("kv", _P), ("block_stride", _L), ("plane_stride", _L), ("kv_type", _I),
        ("scales", _P), ("scale_stride", _L), ("scale_plane_stride", _L),
        ("tables", _P), ("table_stride", _L),
        ("items", _P), ("n", _L), ("heads", _I), ("kv_heads", _I), ("head_dim", _I), ("block_size", _I),
        ("scale", _F),
        ("out", _P), ("out_stride", _L),
        ("window", _I), ("chunked", _I), ("sinks", _P),
    )  # fmt: skip


class Panels(ctypes.Structure):
    """In panels.h."""

    _fields_ = (
        ("weight", _P), ("bias", _P), ("outputs", _L), ("inputs", _L), ("type", _I), ("gated", _I),
        ("bits", _I), ("zero", _I), ("scale_bytes", _I), ("offset_bytes", _I), ("group", _L), ("block", _L),
        ("values", _I), ("table", ctypes.c_uint8 * 16), ("floats", _F * 16),
    )  # fmt: skip


class PackedMatrix(ctypes.Structure):
    """In packed.h."""

    _fields_ = (("codes", _P), ("scales", _P), ("offsets", _P), ("units", _P), ("offset_units", _P))


class Int8Panels(ctypes.Structure):
    """In int8_panels.h."""

    _fields_ = (("weight", _P), ("unit", _P), ("off", _P), ("length", _P))


class Experts(ctypes.Structure):
    """In experts.h."""

    _fields_ = (
        ("count", _L), ("chosen", _L),
        ("scores", _I), ("normalised", _I), ("groups", _I), ("groups_chosen", _I), ("group_top", _I),
        ("least_sum", _F), ("factor", _F),
        ("correction", _P), ("gate_up", ctypes.POINTER(Panels)), ("down", ctypes.POINTER(Panels)),
        ("router", Panels), ("shared_gate_up", Panels), ("shared_down", Panels), ("shared_gate", Panels),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """In step.h."""

    _fields_ = (
        ("input_norm", _P), ("post_norm", _P), ("q_norm", _P), ("k_norm", _P),
        ("qkv", Panels), ("output", Panels), ("gate_up", Panels), ("down", Panels),
        ("experts", ctypes.POINTER(Experts)),
    )  # fmt: skip


class LowRank(ctypes.Structure):
    """In lora.h."""

    _fields_ = (("down", Panels), ("up", Panels))


class Loras(ctypes.Structure):
    """In lora.h."""

    _fields_ = (("adapters", _P), ("of", _P))


class Model(ctypes.Structure):
    """In step.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("hidden", _L), ("inner", _L),
        ("type", _I), ("heads", _I), ("kv_heads", _I), ("head_dim", _I),
        ("eps", _F), ("scale", _F),
    )  # fmt: skip


class Items(ctypes.Structure):
    """In step.h."""

    _fields_ = (("single", _P), ("singles", _L), ("several", _P), ("many", _L))


class NativeProgress(ctypes.Structure):
    """In step.h."""

    _fields_ = (("word", ctypes.c_uint32), ("began_ns", _P))


class NativeStep(ctypes.Structure):
    """In step.h."""

    _fields_ = (
        ("first", _L), ("last", _L), ("index", _L),
        ("hidden", _P), ("rows", _L),
        ("cos", _P), ("sin", _P),
        ("blocks", _P), ("offsets", _P),
        ("kv", _P), ("layer_stride", _L), ("block_stride", _L), ("plane_stride", _L), ("block_size", _L),
        ("scales", _P), ("scale_layer_stride", _L), ("scale_stride", _L), ("scale_plane_stride", _L),
        ("kv_type", _I),
        ("tables", _P), ("table_stride", _L),
        ("all", Items),
        ("wanted", _P), ("wanted_rows", _L),
        ("some", Items),
        ("watch", _P), ("progress", _P), ("loras", ctypes.POINTER(Loras)),
        ("threads", _I),
    )  # fmt: skip


class Sampling(ctypes.Structure):
    """In sample.h."""

    _fields_ = (
        ("logits", _P), ("rows", _L), ("vocab", _L),
        ("row", _P), ("data", _P), ("numbers", _P),
        ("tokens", _P), ("failed", _P),
        ("logprobs", _P), ("ranks", _P),
        ("top_tokens", _P), ("top_logprobs", _P), ("most", _L),
    )  # fmt: skip


class GoOn(ctypes.Structure):
    """In go_on.h."""

    _fields_ = (
        ("model", ctypes.POINTER(Model)), ("step", ctypes.POINTER(NativeStep)),
        ("chosen", _P), ("tokens", _P), ("positions", _P), ("contexts", _P),
        ("turns", _P), ("cosines", _P), ("sines", _P),
        ("embedding", ctypes.POINTER(Panels)), ("table", _P),
        ("norm", _P), ("head", ctypes.POINTER(Panels)), ("normed", _P), ("logits", _P),
        ("int8_head", ctypes.POINTER(Int8Panels)),
        ("sampling", ctypes.POINTER(Sampling)), ("seeds", _P), ("counters", _P), ("numbers", _P), ("later", _L),
        ("ends", _P), ("end_count", _L), ("most", _L), ("until_ns", _L),
        ("full", _P), ("filled", _L), ("found", _P), ("over_ns", _P), ("failed", _L), ("stopped", _L),
    )  # fmt: skip


def sampling_row(options: Sequence[str]) -> np.dtype[np.void]:
    """Return the layout of a `Row` in sample.h; `options` are the names in processors.h's SAMPLING_OPTIONS."""
    fields = [
        ("top_p", "f8"),
        ("mask", "i8"), ("history", "i8"), ("banned", "i8"), ("bias", "i8"),
        ("history_count", "i4"), ("prompt_tokens", "i4"), ("banned_count", "i4"), ("bias_count", "i4"),
        ("draw", "i4"), ("draws", "i4"), ("top_k", "i4"), ("top", "i4"),
        ("scale", "f4"), *((name, "f4") for name in options),
        ("mask_bytes", "i4"),
    ]  # fmt: skip
    return np.dtype(fields, align=True)
