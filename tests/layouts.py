"""Layouts for tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moonpool.base.kv.layout import KVLayout, LayerKV
from moonpool.engine.models.batch import LayersKV


def uniform_like(layout: KVLayout, **changes: Any) -> KVLayout:
    """A uniform layout, with some fields of `KVLayout.uniform` changed."""
    (group,) = layout.groups
    fields = {
        "layers": layout.layers,
        "kv_heads": group.kv_heads,
        "head_dim": group.head_dim,
        "block_size": layout.block_size,
        "dtype": group.dtype,
    }
    return KVLayout.uniform(**{**fields, **changes})


GROUPED = KVLayout.of_layers(16, [LayerKV(2, 8, "bfloat16"), LayerKV(4, 8, "bfloat16", "window", 20)] * 2)
"""Full and windowed layers in turns, with slices of 1,024 and 2,048 bytes."""


def one_tensor(kv: LayersKV) -> Tensor:
    """KV of layers that are alike, [layers, ...]."""
    assert isinstance(kv, Tensor)
    return kv
